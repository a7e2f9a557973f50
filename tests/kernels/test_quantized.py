"""Packed weights: the codecs against bitsandbytes and Transformers, bit by bit, and what they refuse."""

from itertools import product

import pytest
import torch
from helpers.checkpoints import fp8_by_transformers
from helpers.marks import rest_pinned, rest_slow
from moe_problems import poisoned
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sonicmoe_hf import PackedWeight, moe_experts
from sonicmoe_hf.checkpoints.reading.files import same_bytes
from sonicmoe_hf.kernels import eager, minifloat, triton
from sonicmoe_hf.kernels.packed import FORMATS, ORDERS, Quantized
from sonicmoe_hf.kernels.packed.int4 import int4_grid
from sonicmoe_hf.tools.comparing import relative_error

SHAPE = (5, 33, 192)  # 495 NF4 scales: two of the second level, the last one cut
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = ("int4", "uint4")


def bitsandbytes_nf4(weight):
    """Compute bitsandbytes' codes and quantization state, and the same as ours stores them."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    shapes = FORMATS["nf4"].shapes(tuple(weight.shape))
    nested = torch.cat([state.state2.code, state.code, state.offset.view(1), state.state2.absmax])
    return codes, state, Quantized(codes.view(shapes.codes), state.absmax.view(shapes.scales), nested)


def test_nf4_gives_the_values_of_bitsandbytes_from_its_quantization_state():
    from bitsandbytes.functional import dequantize_4bit

    weight = torch.randn(SHAPE)
    weight[1, 3, 64:128] = 0
    codes, state, packed = bitsandbytes_nf4(weight)
    FORMATS["nf4"].check_shapes(packed)
    for dtype in DTYPES:
        state.dtype = dtype
        assert same_bytes(FORMATS["nf4"].dequantize(packed, dtype), dequantize_4bit(codes, state)), dtype


def test_nf4_quantizes_as_bitsandbytes_does():
    weight = torch.randn(SHAPE).bfloat16()
    _, _, theirs = bitsandbytes_nf4(weight)
    for part, ours, wanted in zip(Quantized._fields, FORMATS["nf4"].quantize(weight), theirs):
        assert same_bytes(ours, wanted), part


def test_mxfp4_gives_the_values_of_transformers_for_every_code_and_scale():
    codes = torch.arange(256).repeat(16).view(1, 1, 256, 16).to(torch.uint8)
    codes = codes.view(1, 16, 16, 16).expand(256, 16, 16, 16).reshape(16, 256, 16, 16).contiguous()
    scales = torch.arange(256).repeat_interleave(256).view(16, 256, 16).to(torch.uint8)
    for dtype in DTYPES:
        expected = convert_moe_packed_tensors(codes, scales, dtype=dtype).transpose(1, 2).contiguous()
        assert same_bytes(FORMATS["mxfp4"].dequantize(Quantized(codes, scales, None), dtype), expected), dtype


def test_mxfp4_rounds_to_nearest_even_below_the_smallest_scale_that_holds_the_largest_value():
    weight = torch.zeros(1, 2, 32)
    weight[0, 0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5.0, -0.26])
    packed = FORMATS["mxfp4"].quantize(weight)
    assert packed.scales.tolist() == [[[127], [0]]]
    values = FORMATS["mxfp4"].dequantize(packed, torch.float32)
    assert values[0, 0, :9].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, -4.0, -0.5]
    assert FORMATS["mxfp4"].quantize(weight * 1.01).scales.tolist() == [[[128], [0]]]
    again = FORMATS["mxfp4"].quantize(values)
    assert same_bytes(again.codes, packed.codes) and same_bytes(again.scales, packed.scales)
    tiny = FORMATS["mxfp4"].quantize(values * 2.0**-129)  # 6 * 2^-129: there is no smaller scale than 2^-127
    assert tiny.scales.tolist() == [[[0], [0]]]
    assert FORMATS["mxfp4"].dequantize(tiny, torch.float32)[0, 0, :3].tolist() == [1.5 * 2.0**-127, 0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_quantizes_and_gives_the_values_of_transformers(dtype):
    weight = torch.randn(3, 256, 384).to(dtype)
    weight[1, 128:, 128:256] = 0
    packed = FORMATS["fp8"].quantize(weight)
    for expert in range(3):
        values, scales = fp8_by_transformers(weight[expert], (128, 128))
        assert same_bytes(packed.codes[expert].view(torch.float8_e4m3fn), values)
        assert same_bytes(packed.scales[expert, 0, :, 0], scales)
        expected = Fp8Dequantize(None)._dequantize_one(values, scales, output_dtype=dtype)
        assert same_bytes(FORMATS["fp8"].dequantize(packed, dtype)[expert], expected)


@pytest.mark.parametrize("order", ORDERS)
def test_fp8_blocks_that_are_cut_off_are_those_of_each_half(order):
    # 192 rows of a half and 144 columns: a whole block and a part of one, by DeepSeek's rule
    gate, up = (torch.randn(2, 192, 144).bfloat16() * scale for scale in (1, 50))
    weight = {
        "whole": gate,
        "concatenated": torch.cat((gate, up), 1),
        "interleaved": torch.stack((gate, up), 2).flatten(1, 2),
    }[order]
    packed = FORMATS["fp8"].quantize(weight, order)
    found = FORMATS["fp8"].dequantize(packed, torch.float32)
    rows = {
        "whole": (slice(None),),
        "concatenated": (slice(192), slice(192, None)),
        "interleaved": (slice(0, None, 2), slice(1, None, 2)),
    }[order]
    for (half, place), i, j in product(zip((gate, up), rows), (0, 1), (0, 1)):
        block = slice(None), slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        inverse = 448 / half[block].float().abs().amax((1, 2), keepdim=True)
        expected = (half[block].float() * inverse).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (1 / inverse)
        assert torch.equal(found[:, place][block], expected), (i, j)
    assert packed.scales.numel() == 2 * len(rows) * 4


def test_fp8_scales_in_a_byte_are_powers_of_two():
    packed = FORMATS["fp8"].quantize(torch.randn(1, 256, 256))
    bytes_ = torch.tensor([[0, 1], [127, 200]], dtype=torch.uint8)
    found = FORMATS["fp8"].dequantize(packed._replace(scales=bytes_.view(1, 1, 2, 1, 2)), torch.float32)
    powers = bytes_.view(torch.float8_e8m0fnu).float()
    expected = FORMATS["fp8"].dequantize(packed._replace(scales=powers.view(1, 1, 2, 1, 2)), torch.float32)
    assert same_bytes(found, expected)
    values = packed.codes[0].view(torch.float8_e4m3fn)
    assert same_bytes(found[0], Fp8Dequantize(None)._dequantize_one(values, bytes_, output_dtype=torch.float32))


@pytest.mark.parametrize("order", ORDERS)
def test_nvfp4_gives_each_half_a_scale_of_its_own_and_the_nearest_values(order):
    parts, kinds = ORDERS[order]
    weight = torch.randn(2, parts, 24, kinds, 48)
    weight[:, -1:, :, -1:] *= 100
    packed = FORMATS["nvfp4"].quantize(weight.reshape(2, -1, 48), order)
    largest = weight.abs().amax((2, 4))
    assert same_bytes(packed.state, largest / (6 * 448))
    factors = (
        packed.scales.view(torch.float8_e4m3fn).float().view(2, parts, 24, kinds, 3)
        * packed.state[:, :, None, :, None]
    )
    scaled = weight.unflatten(-1, (3, 16)) / factors.unsqueeze(-1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = values[(scaled.abs().unsqueeze(-1) - values).abs().argmin(-1)] * scaled.sign()
    found = FORMATS["nvfp4"].dequantize(packed, torch.float32).view(weight.shape)
    assert torch.equal(found, (nearest * factors.unsqueeze(-1)).flatten(-2))


def integers(name, shape, group, dtype, device="cpu"):
    """Make an INT4 weight of any codes, with scales of both signs and every zero."""
    num_experts, size_out, size_in = shape
    codes = torch.randint(0, 256, (num_experts, size_out, size_in // 2), device=device).to(torch.uint8)
    scales = torch.randn(num_experts, size_out, size_in // group, device=device).to(dtype)
    zeros = torch.randint(0, 17, scales.shape, device=device).to(torch.uint8) if name == "uint4" else None
    return Quantized(codes, scales, zeros)


@pytest.mark.pinned
@pytest.mark.parametrize("group, dtype", [(32, torch.bfloat16), (64, torch.float16), (128, torch.float32)])
@pytest.mark.parametrize("name", INTEGERS)
def test_int4_is_code_less_zero_times_scale_in_every_group_and_dtype_of_scales(name, group, dtype, device):
    shape = (3, 5, 384)
    packed, format = integers(name, shape, group, dtype, device), FORMATS[name]
    format.check_shapes(packed)
    assert format.shape(packed) == shape and format.group(packed) == group
    codes = torch.stack((packed.codes % 16, packed.codes // 16), -1).flatten(2).double()
    zeros = 8 if packed.state is None else packed.state.repeat_interleave(group, 2).double()
    expected = ((codes - zeros) * packed.scales.double().repeat_interleave(group, 2)).float()
    assert same_bytes(format.dequantize(packed, torch.float32), expected)
    rows = triton.dispatch(torch.tensor([[0], [2]], device=device), None, 2, 3, False)
    for wanted in DTYPES:
        found = triton.dequantize(*packed, name, wanted, rows)[::2].contiguous()
        assert same_bytes(found, expected.to(wanted)[::2].contiguous()), wanted


@pytest.mark.parametrize("name", INTEGERS)
def test_int4_rounds_to_the_nearest_code_beside_scales_of_either_sign(name):
    weight = torch.randn(64, 256)
    codes, scales, *zeros = (part[0] for part in FORMATS[name].quantize(weight[None]) if part is not None)
    loss = FORMATS[name].loss
    grid = int4_grid(32, scales.dtype, *zeros)
    assert loss / 100 - 0.015 < relative_error(grid.dense(codes, scales), weight) < loss / 100 + 0.01
    if not zeros:
        assert same_bytes(scales, (weight.unflatten(1, (-1, 32)).abs().amax(2) / 7.5).bfloat16())
        assert relative_error(grid.round(weight, -scales).values, weight) < 0.11  # AutoRound keeps a sign in the scale


def test_a_scale_for_other_than_32_64_or_128_values_is_no_int4():
    for group in (16, 256):
        with pytest.raises(ValueError, match=rf"a scale for {group} values, not for \[32, 64, 128\]"):
            FORMATS["int4"].check_shapes(integers("int4", (1, 2, 512), group, torch.bfloat16))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-40, 1e-37, 1e-36])
def test_weights_without_a_sound_scale_of_their_own_are_off_by_their_size_at_most(name, size):
    """Zeros, numbers whose reciprocal is no number, and subnormal ones."""
    weight = size * torch.randn(1, 2, 64) + 0.0  # which leaves no negative zeros
    packed = FORMATS[name].quantize(weight)
    found = FORMATS[name].dequantize(packed, torch.float32)
    worst = 0.25 if size > 1e-38 else 1.0  # of four bits, whose scale is a normal number; below, all may become zero
    assert (found - weight).abs().amax() <= worst * weight.abs().amax()
    assert size or not found.any(), "zeros stay zeros, also where their scale is zero"


def test_e4m3_takes_its_largest_value_for_larger_ones_and_knows_both_codes_of_nan():
    codes = minifloat.to_e4m3(torch.tensor([465.0, -1e9, float("inf"), 448.0]))
    assert minifloat.from_e4m3(codes).tolist() == [448.0, -448.0, 448.0, 448.0]
    assert not minifloat.has_e4m3_nan(codes)
    for code in (0x7F, 0xFF):
        assert minifloat.has_e4m3_nan(torch.tensor([0, code], dtype=torch.uint8)), code


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(name, value):
    weight = torch.randn(2, 4, 64)
    weight[1, 2, 3] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        FORMATS[name].quantize(weight)


@pytest.mark.parametrize(
    "name, size, other",
    [
        ("nf4", 96, "or mxfp4"),
        ("nf4", 80, ""),
        ("mxfp4", 80, "or fp8"),
        ("fp8", 72, ""),
        ("nvfp4", 72, ""),
        ("int4", 80, "or fp8"),
    ],
)
def test_rows_that_blocks_would_cross_are_refused_by_name(name, size, other):
    with pytest.raises(
        ValueError,
        match=f"{name} packs rows of a multiple of {FORMATS[name].block} values, .*{size} input features",
    ):
        FORMATS[name].quantize(torch.randn(2, 4, size))


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
@pytest.mark.parametrize("order", ["concatenated", "interleaved"])
def test_an_odd_number_of_rows_is_no_gates_and_ups(name, order):
    with pytest.raises(ValueError, match="the weight has 5 rows, which are no pairs of a gate and an up"):
        FORMATS[name].quantize(torch.randn(2, 5, 64), order)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_that_do_not_fit_are_refused(name):
    packed = FORMATS[name].quantize(torch.randn(2, 4, 128))
    FORMATS[name].check_shapes(packed)
    changes = [{"state": packed.state[..., :-1]}] if packed.state is not None else []
    for change in (
        *changes,
        {"codes": packed.codes[:1]},
        {"codes": packed.codes.view(torch.int8)},
        {"scales": packed.scales[:1]},
        {"scales": packed.scales.view(-1)},
        {"state": packed.scales.float()},
    ):
        with pytest.raises(ValueError, match=f"{name} (weight is|weight has)"):
            FORMATS[name].check_shapes(packed._replace(**change))


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_experts_asked_for_are_expanded(name):
    packed = FORMATS[name].quantize(torch.randn(4, 8, 64))
    whole = FORMATS[name].dequantize(packed, torch.bfloat16)
    some = FORMATS[name].dequantize(packed, torch.bfloat16, experts=[1, 3])
    assert same_bytes(some[1::2].contiguous(), whole[1::2].contiguous())


def every_value(name, order, device):
    """Make a packed weight with every code, and where a byte is a scale every scale, that is finite."""
    # MXFP4: an expert's blocks end within a program; FP8: blocks are cut off on both sides
    shapes = {"mxfp4": (3, 2, 257 * 32), "fp8": (3, 264, 144), "nvfp4": (3, 34, 192)}
    shape = shapes.get(name, (3, 33, 192))
    packed = FORMATS[name].quantize(torch.randn(shape, device=device), order)
    packed.codes.copy_(torch.randint(0, 256, packed.codes.shape))
    if name == "fp8":
        packed.codes[(packed.codes & 127) == 127] = 1
        packed.scales.uniform_(1e-6, 10.0)
    elif name in INTEGERS:
        packed.scales.normal_()
        if packed.state is not None:
            packed.state.copy_(torch.randint(0, 17, packed.state.shape))
    else:
        finite = torch.arange(256) if name != "nvfp4" else torch.cat((torch.arange(127), torch.arange(128, 255)))
        place = torch.arange(packed.scales.numel()).view(packed.scales.shape) % len(finite)
        packed.scales.copy_(finite[place])
    return packed


@pytest.mark.parametrize(
    "name, order",
    [
        *rest_pinned(
            [("nf4", "whole"), ("mxfp4", "whole"), *(("nvfp4", order) for order in ORDERS), ("uint4", "whole")], 3
        ),
        *rest_pinned([("fp8", "whole")], 0),
        *rest_slow((("fp8", order) for order in [*ORDERS][1:]), 0),
    ],
)
def test_triton_gives_the_codecs_values(device, name, order):
    packed = every_value(name, order, device)
    ids = torch.tensor([[0], [2], [2]], device=device)
    rows = triton.dispatch(ids, None, 3, 3, False)
    powers = torch.randint(1, 250, packed.scales.shape).to(torch.uint8)
    if device.type == "cpu":
        powers[..., :1] = 0  # 2^-127, a subnormal number, as values beside it are
    bytes_ = packed._replace(scales=powers.to(device))
    for stored in (packed, bytes_) if name == "fp8" else (packed,):
        for dtype in DTYPES:
            expected = FORMATS[name].dequantize(stored, dtype)[::2].contiguous()
            actual = triton.dequantize(*stored, name, dtype, rows)[::2].contiguous()
            assert same_bytes(actual, expected), dtype
            assert same_bytes(eager.dequantize(*stored, name, dtype, rows)[::2].contiguous(), expected), dtype


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_triton_keeps_values_that_are_no_number(device, name):
    packed = FORMATS[name].quantize(torch.ones(1, 2, 64, device=device))
    (packed.codes if name == "fp8" else packed.scales)[0, 1, :2] = torch.tensor([127, 255])
    rows = triton.dispatch(torch.zeros(1, 1, dtype=torch.long, device=device), None, 1, 1, False)
    for dtype in DTYPES:
        expected = FORMATS[name].dequantize(packed, dtype).isnan()
        assert expected.any() and torch.equal(triton.dequantize(*packed, name, dtype, rows).isnan(), expected)


@pytest.mark.slow
def test_a_layer_on_triton_never_reads_what_experts_without_rows_leave_unwritten(device, monkeypatch):
    E, H, I = 4, 64, 64
    monkeypatch.setattr("sonicmoe_hf.kernels.triton.config.MAX_PACKED_ROWS", dict.fromkeys(FORMATS, 0))
    ids = torch.tensor([[0, 2], [2, 0], [0, 2]], device=device)
    for name in FORMATS:
        gate_up = PackedWeight.quantize(torch.randn(E, 2 * I, H, device=device) * 0.1, name)
        down = PackedWeight.quantize(torch.randn(E, H, I, device=device) * 0.1, name)
        x = torch.randn(3, H, device=device, requires_grad=True)
        found = []
        for weights in ((gate_up, down), (gate_up.dequantize(), down.dequantize())):
            with poisoned():
                out = moe_experts(x, *weights, (ids, torch.ones(3, 2, device=device)), backend="triton")
                found.append((out, *torch.autograd.grad(out.square().sum(), x)))
        assert all(torch.equal(actual, expected) and actual.isfinite().all() for actual, expected in zip(*found))
