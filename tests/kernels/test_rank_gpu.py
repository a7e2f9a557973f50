"""A layer with adapters of frozen bf16 experts on a GPU: fp32 factors as PEFT stores them, its errors beside those of the
eager backend in bf16, and CUDA graphs."""

import pytest
import torch
from kernel_helpers import errors, same_bits
from moe_problems import layer, routing_ids, stored, upcast
from test_launch_gpu import skip_unless_it_runs_here
from test_rank import adapter

from benchmarks.common.timing import recorded
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.moe_experts import LowRank, moe_experts
from sonicmoe_hf.layer.routing import Routing

pytestmark = pytest.mark.gpu
BACKENDS = pytest.mark.parametrize("backend", ("hopper", "triton"))


class AdaptedLayer:
    """`step` gives out and the gradients of x, the routing weights and the factors; experts 0 and 7 have no rows."""

    def __init__(self, rank, layout, T, H, I, E=16, K=4, device="cuda"):
        self.layout, (self.expert, _) = layout, routing_ids(T, E, K, "top_k", device, empty=(0, 7))
        tensors, self.dout = layer(T, H, I, E, T * K, torch.bfloat16, device)
        (a1, b1), (a2, b2) = adapter(E, rank, H, 2 * I, device), adapter(E, rank, I, H, device)
        self.tensors, self.factors = tensors, {"a1": a1, "b1": b1, "a2": a2, "b2": b2}

    def step(self, backend, dtype=torch.bfloat16):
        weights = upcast({name: t for name, t in self.tensors.items() if name != "weight"}, dtype)
        leaves = {"x": weights.pop("x"), "weight": self.tensors["weight"], **self.factors}
        leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
        out = moe_experts(
            leaves["x"],
            stored(weights["gate_up"], self.layout),
            stored(weights["down"], self.layout),
            Routing(self.expert, leaves["weight"].view(self.expert.shape)),
            gate_up_bias=weights["gate_up_bias"],
            down_bias=weights["down_bias"],
            gate_up_adapter=LowRank(leaves["a1"], leaves["b1"], 0.5),
            down_adapter=LowRank(leaves["a2"], leaves["b2"], 2.0),
            layout=self.layout,
            backend=backend,
        )
        gradients = torch.autograd.grad(out, list(leaves.values()), self.dout.to(dtype))
        return {"out": out.detach(), **dict(zip(leaves, gradients))}


@BACKENDS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank, T", [(1, 3001), (16, 3001), (16, 100), (100, 1000), (256, 1000)])
def test_a_layer_with_adapters_errs_no_more_than_the_eager_backend(backend, layout, rank, T):
    skip_unless_it_runs_here(backend)
    problem = AdaptedLayer(rank, layout, T, 264, 200)
    exact = problem.step("eager", torch.float32)
    found, expected = (errors(problem.step(name), exact) for name in (backend, "eager"))
    # other orders of sums round otherwise: a fifth more; and 2^-10 is a quarter of bf16's rounding
    assert {n: (e, expected[n]) for n, e in found.items() if e > 1.2 * expected[n] + 2**-10} == {}


@BACKENDS
def test_a_captured_step_replays_to_the_same_bits(backend):
    skip_unless_it_runs_here(backend)
    problem = AdaptedLayer(16, "concatenated", 2000, 264, 200)
    expected = problem.step(backend)
    assert same_bits(problem.step(backend), expected)
    graph, results = recorded(lambda: problem.step(backend))
    for result in results.values():
        result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(results, expected)
