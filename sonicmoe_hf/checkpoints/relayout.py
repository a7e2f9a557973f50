"""What a checkpoint will hold in another layout or with experts packed.

Experts are packed in the native layout, to train adapters on them, or in the hub's, as engines and Transformers read
them. Blocks that are packed in the format already are moved, bit by bit: none crosses from gate to up, or between rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from ..errors import CheckpointError
from ..formats import HUB, PACKED, Format
from ..kernels.quantized import dequantize_expert, pack_experts
from .converters import WeightGroup
from .plan import Planned, made_together, shell
from .rewriting import ChangedParameters, Rewriting
from .source import Source


class Relayout(Rewriting):
    """A checkpoint's weights under the names of a layout.

    Args:
        source: the checkpoint. groups: by name of a parameter, the weights that it becomes. dtype: to cast to; None keeps
            what is stored. quantize: the format of the experts' weights; None makes packed ones dense. changed: what has
            other values.
    """

    def __init__(
        self,
        source: Source,
        groups: Mapping[str, WeightGroup],
        dtype: torch.dtype | None = None,
        quantize: str | None = None,
        changed: ChangedParameters | None = None,
    ):
        super().__init__(source, source.groups, changed, dtype=dtype)
        self._source, self._outer = source, groups
        self._format = None if quantize is None else PACKED[quantize]
        self._first = {self._target_of[name]: name for name in reversed(source.weights) if name in self._target_of}

    def notices(self) -> list[str]:
        """See Rewriting."""
        return [] if self._format is None else self.roundings.notices(self._format.name)

    def _of_weight(self, name: str) -> Iterator[Planned]:
        """The tensors that stand for the parameter of a weight, once; or a weight that stays where it is.

        Raises:
            CheckpointError: weights that become one differ in dtype, or have rows that the format does not take.
        """
        target = self._target_of.get(name)
        if target is None:
            yield from self._alone(name)
        elif self._first[target] == name:
            yield from self._of_parameter(target)

    def _of_parameter(self, target: str) -> Iterator[Planned]:
        source, names = self._source, self._outer[target].shapes
        dtypes = {name: source.dtype_of(name) for name in self._inner[target].shapes if name in source.weights}
        format = self._format if source.is_experts(target) else None
        if format is not None and not self._changes(target) and all(source.has_blocks_of(n, format) for n in dtypes):
            scales = source.tensors[source.weights[next(iter(dtypes))][1]]
            for name in names:
                shells = self._shells(target, name, format, scales.dtype.itemsize)
                yield from made_together(shells, partial(self._moved, target, name, shells))
            return
        first, *others = dtypes
        other = next((name for name in others if dtypes[name] != dtypes[first]), None)
        if self._dtype is None and other is not None and (format is None or len(names) == 1):
            raise CheckpointError(
                f"{first} is {dtypes[first]}, {other} is {dtypes[other]}: {next(iter(names))} needs one dtype; give "
                "dtype="
            )
        for name in names:
            dtype = self._wanted(name, dtypes[first] if other is None else torch.float32)
            if format is None:
                yield self._dense(target, name, dtype)
            else:
                shells = self._shells(target, name, format)
                yield from made_together(shells, partial(self._packed, target, name, dtype, format, shells))

    def _shells(
        self, target: str, name: str, format: Format, scale_size: int | None = None
    ) -> dict[str, torch.Tensor]:
        """By name, tensors on the meta device like those that will stand for the weight. scale_size: bytes of a scale,
        where the format has several dtypes for them."""
        group, shape = self._outer[target], self._shape(target, name)
        is_whole = group.places[name] is None
        parts = format.stored(name, shape, group.order) if is_whole else HUB[format.name].stored(name, shape[1:])
        return {
            stored: shell(part, next((dtype for dtype in dtypes if dtype.itemsize == scale_size), dtypes[0]))
            for stored, (part, dtypes) in parts.items()
        }

    def _shape(self, target: str, name: str) -> tuple[int, ...]:
        """(experts, out, in) of a weight as it is packed."""
        group, shape = self._outer[target], self._outer[target].shapes[name]
        if group.places[name] is not None:
            return (1, *shape)
        return (shape[0], *shape[:0:-1]) if group.is_transposed else shape

    def _experts(self, target: str, name: str) -> Sequence[int]:
        """Those whose weight this is."""
        place = self._outer[target].places[name]
        return range(self._shape(target, name)[0]) if place is None else [place]

    def _moved(self, target: str, name: str, shells: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What stores a packed weight, its blocks as they are."""
        inner, outer = self._inner[target], self._outer[target]
        made = [torch.empty(shell.shape, dtype=shell.dtype) for shell in shells.values()]
        for number, expert in enumerate(self._experts(target, name)):
            stored = {each: self._source.packed_rows(each, expert) for each in inner.needed(expert)}
            for tensor, rows in zip(made, zip(*stored.values())):
                parameters = inner.parameters(dict(zip(stored, rows)), expert, is_packed=True)
                moved = outer.weights(parameters, expert, is_packed=True)[name]
                own = tensor if outer.places[name] is not None else tensor[number]
                own.copy_(moved.view(own.dtype).view(own.shape))
        return made

    def _packed(
        self, target: str, name: str, dtype: torch.dtype, format: Format, shells: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """What stores a weight in the format: [E, out, in] in the layout's order, or an expert's own."""
        experts, matrix = self._experts(target, name), partial(self._matrix, target, name, dtype)
        try:
            packed = pack_experts(
                map(matrix, experts), self._shape(target, name), format.name, self._outer[target].order
            )
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}; nothing is written") from error
        is_changed = self._changes(target)
        for number, expert in enumerate(experts if is_changed else experts[:1]):
            exact, rounded = matrix(expert), dequantize_expert(packed, format.name, torch.float32, number)
            self.roundings.add(name, matrix(expert, is_changed=False) if is_changed else exact, exact, rounded)
        parts = (part for part in packed if part is not None)
        return [part.view(shell.dtype).view(shell.shape) for part, shell in zip(parts, shells.values())]

    def _matrix(
        self, target: str, name: str, dtype: torch.dtype, expert: int, is_changed: bool = True
    ) -> torch.Tensor:
        """[out, in] of one expert, as it is packed."""
        group, matrix = self._outer[target], self._piece(target, expert, dtype, is_changed)[name]
        matrix = matrix if group.places[name] is not None else matrix[0]
        return matrix.T if group.is_transposed else matrix
