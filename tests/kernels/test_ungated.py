"""Layers whose activation has no gate (Nemotron-H's squared relu and its kin): the eager backend and the Triton kernels
against the loops of reference.py, output and every gradient; with adapters and packed weights. The kernels one by one, and
what is not finite, are beside the gated ones in test_triton.py and test_special_values.py."""

import pytest
import torch
from helpers.marks import rest_pinned
from kernel_helpers import errors
from moe_problems import by_reference, layer, poisoned, routing_ids, run, stored, upcast

from sonicmoe_hf.kernels import eager, reference
from sonicmoe_hf.kernels.interface import UNGATED, Activation, PackedOperand, is_gated
from sonicmoe_hf.kernels.quantized import FORMATS
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.lora_operands import pack
from sonicmoe_hf.layer.moe_experts import LowRank, moe_experts
from sonicmoe_hf.layer.packed_weight import PackedWeight
from sonicmoe_hf.layer.routing import Routing

pytest.importorskip("triton")
from sonicmoe_hf.kernels import triton as kernels

TOLERANCE = {"eager": 1e-12, "triton": 2e-5}  # sums of a few hundred terms, in fp64; in fp32, as test_triton.py has it
DTYPES = {"eager": torch.float64, "triton": torch.float32}
ORDERS = ("concatenated", "transposed_concatenated")
# T, H, I, E, K: more than one tile of rows and columns, nothing divisible; in multiples of 16 bytes; one row
SHAPES = {"odd": (50, 41, 35, 3, 2), "even": (50, 36, 36, 2, 2), "one row": (1, 16, 16, 4, 1)}


@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize(
    "shape, kind, name, save",
    [
        ("odd", "list", "relu2", "preactivation"),
        ("even", "sentinels", "silu", "input"),
        ("one row", "top_k", "gelu_tanh", "preactivation"),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_the_layer_agrees_with_the_reference(device, backend, name, save, shape, kind, layout):
    T, H, I, E, K = SHAPES[shape]
    ids, token = routing_ids(T, E, K, kind, device, empty=(1,) if kind == "list" else ())
    tensors, dout = layer(T, H, I, E, ids.numel(), DTYPES[backend], device, activation=name)
    tensors = upcast(tensors, DTYPES[backend])  # the routing weights too
    with poisoned():
        found = run(tensors, dout, (ids, token), layout, name, backend, save=save)
    expected = by_reference(tensors, dout, (ids, token), layout, name)
    found = {key: value.cpu().double() for key, value in found.items()}
    assert {n: e for n, e in errors(found, expected).items() if e > TOLERANCE[backend]} == {}


@pytest.mark.parametrize("name", UNGATED)
def test_gradients_agree_with_finite_differences(name):
    T, H, I, E, K = 7, 6, 5, 4, 2
    ids, _ = routing_ids(T, E, K, "top_k", empty=(3,))
    tensors, _ = layer(T, H, I, E, T * K, torch.float64, activation=name)

    def by_position(x, gate_up, down, weight, gate_up_bias, down_bias):
        return moe_experts(
            x, gate_up, down, (ids, weight.view(T, K)), gate_up_bias=gate_up_bias, down_bias=down_bias, activation=name
        )

    leaves = tuple(tensor.double().requires_grad_() for tensor in tensors.values())
    assert torch.autograd.gradcheck(by_position, leaves, fast_mode=True)


@pytest.mark.parametrize("layout, rank", [("concatenated", 20), ("transposed_concatenated", 3)])
def test_adapters_agree_with_the_merged_weights(device, layout, rank):
    """W + scale B A in fp64, autograd through it: output and the gradients of x and every factor."""
    T, H, I, E, K = 20, 24, 20, 3, 1
    ids, _ = routing_ids(T, E, K, "top_k", device, empty=(2,))
    tensors, dout = layer(T, H, I, E, T * K, torch.float64, device, activation="relu2")
    a1, b1, a2, b2 = (
        torch.randn(size, dtype=torch.float64, device=device) / 4
        for size in ((E, rank, H), (E, I, rank), (E, rank, I), (E, H, rank))
    )
    names = ("x", "weight", "a1", "b1", "a2", "b2")

    def leaves(dtype):
        values = (tensors["x"], tensors["weight"], a1, b1, a2, b2)
        return [value.detach().to(dtype).requires_grad_() for value in values]

    def adapted(dtype, backend):
        x, weight, *factors = inputs = leaves(dtype)
        out = moe_experts(
            x,
            stored(tensors["gate_up"].to(dtype), layout),
            stored(tensors["down"].to(dtype), layout),
            Routing(ids, weight.view(T, K)),
            activation="relu2",
            layout=layout,
            backend=backend,
            gate_up_adapter=LowRank(*factors[:2], 0.5),
            down_adapter=LowRank(*factors[2:], 2.0),
        )
        gradients = torch.autograd.grad(out, inputs, dout.to(dtype))
        return {"out": out.detach().double(), **{n: g.double() for n, g in zip(names, gradients)}}

    x, weight, first, second, third, fourth = inputs = [leaf.cpu() for leaf in leaves(torch.float64)]
    out = reference.moe_experts(
        x,
        tensors["gate_up"].cpu() + 0.5 * second @ first,
        tensors["down"].cpu() + 2.0 * fourth @ third,
        ids.reshape(-1).cpu(),
        torch.arange(T).repeat_interleave(K),
        weight,
        activation="relu2",
    )
    gradients = torch.autograd.grad(out, inputs, dout.cpu())
    expected = {"out": out.detach(), **dict(zip(names, gradients))}
    for backend in ("eager", "triton"):
        found = {name: value.cpu() for name, value in adapted(DTYPES[backend], backend).items()}
        assert {n: e for n, e in errors(found, expected).items() if e > TOLERANCE[backend]} == {}, backend


@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
@pytest.mark.parametrize("T, rank", [(1, 0), (11, 20)])
def test_packed_weights_are_read_as_their_values(device, name, T, rank):
    """`up` from the packed codes beside the eager backend on what they stand for; I is no multiple of the tile's height."""
    H, I, E, K = 192, 96, 2, 1
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = routing_ids(T, E, K, "top_k", device)
    tensors, _ = layer(T, H, I, E, T * K, dtype, device, activation="relu2")
    packed = PackedWeight.quantize(tensors["gate_up"], name)
    dense, extra = packed.dequantize().to(dtype), None
    if rank:
        a, b = torch.randn(E, rank, H, device=device) / 16, torch.randn(E, I, rank, device=device)
        extra = pack(a, b, 0.7, dense).forward_term(torch.randn(T * K, rank + -rank % 8, device=device).to(dtype))
    rows, act = kernels.dispatch(*ids, T, E, False), Activation("relu2")
    operand = PackedOperand(packed.codes, packed.scales, packed.state, packed.format)
    bias = tensors["gate_up_bias"]
    with poisoned():
        h, a = kernels.up(tensors["x"], operand, bias, rows, act, False, True, True, extra)
    expected = dict(zip("ha", eager.up(tensors["x"], dense, bias, rows, act, False, True, True, extra)))
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2  # bf16: one rounding of h and one of a
    assert {n: e for n, e in errors({"h": h, "a": a}, expected).items() if e > tolerance} == {}
    only_h, nothing = kernels.up(tensors["x"], operand, bias, rows, act, False, True, False, extra)
    assert nothing is None and torch.equal(only_h, h)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", rest_pinned(ORDERS))
def test_a_layer_of_packed_weights_is_the_layer_of_their_values(layout, name):
    T, H, I, E, K = 20, 64, 64, 2, 1
    ids, _ = routing_ids(T, E, K, "top_k")
    tensors, dout = layer(T, H, I, E, T * K, torch.float32, bias=False, activation="relu2")
    weights = [stored(tensors[key], layout) for key in ("gate_up", "down")]
    packed = [PackedWeight.quantize(weight, name, is_transposed=LAYOUTS[layout][0]) for weight in weights]

    def step(gate_up, down, backend):
        x = tensors["x"].detach().requires_grad_()
        out = moe_experts(
            x, gate_up, down, (ids, tensors["weight"].view(T, K)), activation="relu2", layout=layout, backend=backend
        )
        return {"out": out.detach(), "x": torch.autograd.grad(out, x, dout)[0]}

    expected = step(*(weight.dequantize() for weight in packed), "eager")
    for backend in ("eager", "triton"):
        found = step(*packed, backend)
        assert {n: e for n, e in errors(found, expected).items() if e > 2e-5} == {}, backend


def test_the_native_layout_is_refused_with_the_remedy():
    tensors, _ = layer(3, 8, 8, 2, 6, torch.float32, bias=False, activation="relu2")
    routing = torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    for layout in set(LAYOUTS) - set(ORDERS):
        with pytest.raises(
            ValueError, match=f"'relu2' has no gate, so layout='{layout}' .* use layout='concatenated'"
        ):
            moe_experts(
                tensors["x"],
                stored(tensors["gate_up"], layout),
                stored(tensors["down"], layout),
                routing,
                activation="relu2",
                layout=layout,
            )


@pytest.mark.parametrize("activation, given", [("relu2", "swiglu"), ("swiglu", "relu2")])
def test_a_projection_of_the_other_kind_is_refused(activation, given):
    tensors, _ = layer(3, 8, 8, 2, 6, torch.float32, bias=False, activation=given)
    routing = torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    rows = "2I" if is_gated(activation) else "I"
    with pytest.raises(ValueError, match=rf"\[E, {rows}, H\] .* with activation='{activation}', disagree"):
        moe_experts(tensors["x"], tensors["gate_up"], tensors["down"], routing, activation=activation)
