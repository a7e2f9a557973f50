"""Every function of a backend on one problem, and how the Triton kernels' results compare with the eager backend's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from kernel_helpers import errors
from moe_problems import adapter, layer, packed_adapter, poisoned, routing_ids, stored

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Activation
from sonicmoe_hf.layer.config import LAYOUTS

# All in fp32: the sums differ in order alone (on a GPU also by tf32x3, about 2^-21 a product), which leaves room for sums
# of some thousand terms and for nothing else.
TOLERANCE = 2e-5
SCALE = 0.7  # of adapters
# T, H, I, E, K: more than one tile of rows and of columns, nothing divisible; the same in multiples of 16 bytes, which
# tensor descriptors ask for; fewer rows than a tile; one row; every expert; one expert
SHAPES = {
    "odd": (100, 41, 35, 3, 2),
    "even": (100, 44, 36, 3, 2),
    "small": (30, 24, 20, 4, 2),
    "one row": (1, 16, 16, 4, 1),
    "all experts": (33, 32, 16, 5, 5),
    "one expert": (130, 16, 19, 1, 1),
}
PER_ROW = (
    "u",
    "h",
    "a",
    "v",
    "y",
    "dv",
    "dh",
    "weighted_a",
    "du",
    "dx",
)  # of `products`, the tensors with a row a pair


class Operands(NamedTuple):
    """The tensors of a layer, the weights in their logical shape; factors: (a1, b1, a2, b2), or none."""

    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    weight: torch.Tensor
    dout: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    factors: tuple[torch.Tensor, ...] = ()
    activation: Activation = Activation("clamped_swiglu", 1.702, 1.0)
    interleaved: bool = False

    def packed(self, kernels):
        """Pack the adapters as kernels take them."""
        a1, b1, a2, b2 = self.factors
        return packed_adapter(a1, b1, SCALE, self.gate_up, kernels), packed_adapter(a2, b2, SCALE, self.down, kernels)


def operands(
    T,
    H,
    I,
    E,
    num_pairs,
    layout="concatenated",
    rank=0,
    device="cpu",
    dtype=torch.float32,
    bias=True,
    activation=Operands._field_defaults["activation"],
):
    """Make operands whose weights are stored as the layout has them."""
    tensors, dout = layer(T, H, I, E, num_pairs, dtype, device, bias, activation.name)
    if LAYOUTS[layout][0]:
        tensors |= {name: stored(tensors[name], layout).transpose(1, 2) for name in ("gate_up", "down")}
    sizes = ((H, activation.width(I)), (I, H)) if rank else ()
    factors = tuple(factor for size in sizes for factor in adapter(E, rank, *size, device))
    return Operands(**tensors, dout=dout, factors=factors, activation=activation, interleaved=LAYOUTS[layout][1])


def products(kernels, rows, t: Operands, at=None):
    """Call every function of a backend and return its results by name; `at` are another backend's results, from which the
    next function goes on, so that errors do not pile up."""
    found, gated = {}, (rows, t.activation, t.interleaved)

    def result(name, tensor):
        found[name] = tensor
        return tensor if at is None else at[name]

    first = second = of_up = of_down = of_down_backward = of_dx = None
    if t.factors:
        (first, second), (a1, b1, a2, b2) = t.packed(kernels), t.factors
        u = result("u", kernels.lora_shrink(t.x, first.a.mT, rows, SCALE, True))
        of_up = first.term(u)
    h, a = kernels.up(t.x, t.gate_up, t.gate_up_bias, *gated, True, True, of_up)
    h, a = result("h", h), result("a", a)
    if t.factors:
        v = result("v", kernels.lora_shrink(a, second.a.mT, rows, SCALE, False))
        of_down = second.term(v)
    y = result("y", kernels.down(a, t.down, t.down_bias, rows, of_down))
    result("out", kernels.combine(y, t.weight, rows, len(t.x)))
    if t.factors:
        dv, db2 = kernels.lora_b_backward(t.dout, second.b, v, t.weight, rows, SCALE, True, True, b2)
        dv, _ = result("dv", dv), result("db2", db2)
        of_down_backward = second.transposed_term(dv)
    dh, weighted_a, dw = kernels.down_backward(
        t.dout, t.down, t.down_bias, h, t.weight, *gated, True, True, True, of_down_backward
    )
    dh, weighted_a, _ = result("dh", dh), result("weighted_a", weighted_a), result("dw", dw)
    if t.factors:
        result("da2", kernels.lora_a_gradient(dv, weighted_a, rows, False, a2))
        du, db1 = kernels.lora_b_backward(dh, first.b, u, None, rows, SCALE, False, True, b1)
        du, _ = result("du", du), result("db1", db1)
        result("da1", kernels.lora_a_gradient(du, t.x, rows, True, a1))
        of_dx = first.transposed_term(du)
    dx = result("dx", kernels.up_backward_input(dh, t.gate_up, rows, of_dx))
    result("dx_T", kernels.combine(dx, None, rows, len(t.x)))
    result("dgate_up", kernels.gate_up_gradient(dh, t.x, rows, t.gate_up))
    result("ddown", kernels.down_gradient(t.dout, weighted_a, rows, t.down))
    if t.gate_up_bias is not None:
        result("dgate_up_bias", kernels.gate_up_bias_gradient(dh, rows, t.gate_up_bias))
        result("ddown_bias", kernels.down_bias_gradient(t.dout, t.weight, rows, t.down_bias))
    return found


def check_products(device, layout, shape, kind, rank=0):
    """Check that the Triton kernels' `products` are the eager backend's; an expert of a "list" has no rows. Return
    what was found."""
    T, H, I, E, K = SHAPES[shape]
    ids = routing_ids(T, E, K, kind, device, empty=(1,) if kind == "list" else ())
    t = operands(T, H, I, E, ids[0].numel(), layout, rank, device)
    rows = eager.dispatch(*ids, T, E, True)
    expected, num_rows = products(eager, rows, t), rows.offsets[-1].item()
    for name in expected.keys() & set(PER_ROW):
        expected[name][num_rows:] = float("nan")  # nothing is ever written there
    with poisoned():
        found = products(kernels, kernels.dispatch(*ids, T, E, True), t, expected)
    of_weights = {"dgate_up": t.gate_up, "ddown": t.down, **dict(zip(("da1", "db1", "da2", "db2"), t.factors))}
    for name, weight in of_weights.items():
        assert found[name].stride() == weight.stride() and found[name].shape == weight.shape, name
        assert kind != "list" or (found[name][1] == 0).all(), f"{name} of an expert without rows"
    found, expected = (
        {name: t[:num_rows] if name in PER_ROW else t for name, t in results.items()} for results in (found, expected)
    )
    assert {n: e for n, e in errors(found, expected).items() if e > TOLERANCE} == {}
    return found, t
