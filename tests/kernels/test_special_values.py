"""NaN and infinity in every input: they come out where they come out of the reference, and nowhere else.

A NaN must reach the same elements as in the reference: a training run that has gone wrong must show it, and an expert
that is broken must not break another. From an infinity, the same elements must stop being finite; whether one of them
is NaN or infinite follows from the order in which factors are multiplied (w * (dout @ W2) here, (w * dout) @ W2 in
autograd), so that is compared with the eager backend.
"""

import pytest
import torch
from moe_problems import INPUTS, by_reference, layer, routing_ids, run, upcast

from sonicmoe_hf.kernels.interface import GATED, UNGATED

pytestmark = pytest.mark.pinned
NAN, INF = float("nan"), float("inf")
E, K = 5, 2


def broken(tensors, ids, where, value):
    """Make the layer with `value` in one element of the tensor `where`, or, for "expert", in all of one expert's
    weights; the element is one that a routed pair meets."""
    tensors = {name: t.clone() for name, t in tensors.items()}
    expert = int(ids[0].flatten()[0])
    if where == "expert":
        tensors["gate_up"][expert], tensors["down"][expert] = value, value
    elif where == "weight":
        tensors["weight"][0] = value
    elif where == "x":
        tensors["x"][0, -1] = value  # the last column, where kernels pad
    else:
        tensors[where][(expert, *(-1,) * (tensors[where].dim() - 1))] = value
    return tensors


def compare(backend, device, dtype, sizes, activation, where, value, layout="concatenated"):
    T, H, I = sizes
    torch.manual_seed(0)
    ids = routing_ids(T, E, K, "top_k", device, empty=(E - 1,))
    tensors, dout = layer(T, H, I, E, T * K, dtype, device, activation=activation)
    tensors = broken(tensors, ids, where, value)
    found = {name: t.cpu() for name, t in run(tensors, dout, ids, layout, activation, backend).items()}
    expected = by_reference(tensors, dout, ids, layout, activation, torch.float32)
    assert activation.startswith(("clamped", "silu_clamped", "softcapped", "relu")) or not all(
        t.isfinite().all() for t in expected.values()
    )
    assert any(t.isfinite().any() for t in expected.values())
    same = torch.isnan if value != value else lambda t: ~torch.isfinite(t)
    for name in expected:
        assert torch.equal(same(found[name]), same(expected[name])), name
    if backend != "eager" and value == value:
        for name, (is_nan, is_certain) in nans(upcast(tensors), dout.float(), ids, layout, activation).items():
            assert is_certain.float().mean() > 0.9
            assert torch.equal(found[name].isnan() & is_certain, is_nan & is_certain), name


def nans(tensors, dout, ids, layout, activation):
    """Map name -> (where the eager backend has NaN, where it still has with pre-activations that are a little larger
    or smaller). An infinity times a slope takes the slope's sign, and a sum of infinities is NaN where the signs
    differ; h rounded to bf16 (2^-9) can be on the other side of a slope's zero."""
    runs = []
    for scale in (1, 1 + 2**-8, 1 - 2**-8):
        scaled = {name: tensors[name] * scale for name in ("x", "gate_up_bias")}
        results = run(tensors | scaled, dout, ids, layout, activation, "eager")
        runs.append({name: t.cpu().isnan() for name, t in results.items()})
    is_nan, larger, smaller = runs
    return {name: (is_nan[name], (is_nan[name] == larger[name]) & (is_nan[name] == smaller[name])) for name in is_nan}


@pytest.mark.parametrize("value", (NAN, INF, -INF))
@pytest.mark.parametrize("where", (*INPUTS, "expert"))
@pytest.mark.parametrize("activation", (*GATED, *UNGATED))
def test_eager(activation, where, value):
    compare("eager", "cpu", torch.float32, (9, 12, 10), activation, where, value)


def cases_for_triton():
    """Yield the cases without what cannot differ: the sign of an infinity that no activation meets, and what only adds
    to the output."""
    for activation in ("swiglu", "relu2", "clamped_swiglu", "reglu"):
        for where in (*INPUTS, "expert"):
            if where == "down_bias" and activation != "swiglu":
                continue
            signs = (NAN, INF) if where in ("down", "weight", "down_bias") else (NAN, INF, -INF)
            for value in signs:
                # slow, since they show the same on more: other gates, infinities below 0, of no gate the second product
                is_first = activation == "relu2" and where == "x"
                is_slow = not (activation == "swiglu" or is_first) or value == -INF
                yield pytest.param(activation, where, value, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("activation", "where", "value"), cases_for_triton())
def test_triton(device, activation, where, value):
    compare("triton", device, torch.float32, (37, 20, 36), activation, where, value)


@pytest.mark.parametrize("value", (NAN, INF))
def test_a_broken_expert_of_few_rows_breaks_no_other(device, value):
    """Fewer than a block of the weight gradients takes."""
    compare("triton", device, torch.float32, (12, 20, 36), "swiglu", "expert", value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("value", (NAN, INF, -INF))
@pytest.mark.parametrize("where", (*INPUTS, "expert"))
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize(
    "backend, layout", [("triton", "concatenated"), ("hopper", "transposed_interleaved"), ("hopper", "concatenated")]
)
def test_on_a_gpu(backend, layout, activation, where, value):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    compare(backend, "cuda", torch.bfloat16, (307, 72, 88), activation, where, value, layout)
