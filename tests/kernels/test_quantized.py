"""4-bit weights: the codecs against bitsandbytes and Transformers, bit by bit, and what they refuse."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sonicmoe_hf import PackedWeight, moe_experts
from sonicmoe_hf.kernels import eager, triton
from sonicmoe_hf.kernels.quantized import FORMATS, Quantized, check_quantized, dequantize, quantize, stored_shapes

SHAPE = (5, 33, 192)  # 495 NF4 scales: two of the second level, the last one cut
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def same_bits(actual, expected):
    return actual.dtype == expected.dtype and torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def bitsandbytes_nf4(weight):
    """bitsandbytes' codes and quantisation state, and the same as ours stores them."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    shapes = stored_shapes("nf4", tuple(weight.shape))
    nested = torch.cat([state.state2.code, state.code, state.offset.view(1), state.state2.absmax])
    return codes, state, Quantized(codes.view(shapes.codes), state.absmax.view(shapes.scales), nested)


def test_nf4_gives_the_values_of_bitsandbytes_from_its_quantisation_state():
    from bitsandbytes.functional import dequantize_4bit

    weight = torch.randn(SHAPE)
    weight[1, 3, 64:128] = 0
    codes, state, packed = bitsandbytes_nf4(weight)
    check_quantized(packed, "nf4")
    for dtype in DTYPES:
        state.dtype = dtype
        assert same_bits(dequantize(packed, "nf4", dtype), dequantize_4bit(codes, state)), dtype


def test_nf4_quantises_as_bitsandbytes_does():
    weight = torch.randn(SHAPE).bfloat16()
    _, _, theirs = bitsandbytes_nf4(weight)
    for part, ours, wanted in zip(Quantized._fields, quantize(weight, "nf4"), theirs):
        assert same_bits(ours, wanted), part


def test_mxfp4_gives_the_values_of_transformers_for_every_code_and_scale():
    codes = torch.arange(256).repeat(16).view(1, 1, 256, 16).to(torch.uint8)
    codes = codes.view(1, 16, 16, 16).expand(256, 16, 16, 16).reshape(16, 256, 16, 16).contiguous()
    scales = torch.arange(256).repeat_interleave(256).view(16, 256, 16).to(torch.uint8)
    for dtype in DTYPES:
        expected = convert_moe_packed_tensors(codes, scales, dtype=dtype).transpose(1, 2).contiguous()
        assert same_bits(dequantize(Quantized(codes, scales, None), "mxfp4", dtype), expected), dtype


def test_mxfp4_rounds_to_nearest_even_below_the_smallest_scale_that_holds_the_largest_value():
    weight = torch.zeros(1, 2, 32)
    weight[0, 0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5.0, -0.26])
    packed = quantize(weight, "mxfp4")
    assert packed.scales.tolist() == [[[127], [0]]]
    values = dequantize(packed, "mxfp4", torch.float32)
    assert values[0, 0, :9].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, -4.0, -0.5]
    assert quantize(weight * 1.01, "mxfp4").scales.tolist() == [[[128], [0]]]
    again = quantize(values, "mxfp4")
    assert same_bits(again.codes, packed.codes) and same_bits(again.scales, packed.scales)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(name, value):
    weight = torch.randn(2, 4, 64)
    weight[1, 2, 3] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize(weight, name)


@pytest.mark.parametrize("name, size, other", [("nf4", 96, "or mxfp4"), ("nf4", 80, ""), ("mxfp4", 80, "")])
def test_rows_that_blocks_would_cross_are_refused_by_name(name, size, other):
    with pytest.raises(ValueError, match=f"{name} stores {FORMATS[name]} values .* {size} input features"):
        quantize(torch.randn(2, 4, size), name)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_that_do_not_fit_are_refused(name):
    packed = quantize(torch.randn(2, 4, 128), name)
    check_quantized(packed, name)
    for change in (
        {"codes": packed.codes[:, :3]},
        {"codes": packed.codes.view(torch.int8)},
        {"scales": packed.scales[:1]},
        {"scales": packed.scales.view(-1)},
        {"state": packed.scales.float()},
    ):
        with pytest.raises(ValueError, match=f"{name} (weight is|scales have)"):
            check_quantized(packed._replace(**change), name)


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_experts_asked_for_are_expanded(name):
    packed = quantize(torch.randn(4, 8, 64), name)
    whole = dequantize(packed, name, torch.bfloat16)
    some = dequantize(packed, name, torch.bfloat16, experts=[1, 3])
    assert same_bits(some[1::2].contiguous(), whole[1::2].contiguous())


@pytest.mark.parametrize("name", FORMATS)
def test_triton_gives_the_codecs_values(device, name):
    # MXFP4: every scale; an expert's blocks end within a program
    shape = (3, 2, 257 * 32) if name == "mxfp4" else (3, 33, 192)
    packed = quantize(torch.randn(shape, device=device), name)
    packed.codes.copy_(torch.randint(0, 256, packed.codes.shape))
    packed.scales.copy_(torch.arange(packed.scales.numel()).view(packed.scales.shape) % 256)
    ids = torch.tensor([[0], [2], [2]], device=device)
    rows = triton.dispatch(ids, None, 3, 3, False)
    for dtype in DTYPES:
        expected = dequantize(packed, name, dtype)[::2].contiguous()
        actual = triton.dequantize(*packed, name, dtype, rows)[::2].contiguous()
        assert same_bits(actual, expected), dtype
        assert same_bits(eager.dequantize(*packed, name, dtype, rows)[::2].contiguous(), expected), dtype


def test_a_layer_on_triton_never_reads_what_experts_without_rows_leave_unwritten(device, monkeypatch):
    E, H, I = 4, 64, 64
    monkeypatch.setattr("sonicmoe_hf.kernels.triton.config.PACKED", 0)
    ids = torch.tensor([[0, 2], [2, 0], [0, 2]], device=device)
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *shape, **options):
        tensor = new_empty(self, *shape, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    for name in FORMATS:
        gate_up = PackedWeight.quantize(torch.randn(E, 2 * I, H, device=device) * 0.1, name)
        down = PackedWeight.quantize(torch.randn(E, H, I, device=device) * 0.1, name)
        x = torch.randn(3, H, device=device, requires_grad=True)
        found = []
        for weights in ((gate_up, down), (gate_up.dequantize(), down.dequantize())):
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "new_empty", poisoned)
                out = moe_experts(x, *weights, (ids, torch.ones(3, 2, device=device)), backend="triton")
                found.append((out, *torch.autograd.grad(out.square().sum(), x)))
        assert all(torch.equal(actual, expected) and actual.isfinite().all() for actual, expected in zip(*found))
