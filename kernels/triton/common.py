"""What the Triton kernels share: the order of programs, the table of row tiles, and the gated activations."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swizzle(program, num_row_tiles, NUM_COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: GROUP row tiles pass over all columns together, so that both operands of
    the tiles in flight stay in L2."""
    in_group = GROUP * NUM_COLUMN_TILES
    first = program // in_group * GROUP
    size = tl.minimum(num_row_tiles - first, GROUP)
    place = program % in_group
    return first + place % size, place // size


@triton.jit
def write_tiles(
    tiles, first_row, end_row, which, num_row_tiles,
    NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Row tiles of expert `which`; for which = E, the rest of the table, and behind it a counter of claimed work, 0, and
    the number of tiles (kernels/hopper/work.py). first_row, end_row [BINS]: equal past E."""
    bins = tl.arange(0, BINS)
    num_tiles = (end_row - first_row + TILE_ROWS - 1) // TILE_ROWS
    if which < NUM_EXPERTS:
        tile = tl.sum(tl.where(bins < which, num_tiles, 0))
        end = tl.sum(tl.where(bins == which, end_row, 0))
        for row in range(tl.sum(tl.where(bins == which, first_row, 0)), end, TILE_ROWS):
            tl.store(tiles + tile * 3, which)
            tl.store(tiles + tile * 3 + 1, row)
            tl.store(tiles + tile * 3 + 2, tl.minimum(row + TILE_ROWS, end))
            tile += 1
    else:
        used = tl.sum(num_tiles)
        for start in range(used, num_row_tiles, BINS):
            tl.store(tiles + (start + bins) * 3, -1, mask=start + bins < num_row_tiles)
        tl.store(tiles + num_row_tiles * 3, 0)
        tl.store(tiles + num_row_tiles * 3 + 1, used)


@triton.jit
def order_key(score):
    """fp32 scores as int32 that order as they do; -0.0 and 0.0 tie. NaNs are above or below all else, by their sign."""
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where((bits & 0x7FFFFFFF) == 0, 0, key)


@triton.jit
def activate(gate, up, da, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """a and, of its gradient `da`, those of gate and up, in fp32; names and formulas as in interface.Activation. Where a
    clamp or relu is flat they are 0 whatever `da` is. NaN goes through all of them."""
    if NAME == "clamped_swiglu" or NAME == "clamped_silu":
        alpha: tl.constexpr = ALPHA if NAME == "clamped_swiglu" else 1.0
        shift: tl.constexpr = 1.0 if NAME == "clamped_swiglu" else 0.0
        gate_clamped = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up_clamped = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up_clamped = tl.minimum(up_clamped, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        sigmoid = tl.sigmoid(alpha * gate_clamped)
        glu = gate_clamped * sigmoid
        slope = (up_clamped + shift) * (sigmoid + alpha * glu * (1 - sigmoid))
        dgate = tl.where(gate <= LIMIT, da * slope, 0.0)
        return (up_clamped + shift) * glu, dgate, tl.where(tl.abs(up) <= LIMIT, da * glu, 0.0)
    if NAME == "reglu":
        value = tl.where(gate <= 0, 0.0, gate)
        return value * up, tl.where(gate <= 0, 0.0, da * up), da * value
    if NAME == "swiglu":
        sigmoid = tl.sigmoid(gate)
        value = gate * sigmoid
        slope = sigmoid + value * (1 - sigmoid)
    elif NAME == "geglu":
        cdf = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        value = gate * cdf
        slope = cdf + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    else:  # geglu_tanh
        square = gate * gate
        cdf = tl.sigmoid(1.5957691216057308 * gate * (1 + 0.044715 * square))  # 0.5 * (1 + tanh(z)) = sigmoid(2 z)
        value = gate * cdf
        slope = cdf + value * (1 - cdf) * 1.5957691216057308 * (1 + 0.134145 * square)
    return value * up, da * slope * up, da * value
