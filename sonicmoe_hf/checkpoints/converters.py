"""Transformers' own conversions of checkpoints, forth and back: which weights of the files become which parameters of a
model, so that a changed parameter can be written under the files' own names for every family that Transformers loads.

E is the number of experts. Where a conversion takes each expert alone, so does a group, so that memory is that of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..errors import CheckpointError

WITH_PEFT = "merge it with PEFT: PeftModel.from_pretrained(model, adapter).merge_and_unload()"
NOT_INVERTED = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, StopIteration, ValueError)
Tensors = dict[str, torch.Tensor]


class _Shapes:
    """Stands for a model where an operation looks up the shape of what it makes."""

    def __init__(self, shapes: dict[str, torch.Size]):
        self._shapes = shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        """A tensor of this parameter's shape, in fp32, as all that is converted here."""
        return torch.empty(self._shapes[name], device="meta")


class WeightGroup:
    """Weights of a checkpoint's files that become parameters of the model together.

    sources: the weights' names by the converter's pattern, of experts in their order. targets: the parameters' names, in
    the order of the converter's patterns. num_experts: E where experts are converted one by one; None otherwise.
    """

    def __init__(self, converter: WeightConverter | None, target: str, state: Tensors, config: PreTrainedConfig):
        self._converter, self._config = converter, config
        patterns = [target] if converter is None else converter.target_patterns
        self.targets = [target.replace(patterns[0], pattern) for pattern in patterns]
        self.sources: dict[str, list[str]] = {}
        self._shapes = {name: state[name].shape for name in self.targets if name in state}
        each_alone = converter is None or _takes_each_expert_alone(converter.operations)
        is_3d = all(len(shape) == 3 for shape in self._shapes.values())
        self.num_experts = state[target].shape[0] if each_alone and is_3d else None
        self._is_checked = False

    @property
    def weights(self) -> list[str]:
        """The names of the weights."""
        return [name for names in self.sources.values() for name in names]

    def changed(
        self,
        read: Callable[[str, int | None], torch.Tensor],
        change: Callable[[str, torch.Tensor, int | None], torch.Tensor],
        expert: int | None = None,
    ) -> Tensors:
        """The weights by name, in fp32, after the parameters that they become were changed.

        Args:
            read: a weight by its name, or the [1, ...] of one expert where it holds all of them. change: the changed
                parameter, or [1, ...] of it, from its name, itself and the expert. expert: of a group with num_experts.
        Returns:
            All weights; with `expert` those of this expert, [1, ...] of one that holds all.
        Raises:
            CheckpointError: the weights do not become the model's parameters, or the conversion has no inverse.
        """
        names = {
            pattern: [names[expert]] if expert is not None and "*" in pattern else names
            for pattern, names in self.sources.items()
        }
        weights = {
            pattern: [read(name, None if "*" in pattern else expert).float() for name in found]
            for pattern, found in names.items()
        }
        try:
            parameters = self._forward(weights, expert)
            if not self._is_checked:
                self._check_inverse(names, weights, self._backward(names, weights, parameters))
        except NOT_INVERTED as error:
            raise CheckpointError(
                f"{self.targets[0]} cannot be written back as {self.weights[0]}, since Transformers' conversion of this "
                f"family has no inverse ({type(error).__name__}: {' '.join(str(error).split())}); {WITH_PEFT}"
            ) from error
        changed = {name: change(name, parameter, expert) for name, parameter in parameters.items()}
        return self._backward(names, weights, changed)

    def _forward(self, weights: dict[str, list[torch.Tensor]], expert: int | None) -> Tensors:
        """The parameters by name."""
        shapes = dict(self._shapes)
        if expert is not None:
            shapes = {name: torch.Size((1, *shape[1:])) for name, shape in shapes.items()}
        if self._converter is None:
            parameters = {self.targets[0]: next(iter(weights.values()))[0]}
        else:
            made = self._convert(self._converter, dict(weights), self.targets[0], shapes)
            parameters = dict(zip(self.targets, (made[pattern] for pattern in self._converter.target_patterns)))
        for name, parameter in parameters.items():
            if parameter.shape != shapes.get(name, parameter.shape):
                raise ValueError(f"it has shape {tuple(parameter.shape)}, the model's {tuple(shapes[name])}")
        return parameters

    def _backward(self, names: dict[str, list[str]], weights, parameters: Tensors) -> Tensors:
        """The weights by name, of the shapes that `weights` have."""
        if self._converter is None:
            return {next(iter(names.values()))[0]: parameters[self.targets[0]]}
        inverse = self._converter.reverse_transform()
        shapes = {name: weight.shape for pattern in names for name, weight in zip(names[pattern], weights[pattern])}
        tensors = {pattern: [parameters[name]] for pattern, name in zip(inverse.source_patterns, self.targets)}
        made = self._convert(inverse, tensors, next(iter(shapes)), shapes)
        pairs = zip(self._converter.source_patterns, inverse.target_patterns)
        return {
            name: made[ours.replace("*", str(place))]
            for theirs, ours in pairs
            for place, name in enumerate(names.get(theirs, ()))
        }

    def _convert(self, converter: Any, tensors, name: str, shapes: dict[str, torch.Size]) -> Tensors:
        for operation in converter.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=name,
                model=_Shapes(shapes),
                config=self._config,
                missing_keys=None,
            )
        return {key: made[0] if isinstance(made, list) else made for key, made in tensors.items()}

    def _check_inverse(self, names: dict[str, list[str]], weights, back: Tensors) -> None:
        for pattern, found in names.items():
            for name, weight in zip(found, weights[pattern]):
                if not torch.equal(back[name], weight):
                    raise ValueError(f"{name} comes back with other values")
        self._is_checked = True


def _takes_each_expert_alone(operations: list[ConversionOps]) -> bool:
    """Whether [E, ...] comes of experts' own weights, and nothing crosses from one to another."""
    first, *rest = operations
    if not (isinstance(first, MergeModulelist) and first.dim == 0):
        rest = operations
    return all(
        (isinstance(operation, (Chunk, Concatenate, Interleave)) and operation.dim > 0)
        or (isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0)
        for operation in rest
    )


def weight_groups(model: PreTrainedModel, weights: Iterable[str]) -> list[WeightGroup]:
    """What Transformers makes of `weights`, the names in a checkpoint's files, when it loads them into `model`, which may
    be on the meta device. Names that the model does not know, as those of multi-token prediction, are in no group."""
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, WeightGroup] = {}
    for name in sorted(weights, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:  # as save_pretrained of early versions wrote it
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in state:
            if target not in groups:
                converter = None if pattern is None else deepcopy(by_pattern[pattern])
                groups[target] = WeightGroup(converter, target, state, model.config)
            groups[target].sources.setdefault(pattern or name, []).append(name)
    return list(groups.values())
