"""The quantization that a checkpoint declares, in the quantization_config of its config.json, or in the file that older
exports of ModelOpt write beside config.json. Loading, converting and planning all ask here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedConfig

from ..errors import CheckpointError
from ..kernels.packed import FORMATS, Format
from ..kernels.packed.fp8 import FP8_BLOCK
from ..kernels.packed.int4 import GROUP
from ..layer.config import check_choice
from . import declared_integers
from .float_matrices import FP4Matrix, FP8Matrix, NVFP4Matrix
from .integer_matrices import CompressedInt4
from .json_files import check_type, read_json
from .matrix_format import MatrixFormat

TEXT_CONFIGS = ("decoder", "generator", "text_config", "thinker_config")  # where get_text_config looks for them
QUANT_METHOD = "sonicmoe_hf"
MODELOPT, MODELOPT_FILE = "modelopt", "hf_quant_config.json"
FP8_BLOCKS = [FP8_BLOCK, FP8_BLOCK]  # what Transformers takes where a checkpoint does not say
EXPERT_DTYPE = "expert_dtype"  # of config.json: DeepSeek-V4's FP8 may have its experts in FP4
FP8_TAKEN = {  # entries of FP8's declaration: what experts_quantization takes, first what counts where it says nothing
    "weight_block_size": (FP8_BLOCKS,),
    "activation_scheme": ("dynamic",),  # static scales of activations are for FP8 arithmetic alone
    EXPERT_DTYPE: ("fp8", "fp4"),
}
TO_BF16 = "load the bf16 checkpoint that it was made from"
# by the format of experts: how a checkpoint stores a matrix in it, where its declaration does not say
MATRIX_FORMATS: dict[str, MatrixFormat] = {
    format.name: format
    for format in (
        FP8Matrix(),
        FP4Matrix(),
        NVFP4Matrix(),
        CompressedInt4(GROUP, has_zeros=False),
        CompressedInt4(GROUP, has_zeros=True),
    )
}


def check_format(what: str, name: str) -> None:
    """Raise a ValueError unless `name`, of the argument `what`, is one of FORMATS."""
    check_choice(what, name, FORMATS, " (int4 with a zero for each group)")


class DeclaredQuantization(NamedTuple):
    """The declaration of a quantization. method: its quant_method. entries: all of it, and config.json's expert_dtype, of
    DeepSeek-V4.

    `format_name` and `loadable_matrix_format` say what from_pretrained loads, which is FP8 in blocks of 128 x 128 alone;
    `stored_format`, in which blocks the files store it, since conversion and merging read FP8 in any.
    """

    method: str
    entries: dict

    @property
    def is_packed_here(self) -> bool:
        """Tell whether quantize_experts or conversion packed the experts."""
        return self.method == QUANT_METHOD

    @property
    def is_per_expert(self) -> bool:
        """Tell whether it is FP8, NVFP4 or integers in every linear layer, or in experts alone, with tensors for each."""
        return self.method in ("fp8", MODELOPT, *declared_integers.METHODS)

    def loadable_matrix_format(self) -> MatrixFormat:
        """Find the format of each matrix that from_pretrained loads, where `is_per_expert`. Raises CheckpointError as
        `format_name`."""
        if self.method in declared_integers.METHODS:
            return declared_integers.declared_format(self.method, self.entries)
        return MATRIX_FORMATS[self.format_name()]

    def format_name(self) -> str:
        """Name the experts' format, one of FORMATS; where it is none of these, what the quantization is called.

        Raises:
            CheckpointError: FP8, NVFP4 or integers of a kind that no format here is, with the remedy; or experts packed
                here in a format that is not known.
        """
        if self.is_packed_here:
            experts = self.entries.get("experts")
            if experts not in tuple(FORMATS):
                raise CheckpointError(
                    f"the experts' format in quantization_config is {experts!r}, not {' or '.join(FORMATS)}"
                )
            return experts
        if self.method == "fp8":
            self._check_loadable_fp8()
            return "mxfp4" if self.entries.get(EXPERT_DTYPE) == "fp4" else "fp8"
        if self.method == MODELOPT:
            self.check_nvfp4()
            return "nvfp4"
        return self.loadable_matrix_format().name if self.is_per_expert else self.method

    def stored_format(self) -> Format | MatrixFormat | None:
        """Find how the files store weights: the Format of experts stored [E, ...] under their parameter's name, packed
        here or as gpt-oss's are; or the MatrixFormat of matrices, those of experts and of linear layers, each stored by
        itself. None of other checkpoints.

        Raises:
            CheckpointError: it is another kind of ModelOpt's, or of integers; FP8 whose blocks are no sizes, or with
                experts in a format that is neither.
        """
        if self.is_packed_here or self.method == "mxfp4":
            return FORMATS[self.format_name()]
        if self.method == MODELOPT:
            self.check_nvfp4()
            return MATRIX_FORMATS["nvfp4"]
        if self.method in declared_integers.METHODS:
            return self.loadable_matrix_format()
        return self._stored_fp8() if self.method == "fp8" else None

    def _check_loadable_fp8(self) -> None:
        for entry, taken in FP8_TAKEN.items():
            value = self.entries.get(entry, taken[0])
            if (list(value) if isinstance(value, tuple) else value) not in taken:
                raise CheckpointError(
                    f"the checkpoint's FP8 has {entry} {value!r}; experts_quantization takes "
                    f"{' or '.join(map(repr, taken))}: {TO_BF16}"
                )

    def _stored_fp8(self) -> MatrixFormat:
        block = self.entries.get("weight_block_size", FP8_BLOCKS)
        if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(_is_size(size) for size in block)):
            raise CheckpointError(
                f"weight_block_size of the fp8 quantization is {block!r}; it must be two sizes such as [128, 128]"
            )
        fp8 = FP8Matrix((block[0], block[1]), self.entries.get("scale_fmt") == "ue8m0")
        experts, taken = self.entries.get(EXPERT_DTYPE, "fp8"), FP8_TAKEN[EXPERT_DTYPE]
        if experts not in taken:
            raise CheckpointError(
                f"the experts are in {experts!r} (expert_dtype of config.json); conversion and merging read "
                f"{' and '.join(map(repr, taken))}"
            )
        return FP4Matrix(fp8) if experts == "fp4" else fp8

    def check_nvfp4(self) -> None:
        """Raise CheckpointError where what ModelOpt made is not NVFP4."""
        size = FORMATS["nvfp4"].block
        algorithm, block = self.entries.get("quant_algo"), self.entries.get("group_size") or size
        if algorithm != "NVFP4" or block != size:
            raise CheckpointError(
                f"the checkpoint is quantized by ModelOpt as {algorithm!r} in groups of {block}; 'NVFP4' in groups of "
                f"{size} is what sonicmoe_hf reads: {TO_BF16}"
            )


def _is_size(size) -> bool:
    return isinstance(size, int) and size > 0


def declared_quantization(config: PreTrainedConfig | dict, folder: Path | None = None) -> DeclaredQuantization | None:
    """Read the declaration of a config, or else of the text model's inside it, or of ModelOpt's file in `folder`; None of
    a checkpoint that is not quantized.

    Raises:
        CheckpointError: what declares it is damaged.
    """
    configs = list(_with_text_configs(config))
    declared, of_experts = (_first(configs, entry) for entry in ("quantization_config", EXPERT_DTYPE))
    if declared is None and folder is not None and (folder / MODELOPT_FILE).is_file():
        declared = _modelopts(folder / MODELOPT_FILE)
    if declared is None:
        return None
    declared = declared.to_dict() if hasattr(declared, "to_dict") else declared
    file = "config.json" if folder is None else folder / "config.json"
    check_type({"quantization_config": declared}, "quantization_config", dict, file)
    method = declared.get("quant_method")
    beside = {} if of_experts is None else {EXPERT_DTYPE: of_experts}
    return DeclaredQuantization(str(getattr(method, "value", method)), {**beside, **declared})


def _with_text_configs(config: PreTrainedConfig | dict) -> Iterator[dict]:
    """Yield the entries of a config, then those of the text models' inside it."""
    entries = config if isinstance(config, dict) else vars(config)
    yield entries
    for name in TEXT_CONFIGS:
        if isinstance(inner := entries.get(name), (dict, PreTrainedConfig)):
            yield from _with_text_configs(inner)


def _modelopts(path: Path) -> dict | None:
    """Read the declaration in ModelOpt's own file; None where the KV cache alone is quantized."""
    quantization = read_json(path, quantization=dict).get("quantization")
    if not isinstance(quantization, dict) or "quant_algo" not in quantization:
        raise CheckpointError(f"{path} names no quant_algo below quantization; download it again")
    check_type(quantization, "quant_algo", str, path)
    return None if quantization["quant_algo"] is None else {"quant_method": MODELOPT, **quantization}


def _first(configs: list[dict], entry: str):
    return next((config[entry] for config in configs if config.get(entry) is not None), None)
