"""The weights in a checkpoint's files, dense or quantized, under the files' own names; of any family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import CheckpointError
from ...formats.declared import MATRIX_METHODS, QUANT_METHOD, DeclaredQuantization, declared_quantization
from ...formats.matrix_format import MatrixFormat
from ...private.transformers import missing_allowed
from .converters import WeightGroup, weight_groups
from .files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, TensorFiles, check_float, read_config
from .weight import MatrixWeight, PackedExperts, UntiedWeight, Weight

# model types whose dense experts are [E, in, out], and packed ones [E, out, in]
TRANSPOSED = ("aria", "aria_text", "gpt_oss", "openai_privacy_filter")
QUANTIZATIONS = ("mxfp4", QUANT_METHOD, *MATRIX_METHODS)
TIED = "tie_word_embeddings"  # of config.json
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def quantization_of(config: dict, folder: Path) -> DeclaredQuantization | None:
    """Read the quantization that the checkpoint in `folder` declares; None where it is not quantized.

    Raises:
        CheckpointError: it is quantized in a way that conversion does not read.
    """
    path = folder / CONFIG_FILE
    declared = declared_quantization(config, folder)
    if declared is None:
        return None
    if declared.method not in QUANTIZATIONS:
        raise CheckpointError(f"{path}: quantized by {declared.method!r}; conversion reads {', '.join(QUANTIZATIONS)}")
    if declared.is_packed_here and declared.entries.get("linear") is not None:
        raise CheckpointError(
            f"{folder}: the linear layers are bitsandbytes', which conversion does not read: merge the adapter "
            "into the model's bf16 checkpoint, or into one packed by sonicmoe-hf convert --quantize"
        )
    return declared


class StoredWeights(TensorFiles):
    """The weights of a checkpoint, under the names of its files.

    Attributes:
        folder, config: where it is, and its config.json.
        declared: what its config declares of its quantization; None where it is not quantized.
        format: the Format of experts stored [E, ...] under their parameter's name; or the MatrixFormat of matrices, each
            stored by itself: those of all linear layers, or of experts beside linear layers in `MatrixFormat.linear`.
            None where nothing is quantized.
        keep_fp32: modules of the model that are never cast, where it is known.
    Raises:
        CheckpointError: a file is missing, damaged or contradicts another, or a quantized weight is not as declared.
    """

    keep_fp32: frozenset[str] = frozenset()

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.config = read_config(folder)
        if self.config.get("transformers_weights") is not None:
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: transformers_weights is {self.config['transformers_weights']!r}, a file that "
                f"Transformers would load; conversion reads {WEIGHTS_FILE} or {INDEX_FILE} only: remove the entry"
            )
        self.declared = quantization_of(self.config, folder)
        try:
            self.format = None if self.declared is None else self.declared.stored_format()
        except CheckpointError as error:
            raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error

    @property
    def quantization(self) -> str | None:
        """The name of the format."""
        return None if self.format is None else self.format.name

    def format_named(self, name: str | None) -> str | None:
        """Find the format that users mean: "int4" of integers with zeros, too, which are "uint4"."""
        return self.quantization if (name, self.quantization) == ("int4", "uint4") else name

    @property
    def is_packed_here(self) -> bool:
        """Tell whether quantize_experts or conversion packed the experts."""
        return self.declared is not None and self.declared.is_packed_here

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight once it is read, by name."""
        return {name: weight.shape for name, weight in self.weights.items()}

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Every weight, by name."""
        formats: list[Any] = [] if self.format is None else [self.format]
        if isinstance(self.format, MatrixFormat) and self.format.linear is not self.format:
            formats.append(self.format.linear)
        weights: dict[str, Weight] = {}
        others: set[str] = set()  # tensors that store a weight beside the first, such as its scales
        for name, header in self.tensors.items():
            by_format = ((format.weight_of(name, header.dtype), format) for format in formats)
            weight_name, format = next((pair for pair in by_format if pair[0] is not None), (None, None))
            if (
                weight_name is None
                and header.dtype == torch.float8_e4m3fn
                and not isinstance(self.format, MatrixFormat)
            ):
                raise CheckpointError(
                    f"{name} is float8, but config.json declares no fp8 quantization; add quantization_config as the "
                    "original has it"
                )
            weight = Weight(self, name) if weight_name is None else self._quantized_weight(weight_name, format)
            if missing := [tensor for tensor in weight.tensor_names if tensor not in self.tensors]:
                raise CheckpointError(f"{self.folder}: {missing[0]} is missing, a part of a quantized weight")
            weights[weight.name] = weight
            others.update(weight.tensor_names[1:])
        return {name: weight for name, weight in weights.items() if name not in others}

    def _quantized_weight(self, name: str, format: Any) -> Weight:
        if isinstance(format, MatrixFormat):
            return MatrixWeight(self, name, format)
        return PackedExperts(self, name, format, self.dense_dtype, self.config.get("model_type") in TRANSPOSED)

    def groups(self, model: PreTrainedModel) -> dict[str, WeightGroup]:
        """Group the weights as `weight_groups` does.

        Raises:
            CheckpointError: they are not all that `model` has, or have other shapes, or are no floats.
        """
        groups = weight_groups(model, self.shapes)
        tied = {b if a in groups else a for a, b in model.all_tied_weights_keys.items()}
        patterns, state = missing_allowed(model), model.state_dict()
        wanted = (name for name in state if name not in groups and name not in tied)
        missing = next((name for name in wanted if not any(re.search(pattern, name) for pattern in patterns)), None)
        missing = missing or next(filter(None, (group.missing() for group in groups.values())), None)
        if missing is not None:
            raise CheckpointError(
                f"{self.folder}: {missing} is missing, which {type(model).__name__} has; download the checkpoint "
                "again, or convert it to the hub's layout"
            )
        for parameter, group in groups.items():
            if wrong := group.wrong_shape():
                name, reason = wrong
                raise CheckpointError(f"{self.path_of(name)}: {name} has shape {group.shapes[name]}; {reason}")
            for name in group.shapes if state[parameter].is_floating_point() else ():
                self.check_float(self.weights[name])
        return groups

    def check_whole(self, model: PreTrainedModel) -> None:
        """Raise CheckpointError where `groups` does: the weights are not all that `model` has, or do not fit it."""
        self.groups(model)

    def check_float(self, weight: Weight) -> None:
        """Raise CheckpointError where a weight that is not quantized is in no dtype of weights."""
        if weight.format is None:
            check_float(self.path_of(weight.name), weight.name, weight.dtype)

    def path_of(self, name: str) -> Path:
        """Find the path of the file that holds a weight, or a tensor of one."""
        weight = self.weights.get(name)
        return self.folder / self.tensors[name if weight is None else weight.tensor_names[0]].file

    def untie(self, names: Mapping[str, str]) -> None:
        """Untie weights: each gets an entry of its own, with the values of the one that the model ties it to, by whose
        name the files hold it; config says that none is tied."""
        self.weights.update({name: UntiedWeight(self, name, other) for name, other in names.items()})
        self.config = {**self.config, TIED: False}
        if isinstance(text := self.config.get("text_config"), dict):
            self.config["text_config"] = {**text, TIED: False}

    def is_unused(self, name: str) -> bool:
        """Tell whether the format has the tensor for inference alone."""
        return isinstance(self.format, MatrixFormat) and name.endswith(self.format.unused)

    @property
    def dense_dtype(self) -> torch.dtype:
        """Choose the dtype that quantized weights become: bf16; of experts packed here, that which the model computes
        in."""
        declared = self.config.get("dtype") or self.config.get("torch_dtype") if self.is_packed_here else None
        return DTYPES.get(declared, torch.bfloat16) if isinstance(declared, str) else torch.bfloat16
