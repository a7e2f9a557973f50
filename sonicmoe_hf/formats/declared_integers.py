"""The packing that the config of a weight-only checkpoint declares: compressed-tensors', GPTQ's, AutoRound's or AWQ's."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from ..errors import CheckpointError
from .float_matrices import CompressedMXFP4, CompressedNVFP4
from .integer_matrices import (
    TO_BF16_OR_PACK,
    AWQInt4,
    CompressedInt4,
    CompressedInt8,
    GPTQInt4,
)
from .matrix_format import MatrixFormat

COMPRESSED, GPTQ, AUTO_ROUND, AWQ = METHODS = ("compressed-tensors", "gptq", "auto-round", "awq")
MATRICES = ("gate_proj", "w1")
EXPERTS = {"mlp": MATRICES, "block_sparse_moe": MATRICES, "feed_forward": MATRICES, "mixer": ("up_proj",)}
LAYERS = ("model.layers.1", "language_model.model.layers.1", "model.language_model.layers.1")
NAMES = [  # of an expert's matrix, by which targets are tried
    f"{layer}.{module}.experts.0.{matrix}" for layer in LAYERS for module in EXPERTS for matrix in EXPERTS[module]
]
GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # by checkpoint_format: what is missing in its zeros
AUTO_ROUND_OFFSETS = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0}


def declared_format(method: str, entries: dict) -> MatrixFormat:
    """Find the format of matrices that one of METHODS declares by its entries in config.json.

    Raises:
        CheckpointError: it is none that is read here; with the remedy.
    """
    readers = {
        COMPRESSED: _compressed_tensors_format,
        GPTQ: _gptq_format,
        AUTO_ROUND: _auto_round_format,
        AWQ: _awq_format,
    }
    return readers[method](entries)


def _raise_not_read(method: str, what: str) -> NoReturn:
    """Raise CheckpointError: the checkpoint is quantized by `method` in a way that is not read, `what`."""
    raise CheckpointError(f"the checkpoint is quantized by {method} {what}, which is not read: {TO_BF16_OR_PACK}")


def _group_size(method: str, group: Any) -> int | None:
    """Read how many values share a scale; None for a whole row."""
    if group in (-1, None):
        return None
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        _raise_not_read(method, f"in groups of {group!r}")
    return group


def _check_bits(method: str, bits: Any) -> None:
    """Raise CheckpointError unless codes have 4 bits."""
    if bits != 4:
        _raise_not_read(method, f"in {bits!r} bits")


def _compressed_tensors_format(entries: dict) -> MatrixFormat:
    config_group = _experts_config_group(entries)
    weights = config_group.get("weights") or {}
    format = config_group.get("format") or entries.get("format")
    if format in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):  # whatever is said of activations: they stay bf16
        return CompressedMXFP4() if format.startswith("mx") else CompressedNVFP4()
    if format != "pack-quantized" or weights.get("type", "int") != "int":
        _raise_not_read(COMPRESSED, f"as {format!r}")
    if config_group.get("input_activations") is not None:
        _raise_not_read(COMPRESSED, "with activations quantized too")
    if weights.get("actorder") == "group":
        _raise_not_read(COMPRESSED, 'in the order of activations (actorder "group")')
    strategy, is_symmetric = weights.get("strategy"), weights.get("symmetric", True)
    if strategy not in ("group", "channel"):
        _raise_not_read(COMPRESSED, f"with scales for each {strategy}")
    size = _group_size(COMPRESSED, weights.get("group_size")) if strategy == "group" else None
    if weights.get("num_bits") == 8 and is_symmetric:
        return CompressedInt8(size)
    _check_bits(COMPRESSED, weights.get("num_bits"))
    return CompressedInt4(size, not is_symmetric)


def _experts_config_group(entries: dict) -> dict:
    """Find the one of config_groups that counts for experts' matrices: names come before classes."""
    if any(_matches(each) for each in entries.get("ignore") or ()):
        _raise_not_read(COMPRESSED, "with experts left out")
    declared = entries.get("config_groups")
    groups = declared.values() if isinstance(declared, dict) else ()
    by_name = [group for group in groups if any(_matches(each) for each in group.get("targets") or ())]
    by_class = [group for group in groups if "Linear" in (group.get("targets") or ())]
    if groups and not by_name + by_class:
        targets = [each for group in groups for each in group.get("targets") or ()]
        _raise_not_read(COMPRESSED, f"by the targets {targets}, of which none names its experts")
    return next(iter(by_name + by_class), {})


def _matches(target: str) -> bool:
    """Tell whether a target of compressed-tensors is the name of an expert's matrix, in any model."""
    if target.startswith("re:"):
        return any(re.match(target.removeprefix("re:"), name) for name in NAMES)
    return target in NAMES


def _gptq_format(entries: dict) -> MatrixFormat:
    _check_bits(GPTQ, entries.get("bits"))
    format = entries.get("checkpoint_format") or "gptq"
    if entries.get("is_marlin_format") or format not in GPTQ_OFFSETS or entries.get("pack_dtype", "int32") != "int32":
        _raise_not_read(GPTQ, f"as {format!r} in {entries.get('pack_dtype', 'int32')}")
    size = _group_size(GPTQ, entries.get("group_size", 128))
    return GPTQInt4(size, not entries.get("sym", True), GPTQ_OFFSETS[format])


def _auto_round_format(entries: dict) -> MatrixFormat:
    _check_bits(AUTO_ROUND, entries.get("bits"))
    if entries.get("data_type", "int") != "int" or (entries.get("act_bits") or 16) < 16:
        _raise_not_read(
            AUTO_ROUND, f"as {entries.get('data_type', 'int')!r} with activations in {entries.get('act_bits')} bits"
        )
    size = _group_size(AUTO_ROUND, entries.get("group_size", 128))
    packing = entries.get("packing_format") or "auto_round"
    if packing == "auto_round:auto_awq":
        return AWQInt4(size)
    if packing not in AUTO_ROUND_OFFSETS:
        _raise_not_read(AUTO_ROUND, f"as {packing!r}")
    return GPTQInt4(size, not entries.get("sym", True), AUTO_ROUND_OFFSETS[packing])


def _awq_format(entries: dict) -> MatrixFormat:
    _check_bits(AWQ, entries.get("bits", entries.get("w_bit")))
    version = str(entries.get("version", "gemm")).lower()
    if version != "gemm":
        _raise_not_read(AWQ, f"for its kernel {version!r}")
    return AWQInt4(_group_size(AWQ, entries.get("group_size", entries.get("q_group_size", 128))))
