"""The Triton kernels in fp16 and bf16, interpreted on a CPU (or run, where there is a GPU): sums are in fp32, rounded
once where they are stored. Tests in fp32 cannot see a sum in the tensors' own dtype.

The bar is what `rounded_once` loses: sums in another order differ from it by 0.2% or less, and a sum that is rounded on
the way by 9% or more, of these sizes. Triton's own interpreter has no bf16 to test; conftest.py gives it that.
"""

import pytest
import torch
from helpers.marks import rest_slow
from kernel_helpers import errors
from kernel_products import SCALE
from moe_problems import adapter, layer, packed_adapter, rounded_once, routing_ids, run, upcast

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.triton import bias_gradient

pytestmark = pytest.mark.pinned
BAR = 1.02


def over_the_bar(found, exact, best):
    """Name the results that are further from `exact` than BAR times `best`, with the ratio."""
    lost, least = (errors(results, {name: exact[name] for name in best}) for results in (found, best))
    return {name: lost[name] / least[name] for name in best if lost[name] > BAR * least[name]}


@pytest.mark.parametrize(
    "layout, dtype", rest_slow([("concatenated", torch.bfloat16), ("transposed_interleaved", torch.float16)]), ids=str
)
def test_a_layer_loses_what_one_rounding_does(device, layout, dtype):
    T, H, I, E, K = 40, 144, 80, 3, 3
    ids = routing_ids(T, E, K, "sentinels", device)
    tensors, dout = layer(T, H, I, E, T * K, dtype, device)
    found = run(tensors, dout, ids, layout, "swiglu", "triton")
    exact = run(upcast(tensors), dout.float(), ids, layout, "swiglu", "eager")
    assert over_the_bar(found, exact, rounded_once(tensors, dout, ids, layout, "swiglu")) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_biases_sum_many_rows_in_fp32(device, dtype, monkeypatch):
    monkeypatch.setattr(bias_gradient, "PROGRAMS_WANTED", 1)  # rows of an expert are then one program's
    T, N, E = 800, 40, 2
    ids = routing_ids(T, E, 1, "sentinels", device)
    dh, weight, like = torch.randn(T, N, device=device), torch.rand(T, device=device), torch.empty(E, N, device=device)

    def gradients(kernels, dh, like):
        rows = kernels.dispatch(*ids, T, E, True)
        both = kernels.gate_up_bias_gradient(dh, rows, like), kernels.down_bias_gradient(dh, weight, rows, like)
        return dict(zip(("gate_up_bias", "down_bias"), both))

    dh = dh.to(dtype)
    found, exact = gradients(kernels, dh, like.to(dtype)), gradients(eager, dh.float(), like)
    assert over_the_bar(found, exact, {name: t.to(dtype) for name, t in exact.items()}) == {}


@pytest.mark.parametrize("rank, dtype", [(8, torch.bfloat16), (16, torch.bfloat16), (40, torch.float16)], ids=str)
def test_adapters_in_fp32_lose_what_one_rounding_does(device, rank, dtype):
    """Factors are rounded to the experts' dtype once, sums are in fp32, and so are the gradients."""
    T, H, N, E, K = 90, 48, 144, 2, 2
    ids = routing_ids(T, E, K, "sentinels", device)
    x, dh = (torch.randn(rows, size, device=device).to(dtype) for rows, size in ((T, H), (T * K, N)))
    a, b = adapter(E, rank, H, N, device)
    packed = packed_adapter(a, b, SCALE, torch.empty(E, N, H, dtype=dtype, device=device), kernels)
    assert packed.a.mT.dtype == packed.b.dtype == dtype

    def products(kernels, packed, x, dh, u=None):
        rows = kernels.dispatch(*ids, T, E, True)
        found = {"u": kernels.lora_shrink(x, packed.a.mT, rows, SCALE, True)}
        u = found["u"] if u is None else u.float()
        found["du"], found["db"] = kernels.lora_b_backward(dh, packed.b, u, None, rows, SCALE, False, True, b)
        found["da"] = kernels.lora_a_gradient(u, x, rows, True, a)
        num_rows = rows.offsets[-1].item()
        return {name: t[:num_rows] if name in ("u", "du") else t for name, t in found.items()}

    found = products(kernels, packed, x, dh)
    u = kernels.lora_shrink(x, packed.a.mT, kernels.dispatch(*ids, T, E, True), SCALE, True)
    wide = packed._replace(a=packed.a.float(), b=packed.b.float())
    exact = products(eager, wide, x.float(), dh.float(), u)
    assert over_the_bar(found, exact, {name: exact[name].to(dtype) for name in ("u", "du")}) == {}
    assert found["da"].dtype == found["db"].dtype == torch.float32
    lost = errors({name: found[name] for name in ("da", "db")}, {name: exact[name] for name in ("da", "db")})
    assert max(lost.values()) <= 2e-5, "products are exact in fp32, and their sums differ in order alone"
