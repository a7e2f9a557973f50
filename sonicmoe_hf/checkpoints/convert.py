"""convert_checkpoint: a checkpoint from the hub layout to the native one and back, streamed shard by shard.

Memory: the shard being written, and the pages of the one source file that is open. The result appears whole or not at
all: it is written into a hidden folder beside its destination and renamed at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ..errors import CheckpointError
from ..formats.declared import check_format
from ..layer.config import check_choice
from .layouts import CHECKPOINT_LAYOUTS, has_native_layout
from .reading.files import local_folder, read_config
from .reading.source import Source
from .reading.stored import DTYPES, StoredWeights
from .writing.atomic_folder import new_folder
from .writing.model_card import origin_of
from .writing.targets import checked_dense_target, target_of
from .writing.write import Conversion, write_checkpoint


def convert_checkpoint(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    layout: str = "native",
    *,
    dtype: str | None = None,
    dequantize: bool | None = None,
    quantize: str | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = False,
    revision: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Convert a checkpoint between the hub layout and the native one. Weights are moved; they change only if a cast,
    quantization or dequantization is asked for. Of families without a native layout, quantized checkpoints become dense,
    and packed ones get the hub's names.

    Args:
        src: folder, or hub id. dst: the new folder; it must not exist. layout: "native" or "hub".
        dtype: cast weights to "float32", "bfloat16" or "float16"; by default each keeps its own.
        dequantize: MXFP4 (gpt-oss), FP8 (DeepSeek), NVFP4 (ModelOpt) and packed weights become bf16. None does so and
            notes it in the result's `notices`, False raises CheckpointError.
        quantize: "nf4", "mxfp4", "fp8", "nvfp4" or "int4" packs the experts (see `quantize_experts`); those that are
            packed already keep their blocks in that format. In the hub layout "mxfp4" for gpt-oss, and for the other
            families "fp8" or "int4", which is compressed-tensors' pack-quantized.
        max_shard_size: bytes, or text such as "5GB". It, one file of `src` and, packing, one weight bound the memory.
        verify: raise an error for NaN and infinity, and read back and compare every byte that is written.
        revision: of a hub id. on_progress: called with (bytes done, bytes in all).
    Returns:
        What was done.
    Raises:
        CheckpointError: a tensor, file or config entry is unknown, missing, wrong or contradictory, the disk is too
            small or `dst` exists; the message names it and nothing is written. OSError: writing fails.
    Example:
        sonicmoe_hf.convert_checkpoint("Qwen/Qwen3-30B-A3B", "qwen3-native", layout="native")
    """
    check_choice("layout", layout, CHECKPOINT_LAYOUTS)
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    if quantize is not None:
        check_format("quantize", quantize)
        if dequantize:
            raise CheckpointError(f"quantize={quantize!r} and dequantize=True contradict each other; leave one out")
    dst = new_folder(dst)
    folder = local_folder(src, revision)
    if has_native_layout(read_config(folder)) or layout == "native" or quantize is not None:
        target = target_of(Source(folder), layout, dtype, dequantize, quantize)
    else:
        target = checked_dense_target(StoredWeights(folder), dtype, dequantize)
    return write_checkpoint(target, dst, origin_of("convert", src), max_shard_size, verify, on_progress)
