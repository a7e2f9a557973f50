"""Random layers and routings for kernel tests, and buffers that start out poisoned."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

from sonicmoe_hf.kernels import eager, reference
from sonicmoe_hf.kernels.interface import Activation, is_gated
from sonicmoe_hf.kernels.tape import leaves_of
from sonicmoe_hf.layer.call import LayerCall, Options, SaveFlags
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.dispatch import dispatch
from sonicmoe_hf.layer.moe_experts import LowRank, moe_experts
from sonicmoe_hf.layer.packed_weight import PackedWeight
from sonicmoe_hf.layer.projection import Projection, prepare_adapters
from sonicmoe_hf.layer.routing import Routing

INPUTS = ("x", "gate_up", "down", "weight", "gate_up_bias", "down_bias")


def stored(logical, layout):
    """Store a logical [E, 2I, H] or [E, H, I] tensor as `layout` does; values of a concatenated layout stay in place."""
    return logical.transpose(1, 2).contiguous() if LAYOUTS[layout][0] else logical


def routing_ids(num_tokens, num_experts, top_k, kind, device="cpu", empty=()):
    """Draw (expert ids, tokens or None). kind: "top_k", "sentinels" (a third of the ids name no expert) or "list": a
    general list in random order with tokens of many and of no experts, and dropped pairs that all name token 0, as
    token rounding has them. Ids that name no expert are -1, as expert parallelism has them, or E and above. Experts in
    `empty` get no rows."""

    def dropped_from(experts, beyond):
        nobody = torch.where(torch.rand(experts.shape, device=device) < 0.5, -1, beyond)
        dropped = torch.rand(experts.shape, device=device) < 0.33
        return torch.where(dropped, nobody, experts), dropped

    scores = torch.rand(num_tokens, num_experts, device=device)
    scores[:, list(empty)] = -1
    expert_TK = scores.topk(top_k, dim=1).indices
    if kind == "top_k":
        return expert_TK, None
    if kind == "sentinels":
        return dropped_from(expert_TK, num_experts + 1)[0], None
    token_P = torch.arange(num_tokens, device=device).repeat_interleave(top_k)
    order = torch.randperm(token_P.numel(), device=device)
    expert_P, token_P = expert_TK.reshape(-1)[order], token_P[order]
    expert_P, dropped = dropped_from(expert_P, num_experts)
    return expert_P, torch.where(dropped, 0, token_P)


def layer(num_tokens, hidden, inner, num_experts, num_pairs, dtype, device="cpu", bias=True, activation="swiglu"):
    """Draw the logical tensors of a layer by name, with dout; scaled so that h and y are of order one."""
    width = 2 * inner if is_gated(activation) else inner

    def normal(*size, std=1.0):
        return (torch.randn(size, device=device) * std).to(dtype)

    tensors = {
        "x": normal(num_tokens, hidden),
        "gate_up": normal(num_experts, width, hidden, std=hidden**-0.5),
        "down": normal(num_experts, hidden, inner, std=inner**-0.5),
        "weight": torch.rand(num_pairs, device=device),
    }
    if bias:
        tensors |= {"gate_up_bias": normal(num_experts, width), "down_bias": normal(num_experts, hidden)}
    return tensors, normal(num_tokens, hidden)


def run(tensors, dout, ids, layout, activation, backend, sentinels=True, save="preactivation"):
    """Compute out and the gradient of every input, by name; weight gradients in their logical shape."""
    expert, token = ids
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    out = moe_experts(
        leaves["x"],
        stored(leaves["gate_up"], layout),
        stored(leaves["down"], layout),
        Routing(expert, leaves["weight"].view(expert.shape), token, sentinels=sentinels),
        gate_up_bias=leaves.get("gate_up_bias"),
        down_bias=leaves.get("down_bias"),
        activation=activation,
        layout=layout,
        backend=backend,
        save=save,
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **{f"d{name}": g for name, g in zip(leaves, gradients)}}


def adapter(num_experts, rank, size_in, size_out, device):
    """Make factors as PEFT stores them: A with the expert slowest, B with the expert fastest."""
    a = torch.randn(rank * num_experts, size_in, device=device) * size_in**-0.5
    b = torch.randn(size_out, rank * num_experts, device=device) * rank**-0.5
    return a.view(num_experts, rank, size_in), b.view(size_out, rank, num_experts).permute(2, 0, 1)


def packed_adapter(a, b, scale, weight_EON, kernels=eager):
    """Make a projection of this weight whose adapter is in the form that kernels take."""
    projection = Projection(weight_EON, a=a, b=b, scale=scale)
    (packed,) = prepare_adapters([projection], False, weight_EON.dtype, kernels)
    return packed


class AdaptedLayer:
    """A layer of frozen experts, packed in a format or not, with adapters of a rank of both weights, or none."""

    def __init__(
        self,
        rank,
        layout,
        T,
        H,
        I,
        E=16,
        K=4,
        device="cuda",
        dtype=torch.bfloat16,
        format=None,
        empty=(0, 7),
        bias=True,
        scales=(0.5, 2.0),
        activation="swiglu",
    ):
        self.layout, self.scales, self.activation = layout, scales, activation
        self.expert, _ = routing_ids(T, E, K, "top_k", device, empty)
        tensors, self.dout = layer(T, H, I, E, T * K, dtype, device, bias, activation)
        self.weights = [stored(tensors.pop(name), layout) for name in ("gate_up", "down")]
        if format is not None:
            is_transposed = LAYOUTS[layout][0]
            self.weights = [PackedWeight.quantize(w, format, is_transposed=is_transposed) for w in self.weights]
        self.x, self.weight, *self.biases = tensors.values()
        width = 2 * I if is_gated(activation) else I
        sizes = ((H, width), (I, H)) if rank else ()
        self.factors = dict(zip(("a1", "b1", "a2", "b2"), (f for s in sizes for f in adapter(E, rank, *s, device))))

    def leaves(self, dtype=torch.bfloat16):
        """List the tensors that have gradients, by name: x in this dtype, the routing weights and the factors."""
        leaves = {"x": self.x.to(dtype), "weight": self.weight, **self.factors}
        return {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}

    def out(self, backend, leaves, dense=False):
        """Compute the output. dense: of packed weights the values that they stand for."""
        x, weight, *factors = leaves.values()
        adapters = [LowRank(*factors[i : i + 2], scale) for i, scale in zip((0, 2), self.scales) if factors]
        weights = [
            (w.dequantize(x.dtype) if dense else w) if isinstance(w, PackedWeight) else w.to(x.dtype)
            for w in self.weights
        ]
        return moe_experts(
            x,
            *weights,
            Routing(self.expert, weight.view(self.expert.shape)),
            **dict(zip(("gate_up_bias", "down_bias"), (bias.to(x.dtype) for bias in self.biases))),
            **dict(zip(("gate_up_adapter", "down_adapter"), adapters)),
            activation=self.activation,
            layout=self.layout,
            backend=backend,
        )

    def step(self, backend, dtype=torch.bfloat16, dense=False):
        """Compute out and the gradient of every leaf, by name."""
        leaves = self.leaves(dtype)
        out = self.out(backend, leaves, dense)
        gradients = torch.autograd.grad(out, list(leaves.values()), self.dout.to(dtype))
        return {"out": out.detach(), **dict(zip(leaves, gradients))}


def forward_of(expert, backend):
    """Make a layer with these experts for its tokens, as a function of its tensors."""

    def forward(x, gate_up, down, weight, gate_up_bias, down_bias):
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return moe_experts(x, gate_up, down, Routing(expert, weight.view(expert.shape)), **biases, backend=backend)

    return forward


def check_contracts(tensors, dout, ids, num_experts, backend, sentinels):
    """Check with torch's own tests: no result of an op shares memory with an input or another result, and the fakes
    tell sizes and strides."""
    ops, (expert, token), num_tokens = torch.ops.sonicmoe_hf, ids, len(tensors["x"])
    gate_up, down = (Projection(tensors[name], bias=tensors[f"{name}_bias"]) for name in ("gate_up", "down"))
    rows = dispatch(expert, num_tokens, num_experts, token, sentinels=sentinels, backend=backend)
    options = Options(
        activation=Activation(), transposed=False, interleaved=False, backend=backend, saves=SaveFlags(h=True)
    )
    weight = tensors["weight"].view(expert.shape)
    call = LayerCall(weight=weight, x=tensors["x"], gate_up=gate_up, down=down, rows=rows, options=options)
    forward = leaves_of(call)
    _, *saved = ops.experts_forward(*forward)
    needs = "weight x gate_up_weight gate_up_bias down_weight down_bias"
    backward = (dout, *leaves_of(call._replace(saved=options.saves.restore(saved))), needs)
    for op, arguments in (
        (ops.dispatch, (expert, token, num_tokens, num_experts, sentinels, backend)),
        (ops.experts_forward, forward),
        (ops.experts_backward, backward),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


def by_reference(tensors, dout, ids, layout, activation, dtype=torch.float64):
    """Compute the results of `run` by the loops in reference.py and autograd, on the CPU in this dtype."""
    expert, token = (None if part is None else part.cpu() for part in ids)
    token = torch.arange(len(expert)).repeat_interleave(expert.shape[1]) if token is None else token
    leaves = {name: t.detach().cpu().to(dtype).requires_grad_() for name, t in tensors.items()}
    act = Activation(activation)
    out = reference.moe_experts(
        leaves["x"],
        leaves["gate_up"],
        leaves["down"],
        expert.reshape(-1),
        token,
        leaves["weight"],
        gate_up_bias_E2I=leaves.get("gate_up_bias"),
        down_bias_EH=leaves.get("down_bias"),
        interleaved=LAYOUTS[layout][1],
        activation=act.name,
        alpha=act.alpha,
        limit=act.limit,
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), dout.cpu().to(dtype))
    return {"out": out.detach(), **{f"d{name}": g for name, g in zip(leaves, gradients)}}


def upcast(tensors, dtype=torch.float32):
    return {name: t.to(dtype) for name, t in tensors.items()}


def rounded_once(tensors, dout, ids, layout, activation):
    """Compute the results of `run` in fp32 with every stored tensor (h, a, y, out; dh, a', dx's rows, dx and the
    weights' gradients) rounded to the inputs' dtype once: nothing that stores them in that dtype can be closer to
    fp32."""
    dtype, (expert, token) = tensors["x"].dtype, ids
    act, interleaved = Activation(activation), LAYOUTS[layout][1]
    t, dout = upcast(tensors), dout.float()
    gate_up_bias, down_bias, weight_P = t.get("gate_up_bias"), t.get("down_bias"), t["weight"].reshape(-1)
    num_tokens, num_experts = len(t["x"]), len(t["down"])
    rows = eager.dispatch(expert, token, num_tokens, num_experts, True)

    def stored(tensor):
        return tensor.to(dtype).float()

    h, a = (stored(part) for part in eager.up(t["x"], t["gate_up"], gate_up_bias, rows, act, interleaved, True, True))
    y = stored(eager.down(a, t["down"], down_bias, rows))
    found = {"out": stored(eager.combine(y, weight_P, rows, num_tokens))}
    dh, a, dweight = eager.down_backward(
        dout, t["down"], down_bias, h, weight_P, rows, act, interleaved, want_dh=True, want_a=True, want_dw=True
    )
    dh, a = stored(dh), stored(a)
    found["dx"] = stored(
        eager.combine(stored(eager.up_backward_input(dh, t["gate_up"], rows)), None, rows, num_tokens)
    )
    found["dgate_up"] = stored(eager.gate_up_gradient(dh, t["x"], rows, t["gate_up"]))
    found["ddown"] = stored(eager.down_gradient(dout, a, rows, t["down"]))
    found["dweight"] = dweight
    if gate_up_bias is not None:
        found["dgate_up_bias"] = stored(eager.gate_up_bias_gradient(dh, rows, gate_up_bias))
        found["ddown_bias"] = stored(eager.down_bias_gradient(dout, weight_P, rows, down_bias))
    return found


@contextlib.contextmanager
def allocations_as(change, *others):
    """Replace the tensors that torch allocates without values, or by these other functions of it, by what `change`
    makes of them."""

    def changed(allocate):
        return lambda *args, **kwargs: change(allocate(*args, **kwargs))

    with contextlib.ExitStack() as patches:
        for owner, name in (
            (torch.Tensor, "new_empty"),
            *((torch, name) for name in ("empty", "empty_like", *others)),
        ):
            patches.enter_context(mock.patch.object(owner, name, changed(getattr(owner, name))))
        yield


def poisoned():
    """Fill memory that is allocated without a value with NaN, and with a number that is no index."""

    def poison(tensor):
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(1 if tensor.dtype == torch.bool else min(1 << 30, torch.iinfo(tensor.dtype).max))

    return allocations_as(poison)
