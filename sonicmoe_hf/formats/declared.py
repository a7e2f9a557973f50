"""The quantization that a checkpoint declares, in the quantization_config of its config.json, or in the file that older
exports of ModelOpt write beside config.json. Loading, converting and planning all ask here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from ..errors import CheckpointError
from ..kernels.packed import FORMATS, Format
from ..kernels.packed.fp8 import FP8_BLOCK
from ..layer.config import check_choice
from . import declared_integers
from .float_matrices import FP4Matrix, FP8Matrix, NVFP4Matrix
from .json_files import check_type, read_json
from .matrix_format import MatrixFormat

TEXT_CONFIGS = ("decoder", "generator", "text_config", "thinker_config")  # where get_text_config looks for them
QUANT_METHOD = "sonicmoe_hf"
MODELOPT, MODELOPT_FILE = "modelopt", "hf_quant_config.json"
FP8_BLOCKS = [FP8_BLOCK, FP8_BLOCK]  # what Transformers takes where a checkpoint does not say
EXPERT_DTYPE = "expert_dtype"  # of config.json: DeepSeek-V4's FP8 may have its experts in FP4
# entries of FP8's declaration, as from_pretrained loads it and as those that are missing count
FP8_LOADABLE: dict[str, Any] = {
    "weight_block_size": FP8_BLOCKS,
    "activation_scheme": "dynamic",  # static scales of activations are for FP8 arithmetic alone
}
MATRIX_METHODS = ("fp8", MODELOPT, *declared_integers.METHODS)  # that store each matrix by itself
TO_BF16 = "load the bf16 checkpoint that it was made from"


def check_format(what: str, name: str) -> None:
    """Raise a ValueError unless `name`, of the argument `what`, is one of FORMATS."""
    check_choice(what, name, FORMATS, " (int4 with a zero for each group)")


class DeclaredQuantization(NamedTuple):
    """The declaration of a quantization. method: its quant_method. entries: all of them, and config.json's expert_dtype,
    which DeepSeek-V4 has.

    `loadable_matrix_format` and `format_name` say what from_pretrained loads, which is FP8 in blocks of 128 x 128 alone;
    `stored_format`, in which blocks the files store it, since conversion and merging read FP8 in any.
    """

    method: str
    entries: dict

    @property
    def is_packed_here(self) -> bool:
        """Tell whether quantize_experts or conversion packed the experts."""
        return self.method == QUANT_METHOD

    @property
    def stores_matrices(self) -> bool:
        """Tell whether files store each matrix by itself, in FP8, NVFP4 or integers: all linear layers', or experts'."""
        return self.method in MATRIX_METHODS

    def format_name(self) -> str:
        """Name the experts' format, one of FORMATS; where it is none of these, what the quantization is called.

        Raises:
            CheckpointError: as `loadable_matrix_format`; or experts packed here in a format that is not known.
        """
        if self.is_packed_here:
            return self._packed_format().name
        return self.loadable_matrix_format().name if self.stores_matrices else self.method

    def loadable_matrix_format(self) -> MatrixFormat:
        """Find the format of each matrix that from_pretrained loads, where `stores_matrices`.

        Raises:
            CheckpointError: FP8, NVFP4 or integers of a kind that no format here is, with the remedy.
        """
        for entry, loadable in FP8_LOADABLE.items() if self.method == "fp8" else ():
            value = self.entries.get(entry, loadable)
            if (list(value) if isinstance(value, tuple) else value) != loadable:
                raise CheckpointError(
                    f"the checkpoint's FP8 has {entry} {value!r}; experts_quantization takes {loadable!r}: {TO_BF16}"
                )
        format = self.stored_format()
        assert isinstance(format, MatrixFormat)
        return format

    def stored_format(self) -> Format | MatrixFormat | None:
        """Find how the files store weights: the Format of experts stored [E, ...] under their parameter's name, packed
        here or as gpt-oss's are; or the MatrixFormat of matrices, those of experts and of linear layers, each stored by
        itself. None of other checkpoints.

        Raises:
            CheckpointError: it is another kind of ModelOpt's, or of integers; FP8 whose blocks are no sizes, or with
                experts in a format that is neither; or experts packed here in a format that is not known.
        """
        if self.is_packed_here:
            return self._packed_format()
        if self.method in declared_integers.METHODS:
            return declared_integers.declared_format(self.method, self.entries)
        if self.method == "fp8":
            return self._fp8_format()
        if self.method == MODELOPT:
            return self._nvfp4_format()
        return FORMATS["mxfp4"] if self.method == "mxfp4" else None

    def _packed_format(self) -> Format:
        experts = self.entries.get("experts")
        if experts not in tuple(FORMATS):
            raise CheckpointError(
                f"the experts' format in quantization_config is {experts!r}, not {' or '.join(FORMATS)}"
            )
        return FORMATS[experts]

    def _fp8_format(self) -> MatrixFormat:
        block, experts = self.entries.get("weight_block_size", FP8_BLOCKS), self.entries.get(EXPERT_DTYPE, "fp8")
        if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(_is_size(size) for size in block)):
            raise CheckpointError(
                f"weight_block_size of the fp8 quantization is {block!r}; it must be two sizes such as [128, 128]"
            )
        if experts not in ("fp8", "fp4"):
            raise CheckpointError(
                f"the experts are in {experts!r} (expert_dtype of config.json), not in 'fp8' or 'fp4': {TO_BF16}"
            )
        fp8 = FP8Matrix((block[0], block[1]), self.entries.get("scale_fmt") == "ue8m0")
        return FP4Matrix(fp8) if experts == "fp4" else fp8

    def _nvfp4_format(self) -> NVFP4Matrix:
        size = FORMATS["nvfp4"].block
        algorithm, block = self.entries.get("quant_algo"), self.entries.get("group_size") or size
        if algorithm != "NVFP4" or block != size:
            raise CheckpointError(
                f"the checkpoint is quantized by ModelOpt as {algorithm!r} in groups of {block}; 'NVFP4' in groups of "
                f"{size} is what sonicmoe_hf reads: {TO_BF16}"
            )
        return NVFP4Matrix()


def _is_size(size) -> bool:
    return isinstance(size, int) and size > 0


def declared_quantization(config: PreTrainedConfig | dict, folder: Path | None = None) -> DeclaredQuantization | None:
    """Read the declaration of a config, or else of the text model's inside it, or of ModelOpt's file in `folder`; None of
    a checkpoint that is not quantized.

    Raises:
        CheckpointError: what declares it is damaged.
    """
    configs = list(_with_text_configs(config))
    declared, expert_dtype = (_first_value(configs, entry) for entry in ("quantization_config", EXPERT_DTYPE))
    if declared is None and folder is not None and (folder / MODELOPT_FILE).is_file():
        declared = _read_modelopt_file(folder / MODELOPT_FILE)
    if declared is None:
        return None
    declared = declared.to_dict() if hasattr(declared, "to_dict") else declared
    file = "config.json" if folder is None else folder / "config.json"
    check_type({"quantization_config": declared}, "quantization_config", dict, file)
    method = declared.get("quant_method")
    beside = {} if expert_dtype is None else {EXPERT_DTYPE: expert_dtype}
    return DeclaredQuantization(str(getattr(method, "value", method)), {**beside, **declared})


def _with_text_configs(config: PreTrainedConfig | dict) -> Iterator[dict]:
    """Yield the entries of a config, then those of the text models' inside it."""
    entries = config if isinstance(config, dict) else vars(config)
    yield entries
    for name in TEXT_CONFIGS:
        if isinstance(inner := entries.get(name), (dict, PreTrainedConfig)):
            yield from _with_text_configs(inner)


def _read_modelopt_file(path: Path) -> dict | None:
    """Read the declaration in ModelOpt's own file; None where the KV cache alone is quantized."""
    quantization = read_json(path, quantization=dict).get("quantization")
    if not isinstance(quantization, dict) or "quant_algo" not in quantization:
        raise CheckpointError(f"{path} names no quant_algo below quantization; download it again")
    check_type(quantization, "quant_algo", str, path)
    return None if quantization["quant_algo"] is None else {"quant_method": MODELOPT, **quantization}


def _first_value(configs: list[dict], entry: str) -> Any:
    """Find the value of an entry in the first config that has it; None where none has."""
    return next((config[entry] for config in configs if config.get(entry) is not None), None)
