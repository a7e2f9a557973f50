"""Pieces of the grouped GEMMs over rows sorted by expert.

A tile of the tile table times a tile of columns at a time. Rows past a tile's end are computed from whatever lies there,
never stored, and touch no other row. Weight columns past the end are read as zero.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..packed.fp8 import FP8_BLOCK
from ..scaled import empty_rows
from .config import Blocks, as_e4m3, blocks_for, max_row_tiles, num_sms, tile_rows
from .descriptors import is_aligned
from .launch import cdiv

# arguments that change with the number of tokens: Triton must not compile anew for their values
T_DEPENDENT = ["num_row_tiles", "num_rows"]
GROUP = tl.constexpr(FP8_BLOCK)


@triton.jit
def swizzle(program, num_row_tiles, NUM_COLUMN_TILES: tl.constexpr, RASTER: tl.constexpr):
    """Find (row tile, column tile) of a program: RASTER row tiles pass over all columns together, so that both operands
    of the tiles in flight stay in L2."""
    tiles_together = RASTER * NUM_COLUMN_TILES
    first = program // tiles_together * RASTER
    size = tl.minimum(num_row_tiles - first, RASTER)
    index = program % tiles_together
    return first + index % size, index // size


@triton.jit
def row_tile(tiles, tile, ROWS: tl.constexpr, BLOCKS_OF_TILE: tl.constexpr):
    """Read (expert or -1, first row, end) of a row tile: an entry of the tile table, or one of the BLOCKS_OF_TILE blocks
    of ROWS rows into which kernels with smaller tiles cut it."""
    entry = tiles + tile // BLOCKS_OF_TILE * 3
    first = tl.load(entry + 1) + tile % BLOCKS_OF_TILE * ROWS
    end = tl.load(entry + 2)
    return tl.where(first < end, tl.load(entry), -1), first, end


@triton.jit
def scales_of(scales, row, LENGTH: tl.constexpr):
    """Point to the first scale of each row of LENGTH values in FP8."""
    return scales + row.to(tl.int64) * ((LENGTH + GROUP - 1) // GROUP)


@triton.jit
def _multipliable(tile):
    """Convert a tile to a dtype that tensor cores multiply. A GPU without FP8 products has e4m3 values as bytes, which
    become fp16: their exponent and mantissa are moved to those of an fp16 that is 256 times smaller."""
    if tile.dtype == tl.uint8:
        bits = (tile & 0x7F).to(tl.uint16) << 7 | (tile & 0x80).to(tl.uint16) << 8
        return tl.where((tile & 0x7F) == 0x7F, float("nan"), bits.to(tl.float16, bitcast=True) * 256.0)
    else:
        return tile


@triton.jit
def add_lora(
    product,
    shrunk,
    factor,
    expert,
    row,
    end,
    column,
    is_column,
    J: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_J: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add an adapter's shrunk[row] @ factor[expert]^T, shrunk [P, J], factor [E, N, J], to a product; nothing without
    one.

    It comes after the main loop, whose shared memory is free again then.
    """
    if shrunk is not None:
        # fp32 takes 32 always: of 16, Triton 3.6 reads beyond shared memory for sm_90 (64-byte swizzle, two warp groups)
        DEPTH: tl.constexpr = 16 if J <= 16 and shrunk.dtype.element_ty.primitive_bitwidth <= 16 else 32
        shrunk_row = shrunk + tl.minimum(row, end - 1).to(tl.int64)[:, None] * J
        factor_column = factor + expert.to(tl.int64) * STRIDE_E + column[None, :].to(tl.int64) * STRIDE_N
        for start in tl.range(0, J, DEPTH, num_stages=1):
            j = start + tl.arange(0, DEPTH)
            left = tl.load(shrunk_row + j[None, :], mask=(j < J)[None, :], other=0.0)
            is_read = (j < J)[:, None] & is_column[None, :]
            right = tl.load(factor_column + j[:, None] * STRIDE_J, mask=is_read, other=0.0)
            product = tl.dot(left, right, product, input_precision=PRECISION)
    return product


@triton.jit
def pointer_product(
    a_pointers,
    b_pointers,
    a_scales,
    a_row,
    b_scales,
    b_row,
    is_column,
    A_STEP: tl.constexpr,
    B_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute [ROWS, LENGTH] @ [LENGTH, COLUMNS] in fp32, along pointers that are valid for every row. With scales, of
    which a_row and b_row are the rows, DEPTH values are a group in FP8 (../scaled.py), and each group's sum is added
    times both its scales."""
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    if a_scales is not None:
        a_scale, b_scale = scales_of(a_scales, a_row, LENGTH), scales_of(b_scales, b_row, LENGTH)
    depth = tl.arange(0, DEPTH)
    for start in range(0, LENGTH, DEPTH):
        if LENGTH % DEPTH == 0:
            a = tl.load(a_pointers)
            b = tl.load(b_pointers, mask=is_column[None, :], other=0.0)
        else:
            inside = start + depth < LENGTH
            a = tl.load(a_pointers, mask=inside[None, :], other=0.0)
            b = tl.load(b_pointers, mask=inside[:, None] & is_column[None, :], other=0.0)
        if a_scales is None:
            product = tl.dot(a, b, product, input_precision=PRECISION)
        else:
            scale = tl.load(a_scale + start // DEPTH)[:, None] * tl.load(b_scale + start // DEPTH)[None, :]
            product += tl.dot(_multipliable(a), _multipliable(b)) * scale
        a_pointers += DEPTH * A_STEP
        b_pointers += DEPTH * B_STEP
    return product


@triton.jit
def described_product(
    a,
    first_row,
    b,
    expert,
    first_column,
    GATHERED: tl.constexpr,
    GATE_AND_UP: tl.constexpr,
    DEPTH_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the same as `pointer_product`, with `b` a descriptor of weights (GATE_AND_UP: of the same columns of gate
    and up), and `a` pointers to gathered rows or a descriptor of rows."""
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, LENGTH, DEPTH):
        if not GATHERED:
            left = a.load([first_row, start])
        elif LENGTH % DEPTH == 0:
            left = tl.load(a + start)
        else:
            left = tl.load(a + start, mask=(start + tl.arange(0, DEPTH) < LENGTH)[None, :], other=0.0)
        if GATE_AND_UP:
            right = b.load([expert, 0, first_column, start]).reshape(COLUMNS, DEPTH).T
        elif DEPTH_LAST:
            right = b.load([expert, first_column, start]).reshape(COLUMNS, DEPTH).T
        else:
            right = b.load([expert, start, first_column]).reshape(DEPTH, COLUMNS)
        product = tl.dot(left, right, product, input_precision=PRECISION)
    return product


@triton.jit
def used_row_tiles(tiles, num_row_tiles):
    """Count the entries of the tile table that are row tiles; the others have -1 for the expert."""
    count = 0
    for first in range(0, num_row_tiles, 256):
        tile = first + tl.arange(0, 256)
        count += tl.sum((tl.load(tiles + tile * 3, mask=tile < num_row_tiles, other=-1) >= 0).to(tl.int32))
    return count


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split a tile into its left and right half; on tensor-core layouts no value moves between threads."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


def precision(dtype):
    """Choose `input_precision` of products in this dtype: three tf32 products stand in for one of fp32; bf16 and fp16 do
    not read it."""
    return "tf32x3" if dtype.itemsize == 4 else "tf32"


def language_dtype(dtype):
    """Convert PyTorch's dtype to Triton's."""
    return getattr(tl, str(dtype).removeprefix("torch."))


class GemmPlan(NamedTuple):
    """The launch of a kernel over sorted rows.

    rows: of a tile. row_tiles, column_tiles: how many there are. tile: the constants that all these kernels take, ROWS,
    COLUMNS, DEPTH, RASTER and BLOCKS_OF_TILE. options: of Triton.
    """

    blocks: Blocks
    rows: int
    row_tiles: int
    column_tiles: int
    tile: tuple[int, ...]
    options: dict[str, int]
    num_sms: int

    def grid(self, persistent):
        programs = self.row_tiles * self.column_tiles
        return (min(programs, self.num_sms) if persistent else programs,)


def gemm_plan(kernel, tensor, weight, rows, num_columns) -> GemmPlan:
    """Plan the launch of a kernel that multiplies `tensor` and `weight`."""
    aligned = all(is_aligned(read, [s for s in read.stride() if s != 1]) for read in (tensor, weight))
    num_pairs, num_experts = rows.token.numel(), rows.offsets.numel() - 1
    blocks = blocks_for(kernel, tensor, num_pairs, num_experts, aligned)
    tile_of_rows = tile_rows(num_pairs, num_experts)
    rows_of_block = min(tile_of_rows, blocks.rows)
    blocks_of_tile = tile_of_rows // rows_of_block
    return GemmPlan(
        blocks,
        rows_of_block,
        max_row_tiles(num_pairs, num_experts) * blocks_of_tile,
        cdiv(num_columns, blocks.columns),
        (rows_of_block, blocks.columns, blocks.depth, blocks.raster, blocks_of_tile),
        {"num_warps": blocks.warps, "num_stages": blocks.stages},
        num_sms(tensor.device),
    )


def bias_strides(bias):
    return (0, 0) if bias is None else bias.stride()


def scaled_output(is_wanted, like, num_rows, columns):
    """Allocate room for rows in FP8, and its codes and scales as the kernels take them; None for each if they are not
    wanted."""
    if not is_wanted:
        return None, None, None
    rows = empty_rows(like, num_rows, columns)
    return rows, as_e4m3(rows.codes), rows.scales


def lora_operands(lora):
    """Unpack an interface.LoraTerm, or None, into the tensors and the constants of `add_lora`."""
    if lora is None:
        return (None, None), (0, 0, 0, 0)
    return tuple(lora), (lora.shrunk_PJ.shape[1], *lora.factor_ENJ.stride())
