"""Experts' weights in 4 or 8 bits: what is stored, and its conversion from and to floats, in plain PyTorch on any device.

Letters: E experts, N rows (output features) and K columns (input features) of a weight [E, N, K].

"nf4" is bitsandbytes' NF4 with double quantization (QLoRA, arXiv 2305.14314): 64 values share a scale (their largest
magnitude), and 256 scales of the whole tensor share a scale of theirs. "mxfp4" is OCP's MXFP4 as gpt-oss stores it:
E2M1 values, of which 32 share the power of two 2^(scale - 127). "fp8" is that of DeepSeek-V3's checkpoints
(arXiv 2412.19437, section 3.3): E4M3 values, of which a block of 128 rows and 128 columns shares a scale; the last
blocks are cut off. "nvfp4" is NVIDIA's: E2M1 values, of which 16 share an E4M3 scale, and those of a tensor an fp32 one.

The gate and the up projection of an expert are one weight here and two tensors in checkpoints, each with blocks or a
scale of its own, so fp8 and nvfp4 keep them apart: a weight's order says which rows are which (ORDERS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from .minifloat import E2M1_MAX, E2M1_VALUES, E4M3_MAX, from_e2m1, from_e4m3, to_e2m1, to_e4m3
from .nf4 import NF4_BLOCK, SCALE_SCALES, SCALES_PER_SCALE, expert_of_nf4, quantize_scales, to_nf4

FORMATS = {"nf4": NF4_BLOCK, "mxfp4": 32, "fp8": 16, "nvfp4": 16}  # name: what K must be a multiple of
# name: how many values of a row share a scale
SCALE_COLUMNS = {"nf4": NF4_BLOCK, "mxfp4": 32, "fp8": 128, "nvfp4": 16}
FP8_BLOCK = 128  # rows, and columns, that share a scale
ORDERS = {  # (P, Q): N rows are P parts, one behind the other, each of Q kinds of rows in turn
    "whole": (1, 1),  # down
    "concatenated": (2, 1),  # gate and up: all gates, then all ups
    "interleaved": (1, 2),  # gate 0, up 0, gate 1, up 1, ...
}


class Quantized(NamedTuple):
    """A weight [E, N, K] in 4 or 8 bits. All tensors are contiguous.

    nf4: codes uint8 [E, N, K/2], two values a byte, the first in the HIGH half; scales uint8 [E, N, K/64]; state fp32
        [273 + ceil(E N K / 64 / 256)], bitsandbytes' quantization state: nested_quant_map [256], quant_map [16],
        nested_offset, nested_absmax. A value is quant_map[code] * (nested_quant_map[scale] * nested_absmax + offset).
    mxfp4: codes uint8 [E, N, K/32, 16], the first value in the LOW half; scales uint8 [E, N, K/32]; state None.
    fp8: codes uint8 [E, N, K], the bytes of E4M3 values; scales [E, P, ceil(N / P Q / 128), Q, ceil(K/128)], fp32, or
        uint8 that stand for 2^(scale - 127); state None. Row r of a kind q in part p, row (p N/P + r Q + q) of the
        weight, has the scales [p, r // 128, q]. A value is e4m3 * scale, in fp32.
    nvfp4: codes uint8 [E, N, K/2], the first value in the LOW half; scales uint8 [E, N, K/16], the bytes of E4M3 values;
        state fp32 [E, P, Q]. A value is e2m1 * (scale * state), in fp32.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    state: torch.Tensor | None = None


class Shapes(NamedTuple):
    """Those of a Quantized."""

    codes: tuple[int, ...]
    scales: tuple[int, ...]
    state: tuple[int, ...] | None


def weight_shape(packed: Quantized, name: str) -> tuple[int, int, int]:
    """(E, N, K) of a weight in the format `name`."""
    if name == "fp8":
        num_experts, size_out, size_in = packed.codes.shape
        return num_experts, size_out, size_in
    num_experts, size_out, groups = packed.scales.shape
    return num_experts, size_out, groups * SCALE_COLUMNS[name]


def parts_and_kinds(packed: Quantized, name: str) -> tuple[int, int]:
    """(P, Q) of a weight's order; (1, 1) of a format that has none."""
    if name == "fp8":
        return packed.scales.shape[1], packed.scales.shape[3]
    if name == "nvfp4" and packed.state is not None:
        return packed.state.shape[1], packed.state.shape[2]
    return ORDERS["whole"]


def stored_shapes(name: str, shape: tuple[int, ...], order: str = "whole") -> Shapes:
    """The shapes of what stores a weight of shape (E, N, K) in an order of ORDERS.

    Raises:
        ValueError: K is no multiple of the format's block, or N is odd where it has gates and ups.
    """
    return _stored_shapes(name, shape, *ORDERS[order])


def _stored_shapes(name: str, shape: tuple[int, ...], parts: int, kinds: int) -> Shapes:
    num_experts, size_out, size_in = shape
    block = FORMATS[name]
    if size_in % block:
        others = [other for other in FORMATS if FORMATS[other] < block and size_in % FORMATS[other] == 0]
        other = "".join(f" or {other}, which needs {FORMATS[other]}" for other in others[:1])
        raise ValueError(
            f"{name} {_block_text(name)}, which the weight's {size_in} input features are no multiple of; use bf16 "
            f"experts{other}"
        )
    if size_out % (parts * kinds):
        raise ValueError(f"the weight has {size_out} rows, which are no pairs of a gate and an up")
    if name == "fp8":
        blocks = [-(-size // FP8_BLOCK) for size in (size_out // (parts * kinds), size_in)]
        return Shapes((num_experts, size_out, size_in), (num_experts, parts, blocks[0], kinds, blocks[1]), None)
    scales = num_experts, size_out, size_in // block
    codes = num_experts, size_out, size_in // 2
    if name == "mxfp4":
        return Shapes((*scales, block // 2), scales, None)
    if name == "nvfp4":
        return Shapes(codes, scales, (num_experts, parts, kinds))
    num_scales = num_experts * size_out * (size_in // block)
    state = SCALE_SCALES.start + -(-num_scales // SCALES_PER_SCALE)
    return Shapes(codes, scales, (state,))


def _block_text(name: str) -> str:
    if name == "fp8":
        return f"takes rows of a multiple of {FORMATS[name]} values"
    return f"stores {FORMATS[name]} values of a row with one scale"


def stored_dtypes(name: str, part: str) -> tuple[torch.dtype, ...]:
    """The dtypes that `part`, a field of Quantized, may have."""
    if part == "state":
        return (torch.float32,)
    return (torch.float32, torch.uint8) if name == "fp8" and part == "scales" else (torch.uint8,)


def check_quantized(packed: Quantized, name: str) -> None:
    """Raise ValueError where the parts of a packed weight do not fit together."""
    dims, letters = (
        (5, "experts, parts, blocks of rows, kinds of rows, blocks of columns")
        if name == "fp8"
        else (3, "experts, rows, blocks")
    )
    if packed.scales.dim() != dims:
        raise ValueError(f"{name} scales have {packed.scales.dim()} dimensions; they need {dims}: {letters}")
    order = packed.state if name == "nvfp4" else packed.codes
    if name in ("fp8", "nvfp4") and (order is None or order.dim() != 3):
        raise ValueError(
            f"{'state' if name == 'nvfp4' else 'codes'} of this {name} weight is no tensor of 3 dimensions"
        )
    if parts_and_kinds(packed, name) not in ORDERS.values():
        raise ValueError(f"{name} scales have {parts_and_kinds(packed, name)} parts and kinds; see ORDERS")
    wanted = _stored_shapes(name, weight_shape(packed, name), *parts_and_kinds(packed, name))
    for part, tensor, shape in zip(Quantized._fields, packed, wanted):
        dtypes = stored_dtypes(name, part)
        if (tensor is None) != (shape is None) or (
            tensor is not None
            and (tuple(tensor.shape) != shape or tensor.dtype not in dtypes or tensor.device != packed.scales.device)
        ):
            found = None if tensor is None else (tuple(tensor.shape), tensor.dtype, str(tensor.device))
            raise ValueError(
                f"{part} of this {name} weight is {found}; beside scales {tuple(packed.scales.shape)} on "
                f"{packed.scales.device} it must be {None if shape is None else (shape, dtypes[0])}"
            )


def quantize(
    weight_ENK: torch.Tensor,
    name: str,
    order: str = "whole",
    mean: Callable[[torch.Tensor], torch.Tensor] = torch.mean,
) -> Quantized:
    """A weight [E, N, K] of any strides and float dtype, on its device, expert by expert; its rows in an order of ORDERS.

    NF4's codes and scales are bitsandbytes' for the whole tensor. MXFP4: the smallest scale with which no value exceeds
    the largest E2M1 value (as Transformers quantizes), values rounded to nearest, ties to even. FP8: fp32 scales with
    which a block's largest magnitude becomes the largest E4M3 value, as Transformers' Fp8Quantize. NVFP4: ModelOpt's
    scales, of the largest magnitudes of 16 values and of the gate's, the up's or down's whole tensor.

    mean: of NF4's scales [n] in fp32. Where the weight is a part of the experts, that of the whole weight's.

    Raises:
        ValueError: NaN or infinity in the weight, or K no multiple of the format's block.
    """
    return pack_experts(weight_ENK, tuple(weight_ENK.shape), name, order, mean, weight_ENK.device)


def requantize(
    packed: Quantized,
    name: str,
    wanted: str,
    dtype: torch.dtype,
    order: str = "whole",
    mean: Callable[[torch.Tensor], torch.Tensor] = torch.mean,
) -> Quantized:
    """A weight in the format `name`, in the format `wanted`: what `quantize` makes of `dequantize` in `dtype`, with one
    expert dense at a time. Raises ValueError as `quantize`."""
    shape = weight_shape(packed, name)
    experts = (dequantize_expert(packed, name, dtype, expert) for expert in range(shape[0]))
    return pack_experts(experts, shape, wanted, order, mean, packed.codes.device)


def pack_experts(
    experts: Iterable[torch.Tensor],
    shape: tuple[int, ...],
    name: str,
    order: str = "whole",
    mean: Callable[[torch.Tensor], torch.Tensor] = torch.mean,
    device: torch.device | str = "cpu",
) -> Quantized:
    """What `quantize` makes of a weight of this shape [E, N, K] whose experts [N, K] come one after the other, on their
    device (default: the CPU). Raises ValueError as `quantize`."""
    shapes = stored_shapes(name, shape, order)
    if name == "nf4":
        return _quantize_nf4_weight(experts, shapes, device, mean)
    codes = torch.empty(shapes.codes, dtype=torch.uint8, device=device)
    scales = torch.empty(shapes.scales, dtype=torch.float32 if name == "fp8" else torch.uint8, device=device)
    state = None if shapes.state is None else torch.empty(shapes.state, dtype=torch.float32, device=device)
    for expert, weight in enumerate(experts):
        if name == "mxfp4":
            codes[expert], scales[expert] = _quantize_mxfp4(weight)
        elif name == "fp8":
            codes[expert], scales[expert] = _quantize_fp8(weight, *ORDERS[order])
        else:
            assert state is not None
            codes[expert], scales[expert], state[expert] = _quantize_nvfp4(weight, *ORDERS[order])
    return Quantized(codes, scales, state)


def _quantize_nf4_weight(
    experts: Iterable[torch.Tensor], shapes: Shapes, device: torch.device | str, mean
) -> Quantized:
    codes, scales = (torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes[:2])
    absmax = torch.empty(shapes.scales, dtype=torch.float32, device=device)
    for expert, weight in enumerate(experts):
        blocks, absmax[expert] = _blocks(weight, NF4_BLOCK)
        codes[expert] = to_nf4(blocks, absmax[expert])
    assert shapes.state is not None
    state = torch.empty(shapes.state, dtype=torch.float32, device=device)
    quantize_scales(absmax.view(-1), scales.view(-1), state, mean(absmax.view(-1)))
    return Quantized(codes, scales, state)


def _blocks(weight_NK: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K/size, size], and the largest magnitude of each block."""
    blocks = _finite(weight_NK).view(weight_NK.shape[0], -1, size)
    return blocks, blocks.abs().amax(-1)


def _finite(weight_NK: torch.Tensor) -> torch.Tensor:
    """The weight in fp32, contiguous. Raises ValueError where it is not finite."""
    weight = weight_NK.float().contiguous()
    check_finite(weight)
    return weight


def check_finite(weight: torch.Tensor) -> None:
    """Raise ValueError where a weight has NaN or infinity."""
    if not bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all()):
        raise ValueError("the weight has NaN or infinite values, which no format holds; load a sound one")


def _quantize_mxfp4(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, absmax = _blocks(weight_NK, FORMATS["mxfp4"])
    mantissa, exponent = torch.frexp(absmax)  # absmax = mantissa * 2^exponent; 6 = 0.75 * 2^3
    scale = torch.where(mantissa <= 0.75, exponent - 3, exponent - 2)
    scale = torch.where(absmax > 0, scale.clamp(min=-127), -127)
    scaled = blocks.double() * torch.exp2(-scale.double()).unsqueeze(-1)
    return to_e2m1(scaled), (scale + 127).to(torch.uint8)


def _quantize_fp8(weight_NK: torch.Tensor, parts: int, kinds: int) -> tuple[torch.Tensor, torch.Tensor]:
    size_out, size_in = weight_NK.shape
    rows = size_out // (parts * kinds)
    blocks_N, blocks_K = -(-rows // FP8_BLOCK), -(-size_in // FP8_BLOCK)
    weight = _finite(weight_NK).view(parts, rows, kinds, size_in)
    filled = weight.new_zeros(parts, blocks_N * FP8_BLOCK, kinds, blocks_K * FP8_BLOCK)
    filled[:, :rows, :, :size_in] = weight
    absmax = filled.abs().view(parts, blocks_N, FP8_BLOCK, kinds, blocks_K, FP8_BLOCK).amax((2, 5))
    inverse = torch.where(absmax > 0, E4M3_MAX / absmax, 1.0).clamp(max=torch.finfo(torch.float32).max)
    scaled = weight * _spread_blocks(inverse, rows, size_in)
    return to_e4m3(scaled).view(size_out, size_in), 1.0 / inverse


def _spread_blocks(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[P, blocks, Q, blocks] -> [P, rows, Q, columns], the last blocks cut off."""
    by_row = scales.repeat_interleave(FP8_BLOCK, dim=1)[:, :rows]
    return by_row.repeat_interleave(FP8_BLOCK, dim=3)[..., :columns]


def _quantize_nvfp4(weight_NK: torch.Tensor, parts: int, kinds: int):
    size_out, size_in = weight_NK.shape
    weight = _finite(weight_NK).view(parts, size_out // (parts * kinds), kinds, size_in)
    largest = weight.abs().amax((1, 3))
    smallest = torch.finfo(torch.float32).tiny
    state = torch.where(largest > 0, (largest / (E2M1_MAX * E4M3_MAX)).clamp(min=smallest), 1.0)
    blocks = weight.unflatten(-1, (-1, SCALE_COLUMNS["nvfp4"]))
    whole = state[:, None, :, None]
    scales = to_e4m3(blocks.abs().amax(-1) / (E2M1_MAX * whole))
    factors = from_e4m3(scales) * whole
    scaled = blocks.double() / torch.where(factors > 0, factors, 1.0).double().unsqueeze(-1)
    return to_e2m1(scaled).view(size_out, -1), scales.view(size_out, -1), state


def dequantize(packed: Quantized, name: str, dtype: torch.dtype, experts=None) -> torch.Tensor:
    """The weight [E, N, K] in `dtype`, contiguous, each value rounded once.

    Bit by bit what bitsandbytes' dequantize_4bit, Transformers' convert_moe_packed_tensors (which transposes) and
    Fp8Dequantize, and ModelOpt's dequantize give. Where FP8's blocks are cut off, Fp8Dequantize takes other blocks than
    the checkpoint's: it divides the rows by the number of blocks.

    experts: whose rows are wanted; the others' are left uninitialised. None: all.
    """
    num_experts, size_out, size_in = weight_shape(packed, name)
    weight_ENK = torch.empty(num_experts, size_out, size_in, dtype=dtype, device=packed.codes.device)
    expand = _expander(packed, name, dtype)
    for expert in range(num_experts) if experts is None else experts:
        weight_ENK[expert] = expand(expert).view(size_out, size_in)
    return weight_ENK


def dequantize_expert(packed: Quantized, name: str, dtype: torch.dtype, expert: int) -> torch.Tensor:
    """The rows [N, K] of one expert in `dtype`, as `dequantize` gives them."""
    _, size_out, size_in = weight_shape(packed, name)
    return _expander(packed, name, dtype)(expert).view(size_out, size_in).to(dtype)


def _expander(packed: Quantized, name: str, dtype: torch.dtype):
    if name == "mxfp4":
        return _expert_of_mxfp4(packed, dtype)
    return {"nf4": expert_of_nf4, "fp8": _expert_of_fp8, "nvfp4": _expert_of_nvfp4}[name](packed)


def _expert_of_mxfp4(packed: Quantized, dtype: torch.dtype):
    codes, scales, _ = packed
    magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=codes.device)
    values = torch.cat((magnitudes, -magnitudes))
    powers = torch.exp2(torch.arange(-127, 129, dtype=torch.float64, device=codes.device))
    table = (powers.unsqueeze(1) * values).to(dtype).view(-1)  # by scale and code; exact, or infinity, in bf16

    def expand(expert):
        row = scales[expert].int().unsqueeze(-1) << 4
        bytes_ = codes[expert].int()
        return torch.stack((table[row | bytes_ & 15], table[row | bytes_ >> 4]), dim=-1)

    return expand


def scales_in_fp32(scales: torch.Tensor) -> torch.Tensor:
    """FP8's scales as fp32: uint8 are powers of two, 2^(scale - 127)."""
    return scales if scales.dtype != torch.uint8 else torch.exp2(scales.double() - 127).float()


def _expert_of_fp8(packed: Quantized):
    codes, scales, _ = packed
    parts, kinds = parts_and_kinds(packed, "fp8")
    _, size_out, size_in = codes.shape
    rows = size_out // (parts * kinds)

    def expand(expert):
        values = from_e4m3(codes[expert]).view(parts, rows, kinds, size_in)
        return values * _spread_blocks(scales_in_fp32(scales[expert]), rows, size_in)

    return expand


def _expert_of_nvfp4(packed: Quantized):
    codes, scales, state = packed
    assert state is not None  # NVFP4 has one
    parts, kinds = parts_and_kinds(packed, "nvfp4")

    def expand(expert):
        grouped = from_e4m3(scales[expert]).view(parts, -1, kinds, scales.shape[2])
        factors = (grouped * state[expert][:, None, :, None]).view(-1, 1)
        return from_e2m1(codes[expert]).view(-1, SCALE_COLUMNS["nvfp4"]) * factors

    return expand
