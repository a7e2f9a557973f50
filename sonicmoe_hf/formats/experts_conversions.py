"""Conversions that make a packed weight: of experts in floats, of those that were packed here, or in a matrix format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from ..errors import CheckpointError
from ..kernels.packed import FORMATS, Quantized
from ..kernels.packed.format import check_finite
from ..layer.experts_module import is_transposed, packable, row_order
from ..layer.holding import local_shape
from ..layer.packed_weight import PackedWeight
from .matrices_apart import Apart
from .matrix_format import FLOATS, WEIGHT, MatrixFormat
from .parameter_conversion import LoadedParameter, ParameterConversion, StoredTensors, naming_weight
from .shares import assemble_share, pack_share

Matrix = TypeVar("Matrix")  # values, or codes and scales


class PackExperts(ParameterConversion):
    """Make a packed weight of experts in floats. What else is quantized goes to the quantizer of linear layers."""

    def make(self, target: LoadedParameter, stored: StoredTensors) -> torch.Tensor:
        """See ParameterConversion."""
        (tensors,) = stored.values()
        if target.name not in packable(target.module):
            return tensors[0]
        value, order = tensors if isinstance(tensors, Apart) else tensors[0], row_order(target.module, target.name)

        def pack(mean=torch.mean):
            check_shape(target.full_name, value.shape, target.meta_parameter)
            if isinstance(value, Apart):
                return value.pack(self.wanted_format, value.dtype, order, mean)
            return PackedWeight.quantize(value, self.wanted_format, is_transposed(target.module), order, mean)

        return pack_share(self.wanted_format, pack, local_shape(target.meta_parameter), value.device, target.holding)


class TakePacked(ParameterConversion):
    """Make a packed weight of the tensors that store it."""

    def make(self, target: LoadedParameter, stored: StoredTensors) -> torch.Tensor:
        """See ParameterConversion."""
        tensors = {name.rpartition(".")[2]: tensor for name, (tensor, *_) in stored.items()}
        format = FORMATS[self.wanted_format]
        names = format.names(target.name)
        missing = next((name for name in names if name not in tensors), None)
        if missing is not None:
            raise CheckpointError(
                f"{target.full_name}: {missing} is missing, which stores this {format.name} weight too"
            )
        if target.holding.group is not None:
            tensors = dict(zip(names, assemble_share(format, [tensors[name] for name in names], target.holding)))
        with naming_weight(target.full_name.rpartition(".")[0], ", "):
            packed = format.read(target.name, tensors, target.holding.experts.start)
        weight = PackedWeight.of(packed, format.name, target.meta_parameter.dtype, is_transposed(target.module))
        check_shape(target.full_name, weight.shape, target.meta_parameter)
        return weight


class TakeExperts(ParameterConversion):
    """Make a packed weight of experts in a matrix format; or in floats, in layers that the checkpoint's
    modules_to_not_convert names. sources: the names of gate's and up's weights, or down's, with "*" for the expert."""

    def __init__(self, hf_quantizer, stored_format: MatrixFormat, sources: list[str]):
        super().__init__(hf_quantizer)
        self.stored_format, self.sources = stored_format, sources

    def make(self, target: LoadedParameter, stored: StoredTensors) -> torch.Tensor:
        """See ParameterConversion."""
        wanted, dtype, is_in_floats = self.wanted_format, target.meta_parameter.dtype, self._is_in_floats(stored)
        if wanted == self.stored_format.name and not is_in_floats:
            return PackedWeight.of(self._take(stored, target), wanted, dtype)
        order = "concatenated" if len(self.sources) > 1 else "whole"
        device = next(tensor.device for tensors in stored.values() for tensor in tensors)

        def pack(mean=torch.mean):
            if is_in_floats:
                apart = Apart(stored[source] for source in self.sources)
                check_shape(target.full_name, apart.shape, target.meta_parameter)
                return apart.pack(wanted, dtype, order, mean)
            values = (values.to(dtype) for values in self._values(stored, target))
            packed = FORMATS[wanted].pack(values, local_shape(target.meta_parameter), order, mean, device)
            return PackedWeight(packed, wanted, dtype)

        return pack_share(wanted, pack, local_shape(target.meta_parameter), device, target.holding)

    def _is_in_floats(self, stored: StoredTensors) -> bool:
        """Tell whether the checkpoint has these experts in floats."""
        scales = {name for source in self.sources for name in self.stored_format.names(source)} - {*self.sources}
        weights = [tensor for source in self.sources for tensor in stored.get(source, ())]
        is_quantized = any(stored.get(name) for name in scales) or not weights
        return not is_quantized and all(tensor.dtype in FLOATS for tensor in weights)

    def _values(self, stored: StoredTensors, target: LoadedParameter) -> Iterator[torch.Tensor]:
        """Yield the values [N, K] of each expert in fp32."""

        def dense(*tensors: torch.Tensor) -> torch.Tensor:
            matrix = self.stored_format.dense(*tensors)
            check_finite(matrix)
            return matrix

        num_experts = local_shape(target.meta_parameter)[0]
        for matrices in zip(*(self._read_part(stored, source, target, dense) for source in self.sources)):
            values = torch.cat(matrices)
            check_shape(target.full_name, (num_experts, *values.shape), target.meta_parameter)
            yield values

    def _take(self, stored: StoredTensors, target: LoadedParameter) -> Quantized:
        """Join the experts as the checkpoint has them."""
        parts = [[*self._read_part(stored, source, target, self.stored_format.read)] for source in self.sources]
        alike = _tensor_specs(parts[0][0])
        for source, experts in zip(self.sources, parts):
            for expert, matrix in enumerate(experts, target.holding.experts.start):
                if _tensor_specs(matrix) != alike:
                    raise CheckpointError(
                        f"{target.full_name}, {source} of expert {expert}: its weight and scales are stored as "
                        f"{_tensor_specs(matrix)}, others of this layer as {alike}"
                    )
        packed, format = self.stored_format.join_parts(parts), FORMATS[self.stored_format.name]
        format.check(target.full_name, packed, target.holding.experts.start)
        check_shape(target.full_name, format.shape(packed), target.meta_parameter)
        return packed

    def _read_part(
        self, stored: StoredTensors, source: str, target: LoadedParameter, read: Callable[..., Matrix]
    ) -> Iterator[Matrix]:
        """Read a part of each expert's weight, one after the other, from the tensors that store it; an error names it."""
        for expert, tensors in enumerate(self._stored_by_expert(stored, source, target), target.holding.experts.start):
            with naming_weight(f"{target.full_name}, {source} of expert {expert}"):
                matrix = read(*tensors)
            yield matrix

    def _stored_by_expert(
        self, stored: StoredTensors, source: str, target: LoadedParameter
    ) -> list[tuple[torch.Tensor, ...]]:
        """List the tensors that store a part of each expert's weight."""
        there = [name for name in self.stored_format.optional_names(source) if stored.get(name)]
        if target.holding.group is not None:  # Transformers cuts every expert's vectors into stretches, one a rank
            self.stored_format.check_stretches(*(stretch for name in there for stretch in stored[name]))
            there = []
        by_name = {name: stored.get(name, []) for name in [*self.stored_format.names(source), *there]}
        num_experts, module = local_shape(target.meta_parameter)[0], source.removesuffix(f".{WEIGHT}")
        if {len(tensors) for tensors in by_name.values()} != {num_experts}:
            counts = ", ".join(f"{len(tensors)} {name.removeprefix(module)}" for name, tensors in by_name.items())
            raise CheckpointError(
                f"{target.full_name}: weights or scales of {source} are missing, or there are too many: of {num_experts} "
                f"experts the checkpoint has {counts}"
            )
        return list(zip(*by_name.values()))


def check_shape(name: str, stored: tuple[int, ...], parameter: torch.Tensor) -> None:
    """Raise ValueError where a weight that a checkpoint brings has another shape than the model's `parameter`, or
    this rank's share of it. Transformers does not compare the shapes of what a quantizer takes."""
    shape = local_shape(parameter)
    if stored != shape:
        raise ValueError(f"{name} has shape {tuple(stored)} in the checkpoint; the model's is {tuple(shape)}")


def _tensor_specs(packed: Quantized) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """List shape and dtype of each tensor, which are alike for all experts that one weight can hold."""
    return [(tuple(tensor.shape), tensor.dtype) for tensor in packed if tensor is not None]
