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
EXPERT = "model.layers.1.mlp.experts.0.gate_proj"  # by which patterns of names are tried
GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # by checkpoint_format: what is missing in its zeros
AUTO_ROUND_OFFSETS = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0}


def declared_format(method: str, entries: dict) -> MatrixFormat:
    """Find the format of matrices that one of METHODS declares by its entries in config.json.

    Raises:
        CheckpointError: it is none that is read here; with the remedy.
    """
    readers = {COMPRESSED: _of_compressed_tensors, GPTQ: _of_gptq, AUTO_ROUND: _of_auto_round, AWQ: _of_awq}
    return readers[method](entries)


def _refuse(method: str, what: str) -> NoReturn:
    raise CheckpointError(f"the checkpoint is quantized by {method} {what}, which is not read: {TO_BF16_OR_PACK}")


def _size(method: str, group: Any) -> int | None:
    """Read how many values share a scale; None for a whole row."""
    if group in (-1, None):
        return None
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        _refuse(method, f"in groups of {group!r}")
    return group


def _check_bits(method: str, bits: Any) -> None:
    if bits != 4:
        _refuse(method, f"in {bits!r} bits")


def _of_compressed_tensors(entries: dict) -> MatrixFormat:
    groups = entries.get("config_groups") or {}
    group = _group_of_experts(groups if isinstance(groups, dict) else {}, entries.get("ignore") or ())
    weights = group.get("weights") or {}
    format = group.get("format") or entries.get("format")
    if format in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):  # whatever is said of activations: they stay bf16
        return CompressedMXFP4() if format.startswith("mx") else CompressedNVFP4()
    if format != "pack-quantized" or weights.get("type", "int") != "int":
        _refuse(COMPRESSED, f"as {format!r}")
    if group.get("input_activations") is not None:
        _refuse(COMPRESSED, "with activations quantized too")
    if weights.get("actorder") == "group":
        _refuse(COMPRESSED, 'in the order of activations (actorder "group")')
    strategy, is_symmetric = weights.get("strategy"), weights.get("symmetric", True)
    if strategy not in ("group", "channel"):
        _refuse(COMPRESSED, f"with scales for each {strategy}")
    size = _size(COMPRESSED, weights.get("group_size")) if strategy == "group" else None
    if weights.get("num_bits") == 8 and is_symmetric:
        return CompressedInt8(size)
    _check_bits(COMPRESSED, weights.get("num_bits"))
    return CompressedInt4(size, not is_symmetric)


def _group_of_experts(groups: dict, ignored) -> dict:
    """Find the entries of config_groups that count for experts' matrices: names come before classes."""
    if any(_matches(each) for each in ignored):
        _refuse(COMPRESSED, "with experts left out")
    by_name = [group for group in groups.values() if any(_matches(each) for each in group.get("targets") or ())]
    by_class = [group for group in groups.values() if "Linear" in (group.get("targets") or ())]
    return next(iter(by_name + by_class), {})


def _matches(target: str) -> bool:
    """Tell whether a target of compressed-tensors is the name of an expert's matrix, in any model."""
    if target.startswith("re:"):
        names = (EXPERT, f"language_model.{EXPERT}", EXPERT.replace("model.", "model.language_model.", 1))
        return any(re.match(target.removeprefix("re:"), name) for name in names)
    return target == EXPERT


def _of_gptq(entries: dict) -> MatrixFormat:
    _check_bits(GPTQ, entries.get("bits"))
    format = entries.get("checkpoint_format") or "gptq"
    if entries.get("is_marlin_format") or format not in GPTQ_OFFSETS or entries.get("pack_dtype", "int32") != "int32":
        _refuse(GPTQ, f"as {format!r} in {entries.get('pack_dtype', 'int32')}")
    size = _size(GPTQ, entries.get("group_size", 128))
    return GPTQInt4(size, not entries.get("sym", True), GPTQ_OFFSETS[format])


def _of_auto_round(entries: dict) -> MatrixFormat:
    _check_bits(AUTO_ROUND, entries.get("bits"))
    if entries.get("data_type", "int") != "int" or (entries.get("act_bits") or 16) < 16:
        _refuse(
            AUTO_ROUND, f"as {entries.get('data_type', 'int')!r} with activations in {entries.get('act_bits')} bits"
        )
    size, packing = _size(AUTO_ROUND, entries.get("group_size", 128)), entries.get("packing_format") or "auto_round"
    if packing == "auto_round:auto_awq":
        return AWQInt4(size)
    if packing not in AUTO_ROUND_OFFSETS:
        _refuse(AUTO_ROUND, f"as {packing!r}")
    return GPTQInt4(size, not entries.get("sym", True), AUTO_ROUND_OFFSETS[packing])


def _of_awq(entries: dict) -> MatrixFormat:
    _check_bits(AWQ, entries.get("bits", entries.get("w_bit")))
    version = str(entries.get("version", "gemm")).lower()
    if version != "gemm":
        _refuse(AWQ, f"for its kernel {version!r}")
    return AWQInt4(_size(AWQ, entries.get("group_size", entries.get("q_group_size", 128))))
