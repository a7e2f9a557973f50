"""Weights of a checkpoint in another layout, or with their experts packed, expert by expert.

Blocks that are packed in the wanted format already are moved bit by bit, since none crosses from gate to up, or between
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from ...errors import CheckpointError
from ...kernels.packed import Format, Quantized
from ...kernels.packed.format import Stored
from ..layouts import experts_parameters
from ..reading.files import Header
from ..reading.source import Source
from ..reading.weight import Weight
from .output import Output, OutputTensors, in_range, shell
from .packed_config import hub_format
from .rounding_effects import Roundings

Experts = Sequence[int]


class Relayout(Output):
    """The weights of a checkpoint under the names of a layout.

    Args:
        source: the checkpoint. layout: as `detect_layout` names it. dtype: to cast dense weights to; None keeps what is
            stored. format: what experts are packed in, None if in none.
    """

    def __init__(self, source: Source, layout: str, dtype: torch.dtype | None = None, format: Format | None = None):
        super().__init__(source, dtype)
        self._source, self._format = source, format
        self._hub = None if format is None or layout == "native" else hub_format(source, format.name)
        self._experts = experts_parameters(source.family, layout, source.blocks)
        self._first = {source.targets[name]: name for name in reversed(source.weights) if name in source.targets}
        self.roundings = Roundings(str(source.quantization) if format is None else format.name)

    def written_name(self, weight: Weight) -> str:
        """See Output."""
        return self._source.own_names.get(weight.name, weight.name)

    def tensors_of(self, weight: Weight) -> list[OutputTensors]:
        """See Output: what a parameter of experts becomes stands at the place of the first of its weights."""
        target = self._source.targets.get(weight.name)
        if target is None:
            return super().tensors_of(weight)
        if self._first[target] != weight.name:
            return []
        parameter = self._experts[target]
        if not parameter.is_per_expert:
            return [self._of_experts(target, range(parameter.num_experts))]
        return [self._of_experts(target, [expert]) for expert in range(parameter.num_experts)]

    def _of_experts(self, target: str, experts: Experts) -> OutputTensors:
        """Describe the weights that hold these experts, all of them or one, which are made together."""
        there = self._experts[target]
        format = self._format if self._source.is_experts(target) else None
        weights = list({weight.name: weight for e in experts for weight in self._weights_of(target, e)}.values())
        names = there.names_of(experts[0])
        make: Callable[[Experts], Iterable[torch.Tensor]]
        if format is None:
            dtype = self._dtype_of(names[0], weights)
            shells = {name: shell(there.stored_shape, dtype) for name in names}
            make = partial(self._make_dense, target, dtype)
        elif all(format.has_blocks_of(weight.format) for weight in weights):
            shells = self._make_shells(target, names, format, weights[0].scales_header)
            make = partial(self._make_moved, target, list(shells.values()))
        else:
            dtype = torch.float32 if there.is_per_expert else self._dtype_of(names[0], weights)
            shells = self._make_shells(target, names, format)
            make = partial(self._make_packed, target, dtype, format, list(shells.values()))
        at_once = there.is_per_expert or (format is not None and format.is_whole)

        def fill(outs: list[torch.Tensor]) -> None:
            for each in [experts] if at_once else [[expert] for expert in experts]:
                for out, made in zip(outs, make(each)):
                    out = out if at_once else out[each[0]]
                    out.copy_(made.view(out.shape))

        return OutputTensors(shells, fill)

    def _dtype_of(self, name: str, weights: list[Weight]) -> torch.dtype:
        """Choose the dtype that a weight which comes of `weights` is written in, or rounded to a format from."""
        first, *others = weights
        other = next((weight for weight in others if weight.dtype != first.dtype), None)
        if self.dtype is None and other is not None:
            raise CheckpointError(
                f"{first.name} is {first.dtype}, {other.name} is {other.dtype}: {name} needs one dtype; give dtype="
            )
        return self.wanted_dtype(name, first.dtype if other is None else torch.float32)

    def _weights_of(self, target: str, expert: int) -> list[Weight]:
        return [self._source.weights[name] for name in self._source.experts[target].names_of(expert)]

    def _read_rows(self, target: str, dtype: torch.dtype, expert: int, adapter: bool = True) -> list[torch.Tensor]:
        """Read what the layout's weights hold of an expert, [out, in] each or [out], in `dtype`; in fp32 where an adapter
        changes it. adapter: whether to add it."""
        here, matrices = self._source.experts[target], []
        for weight in self._weights_of(target, expert):
            own = None if here.is_per_expert else expert
            values = weight.changed(own) if adapter else weight.read(own)
            values = values if weight.change else in_range(values, dtype, weight.name)
            values = values if here.is_per_expert else values[0]
            matrices.append(values.T if here.is_transposed else values)
        return self._experts[target].join(here.split(matrices))

    def _make_dense(self, target: str, dtype: torch.dtype, experts: Experts) -> list[torch.Tensor]:
        """Make an expert's weights."""
        rows = self._read_rows(target, dtype, experts[0])
        return [matrix.T.contiguous() if self._experts[target].is_transposed else matrix for matrix in rows]

    def _make_moved(self, target: str, shells: list[torch.Tensor], experts: Experts) -> list[torch.Tensor]:
        """Make the tensors that store an expert's weights, whose blocks are as they were but for what an adapter
        changes."""
        here, moved = self._source.experts[target], []
        own = None if here.is_per_expert else experts[0]
        stored = [self._rows(weight, own) for weight in self._weights_of(target, experts[0])]
        for tensors in zip(*stored):
            rows = here.split([tensor if here.is_per_expert else tensor[0] for tensor in tensors])
            moved.append(self._experts[target].join(rows))
        return self._stored([Quantized(*own) for own in zip(*moved)], target, shells)

    def _rows(self, weight: Weight, expert: int | None) -> list[torch.Tensor]:
        if not weight.change:
            return weight.rows(expert)
        before, exact, rounded = weight.rounded(expert)
        self.roundings.add(weight.name, before, exact, rounded.values, expert, weight.is_dithered)
        return weight.rows(expert, rounded)

    def _make_packed(
        self, target: str, dtype: torch.dtype, format: Format, shells: list[torch.Tensor], experts: Experts
    ) -> list[torch.Tensor]:
        """Make the tensors that store the weights of experts, rounded."""
        there, made = self._experts[target], []
        for number, name in enumerate(there.names_of(experts[0])):
            matrices = (self._read_rows(target, dtype, expert)[number] for expert in experts)
            try:
                packed = format.pack(matrices, (len(experts), *there.shape), there.order)
            except ValueError as error:
                raise CheckpointError(f"{name}: {error}; nothing is written") from error
            made.append(packed)
            is_changed = any(
                self._source.weights[each].change for each in self._source.experts[target].names_of(experts[0])
            )
            if is_changed or there.is_per_expert or experts[0] == 0:
                exact = self._read_rows(target, dtype, experts[0])[number]
                before = self._read_rows(target, dtype, experts[0], adapter=False)[number] if is_changed else exact
                rounded = format.dequantize_expert(packed, torch.float32, 0)
                self.roundings.add(name, before, exact, rounded, experts[0])
        return self._stored(made, target, shells)

    def _stored(self, packed: list[Quantized], target: str, shells: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that store weights, like `shells`."""
        stored: Iterable[Iterable[torch.Tensor | None]] = packed
        if self._experts[target].is_per_expert:
            assert self._hub is not None
            stored = [self._hub.unpack_new(_as_matrix(each)) for each in packed]
        tensors = (tensor for own in stored for tensor in own if tensor is not None)
        return [tensor.view(like.dtype) for tensor, like in zip(tensors, shells, strict=True)]

    def _make_shells(
        self, target: str, names: list[str], format: Format, scales: Header | None = None
    ) -> dict[str, torch.Tensor]:
        """Make tensors on the meta device like those that will store weights, by name. scales: the header of those whose
        blocks move, for formats with several dtypes or sizes of groups."""
        there = self._experts[target]
        expected: Stored = {}
        for name in names:
            if there.is_per_expert:
                assert self._hub is not None
                expected |= self._hub.stored(name, there.shape)
            else:
                group = None if scales is None else there.shape[-1] // max(1, *scales.shape[-1:])
                expected |= format.stored(name, (there.num_experts, *there.shape), there.order, group)
        return {stored: shell(shape, _dtype_like(scales, dtypes)) for stored, (shape, dtypes) in expected.items()}


def _as_matrix(packed: Quantized) -> Quantized:
    """View the tensors of one expert's weight as those of a matrix."""
    codes, scales, state = packed
    return Quantized(codes.flatten(0, -2), scales.flatten(0, -2), None if state is None else state.flatten(0, -2))


def _dtype_like(scales: Header | None, dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """Choose the dtype of tensors whose bits come from `scales`, or else the one that is made here."""
    if scales is None or scales.dtype in dtypes:
        return dtypes[0] if scales is None else scales.dtype
    return next((dtype for dtype in dtypes if dtype.itemsize == scales.dtype.itemsize), dtypes[0])
