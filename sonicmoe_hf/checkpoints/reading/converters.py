"""Transformers' own conversions of checkpoints, forth and back: which weights of the files become which parameters of a
model, so that what is added to a parameter can be added to the files' weights.

E is the number of experts. Where a conversion takes each expert alone, so does a group, so that memory is that of one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
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

from ...errors import CheckpointError
from .files import same_bytes

ALTERNATING = 2  # groups whose weights a file may have in turn: gate and up of an expert, and its down
NOT_INVERTED = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, StopIteration, ValueError)
Tensors = dict[str, torch.Tensor]
WeightShapes = Mapping[str, tuple[int, ...]]


class _ModelOfShapes:
    """Stands for a model where an operation looks up the shape of what it makes."""

    def __init__(self, shapes: WeightShapes):
        self._shapes = shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        """Make a tensor of this parameter's shape."""
        return torch.empty(self._shapes[name], dtype=torch.uint8, device="meta")


class WeightGroup:
    """Weights of a checkpoint's files that become parameters of the model together.

    Mixtral's first projection with E = 2, which is converted one expert at a time:

        weight_names: a pattern, and by number the weights               parameter_names

        experts.*.w1.weight  {0: experts.0.w1.weight, 1: experts.1...}
                                                                  ---->  experts.gate_up_proj [E, 2I, H]
        experts.*.w3.weight  {0: experts.0.w3.weight, 1: experts.1...}

        parameters({experts.1.w1.weight: [I, H], experts.1.w3.weight: [I, H]}, 1) == {experts.gate_up_proj: [1, 2I, H]}
        weights({experts.gate_up_proj: [1, 2I, H]}, 1) == {experts.1.w1.weight: [I, H], experts.1.w3.weight: [I, H]}

    weight_names: by the converter's pattern, and by the number that stands for its "*". parameter_names: in the order of
    the converter's patterns. num_experts: E where experts are converted one by one; None otherwise. shapes: those of the
    weights. owners: the expert whose own each weight is; None of a weight that holds all experts, or is needed whole.
    """

    def __init__(self, converter: WeightConverter | None, parameter: str, state: Tensors, config: PreTrainedConfig):
        self._converter, self._config = converter, config
        patterns = [parameter] if converter is None else converter.target_patterns
        self.parameter_names = [parameter.replace(patterns[0], pattern) for pattern in patterns]
        self.weight_names: dict[str, dict[int, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.owners: dict[str, int | None] = {}
        self._parameter_shapes: dict[str, tuple[int, ...]] = {
            n: tuple(state[n].shape) for n in self.parameter_names if n in state
        }
        each_alone = converter is None or _takes_each_expert_alone(converter.operations)
        is_3d = all(len(shape) == 3 for shape in self._parameter_shapes.values())
        self._is_inverted = False
        self.num_experts = state[parameter].shape[0] if each_alone and is_3d else None

    def add(self, pattern: str, name: str, shape: tuple[int, ...], number: int = 0) -> None:
        """Add a weight of this shape, which the converter's pattern stands for, with this number for its "*"."""
        self.owners[name] = number if "*" in pattern and self.num_experts else None
        self.shapes[name] = tuple(shape)
        self.weight_names.setdefault(pattern, {})[number] = name

    @property
    def converts(self) -> bool:
        """Tell whether a parameter is made of weights by operations; otherwise one weight is one."""
        return self._converter is not None

    def missing(self) -> str | None:
        """Say which weight is not there, of those that the model's parameters are made of; None where all are."""
        for pattern in self._converter.source_patterns if self._converter else ():
            there = self.weight_names.get(pattern, {})
            wanted = range(self.num_experts or max(there, default=0) + 1) if "*" in pattern else (0,)
            if (lacking := next((number for number in wanted if number not in there), None)) is not None:
                return f"{pattern.replace('*', str(lacking))} of {self.parameter_names[0]}"
        return None

    def wrong_shape(self) -> tuple[str, str] | None:
        """Find a weight of another shape than the model's, and say which that is; None where there is none."""
        first, shape = next(iter(self.shapes.items()))
        wanted = next(iter(self._parameter_shapes.values()))
        if self._converter is None:
            return None if (shape or (1,)) == (wanted or (1,)) else (first, f"by config.json it must be {wanted}")
        try:
            shapes = self.shapes.items()
            self.parameters({name: torch.empty(own, dtype=torch.float32, device="meta") for name, own in shapes}, None)
        except NOT_INVERTED as error:
            for names in self.weight_names.values():
                usual, _ = Counter(self.shapes[name] for name in names.values()).most_common(1)[0]
                for name in names.values():
                    if self.shapes[name] != usual:
                        return name, f"others beside it have {usual}"
            return first, f"it becomes a part of {self.parameter_names[0]}, by config.json {wanted}: {error}"
        return None

    def reads_of(self, expert: int | None) -> dict[str, int | None]:
        """Map the weights of an expert, or of all, to the expert to read of each; None: the whole weight."""
        return {
            name: expert if owner is None else None
            for name, owner in self.owners.items()
            if expert is None or owner in (None, expert)
        }

    def parameter_shape(self, name: str, expert: int | None) -> tuple[int, ...]:
        """Compute the shape of one of the parameters, or of one expert's [1, ...] of it."""
        return _of_one(self._parameter_shapes, self.parameter_names, expert)[name]

    def parameters(self, weights: Tensors, expert: int | None) -> Tensors:
        """Make the parameters, or one expert's [1, ...] of them, of all weights, or of those of the expert.

        Raises:
            ValueError: one has another shape than the model's; and whatever the operations raise.
        """
        if self._converter is None:
            return {self.parameter_names[0]: next(iter(weights.values()))}
        tensors = {pattern: [weights[name] for name in names] for pattern, names in self._names(expert).items()}
        shapes = _of_one(self._parameter_shapes, self.parameter_names, expert)
        made = self._convert(self._converter, tensors, self.parameter_names[0], shapes)
        parameters = dict(zip(self.parameter_names, (made[pattern] for pattern in self._converter.target_patterns)))
        for name, parameter in parameters.items():
            if tuple(parameter.shape) != shapes.get(name, tuple(parameter.shape)):
                raise ValueError(f"it has shape {tuple(parameter.shape)}, the model's {shapes[name]}")
        return parameters

    def weights(self, parameters: Tensors, expert: int | None, remedy: str = "") -> Tensors:
        """Make the weights of the parameters, or those of one expert, [1, ...] of one that holds all. The first that are
        made must become the same parameters again, bit by bit; on the meta device, those of the same shapes.

        Raises:
            CheckpointError: there is no way, or none back; with `remedy` at its end.
        """
        if self._is_inverted:
            return self._invert(parameters, expert)
        try:
            weights = self._invert(parameters, expert)
            back = self.parameters(weights, expert)
            has_values = not any(parameter.is_meta for parameter in parameters.values())
            if has_values and not all(same_bytes(back[name], own) for name, own in parameters.items()):
                raise ValueError("it comes back with other values")
        except NOT_INVERTED as error:
            raise CheckpointError(
                f"{self.parameter_names[0]} cannot be written back as {next(iter(self.shapes))}, since Transformers' "
                f"conversion of this family has no inverse for these weights alone ({type(error).__name__}: "
                f"{' '.join(str(error).split())}){remedy}"
            ) from error
        self._is_inverted = has_values
        return weights

    def _invert(self, parameters: Tensors, expert: int | None) -> Tensors:
        """Make the checkpoint's weights of parameters, of one expert or of all."""
        names = self._names(expert)
        first = next(name for own in names.values() for name in own)
        if self._converter is None:
            return {first: parameters[self.parameter_names[0]]}
        inverse = self._converter.reverse_transform()
        held = [name for pattern in names if "*" not in pattern for name in names[pattern]]
        tensors = {pattern: [parameters[name]] for pattern, name in zip(inverse.source_patterns, self.parameter_names)}
        made = self._convert(inverse, tensors, first, _of_one(self.shapes, held, expert))
        pairs = zip(self._converter.source_patterns, inverse.target_patterns)
        return {
            name: made[ours.replace("*", str(number))]
            for theirs, ours in pairs
            for number, name in enumerate(names.get(theirs, ()))
        }

    def _names(self, expert: int | None) -> dict[str, list[str]]:
        return {
            pattern: [names[expert]] if expert is not None and "*" in pattern else [names[n] for n in sorted(names)]
            for pattern, names in self.weight_names.items()
        }

    def _convert(self, converter: Any, tensors, name: str, shapes: WeightShapes) -> Tensors:
        for operation in converter.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=name,
                model=_ModelOfShapes(shapes),
                config=self._config,
                missing_keys=None,
            )
        return {key: made[0] if isinstance(made, list) else made for key, made in tensors.items()}


def _of_one(shapes: WeightShapes, names: list[str], expert: int | None) -> dict[str, tuple[int, ...]]:
    """Copy `shapes` with those of one expert alone, where `names` hold all experts."""
    if expert is None:
        return dict(shapes)
    return {name: (1, *shape[1:]) if name in names else shape for name, shape in shapes.items()}


def _takes_each_expert_alone(operations: list[ConversionOps]) -> bool:
    """Say whether [E, ...] comes of experts' own weights, and nothing crosses from one to another."""
    first, *rest = operations
    if not (isinstance(first, MergeModulelist) and first.dim == 0):
        rest = operations
    return all(
        (isinstance(operation, (Chunk, Concatenate, Interleave)) and operation.dim > 0)
        or (isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0)
        for operation in rest
    )


def weight_groups(model: PreTrainedModel, weights: WeightShapes) -> dict[str, WeightGroup]:
    """Group `weights`, the names in a checkpoint's files with their shapes, as Transformers does when it loads them into
    `model`, which may be on the meta device. Returns each group by the names of its parameters. Names that the model does
    not know, as those of multi-token prediction, are in no group."""
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, WeightGroup] = {}
    for name in sorted(weights, key=dot_natural_key):
        parameter, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if parameter not in state and name in state:  # as save_pretrained of early versions wrote it
            parameter, pattern = rename_source_key(name, [], [], prefix, state)
        if parameter in state:
            if parameter not in groups:
                converter = None if pattern is None else deepcopy(by_pattern[pattern])
                groups[parameter] = WeightGroup(converter, parameter, state, model.config)
            groups[parameter].add(pattern or name, name, weights[name], _number(name, pattern, renamings))
    return {name: group for group in groups.values() for name in group.parameter_names}


def _number(name: str, pattern: str | None, renamings: list[WeightRenaming]) -> int:
    """Read the number in a weight's name that stands for the "*" of a converter's pattern; 0 where it has none."""
    if pattern is None or "*" not in pattern:
        return 0
    renamed, _ = rename_source_key(name, renamings, [])
    match = re.search(r"(\d+)" + pattern.rpartition("*")[2], renamed)
    return int(match[1]) if match else 0
