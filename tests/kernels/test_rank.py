"""Products with low-rank adapters in Triton, interpreted on a CPU (or run, where there is a GPU), against the eager backend.
Tolerances as in test_triton.py."""

import pytest
import torch
from helpers.marks import rest_slow
from kernel_helpers import errors
from moe_problems import adapter, layer, poisoned, routing_ids
from test_triton import SHAPES, TOLERANCE, logical_view

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Activation
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.lora_operands import pack

SCALE = 0.7


@pytest.mark.parametrize(
    "layout, shape, kind, rank",
    [
        ("concatenated", "one row", "sentinels", 1),
        ("concatenated", "one expert", "top_k", 8),
        *rest_slow(((layout, "odd", "list", 3) for layout in LAYOUTS), 1),
        ("transposed_interleaved", "even", "list", 16),
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
    T, H, I, E, K = SHAPES[shape]
    ids = routing_ids(T, E, K, kind, device, empty=(1,) if kind == "list" else ())
    tensors, dout = layer(T, H, I, E, ids[0].numel(), torch.float32, device)
    x, weight, bias, down_bias = (tensors[n] for n in ("x", "weight", "gate_up_bias", "down_bias"))
    gate_up, down = logical_view(tensors["gate_up"], layout), logical_view(tensors["down"], layout)
    interleaved, act = LAYOUTS[layout][1], Activation("clamped_swiglu", 1.702, 1.0)
    a1, b1 = adapter(E, rank, H, 2 * I, device)
    a2, b2 = adapter(E, rank, I, H, device)
    first, second = pack(a1, b1, SCALE, gate_up, kernels), pack(a2, b2, SCALE, down, kernels)
    for packed, by_eager in ((first, pack(a1, b1, SCALE, gate_up)), (second, pack(a2, b2, SCALE, down))):
        for factor, same in zip(packed[:2], by_eager[:2]):
            assert torch.equal(factor, same) and factor.stride() == same.stride()

    def everything(kernels, rows, at=None):
        """Every product; `at` are another backend's operands, so that errors do not pile up."""
        found = {}

        def result(name, tensor):
            found[name] = tensor
            return tensor if at is None else at[name]

        u = result("u", kernels.lora_shrink(x, first.a_EKJ, rows, SCALE, True))
        h, a = kernels.up(x, gate_up, bias, rows, act, interleaved, True, True, extra=first.forward_term(u))
        h, a = result("h", h), result("a", a)
        v = result("v", kernels.lora_shrink(a, second.a_EKJ, rows, SCALE, False))
        result("y", kernels.down(a, down, down_bias, rows, extra=second.forward_term(v)))
        dv, db2 = kernels.lora_b_backward(dout, second.b_ENJ, v, weight, rows, SCALE, True, True, b2)
        dv, _ = result("dv", dv), result("db2", db2)
        dh, weighted_a, dw = kernels.down_backward(
            dout, down, down_bias, h, weight, rows, act, interleaved, True, True, True, extra=second.backward_term(dv)
        )
        dh, weighted_a, _ = result("dh", dh), result("weighted_a", weighted_a), result("dw", dw)
        result("da2", kernels.lora_a_gradient(dv, weighted_a, rows, False, a2))
        du, db1 = kernels.lora_b_backward(dh, first.b_ENJ, u, None, rows, SCALE, False, True, b1)
        du, _ = result("du", du), result("db1", db1)
        result("da1", kernels.lora_a_gradient(du, x, rows, True, a1))
        result("dx", kernels.up_backward_input(dh, gate_up, rows, extra=first.backward_term(du)))
        return found

    rows = eager.dispatch(*ids, T, E, True)
    expected, num_rows = everything(eager, rows), rows.offsets[-1].item()
    per_row = ("u", "h", "a", "v", "y", "dv", "dh", "weighted_a", "du", "dx")
    for name in per_row:
        expected[name][num_rows:] = float("nan")  # nothing is ever written there
    with poisoned():
        found = everything(kernels, kernels.dispatch(*ids, T, E, True), expected)
    for name, factor in (("da1", a1), ("db1", b1), ("da2", a2), ("db2", b2)):
        assert found[name].stride() == factor.stride() and found[name].shape == factor.shape
        assert kind != "list" or (found[name][1] == 0).all(), "an expert without rows"
    found, expected = (
        {name: t[:num_rows] if name in per_row else t for name, t in results.items()} for results in (found, expected)
    )
    assert {n: e for n, e in errors(found, expected).items() if e > TOLERANCE} == {}
    assert all((found[name][:, rank:] == 0).all() for name in ("u", "v", "dv", "du")), "the padding of the rank"


def test_no_rows_give_zero_gradients_of_factors(device):
    rows = kernels.dispatch(torch.empty(0, 2, dtype=torch.long, device=device), None, 0, 3, False)
    a, b = adapter(3, 5, 16, 24, device)
    packed = pack(a, b, SCALE, torch.empty(3, 24, 16, device=device))
    empty = torch.empty(0, 16, device=device)
    u = kernels.lora_shrink(empty, packed.a_EKJ, rows, SCALE, True)
    with poisoned():
        da = kernels.lora_a_gradient(u, empty, rows, True, a)
        du, db = kernels.lora_b_backward(empty.new_empty(0, 24), packed.b_ENJ, u, None, rows, SCALE, False, True, b)
    assert u.shape == du.shape == (0, 8) and (da == 0).all() and (db == 0).all()
