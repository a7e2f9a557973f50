"""What a checkpoint will hold that is made of another: under the same names or those of another layout, with other values
of its model's parameters, with experts packed or dense.

Weights become the model's parameters and are made of them again, expert by expert: see WeightGroup. What nothing changes
keeps its values; a weight that changed is rounded once. Experts are packed in the native layout, to train adapters on
them, or in the hub's, as engines and Transformers read them. Blocks that are packed in the format already are moved, bit
by bit: none crosses from gate to up, or between rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Protocol

import torch

from ..errors import CheckpointError
from ..formats import HUB, Format
from ..kernels.quantized import dequantize_expert, pack_experts
from .converters import NOT_INVERTED, WITH_PEFT, Tensors, WeightGroup
from .plan import Planned, in_range, made_together, shell
from .roundings import Roundings
from .stored import StoredWeights, Weight

ALTERNATING = 2  # pieces of weights that a file may have in turn: gate and up of an expert, and its down
Experts = Sequence[int | None]  # None: of a weight that is no expert's


class ChangedParameters(Protocol):
    """Other values of a model's parameters than a checkpoint has."""

    def changes(self, parameter: str) -> bool:
        """Whether the parameter has other values."""

    def change(self, parameter: str, values: torch.Tensor, expert: int | None) -> torch.Tensor:
        """The parameter, or one expert's [1, ...] of it, in fp32, from the checkpoint's."""


class Rewriting:
    """A checkpoint's weights under their own names, or those of a layout.

    Args:
        stored: the checkpoint. inner: by name of a parameter of its model, the weights that become it. outer: those that
            it becomes; `inner` itself where they keep their names. changed: what has other values.
        dtype: to cast dense weights to; None keeps what is stored. keeps_format: whether quantized weights stay quantized
            under their own names, or become dense. format: what the weights of the parameters `experts` are packed in.
    Attributes:
        roundings: what rounding to a format does, once tensors are made.
    """

    def __init__(
        self,
        stored: StoredWeights,
        inner: Mapping[str, WeightGroup],
        outer: Mapping[str, WeightGroup],
        changed: ChangedParameters | None = None,
        dtype: torch.dtype | None = None,
        keeps_format: bool = False,
        format: Format | None = None,
        experts: Collection[str] = (),
    ):
        self._stored, self._inner, self._outer, self._changed = stored, inner, outer, changed
        self._dtype, self.keeps_format, self._format, self._experts = dtype, keeps_format, format, experts
        self._target_of = {name: group.targets[0] for group in inner.values() for name in group.shapes}
        self._first = {self._target_of[name]: name for name in reversed(stored.weights) if name in self._target_of}
        self._piece = lru_cache(ALTERNATING)(self._make_piece)
        self.roundings = Roundings(str(stored.quantization) if format is None else format.name)

    def plan(self) -> list[Planned]:
        """The tensors, in the order of the checkpoint's files; where names change, those that a parameter becomes at the
        place of the first of its weights.

        Raises:
            CheckpointError: weights that become one differ in dtype, or have rows that the format does not take; in
                making them: the weights do not become the model's parameters, or those have no inverse.
        """
        return [planned for name in self._stored.weights for planned in self._of_weight(name)]

    def _of_weight(self, name: str) -> Iterator[Planned]:
        target, keeps_name = self._target_of.get(name), self._inner is self._outer
        if target is None or (keeps_name and not self._changes(target)):
            yield from self._as_it_is(name)
        elif keeps_name:
            yield from self._written(target, name, [name])
        elif self._first[target] == name:
            for each in self._outer[target].shapes:
                yield from self._written(target, each, self._inner[target].shapes)

    def _changes(self, target: str) -> bool:
        return self._changed is not None and any(map(self._changed.changes, self._inner[target].targets))

    def _as_it_is(self, name: str) -> Iterator[Planned]:
        """A weight under its own name, as it is stored or dense; none of what is for inference in its format."""
        stored, weight = self._stored, self._stored.weights[name]
        if self.keeps_format:
            yield from map(self._copied, weight.parts)
        elif not stored.is_unused(name):
            dtype = self._wanted(name, weight.dtype)
            like = shell(weight.shape, dtype)
            yield Planned(name, like, lambda out: out.copy_(in_range(weight.read(), dtype, name)))

    def _copied(self, part: str) -> Planned:
        header = self._stored.tensors[part]
        return Planned(part, shell(header.shape, header.dtype), lambda out: out.copy_(self._stored.raw(part)))

    def _wanted(self, name: str, stored: torch.dtype) -> torch.dtype:
        """What a weight of the dtype `stored` is written in."""
        keeps_fp32 = self._stored.keep_fp32.intersection(name.split("."))
        return self._dtype if self._dtype is not None and stored.is_floating_point and not keeps_fp32 else stored

    def _written(self, target: str, name: str, sources: Iterable[str]) -> Iterator[Planned]:
        """What stands for a weight of a parameter, which comes of the weights `sources`."""
        weights = [self._stored.weights[each] for each in sources if each in self._stored.weights]
        format, first = self._format if target in self._experts else None, weights[0]
        make: Callable[[Experts], list[torch.Tensor]]
        if self.keeps_format and first.format is not None:
            shells = {part: self._copied(part).like for part in first.parts}
            make = partial(self._rounded, target, first)
        elif format and not self._changes(target) and all(format.is_that_of(weight.format) for weight in weights):
            scales = self._stored.tensors[first.parts[1]]
            shells = self._shells(target, name, format, scales.dtype.itemsize)
            make = partial(self._moved, target, name)
        else:
            dtype = self._dtype_of(target, name, weights, format)
            if format is None:
                yield self._dense(target, name, dtype)
                return
            shells, make = self._shells(target, name, format), partial(self._packed, target, name, dtype, format)

        def fill(tensors: list[torch.Tensor]) -> None:
            for experts, own in self._places(target, name, tensors, together=format is not None and format.is_whole):
                for tensor, made in zip(own, make(experts)):
                    tensor.copy_(made.view(tensor.dtype).view(tensor.shape))

        yield from made_together(shells, fill)

    def _dtype_of(self, target: str, name: str, weights: list[Weight], format: Format | None) -> torch.dtype:
        """What a weight that comes of `weights` is written in, or rounded to a format from."""
        first, *others = weights
        other = next((weight for weight in others if weight.dtype != first.dtype), None)
        if self._dtype is None and other is not None and (format is None or len(self._outer[target].shapes) == 1):
            raise CheckpointError(
                f"{first.name} is {first.dtype}, {other.name} is {other.dtype}: {name} needs one dtype; give dtype="
            )
        return self._wanted(name, first.dtype if other is None else torch.float32)

    def _places(
        self, target: str, name: str, tensors: list[torch.Tensor], together: bool = False
    ) -> Iterator[tuple[Experts, list[torch.Tensor]]]:
        """Experts whose weight this is, and their parts of the tensors that stand for it: one by one, or all together."""
        group, place = self._outer[target], self._outer[target].places[name]
        experts: Experts = range(group.num_experts) if place is None and group.num_experts else [place]
        if together or len(experts) == 1:
            yield experts, tensors
        else:
            yield from (([expert], [tensor[expert] for tensor in tensors]) for expert in range(len(experts)))

    def _dense(self, target: str, name: str, dtype: torch.dtype) -> Planned:
        """A weight in `dtype`, rounded once; of one that holds all experts, one after the other."""
        group = self._outer[target]
        make = self._piece if group.num_experts or len(group.shapes) > 1 else self._make_piece  # which keeps nothing

        def fill(out: torch.Tensor) -> None:
            for (expert,), (own,) in self._places(target, name, [out]):
                own.copy_(make(target, expert, dtype)[name].view(own.shape))

        return Planned(name, shell(group.shapes[name], dtype), fill)

    def _make_piece(self, target: str, expert: int | None, dtype: torch.dtype, is_changed: bool = True) -> Tensors:
        """The weights that a parameter becomes, or those of one expert, in `dtype`; what is changed in fp32."""
        inner, outer = self._inner[target], self._outer[target]
        exact, weights = torch.float32 if self.keeps_format else None, {}
        for name, own in inner.needed(expert).items():
            values = self._stored.weights[name].read(own, exact)
            weights[name] = values.float() if self._changes(target) else in_range(values, dtype, name)
        try:
            parameters = inner.parameters(weights, expert)
            if inner is outer:
                inner.check_inverse(weights, parameters, expert)
        except NOT_INVERTED as error:
            raise CheckpointError(
                f"{target} cannot be written back as {next(iter(weights))}, since Transformers' conversion of this "
                f"family has no inverse ({type(error).__name__}: {' '.join(str(error).split())}); {WITH_PEFT}"
            ) from error
        if self._changed is not None and is_changed and self._changes(target):
            parameters = {name: self._changed.change(name, values, expert) for name, values in parameters.items()}
        return outer.weights(parameters, expert)

    def _matrix(
        self, target: str, name: str, expert: int | None, dtype: torch.dtype, is_changed: bool = True
    ) -> torch.Tensor:
        """[out, in] of a weight that is no expert's, or of one expert's, as it is packed."""
        matrix = self._piece(target, expert, dtype, is_changed)[name]
        matrix = matrix[0] if matrix.dim() == 3 else matrix
        return matrix.T if self._outer[target].is_transposed else matrix

    # What stores a weight in a format, each tensor of the experts that are given.

    def _rounded(self, target: str, weight: Weight, experts: Experts) -> list[torch.Tensor]:
        """A changed weight in the format that it has."""
        (expert,) = experts
        own = self._inner[target].needed(expert)[weight.name]
        codes, scales, *others = weight.raw() if own is None else (part[0] for part in weight.raw(own))
        exact, grid = self._matrix(target, weight.name, expert, torch.float32), weight.format.grid(scales, *others)
        rounded = grid.round(exact, scales)
        self.roundings.add(weight.name, grid.dense(codes, scales), exact, rounded.values)
        return [rounded.codes, rounded.scales, *others]

    def _moved(self, target: str, name: str, experts: Experts) -> list[torch.Tensor]:
        """A weight whose blocks are as they were."""
        (expert,) = experts
        inner, moved = self._inner[target], []
        stored = {each: self._stored.weights[each].rows(own) for each, own in inner.needed(expert).items()}
        for rows in zip(*stored.values()):
            parameters = inner.parameters(dict(zip(stored, rows)), expert, is_packed=True)
            moved.append(self._outer[target].weights(parameters, expert, is_packed=True)[name])
        return moved

    def _packed(
        self, target: str, name: str, dtype: torch.dtype, format: Format, experts: Experts
    ) -> list[torch.Tensor]:
        """[E, out, in] in the layout's order, or an expert's own."""
        group = self._outer[target]
        matrices = (self._matrix(target, name, expert, dtype) for expert in experts)
        try:
            packed = pack_experts(matrices, (len(experts), *self._size(target, name)), format.name, group.order)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}; nothing is written") from error
        first, is_changed = experts[0], self._changes(target)
        if is_changed or first in (0, group.places[name]):
            exact = self._matrix(target, name, first, dtype)
            before = self._matrix(target, name, first, dtype, is_changed=False) if is_changed else exact
            self.roundings.add(name, before, exact, dequantize_expert(packed, format.name, torch.float32, 0))
        return [part for part in packed if part is not None]

    def _shells(
        self, target: str, name: str, format: Format, scale_size: int | None = None
    ) -> dict[str, torch.Tensor]:
        """By name, tensors on the meta device like those that will stand for the weight. scale_size: bytes of a scale,
        where the format has several dtypes for them."""
        group, size = self._outer[target], self._size(target, name)
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
        group = self._outer[target]
        rows, columns = group.shapes[name][-2:]
        return (columns, rows) if group.is_transposed else (rows, columns)
