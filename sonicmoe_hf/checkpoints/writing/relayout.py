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
from ...kernels.packed.format import TensorSpecs
from ..layouts import ExpertsParameter, experts_parameters
from ..reading.files import Header
from ..reading.source import Source
from ..reading.weight import Weight
from .output import Output, OutputTensors, cast_in_range, shell
from .packed_config import matrix_format
from .rounding_effects import Roundings


class Relayout(Output):
    """The weights of a checkpoint under the names of a layout.

    Args:
        source: the checkpoint. layout: as `detect_layout` names it. dtype: to cast dense weights to; None keeps what is
            stored. format: what experts are packed in, None if in none.
    """

    def __init__(self, source: Source, layout: str, dtype: torch.dtype | None = None, format: Format | None = None):
        super().__init__(source, dtype)
        self._source, self.format = source, format
        self.matrix_format = None if format is None or layout == "native" else matrix_format(source, format.name)
        self._experts = experts_parameters(source.family, layout, source.blocks)
        self._first: dict[str, str] = {}
        for name in source.weights:
            if name in source.parameter_of:
                self._first.setdefault(source.parameter_of[name], name)
        self.roundings = Roundings(str(source.quantization) if format is None else format.name)

    def written_name(self, weight: Weight) -> str:
        """See Output."""
        return self._source.own_names.get(weight.name, weight.name)

    def tensors_of(self, weight: Weight) -> list[OutputTensors]:
        """See Output: what a parameter of experts becomes stands at the place of the first of its weights."""
        name = self._source.parameter_of.get(weight.name)
        if name is None:
            return super().tensors_of(weight)
        if self._first[name] != weight.name:
            return []
        format = self.format if self._source.is_experts(name) else None
        parameter = _Relaid(self, self._source.weights, self._source.experts[name], self._experts[name], format)
        experts = range(parameter.there.num_experts)
        together = [[expert] for expert in experts] if parameter.there.is_per_expert else [experts]
        return [parameter.tensors_of(each) for each in together]

    def dtype_of(self, name: str, weights: list[Weight]) -> torch.dtype:
        """Choose the dtype that a weight which comes of `weights` is written in, or rounded to a format from."""
        first, *others = weights
        other = next((weight for weight in others if weight.dtype != first.dtype), None)
        if self.dtype is None and other is not None:
            raise CheckpointError(
                f"{first.name} is {first.dtype}, {other.name} is {other.dtype}: {name} needs one dtype; give dtype="
            )
        return self.wanted_dtype(name, first.dtype if other is None else torch.float32)


class _Relaid:
    """A parameter of experts, of which one layout's weights become another's.

    Args:
        output: whose tensors they are. weights: the checkpoint's. here, there: how it stores the parameter, and how the
            output does. format: what it is packed in; None if in none.
    """

    def __init__(
        self,
        output: Relayout,
        weights: dict[str, Weight],
        here: ExpertsParameter,
        there: ExpertsParameter,
        format: Format | None,
    ):
        self._output, self._weights, self._here, self.there, self._format = output, weights, here, there, format

    def tensors_of(self, experts: Sequence[int]) -> OutputTensors:
        """Describe the weights that hold these experts, all of them or one, which are made together."""
        there, format = self.there, self._format
        weights = list({weight.name: weight for expert in experts for weight in self._weights_of(expert)}.values())
        names = there.names_of(experts[0])
        make: Callable[[Sequence[int]], Iterable[torch.Tensor]]
        if format is None:
            dtype = self._output.dtype_of(names[0], weights)
            shells = {name: shell(there.weight_shape, dtype) for name in names}
            make = partial(self._make_dense, dtype)
        elif all(format.has_blocks_of(weight.format) for weight in weights):
            shells = self._make_shells(names, format, weights[0].scales_header)
            make = partial(self._make_moved, list(shells.values()))
        else:
            dtype = torch.float32 if there.is_per_expert else self._output.dtype_of(names[0], weights)
            shells = self._make_shells(names, format)
            make = partial(self._make_packed, dtype, format, list(shells.values()))
        at_once = there.is_per_expert or (format is not None and format.is_whole)

        def fill(outs: list[torch.Tensor]) -> None:
            for each in [experts] if at_once else [[expert] for expert in experts]:
                for out, made in zip(outs, make(each)):
                    out = out if at_once else out[each[0]]
                    out.copy_(made.view(out.shape))

        return OutputTensors(shells, fill)

    def _weights_of(self, expert: int) -> list[Weight]:
        return [self._weights[name] for name in self._here.names_of(expert)]

    def _read_rows(self, dtype: torch.dtype, expert: int, adapter: bool = True) -> list[torch.Tensor]:
        """Read an expert's matrices from the layout's weights, [out, in] each or [out], in `dtype`; in fp32 where an
        adapter changes it. adapter: whether to add it."""
        here, matrices = self._here, []
        for weight in self._weights_of(expert):
            own = None if here.is_per_expert else expert
            values = weight.read_changed(own) if adapter else weight.read(own)
            values = values if weight.change else cast_in_range(values, dtype, weight.name)
            values = values if here.is_per_expert else values[0]
            matrices.append(values.T if here.is_transposed else values)
        return self.there.join(here.split(matrices))

    def _make_dense(self, dtype: torch.dtype, experts: Sequence[int]) -> list[torch.Tensor]:
        """Make an expert's weights."""
        rows = self._read_rows(dtype, experts[0])
        return [matrix.T.contiguous() if self.there.is_transposed else matrix for matrix in rows]

    def _make_moved(self, shells: list[torch.Tensor], experts: Sequence[int]) -> list[torch.Tensor]:
        """Make the tensors that store an expert's weights, whose blocks are as they were but for what an adapter
        changes."""
        here, moved = self._here, []
        own = None if here.is_per_expert else experts[0]
        rows_of_weights = [self._rows(weight, own) for weight in self._weights_of(experts[0])]
        for tensors in zip(*rows_of_weights):
            rows = here.split([tensor if here.is_per_expert else tensor[0] for tensor in tensors])
            moved.append(self.there.join(rows))
        return self._store([Quantized(*own) for own in zip(*moved)], shells)

    def _rows(self, weight: Weight, expert: int | None) -> list[torch.Tensor]:
        if not weight.change:
            return weight.rows(expert)
        before, exact, rounded = weight.round_change(expert)
        self._output.roundings.add(weight.name, before, exact, rounded.values, expert, weight.is_dithered)
        return weight.rows(expert, rounded)

    def _make_packed(
        self, dtype: torch.dtype, format: Format, shells: list[torch.Tensor], experts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Make the tensors that store the weights of experts, rounded."""
        there, made = self.there, []
        is_changed = any(weight.change for weight in self._weights_of(experts[0]))
        for number, name in enumerate(there.names_of(experts[0])):
            matrices = (self._read_rows(dtype, expert)[number] for expert in experts)
            try:
                packed = format.pack(matrices, (len(experts), *there.shape), there.order)
            except ValueError as error:
                raise CheckpointError(f"{name}: {error}; nothing is written") from error
            made.append(packed)
            # where nothing changes, the first expert stands for all that one weight holds
            if is_changed or there.is_per_expert or experts[0] == 0:
                exact = self._read_rows(dtype, experts[0])[number]
                before = self._read_rows(dtype, experts[0], adapter=False)[number] if is_changed else exact
                rounded = format.dequantize_expert(packed, torch.float32, 0)
                self._output.roundings.add(name, before, exact, rounded, experts[0])
        return self._store(made, shells)

    def _store(self, packed: list[Quantized], shells: list[torch.Tensor]) -> list[torch.Tensor]:
        """Make the tensors that store weights, like `shells`."""
        of_weights: Iterable[Iterable[torch.Tensor | None]] = packed
        if self.there.is_per_expert:
            assert self._output.matrix_format is not None
            of_weights = [self._output.matrix_format.write(_as_matrix(each)) for each in packed]
        tensors = (tensor for own in of_weights for tensor in own if tensor is not None)
        return [tensor.view(like.dtype) for tensor, like in zip(tensors, shells, strict=True)]

    def _make_shells(self, names: list[str], format: Format, scales: Header | None = None) -> dict[str, torch.Tensor]:
        """Make tensors on the meta device like those that will store weights, by name. scales: the header of those whose
        blocks move, for formats with several dtypes or sizes of groups."""
        there = self.there
        expected: TensorSpecs = {}
        for name in names:
            if there.is_per_expert:
                assert self._output.matrix_format is not None
                expected |= self._output.matrix_format.specs(name, there.shape)
            else:
                group = None if scales is None else there.shape[-1] // max(1, *scales.shape[-1:])
                expected |= format.specs(name, (there.num_experts, *there.shape), there.order, group)
        return {name: shell(shape, _dtype_like(scales, dtypes)) for name, (shape, dtypes) in expected.items()}


def _as_matrix(packed: Quantized) -> Quantized:
    """View the tensors of one expert's weight as those of a matrix."""
    codes, scales, state = packed
    return Quantized(codes.flatten(0, -2), scales.flatten(0, -2), None if state is None else state.flatten(0, -2))


def _dtype_like(scales: Header | None, dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """Choose the dtype of tensors whose bits come from `scales`, or else the one that is made here."""
    if scales is None or scales.dtype in dtypes:
        return dtypes[0] if scales is None else scales.dtype
    return next((dtype for dtype in dtypes if dtype.itemsize == scales.dtype.itemsize), dtypes[0])
