"""Frozen experts on a GPU: the dequantizing kernel's bits, layers whose products read packed weights beside layers of the
dequantized ones, layers of bf16 experts with fp32 adapters as PEFT stores them, and CUDA graphs."""

import pytest
import torch
from kernel_helpers import check_replay, errors, relative_error
from moe_problems import AdaptedLayer
from test_quantized import every_value

from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.kernels.triton import config
from sonicmoe_hf.layer.config import LAYOUTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_gives_the_codecs_bits_for_every_code_and_scale(name):
    packed = every_value(name, "whole", "cpu")
    rows = kernels.dispatch(torch.tensor([[0, 1, 2]], device="cuda"), None, 1, 3, False)
    there = [None if part is None else part.cuda() for part in packed]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = kernels.dequantize(*there, name, dtype, rows).cpu()
        expected = FORMATS[name].dequantize(packed, dtype)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), dtype


def out_of(problem, backend, dense=False, dtype=torch.bfloat16):
    with torch.no_grad():
        return {"out": problem.out(backend, problem.leaves(dtype), dense)}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout, rank", [("concatenated", 0), ("interleaved", 16), ("transposed_interleaved", 40)])
def test_products_that_read_packed_weights_err_no_more_than_eager_ones(backend, name, layout, rank):
    for T, H, I in ((1, 256, 192), (30, 2048, 768), (64, 320, 320)):  # in the last more rows than at once; steps cut
        assert config.MAX_PACKED_ROWS[name] * 16 >= 4 * T
        problem = AdaptedLayer(rank, layout, T, H, I, format=name)
        exact = out_of(problem, "eager", dense=True, dtype=torch.float32)
        found, expected = (errors(out_of(problem, *how), exact) for how in ((backend,), ("eager", True)))
        # other orders of sums round otherwise: a fifth more; and 2^-10 is a quarter of bf16's rounding
        assert found["out"] <= 1.2 * expected["out"] + 2**-10, (T, found, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_reading_packed_weights_agrees_with_expanding_them(backend, name, monkeypatch):
    problem = AdaptedLayer(0, "concatenated", 64, 1024, 512, format=name)
    read = out_of(problem, backend)
    monkeypatch.setattr("sonicmoe_hf.kernels.triton.config.MAX_PACKED_ROWS", dict.fromkeys(FORMATS, 0))
    assert relative_error(read["out"], out_of(problem, backend)["out"]) < 2**-7  # each rounds h's, a's and y's sums


@pytest.mark.parametrize("name", FORMATS)
def test_a_captured_forward_replays_to_the_same_bits(name):
    problem = AdaptedLayer(0, "concatenated", 16, 512, 256, format=name)
    check_replay(lambda: out_of(problem, "triton"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank, T", [(1, 3001), (16, 3001), (16, 100), (100, 1000), (256, 1000)])
def test_a_layer_with_adapters_errs_no_more_than_the_eager_backend(backend, layout, rank, T):
    problem = AdaptedLayer(rank, layout, T, 264, 200)
    exact = problem.step("eager", torch.float32)
    found, expected = (errors(problem.step(name), exact) for name in (backend, "eager"))
    # other orders of sums round otherwise: a fifth more; and 2^-10 is a quarter of bf16's rounding
    assert {n: (e, expected[n]) for n, e in found.items() if e > 1.2 * expected[n] + 2**-10} == {}


def test_a_captured_step_replays_to_the_same_bits(backend):
    problem = AdaptedLayer(16, "concatenated", 2000, 264, 200)
    check_replay(lambda: problem.step(backend))
