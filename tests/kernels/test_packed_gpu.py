"""Packed experts on a GPU: the dequantizing kernel's bits, layers whose products read packed weights beside layers of the
dequantized ones, and CUDA graphs."""

import pytest
import torch
from kernel_helpers import errors, relative_error, same_bits
from moe_problems import layer, routing_ids, stored
from test_launch_gpu import skip_unless_it_runs_here
from test_quantized import every_value
from test_rank import adapter

from benchmarks.common.timing import recorded
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.kernels import quantized
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.quantized import FORMATS
from sonicmoe_hf.kernels.triton import config
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.moe_experts import LowRank, moe_experts

pytestmark = pytest.mark.gpu
BACKENDS = pytest.mark.parametrize("backend", ("hopper", "triton"))


@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_gives_the_codecs_bits_for_every_code_and_scale(name):
    packed = every_value(name, "whole", "cpu")
    rows = kernels.dispatch(torch.tensor([[0, 1, 2]], device="cuda"), None, 1, 3, False)
    there = [None if part is None else part.cuda() for part in packed]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = kernels.dequantize(*there, name, dtype, rows).cpu()
        assert torch.equal(found.view(torch.uint8), quantized.dequantize(packed, name, dtype).view(torch.uint8)), dtype


class PackedLayer:
    """`step` gives out; experts 0 and 7 have no rows."""

    def __init__(self, name, layout, T, H, I, rank=0, E=16, K=4, device="cuda"):
        self.layout, (self.expert, _) = layout, routing_ids(T, E, K, "top_k", device, empty=(0, 7))
        self.tensors, _ = layer(T, H, I, E, T * K, torch.bfloat16, device)
        self.packed = [
            PackedWeight.quantize(stored(self.tensors.pop(weight), layout), name, is_transposed=LAYOUTS[layout][0])
            for weight in ("gate_up", "down")
        ]
        self.adapters = {}
        if rank:
            self.adapters = {
                "gate_up_adapter": LowRank(*adapter(E, rank, H, 2 * I, device), 0.5),
                "down_adapter": LowRank(*adapter(E, rank, I, H, device), 2.0),
            }

    def step(self, backend, dense=False, dtype=torch.bfloat16):
        weights = [weight.dequantize(dtype) for weight in self.packed] if dense else self.packed
        x, routed, *biases = (self.tensors[n] for n in ("x", "weight", "gate_up_bias", "down_bias"))
        gate_up_bias, down_bias = (bias.to(dtype) for bias in biases)
        out = moe_experts(
            x.to(dtype),
            *weights,
            (self.expert, routed.view(self.expert.shape)),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            layout=self.layout,
            backend=backend,
            **self.adapters,
        )
        return {"out": out}


@BACKENDS
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout, rank", [("concatenated", 0), ("interleaved", 16), ("transposed_interleaved", 40)])
def test_products_that_read_packed_weights_err_no_more_than_eager_ones(backend, name, layout, rank):
    skip_unless_it_runs_here(backend)
    for T, H, I in (
        (1, 256, 192),
        (30, 2048, 768),
        (64, 320, 320),
    ):  # more rows than are taken at once in the last; steps cut
        assert config.PACKED[name] * 16 >= 4 * T
        problem = PackedLayer(name, layout, T, H, I, rank)
        exact = problem.step("eager", dense=True, dtype=torch.float32)
        found, expected = (
            errors(problem.step(*how), exact) for how in ((backend,), ("eager", True))
        )  # other orders of sums round otherwise: a fifth more; and 2^-10 is a quarter of bf16's rounding
        assert found["out"] <= 1.2 * expected["out"] + 2**-10, (T, found, expected)


@BACKENDS
@pytest.mark.parametrize("name", FORMATS)
def test_reading_packed_weights_agrees_with_expanding_them(backend, name, monkeypatch):
    skip_unless_it_runs_here(backend)
    problem = PackedLayer(name, "concatenated", 64, 1024, 512)
    read = problem.step(backend)
    monkeypatch.setattr("sonicmoe_hf.kernels.triton.config.PACKED", dict.fromkeys(FORMATS, 0))
    assert relative_error(read["out"], problem.step(backend)["out"]) < 2**-7  # each rounds h's, a's and y's sums


@pytest.mark.parametrize("name", FORMATS)
def test_a_captured_forward_replays_to_the_same_bits(name):
    problem = PackedLayer(name, "concatenated", 16, 512, 256)
    expected = problem.step("triton")
    assert same_bits(problem.step("triton"), expected)
    graph, results = recorded(lambda: problem.step("triton"))
    results["out"].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(results, expected)
