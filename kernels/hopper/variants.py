"""Lists the compiled kernels that a layer asks for, and its functions that run on Triton; by sizes and layout alone."""

from __future__ import annotations

import torch

from ..interface import Activation
from ..packed import FORMATS
from .config import MAX_DECODED_ROWS, PackedKind, gemm_down_tiles, gemm_wgrad_tiles, supports_sizes, tile

# (h, a) of a forward that keeps h, of one that does not, and of one repeated in backward
UP = ((True, True), (False, True), (True, False))
# (dh, a, dw) of a full backward, with frozen experts, with a frozen router, and with both
DOWN_BACKWARD = ((True, True, True), (True, False, True), (True, True, False), (True, False, False))


def on_triton(hidden: int, inner: int, activation: Activation) -> list[str]:
    """Name the functions of ../interface.py that run on Triton because of H = hidden or I = inner."""
    small, large = supports_sizes(hidden, inner), supports_sizes(hidden, activation.width(inner))
    is_supported = {
        "up": small,
        "down": small,
        "down_backward": small,
        "up_backward_input": large,
        "gate_up_gradient": large,
        "down_gradient": small,
    }
    return [name for name, supported in is_supported.items() if not supported]


def training_step_kernels(
    weights, hidden, inner, hidden_contiguous, bias, want_h, want_a, activation, interleaved, rank, tile
):
    """List the kernels that a training step asks for after gemm_up with these parameters; without h no step follows.
    Experts with an adapter of `rank` > 0 are frozen, and both of their products are taken to have one."""
    if not want_h:
        return []
    skipped = ("gemm_up", "gemm_wgrad") if rank else ("gemm_up",)
    return [
        (name, parameters)
        for name, parameters in variants(
            hidden, inner, weights, activation, not hidden_contiguous, interleaved, bias, rank
        )
        if name not in skipped and (name != "gemm_down_backward" or parameters[4:7] == DOWN_BACKWARD[0])
    ]


def packed_variants(
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    activation: Activation,
    interleaved: bool,
    bias: bool,
    format: str,
    rank: int,
) -> list[tuple[str, tuple]]:
    """List as `variants` the kernels of layers whose experts are packed in a format as `Format.quantize` makes them, both
    those that decode experts and those that take expanded ones."""
    block, scales = FORMATS[format].block, FORMATS[format].dtypes("scales")[0]
    kind = PackedKind(format, str(scales).removeprefix("torch."), block)
    is_decoded = MAX_DECODED_ROWS.get(format) and dtype == torch.bfloat16 and not hidden % block and not inner % block
    kernels = [
        kernel
        for weights in ((dtype, kind) if is_decoded else (dtype,))
        for kernel in variants(hidden, inner, weights, activation, False, interleaved, bias, rank)
    ]
    return [(name, parameters) for name, parameters in kernels if name != "gemm_wgrad"]


def variants(
    hidden: int,
    inner: int,
    weights: torch.dtype | PackedKind,
    activation: Activation,
    transposed: bool,
    interleaved: bool,
    bias: bool,
    rank: int = 0,
) -> list[tuple[str, tuple]]:
    """List (function of compiled.py, its parameters) for forward, backward and frozen parts of layers with H = hidden
    and I = inner, whose weights are stored `transposed` and `interleaved` or not, with `bias` or without, with
    adapters of `rank` (a multiple of 8) or, where it is 0, without; any T, E and K. weights: as in compiled.py; packed
    ones are frozen, and not stored transposed."""
    width = activation.width(inner)
    wgrad_tiles = () if isinstance(weights, PackedKind) else gemm_wgrad_tiles(hidden)
    kernels = []
    if supports_sizes(hidden, inner):
        gated = activation, interleaved, rank
        for want in UP:
            kernels.append(
                (
                    "gemm_up",
                    (weights, hidden, inner, not transposed, bias, *want, *gated, tile("gemm_up", width, weights)),
                )
            )
        for want in DOWN_BACKWARD:
            chosen = tile("gemm_down_backward", inner, weights)
            kernels.append(("gemm_down_backward", (weights, hidden, inner, transposed, *want, *gated, chosen)))
        for chosen in gemm_down_tiles(hidden, inner, weights):
            kernels.append(("gemm_down", (weights, hidden, inner, not transposed, bias, rank, chosen)))
        for chosen in wgrad_tiles:
            kernels.append(("gemm_wgrad", (weights, inner, hidden, transposed, chosen)))
    if supports_sizes(hidden, width):
        for chosen in gemm_down_tiles(hidden, width, weights):
            kernels.append(("gemm_down", (weights, hidden, width, transposed, False, rank, chosen)))
        for chosen in wgrad_tiles:
            kernels.append(("gemm_wgrad", (weights, width, hidden, not transposed, chosen)))
    return list(dict.fromkeys(kernels))
