"""Transformers' conversions of the hub's checkpoints in FP8, FP4 or integers, which store tensors for each expert and
projection: experts are taken as they are while they stream in, and the linear layers beside them become dense."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from ..errors import CheckpointError
from ..kernels.packed import FORMATS, Quantized
from ..layer.holding import holding_of
from ..layer.packed_weight import PackedWeight, as_parameter
from .apart import Apart
from .hub import WEIGHT, HubFormat, HubFP8
from .loading_errors import keeping_errors
from .shares import gathered_rows, pack_share
from .state import check_shape, local_shape

# DeepSeek-V4's names of scales, and those that we go by
SHORT_NAMES = (r"^(.+)(?<!_l2_clip)\.scale$", r"\1.weight_scale_inv")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LOADS_HUB_FORMATS = hasattr(HfQuantizer, "get_new_dtype")  # since 5.19: it casts nothing on its own


class _TakeExperts(ConversionOps):
    """A packed weight of what a checkpoint has of its experts, in its format or in another that the quantizer wants."""

    def __init__(self, hf_quantizer, format: HubFormat, sources: list[str]):
        self.hf_quantizer = hf_quantizer  # by this name Transformers knows that it must not cast
        self.format, self.sources = format, sources

    @keeping_errors
    def convert(self, input_dict, *, full_layer_name, model, **kwargs):
        module, name = get_module_from_name(model, full_layer_name)
        wanted, holding = self.hf_quantizer.quantization_config.experts, holding_of(module)
        dense, first = getattr(module, name), holding.experts.start
        order = "concatenated" if len(self.sources) > 1 else "whole"
        is_plain = self._is_plain(input_dict)
        if wanted == self.format.name and not is_plain:
            parts = self._parts(input_dict, full_layer_name, dense, first)
            packed = self._joined(parts, full_layer_name, dense, first)
            return {full_layer_name: as_parameter(PackedWeight.of(packed, wanted, dense.dtype))}

        def pack(mean=torch.mean):
            if is_plain:
                plain = Apart(input_dict[f"{source}$"] for source in self.sources)
                check_shape(full_layer_name, plain.shape, dense)
                return plain.packed(wanted, dense.dtype, order, mean)
            values = (values.to(dense.dtype) for values in self._values(input_dict, full_layer_name, dense, first))
            device = next(tensor.device for tensors in input_dict.values() for tensor in tensors)
            packed = FORMATS[wanted].pack(values, local_shape(dense), order, mean, device)
            return PackedWeight(packed, wanted, dense.dtype)

        if holding.group is None:
            return {full_layer_name: as_parameter(pack())}
        device = next(tensor.device for tensors in input_dict.values() for tensor in tensors)
        return {full_layer_name: as_parameter(pack_share(wanted, pack, local_shape(dense), device, holding))}

    def _is_plain(self, input_dict) -> bool:
        """Tell whether the checkpoint has these experts in floats, as a layer that its modules_to_not_convert names."""
        beside = {name for source in self.sources for name in self.format.names(source)} - {*self.sources}
        weights = [tensor for source in self.sources for tensor in input_dict.get(f"{source}$", ())]
        is_packed = any(input_dict.get(f"{name}$") for name in beside) or not weights
        return not is_packed and all(tensor.dtype in FLOATS for tensor in weights)

    def _values(self, input_dict, layer: str, dense: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
        """Yield the values [N, K] of each expert."""
        if self.format.name not in FORMATS:
            stored = [self._stored(input_dict, source, layer, dense) for source in self.sources]
            for number, expert in enumerate(zip(*stored), first):
                try:
                    yield torch.cat([self.format.dense(*tensors) for tensors in expert])
                except CheckpointError as error:
                    raise CheckpointError(f"{layer}, expert {number}: {error}") from error
            return
        for number, expert in enumerate(zip(*self._parts(input_dict, layer, dense, first)), first):
            joined = self._joined([[part] for part in expert], layer, dense, number)
            yield FORMATS[self.format.name].expert(joined, 0)

    def _parts(self, input_dict, layer: str, dense: torch.Tensor, first: int) -> list[list[Quantized]]:
        """Return the experts as the checkpoint has them, [part][expert], of a weight that stands for a dense one on the
        meta device. first: the first of the layer's experts that is here."""
        parts = [self._part(input_dict, source, layer, dense, first) for source in self.sources]
        alike = parts[0][0]
        for source, experts in zip(self.sources, parts):
            for expert, part in enumerate(experts, first):
                if _kinds(part) != _kinds(alike):
                    raise CheckpointError(
                        f"{layer}, {source} of expert {expert}: its weight and scales are stored as {_kinds(part)}, "
                        f"others of this layer as {_kinds(alike)}"
                    )
        return parts

    def _joined(self, parts: list[list[Quantized]], layer: str, dense: torch.Tensor, first: int) -> Quantized:
        """Join experts from the `first` on, all or some of those of a weight that stands for `dense`."""
        packed, format = self.format.join(parts), FORMATS[self.format.name]
        format.check(layer, packed, first)
        check_shape(layer, (local_shape(dense)[0], *format.shape(packed)[1:]), dense)
        return packed

    def _stored(self, input_dict, source: str, layer: str, dense: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Return the tensors that store a projection of each expert."""
        there = [name for name in self.format.optional_names(source) if input_dict.get(f"{name}$")]
        by_name = {name: input_dict.get(f"{name}$", []) for name in [*self.format.names(source), *there]}
        num_experts, module = local_shape(dense)[0], source.removesuffix(WEIGHT)
        if {len(found) for found in by_name.values()} != {num_experts}:
            counts = ", ".join(f"{len(found)} {name.removeprefix(module)}" for name, found in by_name.items())
            raise CheckpointError(
                f"{layer}: weights or scales of {source} are missing, or there are too many: of {num_experts} experts "
                f"the checkpoint has {counts}"
            )
        return list(zip(*by_name.values()))

    def _part(self, input_dict, source: str, layer: str, dense: torch.Tensor, first: int) -> list[Quantized]:
        packed = []
        for expert, found in enumerate(self._stored(input_dict, source, layer, dense), first):
            try:
                packed.append(self.format.pack(*found))
            except CheckpointError as error:
                raise CheckpointError(f"{layer}, {source} of expert {expert}: {error}") from error
        return packed


def _kinds(part: Quantized) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in part if tensor is not None]


class _TakeDense(ConversionOps):
    """A linear layer's weight in its own dtype, or packed by the quantizer of linear layers."""

    def __init__(self, hf_quantizer, format: HubFormat):
        self.hf_quantizer, self.format = hf_quantizer, format

    @keeping_errors
    def convert(self, input_dict, *, full_layer_name, model, **kwargs):
        module, name = get_module_from_name(model, full_layer_name)
        parameter, stored = getattr(module, name), self.format.names(WEIGHT[1:])
        names = dict.fromkeys([*stored, *self.format.optional_names(WEIGHT[1:]), WEIGHT[1:]])
        by_name = {each: found[0] for each in names if (found := input_dict.get(pattern_of(each)))}
        weight, *others = by_name.values()
        if weight.is_meta:
            return {full_layer_name: torch.empty_like(parameter, device="meta")}
        is_packed = weight.dtype not in FLOATS
        missing = [each for each in stored if each not in by_name] if is_packed else []
        if missing or (bool(others) and not is_packed):
            scales = len(by_name.keys() & {*stored[1:]})
            raise CheckpointError(
                f"{full_layer_name} is {weight.dtype} with {scales} of {len(stored) - 1} scales; the checkpoint is "
                "incomplete"
            )
        try:
            dense = self._dense(weight, others, parameter) if is_packed else weight
        except CheckpointError as error:
            raise CheckpointError(f"{full_layer_name}: {error}") from error
        if is_packed and not bool(torch.isfinite(dense).all()):
            raise CheckpointError(f"{full_layer_name} or its scales have NaN or infinite values")
        dense, linear = dense.to(parameter.dtype), self.hf_quantizer.linear
        if linear is not None and linear.param_needs_quantization(model, full_layer_name):
            operation = linear.get_quantize_ops()
            return operation.convert({full_layer_name: dense}, full_layer_name=full_layer_name, model=model, **kwargs)
        return {full_layer_name: dense}

    def _dense(self, weight: torch.Tensor, others: list[torch.Tensor], parameter) -> torch.Tensor:
        if not hasattr(parameter, "device_mesh"):
            return self.format.dense(weight, *others)
        if isinstance(self.format, HubFP8):
            return dense_rows(self.format, weight, others[0], parameter)
        if weight.dtype == torch.int32:
            raise CheckpointError(
                "ranks share a linear layer that the checkpoint packs in integers, which cannot be cut; leave out "
                "fsdp_size, or load it once on one rank and save_pretrained it, which makes linear layers dense"
            )
        return self.format.dense(weight, *others)


def pattern_of(name: str) -> str:
    """Return the pattern of tensors of this name in any module. Names that do not begin with "weight" are whole ones."""
    return f"{name}$" if name.startswith(WEIGHT[1:]) else rf"(?<=\.){name}$"


def dense_rows(format: HubFP8, weight: torch.Tensor, scales: torch.Tensor, parameter) -> torch.Tensor:
    """Return a rank's rows of a sharded weight. Transformers cuts the scales into as many parts as the weight, but blocks
    need not end where parts do."""
    rows = parameter.shape[0]
    _, ((num_blocks, _), _) = format.stored("", parameter.shape).values()
    whole, first = gathered_rows(scales, num_blocks, parameter)
    return format.dense_rows(weight, whole, rows, first)


def with_hub_converters(conversions: list, hf_quantizer, format: HubFormat) -> list:
    """Return Transformers' conversions of a model, changed so that experts stay packed and the rest becomes dense."""
    return [
        *([WeightRenaming(*SHORT_NAMES)] if isinstance(format.linear, HubFP8) else []),
        *(_of_experts(converter, hf_quantizer, format) for converter in conversions),
        WeightConverter(
            [*map(pattern_of, _all_names(format.linear, WEIGHT[1:])), *(f"{end[1:]}$" for end in format.unused)],
            WEIGHT[1:],
            [_TakeDense(hf_quantizer, format.linear)],
        ),
    ]


def _all_names(format: HubFormat, weight: str) -> list[str]:
    """Return the names of what may store a weight, also where it is in floats."""
    return list(dict.fromkeys([*format.names(weight), *format.optional_names(weight), weight]))


def _of_experts(converter, hf_quantizer, format: HubFormat):
    if not isinstance(converter, WeightConverter):
        return converter
    sources, targets = converter._original_source_patterns, converter._original_target_patterns
    if len(targets) != 1 or not re.search(r"experts\.\w+$", targets[0]) or not all(map(_is_weight, sources)):
        return converter
    patterns = [f"{name}$" for source in sources for name in _all_names(format, source)]
    patterns += [f"{source.removesuffix(WEIGHT)}{end}$" for source in sources for end in format.unused]
    return WeightConverter(patterns, targets[0], [_TakeExperts(hf_quantizer, format, sources)])


def _is_weight(source: str) -> bool:
    return source.endswith(WEIGHT)
