"""Conversions with which Transformers loads experts packed: what the tensors of a checkpoint become while they stream in.

    a checkpoint has                      conversion     makes
    experts in floats                     PackExperts    a packed weight
    experts that were packed here         TakePacked     the same packed weight
    experts in a matrix format      TakeExperts    a packed weight, in that format or in another
    linear layers beside these            TakeDense      a dense weight, or what the linear layers' quantizer makes of it

Where a checkpoint has a tensor for each expert and projection, LeaveApart keeps Transformers from merging them: they are
packed one after the other, so that no tensor of all of them is made.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from ..errors import CheckpointError
from ..kernels.packed import FORMATS, Quantized
from ..kernels.packed.format import Mean
from ..layer.experts_module import is_transposed, packable, row_order
from ..layer.holding import Holding, holding_of, local_shape, mesh_of
from ..layer.packed_weight import PackedWeight, as_parameter
from .float_matrices import FP8Matrix
from .loading_errors import check_shape, keeping_errors
from .matrix_format import WEIGHT, MatrixFormat
from .shares import assemble_share, dense_shard, pack_share

# DeepSeek-V4's names of scales, and those that we go by
SHORT_NAMES = (r"^(.+)(?<!_l2_clip)\.scale$", r"\1.weight_scale_inv")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LOADS_MATRICES = hasattr(HfQuantizer, "get_new_dtype")  # since 5.19: it casts nothing on its own
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj", "c_fc", "c_proj")
MERGES = (
    [(MergeModulelist, 0)],
    [(MergeModulelist, 0), (Concatenate, 1)],  # gate and up
)
WHOLE_NAME = r"(?<=\.)"  # how the pattern of a whole name begins


class Apart(list):
    """Matrices of experts by projection, [gates, ups] or [downs]."""

    @property
    def shape(self) -> torch.Size:
        """The shape [E, N, K] of their merged weight. Raises RuntimeError, as merging does, where they do not fit."""
        return torch.cat([torch.stack([each.to("meta") for each in source]) for source in self], dim=1).shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices."""
        return self[0][0].dtype

    @property
    def device(self) -> torch.device:
        """The device that has the matrices."""
        return self[0][0].device

    def pack(self, format: str, dtype: torch.dtype, order: str, mean: Mean = torch.mean) -> PackedWeight:
        """Pack their merged weight, in `dtype`, as PackedWeight.quantize does."""
        experts = (torch.cat(matrices).to(dtype) for matrices in zip(*self))
        packed = FORMATS[format].pack(experts, self.shape, order, mean, self.device)
        return PackedWeight(packed, format, dtype)


class LoadedParameter(NamedTuple):
    """The parameter that a conversion makes: `full_name` of the model, `name` of `module`. dense: the parameter on the
    meta device that stands there until then. holding: of the module's experts."""

    full_name: str
    module: nn.Module
    name: str
    dense: Any
    holding: Holding


@contextmanager
def _naming_weight(weight: str, separator: str = ": ") -> Iterator[None]:
    """Name the weight in errors of the formats, inside `with`."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{weight}{separator}{error}") from error


StoredTensors = dict[str, Any]  # by name: tensors in a list, those of the experts in their order; or Apart


class LeaveApart(MergeModulelist):
    """Hand on the matrices of experts that are to be packed, and merge others as the `operations` do. Transformers 5.17
    gives a rank of expert parallelism whole experts where it finds a MergeModulelist among a conversion's."""

    def __init__(self, operations: list[ConversionOps]):
        super().__init__()
        self.operations = operations

    # mypy takes torch.no_grad, by which the other is decorated, for what it returns
    def convert(self, input_dict, source_patterns, target_patterns, **options):  # type: ignore[override]
        module, name = get_module_from_name(options["model"], options["full_layer_name"])
        if name in packable(module) and not is_transposed(module):
            return {
                target_patterns[0]: Apart(input_dict[source] for source in source_patterns if source in input_dict)
            }
        for operation in self.operations:
            input_dict = operation.convert(input_dict, source_patterns, target_patterns, **options)
        return input_dict


class _ParameterConversion(ConversionOps):
    """A conversion that makes one parameter of the tensors that store it."""

    def __init__(self, hf_quantizer):
        self.hf_quantizer = hf_quantizer  # by this name Transformers knows that it must not cast

    @property
    def format(self) -> str:
        """The name of the format in which the quantizer wants experts."""
        return self.hf_quantizer.quantization_config.experts

    @keeping_errors
    def convert(self, input_dict, *, full_layer_name, model, **options):
        """Make {full_layer_name: parameter} of lists of tensors by the patterns of their names, or of bare tensors."""
        module, name = get_module_from_name(model, full_layer_name)
        target = LoadedParameter(full_layer_name, module, name, getattr(module, name), holding_of(module))
        stored = {
            pattern.removeprefix(WHOLE_NAME).removesuffix("$"): tensors if isinstance(tensors, list) else [tensors]
            for pattern, tensors in input_dict.items()
        }
        made = self.make(target, stored)
        made = as_parameter(made) if isinstance(made, PackedWeight) else made
        linear = self.hf_quantizer.linear
        is_linear = name not in packable(module) and not made.is_meta
        if is_linear and linear is not None and linear.param_needs_quantization(model, full_layer_name):
            operation = linear.get_quantize_ops()
            return operation.convert({full_layer_name: made}, full_layer_name=full_layer_name, model=model, **options)
        return {full_layer_name: made}

    def make(self, target: LoadedParameter, stored: StoredTensors) -> torch.Tensor:
        """Make the parameter."""
        raise NotImplementedError


class PackExperts(_ParameterConversion):
    """Make a packed weight of experts in floats. What else is quantized goes to the quantizer of linear layers."""

    def make(self, target: LoadedParameter, stored: StoredTensors) -> torch.Tensor:
        """See _ParameterConversion."""
        (sources,) = stored.values()
        if target.name not in packable(target.module):
            return sources[0]
        value, order = sources if isinstance(sources, Apart) else sources[0], row_order(target.module, target.name)

        def pack(mean=torch.mean):
            check_shape(target.full_name, value.shape, target.dense)
            if isinstance(value, Apart):
                return value.pack(self.format, value.dtype, order, mean)
            return PackedWeight.quantize(value, self.format, is_transposed(target.module), order, mean)

        return pack_share(self.format, pack, local_shape(target.dense), value.device, target.holding)


class TakePacked(_ParameterConversion):
    """Make a packed weight of the tensors that store it."""

    def make(self, target: LoadedParameter, stored: StoredTensors) -> torch.Tensor:
        """See _ParameterConversion."""
        tensors = {name.rpartition(".")[2]: tensor for name, (tensor, *_) in stored.items()}
        format = FORMATS[self.format]
        names = format.names(target.name)
        missing = next((name for name in names if name not in tensors), None)
        if missing is not None:
            raise CheckpointError(
                f"{target.full_name}: {missing} is missing, which stores this {format.name} weight too"
            )
        if target.holding.group is not None:
            tensors = dict(zip(names, assemble_share(format, [tensors[name] for name in names], target.holding)))
        with _naming_weight(target.full_name.rpartition(".")[0], ", "):
            packed = format.read(target.name, tensors, target.holding.experts.start)
        weight = PackedWeight.of(packed, format.name, target.dense.dtype, is_transposed(target.module))
        check_shape(target.full_name, weight.shape, target.dense)
        return weight


class TakeExperts(_ParameterConversion):
    """Make a packed weight of experts in a matrix format; or in floats, in layers that the checkpoint's
    modules_to_not_convert names. sources: the names of gate's and up's weights, or down's, with "*" for the expert."""

    def __init__(self, hf_quantizer, stored_format: MatrixFormat, sources: list[str]):
        super().__init__(hf_quantizer)
        self.stored_format, self.sources = stored_format, sources

    def make(self, target: LoadedParameter, stored: StoredTensors) -> torch.Tensor:
        """See _ParameterConversion."""
        wanted, dtype, is_plain = self.format, target.dense.dtype, self._is_plain(stored)
        if wanted == self.stored_format.name and not is_plain:
            packed = self._join_experts(self._projections(stored, target), target, target.holding.experts.start)
            return PackedWeight.of(packed, wanted, dtype)
        order = "concatenated" if len(self.sources) > 1 else "whole"
        device = next(tensor.device for tensors in stored.values() for tensor in tensors)

        def pack(mean=torch.mean):
            if is_plain:
                plain = Apart(stored[source] for source in self.sources)
                check_shape(target.full_name, plain.shape, target.dense)
                return plain.pack(wanted, dtype, order, mean)
            values = (values.to(dtype) for values in self._values(stored, target))
            packed = FORMATS[wanted].pack(values, local_shape(target.dense), order, mean, device)
            return PackedWeight(packed, wanted, dtype)

        return pack_share(wanted, pack, local_shape(target.dense), device, target.holding)

    def _is_plain(self, stored: StoredTensors) -> bool:
        """Tell whether the checkpoint has these experts in floats."""
        scales = {name for source in self.sources for name in self.stored_format.names(source)} - {*self.sources}
        weights = [tensor for source in self.sources for tensor in stored.get(source, ())]
        is_packed = any(stored.get(name) for name in scales) or not weights
        return not is_packed and all(tensor.dtype in FLOATS for tensor in weights)

    def _values(self, stored: StoredTensors, target: LoadedParameter) -> Iterator[torch.Tensor]:
        """Yield the values [N, K] of each expert."""
        first = target.holding.experts.start
        if self.stored_format.name not in FORMATS:
            tensors = [self._tensors(stored, source, target) for source in self.sources]
            for number, expert in enumerate(zip(*tensors), first):
                with _naming_weight(f"{target.full_name}, expert {number}"):
                    values = torch.cat([self.stored_format.dense(*projection) for projection in expert])
                yield values
            return
        for number, expert in enumerate(zip(*self._projections(stored, target)), first):
            joined = self._join_experts([[projection] for projection in expert], target, number)
            yield FORMATS[self.stored_format.name].expert(joined, 0)

    def _projections(self, stored: StoredTensors, target: LoadedParameter) -> list[list[Quantized]]:
        """List the experts as the checkpoint has them, [projection][expert]."""
        projections = [self._projection(stored, source, target) for source in self.sources]
        alike = _kinds(projections[0][0])
        for source, experts in zip(self.sources, projections):
            for expert, packed in enumerate(experts, target.holding.experts.start):
                if _kinds(packed) != alike:
                    raise CheckpointError(
                        f"{target.full_name}, {source} of expert {expert}: its weight and scales are stored as "
                        f"{_kinds(packed)}, others of this layer as {alike}"
                    )
        return projections

    def _join_experts(self, projections: list[list[Quantized]], target: LoadedParameter, first: int) -> Quantized:
        """Join experts from the `first` on, all or some of those of the weight."""
        packed, format = self.stored_format.join(projections), FORMATS[self.stored_format.name]
        format.check(target.full_name, packed, first)
        check_shape(target.full_name, (local_shape(target.dense)[0], *format.shape(packed)[1:]), target.dense)
        return packed

    def _tensors(self, stored: StoredTensors, source: str, target: LoadedParameter) -> list[tuple[torch.Tensor, ...]]:
        """List the tensors that store a projection of each expert."""
        there = [name for name in self.stored_format.optional_names(source) if stored.get(name)]
        if target.holding.group is not None:  # of vectors Transformers gives a rank stretches, and of every expert
            self.stored_format.check_stretches(*(stretch for name in there for stretch in stored[name]))
            there = []
        by_name = {name: stored.get(name, []) for name in [*self.stored_format.names(source), *there]}
        num_experts, module = local_shape(target.dense)[0], source.removesuffix(f".{WEIGHT}")
        if {len(tensors) for tensors in by_name.values()} != {num_experts}:
            counts = ", ".join(f"{len(tensors)} {name.removeprefix(module)}" for name, tensors in by_name.items())
            raise CheckpointError(
                f"{target.full_name}: weights or scales of {source} are missing, or there are too many: of {num_experts} "
                f"experts the checkpoint has {counts}"
            )
        return list(zip(*by_name.values()))

    def _projection(self, stored: StoredTensors, source: str, target: LoadedParameter) -> list[Quantized]:
        packed = []
        for expert, tensors in enumerate(self._tensors(stored, source, target), target.holding.experts.start):
            with _naming_weight(f"{target.full_name}, {source} of expert {expert}"):
                packed.append(self.stored_format.pack(*tensors))
        return packed


class TakeDense(_ParameterConversion):
    """Make a linear layer's weight in its own dtype, of the tensors that store it in a matrix format."""

    def __init__(self, hf_quantizer, stored_format: MatrixFormat):
        super().__init__(hf_quantizer)
        self.stored_format = stored_format

    def make(self, target: LoadedParameter, stored: StoredTensors) -> torch.Tensor:
        """See _ParameterConversion."""
        parameter, layer = target.dense, target.full_name
        needed, names = self.stored_format.names(WEIGHT), _all_names(self.stored_format, WEIGHT)
        by_name = {name: tensors[0] for name in names if (tensors := stored.get(name))}
        weight, *others = by_name.values()
        if weight.is_meta:
            return torch.empty_like(parameter, device="meta")
        is_packed = weight.dtype not in FLOATS
        missing = [name for name in needed if name not in by_name] if is_packed else []
        if missing or (bool(others) and not is_packed):
            scales = len(by_name.keys() & {*needed[1:]})
            raise CheckpointError(
                f"{layer} is {weight.dtype} with {scales} of {len(needed) - 1} scales; the checkpoint is incomplete"
            )
        with _naming_weight(layer):
            dense = self._dense(weight, others, parameter) if is_packed else weight
        if is_packed and not bool(torch.isfinite(dense).all()):
            raise CheckpointError(f"{layer} or its scales have NaN or infinite values")
        return dense.to(parameter.dtype)

    def _dense(self, weight: torch.Tensor, others: list[torch.Tensor], parameter) -> torch.Tensor:
        is_sharded = mesh_of(parameter) is not None
        if is_sharded and isinstance(self.stored_format, FP8Matrix):
            return dense_shard(self.stored_format, weight, others[0], parameter)
        if is_sharded and weight.dtype == torch.int32:
            raise CheckpointError(
                "ranks share a linear layer that the checkpoint packs in integers, which cannot be cut; leave out "
                "distributed_config, or load it once on one rank and save_pretrained it, which makes linear layers dense"
            )
        return self.stored_format.dense(weight, *others)


def _kinds(packed: Quantized) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in packed if tensor is not None]


# the conversions of a model, by what its checkpoint has


def with_experts_apart(conversions: list[WeightTransform]) -> list[WeightTransform]:
    """Change Transformers' conversions of a model so that experts are not merged before they are packed."""

    def leave_apart(conversion: WeightTransform) -> WeightTransform:
        if not isinstance(conversion, WeightConverter):
            return conversion
        if [(type(each), getattr(each, "dim", None)) for each in conversion.operations] not in MERGES:
            return conversion
        changed = copy.copy(conversion)
        changed.operations = [LeaveApart(conversion.operations)]
        return changed

    return [leave_apart(conversion) for conversion in conversions]


def of_packed_experts(hf_quantizer) -> list[WeightConverter]:
    """Make the conversions of a checkpoint whose experts were packed here, in the quantizer's format."""
    format = FORMATS[hf_quantizer.quantization_config.experts]
    return [
        WeightConverter(
            [f"experts.{tensor}$" for tensor in format.names(name)], f"experts.{name}", [TakePacked(hf_quantizer)]
        )
        for name in WEIGHTS
    ]


def with_matrix_format(conversions: list, hf_quantizer, format: MatrixFormat) -> list:
    """Change Transformers' conversions of a model so that experts in a matrix format stay packed and the
    rest becomes dense."""
    return [
        *([WeightRenaming(*SHORT_NAMES)] if isinstance(format.linear, FP8Matrix) else []),
        *(_of_experts(converter, hf_quantizer, format) for converter in conversions),
        WeightConverter(
            [*map(_pattern_of, _all_names(format.linear, WEIGHT)), *(f"{end[1:]}$" for end in format.unused)],
            WEIGHT,
            [TakeDense(hf_quantizer, format.linear)],
        ),
    ]


def _pattern_of(name: str) -> str:
    """Make the pattern of tensors of this name in any module. Names that do not begin with "weight" are whole ones."""
    return f"{name}$" if name.startswith(WEIGHT) else f"{WHOLE_NAME}{name}$"


def _all_names(format: MatrixFormat, weight: str) -> list[str]:
    """List the names of the tensors that may store a weight, also where it is in floats."""
    return list(dict.fromkeys([*format.names(weight), *format.optional_names(weight), weight]))


def _of_experts(converter, hf_quantizer, format: MatrixFormat):
    if not isinstance(converter, WeightConverter):
        return converter
    sources, targets = converter._original_source_patterns, converter._original_target_patterns
    is_of_weights = all(source.endswith(f".{WEIGHT}") for source in sources)
    if len(targets) != 1 or not re.search(r"experts\.\w+$", targets[0]) or not is_of_weights:
        return converter
    patterns = [f"{name}$" for source in sources for name in _all_names(format, source)]
    patterns += [source.removesuffix(f".{WEIGHT}") + f"{end}$" for source in sources for end in format.unused]
    return WeightConverter(patterns, targets[0], [TakeExperts(hf_quantizer, format, sources)])
