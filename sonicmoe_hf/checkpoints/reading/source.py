"""Source: a checkpoint of a family that has a native layout, checked against its config before a weight is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import CheckpointError
from ...formats.stored_as_declared import PLAIN_BLOCKS, TO_PLAIN_NAMES
from ...model_patches import NativeFamily
from ...patching.experts import sizes_of
from ...patching.moe_layers import find_layers
from ...private.transformers import ignored_on_load, strictly_fp32_modules
from ..layouts import HUB_MATRICES, detect_layout, experts_parameters, family_of, hub_config, name_in_layout
from .config_only import build_from_config
from .files import CONFIG_FILE
from .stored import StoredWeights


def _model(hub_config: dict, family: NativeFamily, path: Path) -> PreTrainedModel:
    """Build the family's causal language model under this hub config, on the meta device."""
    entries = {key: value for key, value in hub_config.items() if key != "quantization_config"}
    return build_from_config({**entries, "architectures": [family.causal_lm]}, path)


def _ignored_patterns(model: Any, path: Path) -> list[str]:
    """List patterns of names that a checkpoint may hold besides the model's: old buffers, multi-token prediction."""
    first = model.config.num_hidden_layers
    extra = getattr(model.config, "num_nextn_predict_layers", 0) or 0
    layers = [rf"^model\.layers\.{first + i}\." for i in range(extra)]
    return [*ignored_on_load(model), r"rotary_emb\.inv_freq$", *layers]


class Source(StoredWeights):
    """An opened checkpoint, whose tensors are what its config says.

    Attributes:
        family, native: what config.json says. model: the family's own, on the meta device. blocks: its experts' sizes.
        layout: as `detect_layout` names it. experts: how it stores the model's parameters of experts, by their names;
        parameter_of: its name, by name of the weights that hold it. own_names: the model's names, by those of other
        weights.
    Raises:
        CheckpointError: something is unknown, missing, wrongly shaped or contradictory; the message names it.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        path = folder / CONFIG_FILE
        self.family, self.native = family_of(self.config, path)
        self.hub_config = hub_config(self.config, self.family)
        self.model = _model(self.hub_config, self.family, path)
        self.keep_fp32 = frozenset(strictly_fp32_modules(self.model))
        self.blocks = {layer.name: sizes_of(layer.experts) for layer in find_layers(self.model)}
        self.layout = self._find_layout()
        self.experts = experts_parameters(self.family, self.layout, self.blocks)
        self.parameter_of = {name: own for own, parameter in self.experts.items() for name in parameter.shapes()}
        others = [name for name in self.model.state_dict() if name not in self.experts]
        self.own_names = {name_in_layout(name, self.layout, self.family, self.blocks): name for name in others}
        self._check_names_and_shapes(_ignored_patterns(self.model, path))

    def untie(self, names: Mapping[str, str]) -> None:
        """See StoredWeights."""
        super().untie(names)
        self.hub_config = hub_config(self.config, self.family)

    def _find_layout(self) -> str:
        """Detect the layout of the first block's experts; names of others are unknown."""
        block = next(iter(self.blocks), "")
        layout = detect_layout(self.weights, block, self.family) if block else None
        if layout is None and (renamed := [name for name in self.weights if name.endswith(PLAIN_BLOCKS)]):
            raise CheckpointError(f"{self.folder}: {renamed[0]} and others {TO_PLAIN_NAMES}")
        if layout is None:
            raise CheckpointError(
                f"{self.folder} has no mixture-of-experts layer {block} in a layout that conversion knows"
            )
        if self.native != (layout == "native"):
            raise CheckpointError(
                f"{self.folder / CONFIG_FILE} says model_type {self.config['model_type']!r}, but the experts are in the "
                f"{layout!r} layout: config and files contradict each other"
            )
        return layout

    def is_experts(self, parameter: str) -> bool:
        """Say whether a parameter of the model is a weight of experts, not biases."""
        return parameter in self.experts and parameter.rpartition(".")[2] in HUB_MATRICES

    def _check_names_and_shapes(self, ignored: list[str]) -> None:
        state = self.model.state_dict()
        shapes = {there: tuple(state[name].shape) for there, name in self.own_names.items()}
        shapes |= {name: shape for parameter in self.experts.values() for name, shape in parameter.shapes().items()}
        missing = sorted(set(shapes) - set(self.weights) - self._tied_to_stored())
        unknown = sorted(name for name in set(self.weights) - set(shapes) if not self.is_unused(name))
        unknown = [name for name in unknown if not any(re.search(pattern, name) for pattern in ignored)]
        for what, names in (("is missing", missing), ("is unknown", unknown)):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise CheckpointError(f"{self.folder}: {names[0]}{more} {what} in a {self.family.name} model")
        if self.format is not None and not any(weight.format for weight in self.weights.values()):
            raise CheckpointError(f"{self.folder} is declared to be in {self.format.name.upper()}, but no weight is")
        for name, weight in self.weights.items():
            order = self.experts[self.parameter_of[name]].order if name in self.parameter_of else "whole"
            for tensor, (shape, dtypes) in weight.specs(shapes.get(name, weight.shape), order).items():
                self._check_tensor(tensor, self.tensors[tensor].shape or (1,), shape or (1,), dtypes)
            if not self.is_unused(name):
                self.check_float(weight)

    def _check_tensor(
        self, name: str, own: tuple[int, ...], shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ()
    ) -> None:
        dtype = self.tensors[name].dtype
        if own != shape or (dtypes and dtype not in dtypes):
            expected = " of ".join(map(str, (shape, *dtypes[:1])))
            raise CheckpointError(
                f"{self.path_of(name)}: {name} has shape {own} of {dtype}; by config.json it must be {expected}"
            )

    def _tied_to_stored(self) -> set[str]:
        """List names that the checkpoint may lack, since it has the other of the two that are tied."""
        return {b if a in self.tensors else a for a, b in self.model.all_tied_weights_keys.items()}
