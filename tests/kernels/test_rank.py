"""Products with low-rank adapters in Triton, interpreted on a CPU (or run, where there is a GPU),
against the eager backend."""

import pytest
import torch
from helpers.marks import rest_pinned, rest_slow
from kernel_helpers import errors
from kernel_products import SCALE, TOLERANCE, check_products
from moe_problems import AdaptedLayer, adapter, packed_adapter, poisoned

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.layer.config import LAYOUTS


@pytest.mark.parametrize(
    "layout, shape, kind, rank",
    [
        ("concatenated", "one row", "sentinels", 1),
        ("concatenated", "one expert", "top_k", 8),
        *rest_pinned([("concatenated", "odd", "list", 3), ("transposed_interleaved", "even", "list", 16)], 0),
        *rest_slow(((layout, "odd", "list", 3) for layout in [*LAYOUTS][1:]), 0),
        *rest_slow(
            [
                ("concatenated", "even", "list", 16),
                ("transposed_concatenated", "even", "top_k", 40),
                ("interleaved", "even", "top_k", 40),
            ],
            0,
        ),
    ],
)
def test_every_product_agrees_with_the_eager_backend(device, layout, shape, kind, rank):
    found, t = check_products(device, layout, shape, kind, rank)
    assert all((found[name][:, rank:] == 0).all() for name in ("u", "v", "dv", "du")), "the padding of the rank"
    for packed, by_eager in zip(t.packed(kernels), t.packed(eager)):
        for factor, same in ((packed.a, by_eager.a), (packed.b, by_eager.b)):
            assert torch.equal(factor, same) and factor.stride() == same.stride()


@pytest.mark.parametrize("layout, rank", rest_pinned([("transposed_concatenated", 3), ("concatenated", 20)]))
def test_a_layer_without_gates_agrees_with_the_eager_backend(device, layout, rank):
    """Compare output and the gradients of what is trained in fp64, with adapters, as tests/layer does with merged
    weights."""
    problem = AdaptedLayer(
        rank, layout, 20, 24, 20, 3, 1, device, torch.float64, empty=(2,), bias=False, activation="relu2"
    )
    found, expected = problem.step("triton", torch.float32), problem.step("eager", torch.float64)
    assert {n: e for n, e in errors(found, expected).items() if e > TOLERANCE} == {}


def test_no_rows_give_zero_gradients_of_factors(device):
    rows = kernels.dispatch(torch.empty(0, 2, dtype=torch.long, device=device), None, 0, 3, False)
    a, b = adapter(3, 5, 16, 24, device)
    packed = packed_adapter(a, b, SCALE, torch.empty(3, 24, 16, device=device))
    empty = torch.empty(0, 16, device=device)
    u = kernels.lora_shrink(empty, packed.a.mT, rows, SCALE, True)
    with poisoned():
        da = kernels.lora_a_gradient(u, empty, rows, True, a)
        du, db = kernels.lora_b_backward(empty.new_empty(0, 24), packed.b, u, None, rows, SCALE, False, True, b)
    assert u.shape == du.shape == (0, 8) and (da == 0).all() and (db == 0).all()
