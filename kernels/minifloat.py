"""Values in 4 and 8 bits to and from floats: E2M1, two a byte, and E4M3, without infinities (OCP's MX formats)."""

from __future__ import annotations

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # bit 3 is the sign
E2M1_MAX, E4M3_MAX = 6.0, 448.0
E4M3_NAN = 0x7F  # and with the sign bit
POWER_BITS = 0x7F800000  # of fp32: alone they are the power of two in a value


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round fp32 or fp64 [..., n] to uint8 [..., n / 2], the first value of a byte in its low half; to nearest, ties to
    even."""
    table = torch.tensor(E2M1_VALUES, dtype=values.dtype, device=values.device)
    bounds = (table[:-1] + table[1:]) / 2
    bounds[1::2] = bounds[1::2].nextafter(bounds.new_zeros(()))  # there a tie goes up, to the even code
    codes = torch.bucketize(values.abs(), bounds, out_int32=True).to(torch.uint8) | torch.signbit(values).byte() << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Convert E2M1 codes to fp32."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    table = torch.cat((values, -values))
    return torch.stack((table[(codes & 15).int()], table[(codes >> 4).int()]), dim=-1).flatten(-2)


def e2m1_neighbours(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the E2M1 values below and above fp32 values, in fp32; beyond all of them the last two."""
    return _neighbours(values, mantissa=1, smallest=1.0, largest=E2M1_MAX)


def e4m3_neighbours(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the E4M3 values below and above fp32 values, in fp32; beyond all of them the last two."""
    return _neighbours(values, mantissa=3, smallest=2.0**-6, largest=E4M3_MAX)


def _neighbours(
    values: torch.Tensor, mantissa: int, smallest: float, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the floats with so many bits of mantissa below and above; below `smallest`, the smallest normal one, steps are
    those above it."""
    values = values.clamp(-largest, largest * (1 - 2.0**-20))  # the largest is the upper one
    power = values.view(torch.int32).bitwise_and(POWER_BITS).view(torch.float32)
    step = power.clamp_(min=smallest).mul_(2.0**-mantissa)
    low = torch.floor(values / step).mul_(step)
    return low, step.add_(low)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round floats to uint8 of the same shape, to nearest, and to the largest what is larger."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Convert E4M3 codes to fp32."""
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def has_e4m3_nan(codes: torch.Tensor) -> bool:
    """Tell whether one of the bytes stands for NaN."""
    return bool(((codes & E4M3_NAN) == E4M3_NAN).any())
