"""Block shapes: a short table over GPU, dtype and rows per expert. Nothing is tuned at run time.

The row tile depends on rows per expert alone, because dispatch cuts rows into tiles once for all kernels; the table
holds what each kernel chooses beside it. Hopper's entries come from benchmarks/sweep/sweep_triton.py on an H200 (L2
bandwidth decides: 256 columns beat 128 wherever registers allow); the others follow from those GPUs' shared memory,
unmeasured.
A descriptor is encoded on the host at every launch, so they are for many rows, where the host waits anyway.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..packed.fp8 import FP8_BLOCK
from .launch import cdiv

# Mean rows per expert. Up to FEW_ROWS a row tile is small; at 128 rows, tiles of 128 are already faster although every
# second one is nearly empty, because the weights are then read less often. Up to SOME_ROWS, weight gradients take small
# tiles.
FEW_ROWS, SOME_ROWS = 48, 256
SMALL_ROW_TILE, ROW_TILE = 64, 128  # rows
# Mean rows per expert up to which up and down read packed weights; above, expanding them first is faster, since every
# eight rows decode them again, FP8 at twice the cost of the others.
MAX_PACKED_ROWS = {"nf4": 32, "mxfp4": 32, "fp8": 16, "nvfp4": 32, "int4": 32, "uint4": 32}
# The same where weights are expanded in any case, for backward. On an H200 up and down of Qwen3-30B-A3B's layer take 302,
# 312 and 317 us in bf16 at 4, 8 and 16 rows, packed as NF4 146, 219 and 345, as FP8 255, 374 and 595, and expanding takes
# 390 (quantized_layer_fp8.csv).
MAX_PACKED_ROWS_BESIDE_EXPANDED = {"nf4": 12, "mxfp4": 12, "fp8": 6, "nvfp4": 12, "int4": 12, "uint4": 12}
FEW_PACKED_ROWS = 1  # up to as many, programs are few, and each takes fewer rows of a packed weight


class Blocks(NamedTuple):
    """A tile of a product over sorted rows, and how a program computes it.

    columns, depth: of the tile; columns of lora_shrink are at most those of the rank. warps, stages: num_warps and
    num_stages. raster: row tiles that pass over all columns together. piece: columns that the epilogue of down_backward
    holds in registers at a time. descriptors: operands that are not gathered come as tensor descriptors where the copy
    engine takes them. rows: the maximum of a tile's rows.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    raster: int = 8
    piece: int = 32
    descriptors: bool = False
    rows: int = ROW_TILE


class GradientBlocks(NamedTuple):
    """A tile of a weight gradient, a sum over rows, and how a program computes it.

    height, width: the tile's columns of the gathered and of the other side; width of rank_gradient is at most that of the
    rank. lora_b_backward takes the whole rank, and `height` columns of the wide side. depth: rows taken at a time. warps,
    stages, descriptors: as in Blocks. raster: tiles of the gathered side that pass over the other one together. peel:
    full depths are computed without masks, and the rest apart, which is faster unless an expert has few full depths, or
    one side is read through a descriptor.
    """

    height: int
    width: int
    depth: int
    warps: int
    stages: int
    raster: int = 8
    peel: bool = True
    descriptors: bool = False


class PackedBlocks(NamedTuple):
    """Blocks of a product that reads packed weights: the weight's rows that a program takes, 16 or 32 a warp; warps;
    the maximum of registers of a thread (None: as many as the compiler takes)."""

    height: int
    warps: int
    registers: int | None = None


def _one_bucket(blocks, gradient, lora_shrink, rank_gradient, packed_nf4=None, packed_mxfp4=None):
    """Make a GPU's entries, which are the same for any number of rows per expert; none of them is measured."""
    rows, up = {"many": blocks}, {"many": blocks._replace(columns=blocks.columns // 2)}
    return {
        "up": up,
        "up_ungated": rows,
        "down": rows,
        "down_backward": rows,
        "up_backward_input": rows,
        "gradient": {"many": gradient},
        "lora_shrink": {"many": lora_shrink},
        "rank_gradient": {"many": rank_gradient},
        "lora_b_backward": {"many": rank_gradient},
        "rank_backward_gathered": {"many": rank_gradient},
        "packed_nf4": {"some": packed_nf4},
        "packed_mxfp4": {"some": packed_mxfp4},
        "packed_fp8": {"some": packed_mxfp4},
        "packed_nvfp4": {"some": packed_mxfp4},
        "packed_int4": {"some": packed_mxfp4},
        "packed_uint4": {"some": packed_mxfp4},
    }


def _fp8_blocks(stages):
    """Choose the blocks of FP8 products, which are not measured. A tile has a group of columns, which up and
    down_backward quantize, and 64 rows, because the sums of one group are held beside those of all."""
    blocks = Blocks(FP8_BLOCK, FP8_BLOCK, 8, stages, rows=SMALL_ROW_TILE)
    return {"up": {"many": blocks._replace(warps=16)}, "down": {"many": blocks}, "down_backward": {"many": blocks}}


# (GPU, bytes of an element) -> kernel -> bucket of rows per expert -> blocks; a bucket left out is as the next larger.
# "unaligned", where there is one, is for operands whose address or rows are no multiples of 16 bytes: they come through
# registers, of which wide tiles leave too few.
# Of packed weights "few" is up to FEW_PACKED_ROWS rows per expert, "some" up to MAX_PACKED_ROWS.
# A column of `up` is a gate and an up; `up_ungated`, not measured yet, has tiles of the same width. Gradients need
# five stages: the pipeline spends two on the gathered indices.
TABLE = {
    ("hopper", 2): {
        "up": {
            "few": Blocks(128, 64, 8, 5),
            "some": Blocks(128, 64, 8, 4),
            "many": Blocks(128, 64, 8, 4, descriptors=True),
            "unaligned": Blocks(64, 64, 8, 4),
        },
        "up_ungated": {
            "few": Blocks(256, 64, 8, 5),
            "some": Blocks(256, 64, 8, 4),
            "many": Blocks(256, 64, 8, 4, descriptors=True),
            "unaligned": Blocks(128, 64, 8, 4),
        },
        "down": {
            "few": Blocks(256, 64, 8, 5),
            "some": Blocks(256, 64, 8, 4, 16),
            "many": Blocks(256, 64, 8, 4, descriptors=True),
            "unaligned": Blocks(128, 64, 8, 4),
        },
        "down_backward": {
            "few": Blocks(256, 64, 16, 5, piece=128),
            "some": Blocks(256, 64, 16, 4, piece=64),
            "many": Blocks(256, 64, 16, 4, piece=64, descriptors=True),
            "unaligned": Blocks(128, 64, 16, 4, piece=64),
        },
        "up_backward_input": {
            "few": Blocks(256, 64, 8, 5),
            "some": Blocks(256, 64, 8, 4),
            "many": Blocks(256, 64, 8, 4, descriptors=True),
            "unaligned": Blocks(128, 64, 8, 4),
        },
        "packed_nf4": {"few": PackedBlocks(64, 4), "some": PackedBlocks(128, 4, 128)},
        "packed_mxfp4": {"some": PackedBlocks(16, 1)},
        "packed_fp8": {"some": PackedBlocks(16, 1)},
        "packed_nvfp4": {"some": PackedBlocks(16, 1)},  # not swept yet, nor are those below
        "packed_int4": {"some": PackedBlocks(16, 1)},
        "packed_uint4": {"some": PackedBlocks(16, 1)},
        "gradient": {
            "some": GradientBlocks(128, 128, 32, 4, 5, peel=False),
            "many": GradientBlocks(128, 256, 64, 8, 5, descriptors=True),
        },
        "lora_shrink": {"many": Blocks(64, 64, 4, 4)},
        "rank_gradient": {"many": GradientBlocks(128, 64, 64, 4, 2)},
        "lora_b_backward": {"some": GradientBlocks(256, 64, 32, 4, 4), "many": GradientBlocks(512, 64, 64, 8, 3)},
        "rank_backward_gathered": {"many": GradientBlocks(256, 64, 64, 4, 4)},
    },
    ("ampere", 2): _one_bucket(
        Blocks(128, 32, 8, 4),
        GradientBlocks(128, 128, 32, 8, 4),
        Blocks(64, 64, 4, 4),
        GradientBlocks(128, 64, 64, 4, 4),
        PackedBlocks(128, 4),
        PackedBlocks(16, 1),
    ),
    ("small", 2): _one_bucket(
        Blocks(128, 32, 8, 3),
        GradientBlocks(128, 128, 32, 8, 3),
        Blocks(64, 64, 4, 3),
        GradientBlocks(128, 64, 32, 4, 3),
        PackedBlocks(128, 4),
        PackedBlocks(16, 1),
    ),
    ("any", 4): _one_bucket(
        Blocks(64, 32, 8, 2), GradientBlocks(64, 64, 32, 8, 2), Blocks(64, 32, 8, 2), GradientBlocks(64, 64, 32, 8, 2)
    ),
    ("interpreter", 0): _one_bucket(
        Blocks(32, 32, 1, 1, descriptors=True),
        GradientBlocks(16, 32, 16, 1, 1, raster=2, descriptors=True),
        Blocks(32, 32, 1, 1),
        GradientBlocks(32, 32, 16, 1, 1),
        PackedBlocks(64, 2),
        PackedBlocks(32, 2),
    ),
    ("hopper", 1): _fp8_blocks(stages=5),
    ("ampere", 1): _fp8_blocks(stages=4),
    ("small", 1): _fp8_blocks(stages=3),
    ("interpreter", 1): _fp8_blocks(stages=1),
}


def _gpu(device: torch.device) -> torch.device | None:
    """Choose the GPU whose properties count for tensors on a device: for the meta device, where kernels are listed, None,
    which is the current GPU."""
    return None if device.type == "meta" else device


@functools.cache
def num_sms(device: torch.device) -> int:
    """Count the programs of a persistent kernel: one for every streaming multiprocessor, whose shared memory it fills."""
    return 3 if device.type == "cpu" else torch.cuda.get_device_properties(_gpu(device)).multi_processor_count


@functools.cache
def gpu_kind(device: torch.device) -> str:
    """Choose the entries of the table that a device reads, by the shared memory that a block can have there."""
    if device.type == "cpu":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(_gpu(device))
    if major in (9, 10):
        return "hopper"
    return "ampere" if (major, minor) in ((8, 0), (8, 7)) else "small"


@functools.cache
def multiplies_fp8(device: torch.device) -> bool:
    """Tell whether the GPU has FP8 products and conversions."""
    return device.type != "cpu" and torch.cuda.get_device_capability(_gpu(device)) >= (8, 9)


def as_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """View E4M3 codes as the kernels take them: of that type, or as bytes for a GPU that does not know it."""
    return codes.view(torch.float8_e4m3fn) if multiplies_fp8(codes.device) else codes


def is_interpreted(device: torch.device) -> bool:
    """Tell whether kernels for the device run in Triton's interpreter, which has no PTX."""
    return gpu_kind(device) == "interpreter"


def bucket(num_pairs: int, num_experts: int) -> str:
    """Name the bucket of a mean number of rows per expert: few, some or many."""
    if num_pairs <= FEW_ROWS * num_experts:
        return "few"
    return "some" if num_pairs <= SOME_ROWS * num_experts else "many"


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Choose the rows of a row tile, for dispatch and for every kernel over sorted rows."""
    return SMALL_ROW_TILE if bucket(num_pairs, num_experts) == "few" else ROW_TILE


def reads_packed(format: str, dtype: torch.dtype, rows, is_expanded: bool = False) -> bool:
    """Tell whether up and down read weights packed in this format; the compiled kernels do in bf16."""
    is_taken = dtype == torch.bfloat16 or is_interpreted(rows.token.device)
    limit = (MAX_PACKED_ROWS_BESIDE_EXPANDED if is_expanded else MAX_PACKED_ROWS)[format]
    return is_taken and rows.token.numel() <= limit * (rows.offsets.numel() - 1)


def decodes(weight, dtype: torch.dtype, rows, is_expanded: bool = False) -> bool:
    """Tell as ../interface.py has it whether products decode the weight: in backward none of these kernels does."""
    return False


def max_row_tiles(num_pairs: int, num_experts: int) -> int:
    """Bound the number of row tiles, for which kernels are launched: every expert may have one that is not full."""
    return min(cdiv(num_pairs, tile_rows(num_pairs, num_experts)) + num_experts, num_pairs)


@functools.cache
def _entry(kernel: str, device: torch.device, size: int, rows_per_expert: str, aligned: bool = True):
    kind = gpu_kind(device)
    if kind == "interpreter" and size > 1:
        size = 0
    elif size == 4:
        kind = "any"
    entries = TABLE[kind, size][kernel]
    if not aligned and "unaligned" in entries:
        return entries["unaligned"]
    buckets = ("few", "some", "many")
    return next(entries[name] for name in buckets[buckets.index(rows_per_expert) :] if name in entries)


def blocks_for(kernel: str, like: torch.Tensor, num_pairs: int, num_experts: int, aligned: bool = True):
    """Look up the table's entry for a kernel whose operands are like this one; aligned: to 16 bytes, all of them."""
    return _entry(kernel, like.device, like.dtype.itemsize, bucket(num_pairs, num_experts), aligned)


def packed_blocks(format: str, tensor: torch.Tensor, num_pairs: int, num_experts: int) -> PackedBlocks:
    """Look up the table's entry for a product that reads weights packed in this format."""
    is_few = num_pairs <= FEW_PACKED_ROWS * num_experts
    return _entry(f"packed_{format}", tensor.device, tensor.element_size(), "few" if is_few else "some")
