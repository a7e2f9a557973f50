"""What a checkpoint will hold in another layout or with experts packed.

Experts are packed in the native layout, to train adapters on them, or in the hub's, as engines and Transformers read
them. Blocks that are packed in the format already are moved, bit by bit: none crosses from gate to up, or between rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from ..errors import CheckpointError
from ..formats import HUB, PACKED, Format
from ..kernels.quantized import Quantized, dequantize, dequantize_expert, quantize
from .layouts import layout_groups, order_in
from .plan import Planned, is_finite, is_sound, made_together, shell
from .rewriting import ChangedParameters, Rewriting
from .source import Source


class Relayout(Rewriting):
    """A checkpoint's weights under the names of a layout.

    Args:
        source: the checkpoint. layout: a name of CHECKPOINT_LAYOUTS. dtype: to cast to; None keeps what is stored.
        quantize: the format of the experts' weights; None makes packed ones dense. changed: what has other values.
    """

    def __init__(
        self,
        source: Source,
        layout: str,
        dtype: torch.dtype | None = None,
        quantize: str | None = None,
        changed: ChangedParameters | None = None,
    ):
        super().__init__(source, source.groups, changed)
        self._source, self._layout, self._dtype = source, layout, dtype
        self._format = None if quantize is None else PACKED[quantize]
        self._outer = layout_groups(source.model, source.family, layout, source.blocks)
        self._is_for_training = layout == "native"
        self._is_same = layout == source.layout and quantize is None and changed is None
        self._first = {self._target_of[name]: name for name in reversed(source.weights) if name in self._target_of}

    def notices(self) -> list[str]:
        """See Rewriting."""
        if self._format is None:
            return []
        if not self._is_for_training:
            return self.roundings.notices(self._format.name)
        if self._source.quantization == self._format.name:
            return [f"the experts' {self._format.name} blocks are those of {self._source.folder}"]
        return [self.roundings.loss_notice(self._format.name)]

    def _of_weight(self, name: str) -> Iterator[Planned]:
        """The tensors that stand for the parameter of a weight, once; or a weight that stays where it is.

        Raises:
            CheckpointError: weights that become one differ in dtype, are packed in another format than is wanted, or have
                rows that it does not take.
        """
        target = self._target_of.get(name)
        if target is None or self._is_same:
            yield from self._alone(name, self._wanted(name, self._source.dtype_of(name)))
        elif self._first[target] == name:
            yield from self._of_parameter(target)

    def _wanted(self, name: str, stored: torch.dtype) -> torch.dtype:
        keeps_fp32 = self._source.keep_fp32.intersection(name.split("."))
        return self._dtype if self._dtype is not None and stored.is_floating_point and not keeps_fp32 else stored

    def _of_parameter(self, target: str) -> Iterator[Planned]:
        source, names = self._source, self._outer[target].shapes
        dtypes = {name: source.dtype_of(name) for name in self._inner[target].shapes if name in source.weights}
        format = self._format if source.is_experts(target) else None
        is_kept = format is not None and not self._changes(target)
        if format is not None and is_kept and all(source.is_kept(name, format.name) for name in dtypes):
            for name in names:
                yield from self._moved(target, name, format)
            return
        first, *others = dtypes
        other = next((name for name in others if dtypes[name] != dtypes[first]), None)
        if self._dtype is None and other is not None and (format is None or self._is_for_training):
            raise CheckpointError(
                f"{first} is {dtypes[first]}, {other} is {dtypes[other]}: {next(iter(names))} needs one dtype; give "
                "dtype="
            )
        for name in names:
            dtype = self._wanted(name, dtypes[first] if other is None else torch.float32)
            if format is None:
                yield self._dense(target, name, dtype)
            else:
                yield from self._packed(target, name, dtype, format)

    def _shells(
        self, target: str, name: str, format: Format, scales: torch.dtype = torch.float32
    ) -> dict[str, torch.Tensor]:
        """By name, tensors on the meta device like those that will stand for the weight. scales: dtype of FP8's."""
        shape = self._outer[target].shapes[name]
        if len(shape) == 2:  # an expert's own
            hub = HUB[format.name]
            (of_scales, _), *_ = hub.stored_scales(shape)
            dtype = torch.float8_e8m0fnu if scales == torch.uint8 else scales
            return dict(zip(hub.names(name), (shell(shape, hub.dtype), shell(of_scales, dtype))))
        shape = (shape[0], *shape[:0:-1]) if self._layout == "gpt_oss" else shape
        parts = format.stored(name, shape, order_in(self._layout, target))
        return {
            stored: shell(part, scales if scales in dtypes else dtypes[0]) for stored, (part, dtypes) in parts.items()
        }

    def _filled(
        self,
        shells: dict[str, torch.Tensor],
        target: str,
        name: str,
        parts: Callable[[int], Iterable[torch.Tensor | None]],
    ) -> list[torch.Tensor]:
        """Tensors like `shells`, of each expert's parts in their order."""
        made = [torch.empty(shell.shape, dtype=shell.dtype) for shell in shells.values()]
        place = self._outer[target].places[name]
        for expert in range(len(made[0])) if place is None else [place]:
            own = [tensor[expert] for tensor in made] if place is None else made
            for tensor, part in zip(own, parts(expert)):
                if part is not None:
                    tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        return made

    def _moved(self, target: str, name: str, format: Format) -> Iterator[Planned]:
        """A packed weight, its blocks as they are."""
        source, first = self._source, next(iter(self._inner[target].shapes))
        if source.quantization != format.name:
            raise CheckpointError(
                f"{name} would be packed as {format.name}, but is {source.quantization} already, and rounding twice "
                "loses more: keep that format, or convert the bf16 checkpoint"
            )
        if format.name == "nf4":
            raise CheckpointError(
                f"{source.folder} is packed as nf4 already; from_pretrained loads it as it is (NF4's scales have scales "
                "of 256 neighbouring blocks, which cannot be put into another order)"
            )
        are_bytes = source.tensors[source.weights[first][1]].dtype.itemsize == 1
        shells = self._shells(target, name, format, torch.uint8 if are_bytes else torch.float32)

        def is_finite_dense(scales: torch.Tensor) -> bool:
            return is_sound(scales) and is_finite(self._dense(target, name, source.dense_dtype).make())

        codes, *beside = made_together(
            shells, lambda: self._filled(shells, target, name, partial(self._rows, target, name))
        )
        yield codes
        yield from (each._replace(is_finite=is_finite_dense) for each in beside)

    def _rows(self, target: str, name: str, expert: int) -> Iterator[torch.Tensor]:
        """What stores one expert of a packed weight, each tensor as [rows, ...] or [1, rows, ...]."""
        inner, outer = self._inner[target], self._outer[target]
        stored = {each: self._source.packed_rows(each, expert) for each in inner.needed(expert)}
        for rows in zip(*stored.values()):
            parameters = inner.parameters(dict(zip(stored, rows)), expert, is_packed=True)
            yield outer.weights(parameters, expert, is_packed=True)[name]

    def _packed(self, target: str, name: str, dtype: torch.dtype, format: Format) -> Iterator[Planned]:
        """A weight in the format: [E, out, in] in the layout's order, or an expert's own."""
        shells = self._shells(target, name, format)

        def make() -> list[torch.Tensor]:
            if self._changes(target):
                self.roundings.begin(name)
            if format.name == "nf4":  # its scales cross experts
                weight = self._dense(target, name, dtype).make()
                packed = self._quantized(target, name, weight, format)
                self.roundings.add_first(name, weight[0].float(), dequantize_expert(packed, "nf4", torch.float32, 0))
                return [part for part in packed if part is not None]
            return self._filled(shells, target, name, expert_in_format)

        def expert_in_format(expert: int) -> Quantized:
            exact = self._matrix(target, name, expert, dtype)
            packed = self._quantized(target, name, exact, format)
            if self._changes(target):
                before = self._matrix(target, name, expert, dtype, is_changed=False)
                self.roundings.add(name, before, exact, dequantize(packed, format.name, torch.float32))
            elif expert == 0:
                self.roundings.add_first(name, exact.float(), dequantize(packed, format.name, torch.float32))
            return packed

        return made_together(shells, make)

    def _matrix(
        self, target: str, name: str, expert: int, dtype: torch.dtype, is_changed: bool = True
    ) -> torch.Tensor:
        """[1, out, in] of one expert, as it is packed."""
        matrix = self._piece(target, expert, dtype, is_changed)[name]
        matrix = matrix if matrix.dim() == 3 else matrix.unsqueeze(0)
        return matrix.transpose(1, 2) if self._layout == "gpt_oss" else matrix

    def _quantized(self, target: str, name: str, matrices: torch.Tensor, format: Format) -> Quantized:
        order = order_in(self._layout, target) if self._outer[target].places[name] is None else "whole"
        try:
            return quantize(matrices, format.name, order)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}; nothing is written") from error
