"""What a checkpoint will hold whose model's parameters are changed, under the names of another's files: weights that
nothing changes are as they were, changed ones keep their dtype, or are rounded to the format that the hub stored them in.

Weights become the model's parameters and are made of them again, expert by expert: see WeightGroup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Protocol

import torch

from ..errors import CheckpointError
from .converters import NOT_INVERTED, WITH_PEFT, Tensors, WeightGroup
from .plan import Planned, in_range, made_together, shell
from .roundings import Roundings
from .stored import StoredWeights

ALTERNATING = 2  # pieces of weights that a file may have in turn: gate and up of an expert, and its down


class ChangedParameters(Protocol):
    """Other values of a model's parameters than a checkpoint has."""

    def changes(self, parameter: str) -> bool:
        """Whether the parameter has other values."""

    def change(self, parameter: str, values: torch.Tensor, expert: int | None) -> torch.Tensor:
        """The parameter, or one expert's [1, ...] of it, in fp32, from the checkpoint's."""


class Rewriting:
    """A checkpoint's weights under their own names.

    Args:
        stored: the checkpoint. groups: by name of a parameter of its model, the weights that become it. changed: what has
            other values. keeps_format: whether quantized weights stay quantized, or become dense. dtype: to cast dense
            weights to; None keeps what is stored.
    Attributes:
        roundings: what rounding to a format does, once tensors are made.
    """

    def __init__(
        self,
        stored: StoredWeights,
        groups: Mapping[str, WeightGroup],
        changed: ChangedParameters | None = None,
        keeps_format: bool = False,
        dtype: torch.dtype | None = None,
    ):
        self._stored, self._inner, self._changed, self.keeps_format = stored, groups, changed, keeps_format
        self._outer, self._dtype = groups, dtype
        self._target_of = {name: group.targets[0] for group in groups.values() for name in group.shapes}
        self._piece = lru_cache(ALTERNATING)(self._make_piece)
        self.roundings = Roundings()

    def plan(self) -> list[Planned]:
        """The tensors, in the order of the checkpoint's files.

        Raises:
            CheckpointError: the weights do not become the model's parameters, or those have no inverse; in making them.
        """
        return [planned for name in self._stored.weights for planned in self._of_weight(name)]

    def notices(self) -> list[str]:
        """What rounding did, in sentences, once tensors are made."""
        return self.roundings.notices(str(self._stored.quantization)) if self.keeps_format else []

    def _of_weight(self, name: str) -> Iterator[Planned]:
        target, parts = self._target_of.get(name), self._stored.weights[name]
        if target is None or not self._changes(target):
            yield from map(self._copied, parts) if self.keeps_format else self._alone(name)
        elif self.keeps_format and len(parts) > 1:
            headers = {part: self._stored.tensors[part] for part in parts}
            shells = {part: shell(header.shape, header.dtype) for part, header in headers.items()}
            yield from made_together(shells, partial(self._round, name, target))
        else:
            yield self._dense(target, name, self._stored.dtype_of(name))

    def _changes(self, target: str) -> bool:
        return self._changed is not None and any(map(self._changed.changes, self._inner[target].targets))

    def _copied(self, name: str) -> Planned:
        header = self._stored.tensors[name]
        return Planned(name, shell(header.shape, header.dtype), lambda out: out.copy_(self._stored.raw(name)))

    def _alone(self, name: str) -> Iterator[Planned]:
        """A weight under its own name, dequantized where it is quantized; none of what is for inference in its format."""
        stored = self._stored
        if not stored.is_unused(name):
            dtype = self._wanted(name, stored.dtype_of(name))
            like = shell(stored.shape_of(name), dtype)
            yield Planned(name, like, lambda out: out.copy_(in_range(stored.read(name), dtype, name)))

    def _wanted(self, name: str, stored: torch.dtype) -> torch.dtype:
        """What a weight of the dtype `stored` is written in."""
        keeps_fp32 = self._stored.keep_fp32.intersection(name.split("."))
        return self._dtype if self._dtype is not None and stored.is_floating_point and not keeps_fp32 else stored

    def _dense(self, target: str, name: str, dtype: torch.dtype) -> Planned:
        """A weight in `dtype`, rounded once; of one that holds all experts, one after the other."""
        group, place = self._outer[target], self._outer[target].places[name]
        make = self._piece if group.num_experts or len(group.shapes) > 1 else self._make_piece  # which keeps nothing

        def fill(out: torch.Tensor) -> None:
            if place is not None or group.num_experts is None:
                out.copy_(make(target, place, dtype)[name])
                return
            for expert, own in enumerate(out):
                own.copy_(make(target, expert, dtype)[name][0])

        return Planned(name, shell(group.shapes[name], dtype), fill)

    def _make_piece(self, target: str, expert: int | None, dtype: torch.dtype, is_changed: bool = True) -> Tensors:
        """The weights that a parameter becomes, or those of one expert, in `dtype`; what is changed in fp32."""
        inner, outer = self._inner[target], self._outer[target]
        exact, weights = torch.float32 if self.keeps_format else None, {}
        for name, own in inner.needed(expert).items():
            values = self._stored.read(name, own, exact)
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

    def _round(self, name: str, target: str) -> list[torch.Tensor]:
        """What stands for a changed weight in the format that it has."""
        stored, place = self._stored, self._outer[target].places[name]
        tensors = [stored.stored(part) for part in stored.weights[name]]
        grid, (codes, scales, *_) = stored.grid(name), tensors
        is_packed = stored.is_packed(name)  # of all experts
        for expert in range(codes.shape[0]) if is_packed else [place]:
            exact, of_codes, of_scales = self._piece(target, expert, torch.float32)[name], codes, scales
            if is_packed:
                exact, of_codes, of_scales = exact[0], codes[expert], scales[expert]
                exact = exact.T if stored.is_transposed else exact
            before, rounded = grid.dense(of_codes, of_scales), grid.round(exact, of_scales)
            of_codes.copy_(rounded.codes)
            of_scales.copy_(rounded.scales)
            self.roundings.add(name, before, exact, rounded.values)
        return tensors
