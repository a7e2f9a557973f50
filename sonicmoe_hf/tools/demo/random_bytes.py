"""Packed weights of random bytes, made as they are stored: no dense weight stands behind them, and nothing is rounded.

Letters: E experts, N rows (output features) and K columns (input features) of a weight [E, N, K].
"""

from __future__ import annotations

import math

import torch

from ...kernels.minifloat import E2M1_VALUES, from_e4m3
from ...kernels.packed import FORMATS, Quantized
from ...kernels.packed.format import Shapes
from ...kernels.packed.nf4 import NF4_VALUES, SCALE_OFFSET, SCALE_SCALES

E4M3_BELOW_NAN = 0x7F  # bytes of each sign that stand for numbers
SPREAD = 0.25  # scales differ by at most this part of their mean
ONE_TO_TWO = range(0x38, 0x40)  # bytes of the E4M3 values in [1, 2)


def random_packed(
    shape: tuple[int, int, int], format: str, std: float, order: str = "whole", device: torch.device | str = "cpu"
) -> Quantized:
    """Make a weight [E, N, K] of random codes, in the memory of what is stored and of one expert more.

    Codes are drawn evenly from those that stand for numbers. With its scales the values have a root mean square of
    about `std`, none larger than six times that.

    Args:
        format: a name of kernels.packed.FORMATS. order: of ORDERS. device: where it is made.
    Raises:
        ValueError: K is no multiple of the format's block.
    """
    return _RANDOM[format](FORMATS[format].shapes(shape, order), std, device)


def _root_mean_square(values) -> float:
    return torch.as_tensor(values, dtype=torch.float64, device="cpu").square().mean().sqrt().item()


def _bytes(shape: tuple[int, ...], device, end: int = 256) -> torch.Tensor:
    return torch.randint(end, shape, dtype=torch.uint8, device=device)


def _random_nf4(shapes: Shapes, std: float, device) -> Quantized:
    assert shapes.state is not None  # NF4 has one
    zeros = torch.zeros(1, 1, 64, dtype=torch.float32, device="cpu")
    head = FORMATS["nf4"].quantize(zeros).state  # the two tables of values
    assert head is not None
    mean = std / _root_mean_square(NF4_VALUES)
    state = torch.full(shapes.state, SPREAD * mean, dtype=torch.float32, device=device)
    state[: SCALE_SCALES.start] = head[: SCALE_SCALES.start].to(device)
    state[SCALE_OFFSET] = mean
    return Quantized(_bytes(shapes.codes, device), _bytes(shapes.scales, device), state)


def _random_mxfp4(shapes: Shapes, std: float, device) -> Quantized:
    factor = std / _root_mean_square(E2M1_VALUES)
    exponent = math.floor(math.log2(factor))
    doubled = (4.0 ** (math.log2(factor) - exponent) - 1) / 3  # of the scales: the mean square becomes the factor's
    scales = torch.full(shapes.scales, exponent + 127, dtype=torch.uint8, device=device)
    scales += torch.rand(shapes.scales, dtype=torch.float32, device=device) < doubled
    return Quantized(_bytes(shapes.codes, device), scales)


def _random_fp8(shapes: Shapes, std: float, device) -> Quantized:
    codes = torch.empty(shapes.codes, dtype=torch.uint8, device=device)
    for expert in codes:
        expert.random_(0, 2 * E4M3_BELOW_NAN)
        expert += expert >= E4M3_BELOW_NAN  # past the positive NaN; the negative one is never drawn
    numbers = from_e4m3(torch.arange(E4M3_BELOW_NAN, dtype=torch.uint8, device="cpu"))
    scales = 1 + SPREAD * (2 * torch.rand(shapes.scales, dtype=torch.float32, device=device) - 1)
    return Quantized(codes, scales * (std / _root_mean_square(numbers)))


def _random_nvfp4(shapes: Shapes, std: float, device) -> Quantized:
    assert shapes.state is not None  # NVFP4 has one
    scales = ONE_TO_TWO.start + _bytes(shapes.scales, device, len(ONE_TO_TWO))
    size = _root_mean_square(E2M1_VALUES) * _root_mean_square(
        from_e4m3(torch.tensor(ONE_TO_TWO, dtype=torch.uint8, device="cpu"))
    )
    return Quantized(
        _bytes(shapes.codes, device), scales, torch.full(shapes.state, std / size, dtype=torch.float32, device=device)
    )


_RANDOM = {"nf4": _random_nf4, "mxfp4": _random_mxfp4, "fp8": _random_fp8, "nvfp4": _random_nvfp4}
