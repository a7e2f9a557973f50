"""Weights of a checkpoint in another layout, or with their experts packed.

Weights become the model's parameters, and are made of them again, expert by expert: see WeightGroup. Blocks that are
packed in the wanted format already are moved bit by bit, since none crosses from gate to up, or between rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ..errors import CheckpointError
from ..formats import HUB, Format
from ..kernels.quantized import dequantize_expert, pack_experts
from .converters import Tensors, WeightGroup
from .plan import Plan, Planned, in_range, shell
from .roundings import Roundings
from .source import Source
from .stored import Weight

Experts = Sequence[int | None]  # None: of a weight that is no expert's


class Relayout(Plan):
    """The weights of a checkpoint under the names of a layout.

    Args:
        source: the checkpoint. groups: by name of a parameter of its model, the weights that stand for it in the layout.
        dtype: to cast dense weights to; None keeps what is stored. format: what experts are packed in, None if in none.
    """

    def __init__(
        self,
        source: Source,
        groups: Mapping[str, WeightGroup],
        dtype: torch.dtype | None = None,
        format: Format | None = None,
    ):
        super().__init__(source, dtype)
        self._source, self._groups, self._format = source, groups, format
        self._first = {source.targets[name]: name for name in reversed(source.weights) if name in source.targets}
        self.roundings = Roundings(str(source.quantization) if format is None else format.name)

    def of_weight(self, weight: Weight) -> list[Planned]:
        """See Plan: what a parameter becomes stands at the place of the first of its weights."""
        target = self._source.targets.get(weight.name)
        if target is None:
            return super().of_weight(weight)
        if self._first[target] != weight.name:
            return []
        places: dict[int | None, list[str]] = {}
        for name, place in self._groups[target].places.items():
            places.setdefault(place, []).append(name)
        return [self._of_place(target, names, place) for place, names in places.items()]

    def _of_place(self, target: str, names: list[str], place: int | None) -> Planned:
        """Plan the weights that a parameter becomes, or those of one expert, which are made together."""
        group, format = self._groups[target], self._format if self._source.is_experts(target) else None
        needed = self._source.groups[target].needed(place)
        weights = [self._source.weights[name] for name in needed if name in self._source.weights]  # of two tied, one
        experts: Experts = range(group.num_experts) if place is None and group.num_experts else [place]
        make: Callable[[Experts], Tensors]
        if format is None:
            dtype = self._dtype_of(names[0], weights)
            stored = {name: {name: shell(group.shapes[name], dtype)} for name in names}
            make = partial(self._piece, target, dtype)
        elif all(format.is_that_of(weight.format) and not weight.added for weight in weights):
            scales = self._source.tensors[weights[0].parts[1]]
            stored = {name: self._shells(target, name, format, scales.dtype.itemsize) for name in names}
            make = partial(self._moved, target, stored)
        else:
            dtype = torch.float32 if place is not None else self._dtype_of(names[0], weights)
            stored = {name: self._shells(target, name, format) for name in names}
            make = partial(self._packed, target, stored, dtype, format)
        pieces: list[Experts] = [experts] if format is not None and format.is_whole else [[each] for each in experts]

        def fill(outs: list[torch.Tensor]) -> None:
            out = dict(zip(shells, outs))
            for piece in pieces:
                for name, made in make(piece).items():
                    part = out[name] if len(pieces) == 1 else out[name][piece[0]]
                    part.copy_(made.view(part.shape))

        shells = {name: part for own in stored.values() for name, part in own.items()}
        return Planned(shells, fill)

    def _dtype_of(self, name: str, weights: list[Weight]) -> torch.dtype:
        """The dtype that a weight which comes of `weights` is written in, or rounded to a format from."""
        first, *others = weights
        other = next((weight for weight in others if weight.dtype != first.dtype), None)
        if self.dtype is None and other is not None:
            raise CheckpointError(
                f"{first.name} is {first.dtype}, {other.name} is {other.dtype}: {name} needs one dtype; give dtype="
            )
        return self.wanted_dtype(name, first.dtype if other is None else torch.float32)

    def _piece(self, target: str, dtype: torch.dtype, experts: Experts, adapter: bool = True) -> Tensors:
        """Make the weights that a parameter becomes, or those of one expert, in `dtype`; what an adapter changes in fp32,
        or without it."""
        (expert,), inner, weights = experts, self._source.groups[target], {}
        for name, own in inner.needed(expert).items():
            weight = self._source.weights[name]
            values = weight.merged(own) if adapter else weight.read(own)
            weights[name] = values if weight.added else in_range(values, dtype, name)
        return self._groups[target].weights(inner.parameters(weights, expert), expert)

    def _matrix(
        self, target: str, name: str, dtype: torch.dtype, expert: int | None, adapter: bool = True
    ) -> torch.Tensor:
        """[out, in] of a weight of one expert, as it is packed."""
        matrix = self._piece(target, dtype, [expert], adapter)[name]
        matrix = matrix[0] if matrix.dim() == 3 else matrix
        return matrix.T if self._groups[target].is_transposed else matrix

    def _moved(self, target: str, stored: dict[str, Tensors], experts: Experts) -> Tensors:
        """Make the tensors that store weights whose blocks are as they were."""
        (expert,), inner, moved = experts, self._source.groups[target], {}
        rows = {name: self._source.weights[name].rows(own) for name, own in inner.needed(expert).items()}
        for number, parts in enumerate(zip(*rows.values())):
            parameters = inner.parameters(dict(zip(rows, parts)), expert, is_packed=True)
            for name, made in self._groups[target].weights(parameters, expert, is_packed=True).items():
                if name in stored:
                    part, like = list(stored[name].items())[number]
                    moved[part] = made.view(like.dtype)
        return moved

    def _packed(
        self, target: str, stored: dict[str, Tensors], dtype: torch.dtype, format: Format, experts: Experts
    ) -> Tensors:
        """Make the tensors that store weights, [E, out, in] in the layout's order, or an expert's own."""
        group = self._groups[target]
        made: Tensors = {}
        for name, shells in stored.items():
            matrices = (self._matrix(target, name, dtype, expert) for expert in experts)
            try:
                packed = pack_experts(matrices, (len(experts), *self._size(target, name)), format.name, group.order)
            except ValueError as error:
                raise CheckpointError(f"{name}: {error}; nothing is written") from error
            self._note_rounding(
                target, name, dtype, experts[0], dequantize_expert(packed, format.name, torch.float32, 0)
            )
            parts = (part for part in packed if part is not None)
            made |= {part: tensor.view(like.dtype) for (part, like), tensor in zip(shells.items(), parts)}
        return made

    def _note_rounding(
        self, target: str, name: str, dtype: torch.dtype, expert: int | None, rounded: torch.Tensor
    ) -> None:
        """Count what rounding did to one expert's weight; without an adapter, to the first's alone."""
        is_changed = any(self._source.weights[each].added for each in self._source.groups[target].needed(expert))
        if is_changed or expert in (0, self._groups[target].places[name]):
            exact = self._matrix(target, name, dtype, expert)
            before = self._matrix(target, name, dtype, expert, adapter=False) if is_changed else exact
            self.roundings.add(name, before, exact, rounded)

    def _shells(self, target: str, name: str, format: Format, scale_size: int | None = None) -> Tensors:
        """By name, tensors on the meta device like those that will store the weight. scale_size: bytes of a scale, where
        the format has several dtypes for them."""
        group, size = self._groups[target], self._size(target, name)
        if group.places[name] is None:
            parts = format.stored(name, (group.shapes[name][0], *size), group.order)
        else:
            parts = HUB[format.name].stored(name, size)
        return {
            stored: shell(part, next((dtype for dtype in dtypes if dtype.itemsize == scale_size), dtypes[0]))
            for stored, (part, dtypes) in parts.items()
        }

    def _size(self, target: str, name: str) -> tuple[int, int]:
        """(out, in) of a weight of experts."""
        group = self._groups[target]
        rows, columns = group.shapes[name][-2:]
        return (columns, rows) if group.is_transposed else (rows, columns)
