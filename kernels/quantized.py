"""Experts' weights in 4 bits: what is stored, and its conversion from and to floats, in plain PyTorch on any device.

Letters: E experts, N rows (output features) and K columns (input features) of a weight [E, N, K].

"nf4" is bitsandbytes' NF4 with double quantisation (QLoRA, arXiv 2305.14314): 64 values share a scale (their largest
magnitude), and 256 scales of the whole tensor share a scale of theirs. "mxfp4" is OCP's MXFP4 as gpt-oss stores it:
E2M1 values, of which 32 share the power of two 2^(scale - 127).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FORMATS = {"nf4": 64, "mxfp4": 32}  # name: how many values of a row share a scale

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # bit 3 is the sign

# where the parts of an NF4 weight's `state` lie
SCALE_MAP = slice(0, 256)  # the values that `scales` are indices into
VALUE_MAP = slice(256, 272)  # those of the weights' codes
SCALE_OFFSET = 272  # the mean of all scales
SCALE_SCALES = slice(273, None)  # of 256 scales each
SCALES_PER_SCALE = 256


class Quantized(NamedTuple):
    """A weight [E, N, K] in 4 bits. All tensors are contiguous.

    nf4: codes uint8 [E, N, K/2], two values a byte, the first in the HIGH half; scales uint8 [E, N, K/64]; state fp32
        [273 + ceil(E N K / 64 / 256)], bitsandbytes' quantisation state: nested_quant_map [256], quant_map [16],
        nested_offset, nested_absmax. A value is quant_map[code] * (nested_quant_map[scale] * nested_absmax + offset).
    mxfp4: codes uint8 [E, N, K/32, 16], the first value in the LOW half; scales uint8 [E, N, K/32]; state None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    state: torch.Tensor | None = None


class Shapes(NamedTuple):
    """Those of a Quantized."""

    codes: tuple[int, ...]
    scales: tuple[int, int, int]
    state: tuple[int] | None


def weight_shape(packed: Quantized, name: str) -> tuple[int, int, int]:
    """(E, N, K) of a weight in the format `name`."""
    num_experts, size_out, groups = packed.scales.shape
    return num_experts, size_out, groups * FORMATS[name]


def stored_shapes(name: str, shape: tuple[int, ...]) -> Shapes:
    """The shapes of what stores a weight of shape (E, N, K).

    Raises:
        ValueError: K is no multiple of the format's block.
    """
    num_experts, size_out, size_in = shape
    block = FORMATS[name]
    if size_in % block:
        raise ValueError(
            f"{name} stores {block} values of a row with one scale, which the weight's {size_in} input features are no "
            f"multiple of; use bf16 experts{' or mxfp4, which needs 32' if block == 64 and size_in % 32 == 0 else ''}"
        )
    scales = num_experts, size_out, size_in // block
    if name == "mxfp4":
        return Shapes((*scales, block // 2), scales, None)
    num_scales = num_experts * size_out * (size_in // block)
    state = SCALE_SCALES.start + -(-num_scales // SCALES_PER_SCALE)
    return Shapes((num_experts, size_out, size_in // 2), scales, (state,))


def check_quantized(packed: Quantized, name: str) -> None:
    """Raise ValueError where the parts of a packed weight do not fit together."""
    if packed.scales.dim() != 3:
        raise ValueError(f"{name} scales have {packed.scales.dim()} dimensions; they need 3: experts, rows, blocks")
    wanted = stored_shapes(name, weight_shape(packed, name))
    for part, tensor, shape in zip(Quantized._fields, packed, wanted):
        dtype = torch.float32 if part == "state" else torch.uint8
        if (tensor is None) != (shape is None) or (
            tensor is not None
            and (tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != packed.scales.device)
        ):
            found = None if tensor is None else (tuple(tensor.shape), tensor.dtype, str(tensor.device))
            raise ValueError(
                f"{part} of this {name} weight is {found}; beside scales {tuple(packed.scales.shape)} on "
                f"{packed.scales.device} it must be {None if shape is None else (shape, dtype)}"
            )


def quantize(weight_ENK: torch.Tensor, name: str) -> Quantized:
    """A weight [E, N, K] of any strides and float dtype, on its device, expert by expert.

    NF4's codes and scales are bitsandbytes' for the whole tensor. MXFP4: the smallest scale with which no value exceeds
    the largest E2M1 value (as Transformers quantises), values rounded to nearest, ties to even.

    Raises:
        ValueError: NaN or infinity in the weight, or K no multiple of the format's block.
    """
    shapes = stored_shapes(name, tuple(weight_ENK.shape))
    codes, scales = (torch.empty(shape, dtype=torch.uint8, device=weight_ENK.device) for shape in shapes[:2])
    if shapes.state is None:
        for expert, weight in enumerate(weight_ENK):
            codes[expert], scales[expert] = _quantize_mxfp4(weight)
        return Quantized(codes, scales, None)
    absmax = torch.empty(shapes.scales, device=weight_ENK.device)
    for expert, weight in enumerate(weight_ENK):
        codes[expert], absmax[expert] = _quantize_nf4(weight)
    state = torch.empty(shapes.state, device=weight_ENK.device)
    _quantize_scales(absmax.view(-1), scales.view(-1), state)
    return Quantized(codes, scales, state)


def _blocks(weight_NK: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K/size, size], and the largest magnitude of each block."""
    blocks = weight_NK.float().contiguous().view(weight_NK.shape[0], -1, size)
    absmax = blocks.abs().amax(-1)
    if not bool(torch.isfinite(absmax).all()):
        raise ValueError("the weight has NaN or infinite values, which 4-bit formats cannot hold; load a sound one")
    return blocks, absmax


def _nearest(scaled: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Indices of the nearest of the rising `values`, a tie going down (bitsandbytes' default kernel)."""
    return torch.bucketize(scaled, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


def _quantize_nf4(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, absmax = _blocks(weight_NK, FORMATS["nf4"])
    scaled = (blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1)
    codes = _nearest(scaled, torch.tensor(NF4_VALUES, device=scaled.device)).view(weight_NK.shape[0], -1)
    return codes[:, 0::2] << 4 | codes[:, 1::2], absmax


def _dynamic_map() -> torch.Tensor:
    """bitsandbytes' create_dynamic_map(): 256 values in [-1, 1], denser towards 0 (arXiv 1511.04561)."""
    values = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = ((bounds[:-1] + bounds[1:]) / 2.0) * 10 ** (i - 6)
        values += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


def _quantize_scales(absmax: torch.Tensor, scales: torch.Tensor, state: torch.Tensor) -> None:
    """Fill `scales` [n] and `state` from absmax [n]: blocks of 256 less the mean, in 8 bits."""
    values, offset = _dynamic_map().to(absmax.device), absmax.mean()
    size = -absmax.numel() % SCALES_PER_SCALE
    blocks = torch.nn.functional.pad(absmax - offset, (0, size)).view(-1, SCALES_PER_SCALE)
    largest = blocks.abs().amax(-1)
    scaled = (blocks * (1.0 / largest.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1)
    scales.copy_(_nearest(scaled, values).view(-1)[: scales.numel()])
    state[SCALE_MAP] = values
    state[VALUE_MAP] = torch.tensor(NF4_VALUES, device=state.device)
    state[SCALE_OFFSET] = offset
    state[SCALE_SCALES] = largest


def _quantize_mxfp4(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, absmax = _blocks(weight_NK, FORMATS["mxfp4"])
    mantissa, exponent = torch.frexp(absmax)  # absmax = mantissa * 2^exponent; 6 = 0.75 * 2^3
    scale = torch.where(mantissa <= 0.75, exponent - 3, exponent - 2)
    scale = torch.where(absmax > 0, scale.clamp(min=-127), -127)
    magnitude = blocks.double().abs() * torch.exp2(-scale.double()).unsqueeze(-1)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=blocks.device)
    bounds = (values[:-1] + values[1:]) / 2
    bounds[1::2] = bounds[1::2].nextafter(bounds.new_zeros(()))  # there a tie goes up, to the even code
    codes = torch.bucketize(magnitude, bounds, out_int32=True).to(torch.uint8) | torch.signbit(blocks) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, (scale + 127).to(torch.uint8)


def dequantize(packed: Quantized, name: str, dtype: torch.dtype, experts=None) -> torch.Tensor:
    """The weight [E, N, K] in `dtype`, contiguous, each value rounded once.

    Bit by bit what bitsandbytes' dequantize_4bit and Transformers' convert_moe_packed_tensors (which transposes) give.

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
    return _expert_of_mxfp4(packed, dtype) if name == "mxfp4" else _expert_of_nf4(packed)


def _expert_of_nf4(packed: Quantized):
    codes, scales, state = packed
    assert state is not None  # NF4 has one
    num_scales = scales[0].numel()
    values, scale_map = state[VALUE_MAP], state[SCALE_MAP]

    def expand(expert):
        first = expert * num_scales
        block = torch.arange(first, first + num_scales, device=codes.device) // SCALES_PER_SCALE
        absmax = scale_map[scales[expert].view(-1).int()] * state[SCALE_SCALES][block] + state[SCALE_OFFSET]
        bytes_ = codes[expert]
        pairs = torch.stack((values[(bytes_ >> 4).int()], values[(bytes_ & 15).int()]), dim=-1)
        return pairs.view(-1, FORMATS["nf4"]) * absmax.unsqueeze(-1)

    return expand


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
