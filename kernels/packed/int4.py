"""INT4 as weight-only checkpoints have it (compressed-tensors, GPTQ, AWQ, AutoRound): (code - zero) * scale.

Codes are unsigned, and 32, 64 or 128 values of a row share a scale and a zero.
"""

from __future__ import annotations

import math

import torch

from .format import Format, Quantized, Shapes
from .grid import Grid, Rounded

GROUPS = (128, 64, 32)  # values of a row that share a scale
GROUP = GROUPS[-1]  # as many as `pack` chooses
ZERO = 8  # the code of zero where a weight stores none
LARGEST = 15  # code
DIVISOR = 7.5  # the largest magnitude of a group over its scale, as compressed-tensors has it


def to_nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """Split bytes [..., B] into halves [..., 2 B], the low one first."""
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)


def to_bytes(nibbles: torch.Tensor) -> torch.Tensor:
    """Join halves [..., 2 B], the low one first, to bytes [..., B], contiguous."""
    # contiguous() would leave strides of a single row as they are, and a view as words refuses those
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).clone(memory_format=torch.contiguous_format)


def group_of(size_in: int, group: int) -> int:
    """Compute the length of groups here for a row of `size_in` values whose groups in a checkpoint have length `group`,
    the last of them maybe a shorter one. Long groups are stored as several. A result below GROUP means that no format
    here takes the row."""
    return math.gcd(size_in, group, GROUPS[0])


def int4_grid(group: int, dtype: torch.dtype, zeros: torch.Tensor | None = None) -> Grid:
    """Make the grid of a matrix [rows, columns] with scales of this dtype. zeros: [rows, groups] in uint8, which stay as
    they are; None where all are 8."""

    def new_scales(largest: torch.Tensor) -> torch.Tensor:
        return torch.where(largest > 0, largest / DIVISOR, 1.0).to(dtype)

    def neighbours(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zero = zero_of(scaled.shape[1])
        codes = (torch.floor(scaled) + zero).clamp(0, LARGEST - 1)
        low = (codes - zero).float()
        return low, low + 1.0

    def zero_of(columns: int) -> int | torch.Tensor:
        return ZERO if zeros is None else zeros.double().repeat_interleave(group, 1)[:, :columns]

    def codes(scaled: torch.Tensor) -> torch.Tensor:
        return to_bytes((scaled + zero_of(scaled.shape[1])).round().clamp(0, LARGEST).to(torch.uint8))

    def values(codes: torch.Tensor) -> torch.Tensor:
        nibbles = to_nibbles(codes)
        return (nibbles.double() - zero_of(nibbles.shape[1])).float()

    return Grid(1, group, new_scales if zeros is None else None, torch.Tensor.double, codes, values, neighbours)


class Int4(Format):
    """INT4 in groups of 32, 64 or 128: "int4" where the zero of every group is 8, and "uint4" where a tensor has them.

    codes uint8 [E, N, K/2], unsigned, the first value in the LOW half; scales [E, N, K/group], bf16, fp16 or fp32, as the
    checkpoint has them, and also negative; state of "uint4", the zeros, uint8 [E, N, K/group], 0 to 16. A value is
    (code - zero) * scale, rounded once to fp32. `pack` makes bf16 scales of 32 values: their largest magnitude
    over 7.5, or in "uint4" a fifteenth of what lies between the smallest and the largest, zero included.
    """

    block = GROUP

    def __init__(self, has_zeros: bool):
        self.name, self.loss = ("uint4", 8) if has_zeros else ("int4", 10)
        self.suffixes = ("packed", "scale", "zero") if has_zeros else ("packed", "scale")
        self.dims = (3, 3, 3 if has_zeros else None)

    def shape(self, packed: Quantized) -> tuple[int, int, int]:
        """See Format."""
        num_experts, size_out, num_bytes = packed.codes.shape
        return num_experts, size_out, 2 * num_bytes

    def group(self, packed: Quantized) -> int:
        """See Format."""
        return 2 * packed.codes.shape[-1] // max(1, packed.scales.shape[-1])

    def _stored_shapes(self, num_experts, size_out, size_in, parts, kinds, group):
        group = GROUP if group is None else group_of(size_in, group)
        scales = num_experts, size_out, size_in // group
        return Shapes((num_experts, size_out, size_in // 2), scales, scales if self.dims[2] else None)

    def dtypes(self, field: str) -> tuple[torch.dtype, ...]:
        """See Format."""
        return (torch.bfloat16, torch.float16, torch.float32) if field == "scales" else (torch.uint8,)

    def check_shapes(self, packed: Quantized) -> None:
        """See Format."""
        if packed.codes.dim() == packed.scales.dim() == 3 and self.group(packed) not in GROUPS:
            raise ValueError(
                f"this {self.name} weight has a scale for {self.group(packed)} values, not for {sorted(GROUPS)}"
            )
        super().check_shapes(packed)

    def pack_expert(self, weight_NK: torch.Tensor, parts: int, kinds: int) -> tuple[torch.Tensor, ...]:
        """See Format."""
        dtype = self.dtypes("scales")[0]
        if self.dims[2] is None:
            return int4_grid(GROUP, dtype).quantize(weight_NK)
        low, high = torch.aminmax(weight_NK.unflatten(1, (-1, GROUP)), dim=2)
        low, span = low.clamp(max=0), high.clamp(min=0) - low.clamp(max=0)
        scales = torch.where(span > 0, span / LARGEST, 1.0).to(dtype)
        divisors = torch.where(scales > 0, scales, 1.0)
        zeros = (-low / divisors).round().clamp(0, LARGEST).to(torch.uint8)
        grid = int4_grid(GROUP, dtype, zeros)
        return grid.codes(weight_NK / grid.spread(divisors, weight_NK.shape)), scales, zeros

    def round_expert(self, packed: Quantized, expert: int, weight_NK: torch.Tensor, uniform=None) -> Rounded:
        """See Format. Zeros stay, and with them the scales of "uint4"."""
        zeros = None if packed.state is None else packed.state[expert]
        grid = int4_grid(self.group(packed), packed.scales.dtype, zeros)
        return grid.round(weight_NK, packed.scales[expert], packed.codes[expert], uniform)

    def expert(self, packed: Quantized, expert: int) -> torch.Tensor:
        """See Format."""
        nibbles = to_nibbles(packed.codes[expert]).float().view(-1, self.group(packed))
        zeros = ZERO if packed.state is None else packed.state[expert].float().view(-1, 1)
        return ((nibbles - zeros) * packed.scales[expert].float().view(-1, 1)).view(self.shape(packed)[1:])
