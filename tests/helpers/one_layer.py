"""One layer's moe_experts in the tests: its inputs, its reference, its gradients, and the ops that it calls."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sonicmoe_hf.kernels import reference
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.moe_experts import Activation, LowRank, moe_experts
from sonicmoe_hf.layer.routing import Routing

OF_ONE_KIND = ("concatenated", "transposed_concatenated")  # layouts for activations without a gate
NAMES = ("x", "gate_up", "down", "weights", "gate_up_bias", "down_bias")


def problem(
    T=7,
    H=6,
    I=5,
    E=4,
    K=2,
    layout="concatenated",
    bias=True,
    dtype=torch.float64,
    grad=True,
    idle=1,
    activation=None,
):
    """Draw inputs of O(1) pre-activations; the last `idle` experts get no rows."""
    transposed, width = LAYOUTS[layout][0], (activation or Activation()).width(I)
    gate_up = torch.randn(E, width, H, dtype=torch.float64) * H**-0.5 * 1.5
    down = torch.randn(E, H, I, dtype=torch.float64) * I**-0.5
    inputs = {
        "x": torch.randn(T, H, dtype=torch.float64),
        "gate_up": gate_up.transpose(1, 2).contiguous() if transposed else gate_up,
        "down": down.transpose(1, 2).contiguous() if transposed else down,
        "weights": torch.rand(T, K, dtype=torch.float64) + 0.1,
    }
    if bias:
        inputs["gate_up_bias"] = torch.randn(E, width, dtype=torch.float64)
        inputs["down_bias"] = torch.randn(E, H, dtype=torch.float64)
    inputs = {name: tensor.to(dtype).requires_grad_(grad) for name, tensor in inputs.items()}
    index = torch.stack([torch.randperm(E - idle)[:K] for _ in range(T)]) if T else torch.zeros(0, K, dtype=torch.long)
    return inputs, index


def run(inputs, index, *, token_index=None, sentinels=False, **options):
    routing = Routing(index, inputs["weights"], token_index, sentinels=sentinels)
    biases = {name: inputs.get(name) for name in ("gate_up_bias", "down_bias")}
    return moe_experts(inputs["x"], inputs["gate_up"], inputs["down"], routing, **biases, **options)


def expected(inputs, index, *, token_index=None, layout="concatenated", activation=None):
    transposed, interleaved = LAYOUTS[layout]
    activation = activation or Activation()
    T, K = inputs["x"].shape[0], index.shape[-1]
    token = torch.arange(T).repeat_interleave(K) if token_index is None else token_index
    gate_up, down = (w.transpose(1, 2) if transposed else w for w in (inputs["gate_up"], inputs["down"]))
    return reference.moe_experts(
        inputs["x"],
        gate_up,
        down,
        index.reshape(-1),
        token,
        inputs["weights"].reshape(-1),
        gate_up_bias_E2I=inputs.get("gate_up_bias"),
        down_bias_EH=inputs.get("down_bias"),
        interleaved=interleaved,
        activation=activation.name,
        alpha=activation.alpha,
        limit=activation.limit,
    )


def output_and_gradients(function, inputs, *args, **options):
    """Compute output, and gradients of a fixed random projection of it, by name."""
    out = function(inputs, *args, **options)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    gradients = torch.autograd.grad((out * direction).sum(), list(inputs.values()), allow_unused=True)
    named = {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(inputs.items(), gradients)}
    return {"out": out.detach(), **named}


def with_factors(inputs, ranks=(3, 2), seed=0, dtype=torch.float64):
    """Make inputs of `problem` and factors as PEFT stores them, of other values for every expert."""
    generator = torch.Generator().manual_seed(seed)
    hidden, num_experts = inputs["x"].shape[1], len(inputs["down"])
    inner = inputs["down"].numel() // (num_experts * hidden)

    def factor(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    factors = {}
    width = inputs["gate_up"].numel() // (num_experts * hidden)
    for name, rank, size_in, size_out in (("gate_up", ranks[0], hidden, width), ("down", ranks[1], inner, hidden)):
        if rank:
            factors[f"{name}_a"] = factor(rank * num_experts, size_in)
            factors[f"{name}_b"] = factor(size_out, rank * num_experts)
    return {**inputs, **factors}


def low_rank(inputs, name, scale=0.5):
    """Make the adapter of one weight, in views of what `with_factors` made."""
    a, b, num_experts = inputs.get(f"{name}_a"), inputs.get(f"{name}_b"), len(inputs["down"])
    if a is None:
        return None
    return LowRank(a.view(num_experts, -1, a.shape[1]), b.view(len(b), -1, num_experts).permute(2, 0, 1), scale)


def as_stored(inputs, name, scale=0.5):
    """Make the adapter of one weight as PEFT stores it."""
    return LowRank(inputs[f"{name}_a"], inputs[f"{name}_b"], scale) if f"{name}_a" in inputs else None


def run_adapted(inputs, index, low_rank=low_rank, **options):
    return moe_experts(
        inputs["x"],
        inputs["gate_up"],
        inputs["down"],
        (index, inputs["weights"]),
        gate_up_bias=inputs.get("gate_up_bias"),
        down_bias=inputs.get("down_bias"),
        gate_up_adapter=low_rank(inputs, "gate_up"),
        down_adapter=low_rank(inputs, "down"),
        **options,
    )


class Watching(TorchDispatchMode):
    """Notes the names of our ops."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sonicmoe_hf":
            self.seen.append(func.name().removeprefix("sonicmoe_hf::"))
        return func(*args, **(kwargs or {}))
