"""A layer with adapters of frozen bf16 experts on a GPU: fp32 factors as PEFT stores them, its errors beside those of the
eager backend in bf16, and CUDA graphs."""

import pytest
import torch
from kernel_helpers import check_replay, errors
from moe_problems import AdaptedLayer

from sonicmoe_hf.layer.config import LAYOUTS

pytestmark = pytest.mark.gpu


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
