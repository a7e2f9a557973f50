"""Experts in FP8 and NVFP4 as the hub's checkpoints store them, one tensor for each expert and projection, taken as they
are while they stream in; the linear layers beside them become dense."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from ..errors import CheckpointError
from ..kernels.minifloat import from_e2m1, from_e4m3
from ..kernels.quantized import FP8_BLOCK, SCALE_COLUMNS, Quantized, scales_in_fp32
from ..layer.packed_weight import PackedWeight, as_parameter
from .loading_errors import noted
from .shares import gathered_rows, pack_share, share_of
from .state import check_shape, check_stored, local_shape

FP8_SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)  # what stores them; bytes: E8M0
FP8_ENDS = ("_scale_inv",)  # what follows a weight's name in those of its scales, where linear layers are in FP8
FP4_PAIRS = (torch.int8, torch.uint8)  # what stores two values a byte, the first in its low half
SHORT_NAMES = (
    r"^(.+)(?<!_l2_clip)\.scale$",
    r"\1.weight_scale_inv",
)  # DeepSeek-V4's names of scales, and those that we go by
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WEIGHT = ".weight"  # how the name of a projection's tensor ends


class HubFormat(NamedTuple):
    """How a checkpoint stores a weight [N, K].

    name: in FORMATS. scales: what follows the weight's name in those of its scales. unused: what ends names of tensors
    beside it that are for inference alone. dense: the values in fp32, from the weight and its scales. pack: one expert's
    codes, scales and state.
    """

    name: str
    scales: tuple[str, ...]
    unused: tuple[str, ...]
    dense: Callable[..., torch.Tensor]
    pack: Callable[..., Quantized]


def _checked(tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], what: str) -> torch.Tensor:
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{what} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be {dtypes[0]} of shape {shape}"
        )
    return tensor


def _fp8_scales(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """[ceil(N/128), ceil(K/128)] in fp32, or uint8 of powers of two."""
    _checked(weight, tuple(weight.shape), (torch.float8_e4m3fn,), "an FP8 weight")
    shape = tuple(-(-size // FP8_BLOCK) for size in weight.shape)
    _checked(scale_inv, shape, FP8_SCALES, "the scales (weight_scale_inv)")
    return scale_inv.view(torch.uint8) if scale_inv.dtype.itemsize == 1 else scale_inv.float()


def _dense_fp8(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    return _rows_of_fp8(weight, scales_in_fp32(_fp8_scales(weight, scale_inv)), 0)


def _rows_of_fp8(weight: torch.Tensor, scales: torch.Tensor, first: int) -> torch.Tensor:
    """Some rows of a weight, from the `first` on, by the scales of the whole weight."""
    rows, columns = weight.shape
    by_row = scales[torch.arange(first, first + rows, device=scales.device) // FP8_BLOCK]
    return weight.float() * by_row.repeat_interleave(FP8_BLOCK, 1)[:, :columns]


def _dense_part_of_fp8(weight: torch.Tensor, scale_inv: torch.Tensor, parameter) -> torch.Tensor:
    """A rank's rows of a sharded weight. Transformers cuts the scales into as many parts as the weight, but blocks need
    not end where parts do."""
    whole, first = gathered_rows(scale_inv, -(-parameter.shape[0] // FP8_BLOCK), parameter)
    like_whole = weight.new_empty(parameter.shape, device="meta")
    return _rows_of_fp8(weight, scales_in_fp32(_fp8_scales(like_whole, whole)), first)


def _pack_fp8(weight: torch.Tensor, scale_inv: torch.Tensor) -> Quantized:
    return Quantized(weight.view(torch.uint8), _fp8_scales(weight, scale_inv))


def _pack_fp4(weight: torch.Tensor, scale_inv: torch.Tensor) -> Quantized:
    _checked(weight, tuple(weight.shape), FP4_PAIRS, "an FP4 weight")
    rows, bytes_ = weight.shape
    block = SCALE_COLUMNS["mxfp4"]
    _checked(scale_inv, (rows, 2 * bytes_ // block), (torch.float8_e8m0fnu, torch.uint8), "the scales (scale)")
    return Quantized(weight.view(torch.uint8).unflatten(-1, (-1, block // 2)), scale_inv.view(torch.uint8))


def _check_nvfp4(weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> None:
    _checked(weight, tuple(weight.shape), (torch.uint8,), "an NVFP4 weight")
    rows, bytes_ = weight.shape
    shape = rows, 2 * bytes_ // SCALE_COLUMNS["nvfp4"]
    _checked(scale, shape, (torch.float8_e4m3fn,), "the scales (weight_scale)")
    _checked(scale_2.reshape(-1), (1,), (torch.float32,), "the scale of the tensor (weight_scale_2)")


def _dense_nvfp4(weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    _check_nvfp4(weight, scale, scale_2)
    factors = from_e4m3(scale.view(torch.uint8)) * scale_2.reshape(())
    values = from_e2m1(weight).unflatten(-1, (-1, SCALE_COLUMNS["nvfp4"]))
    return (values * factors.unsqueeze(-1)).flatten(-2)


def _pack_nvfp4(weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> Quantized:
    _check_nvfp4(weight, scale, scale_2)
    return Quantized(weight, scale.view(torch.uint8), scale_2.reshape(1))


HUB_FORMATS = {
    "fp8": HubFormat("fp8", FP8_ENDS, (), _dense_fp8, _pack_fp8),
    "nvfp4": HubFormat(
        "nvfp4", ("_scale", "_scale_2"), (".input_scale", ".k_scale", ".v_scale"), _dense_nvfp4, _pack_nvfp4
    ),
    # DeepSeek-V4's: its FP4 experts are MXFP4 in other words, beside linear layers in FP8
    "mxfp4": HubFormat("mxfp4", FP8_ENDS, (), _dense_fp8, _pack_fp4),
}
CASTS_FP8 = not hasattr(HfQuantizer, "get_new_dtype")


def _joined(parts: list[list[Quantized]], format: str) -> Quantized:
    """One weight of the parts [part][expert], gate and up or down alone, one behind the other."""
    first = parts[0][0].codes
    num_parts, num_experts, rows = len(parts), len(parts[0]), first.shape[0]
    codes = first.new_empty(num_experts, num_parts * rows, *first.shape[1:])
    stacked = [torch.stack([part.scales for part in experts]) for experts in parts]
    for place, experts in enumerate(parts):
        for expert, part in enumerate(experts):
            codes[expert, place * rows : (place + 1) * rows] = part.codes
    if format == "fp8":
        return Quantized(codes, torch.stack(stacked, dim=1).unsqueeze(3))
    if format == "mxfp4":
        return Quantized(codes, torch.cat(stacked, dim=1))
    state = torch.stack([_states(experts) for experts in parts], dim=1)
    return Quantized(codes, torch.cat(stacked, dim=1), state)


def _states(experts: list[Quantized]) -> torch.Tensor:
    return torch.stack([part.state for part in experts if part.state is not None])


class _TakeExperts(ConversionOps):
    """A packed weight of what a checkpoint has of its experts, in its format or in another that the quantizer wants."""

    def __init__(self, hf_quantizer, format: HubFormat, sources: list[str]):
        self.hf_quantizer = hf_quantizer  # by this name Transformers knows that it must not cast
        self.format, self.sources = format, sources

    @noted
    def convert(self, input_dict, *, full_layer_name, model, **kwargs):
        module, name = get_module_from_name(model, full_layer_name)
        wanted, share = self.hf_quantizer.quantization_config.experts, share_of(module, name)
        dense = getattr(module, name)
        first = 0 if share is None else share.experts(local_shape(dense)[0]).start
        order = "concatenated" if len(self.sources) > 1 else "whole"
        is_plain = self._is_plain(input_dict)
        if wanted == self.format.name and not is_plain:
            return {full_layer_name: as_parameter(self._weight(input_dict, full_layer_name, dense, first))}

        def pack(mean=torch.mean):
            if is_plain:
                plain = torch.cat([torch.stack(input_dict[f"{source}$"]) for source in self.sources], dim=1)
                check_shape(full_layer_name, plain, dense)
                return PackedWeight.quantize(plain.to(dense.dtype), wanted, order=order, mean=mean)
            return self._weight(input_dict, full_layer_name, dense, first).requantized(wanted, order, mean)

        if share is None:
            return {full_layer_name: as_parameter(pack())}
        device = next(tensor.device for tensors in input_dict.values() for tensor in tensors)
        return {full_layer_name: as_parameter(pack_share(pack, wanted, dense.shape, device, share))}

    def _is_plain(self, input_dict) -> bool:
        """Whether the checkpoint has these experts in floats, as a layer that its modules_to_not_convert names."""
        has_scales = any(input_dict.get(f"{source}{end}$") for source in self.sources for end in self.format.scales)
        weights = [tensor for source in self.sources for tensor in input_dict.get(f"{source}$", ())]
        return not has_scales and all(tensor.dtype in FLOATS for tensor in weights)

    def _weight(self, input_dict, layer: str, dense: torch.Tensor, first: int) -> PackedWeight:
        """The weight as the checkpoint has it, which stands for a dense one on the meta device. first: which of the
        layer's experts is the first here."""
        parts = [self._part(input_dict, source, layer, dense, first) for source in self.sources]
        alike = parts[0][0]
        for source, experts in zip(self.sources, parts):
            for expert, part in enumerate(experts, first):
                if _kinds(part) != _kinds(alike):
                    raise CheckpointError(
                        f"{layer}, {source} of expert {expert}: its weight and scales are stored as {_kinds(part)}, "
                        f"others of this layer as {_kinds(alike)}"
                    )
        packed, format = _joined(parts, self.format.name), self.format.name
        check_stored(layer, packed, format, first)
        weight = PackedWeight.of(packed, format, dense.dtype)
        check_shape(layer, weight, dense)
        return weight

    def _part(self, input_dict, source: str, layer: str, dense: torch.Tensor, first: int) -> list[Quantized]:
        tensors = [input_dict.get(f"{source}{end}$", []) for end in ("", *self.format.scales)]
        num_experts = local_shape(dense)[0]
        if {len(found) for found in tensors} != {num_experts}:
            counts = ", ".join(f"{len(found)} {WEIGHT}{end}" for end, found in zip(("", *self.format.scales), tensors))
            raise CheckpointError(
                f"{layer}: weights or scales of {source} are missing, or there are too many: of {num_experts} experts "
                f"the checkpoint has {counts}"
            )
        packed = []
        for expert, found in enumerate(zip(*tensors), first):
            try:
                packed.append(self.format.pack(*found))
            except CheckpointError as error:
                raise CheckpointError(f"{layer}, {source} of expert {expert}: {error}") from error
        return packed


def _kinds(part: Quantized) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in part if tensor is not None]


def _uncast(weight: torch.Tensor) -> torch.Tensor:
    """A linear layer's weight as the checkpoint has it: early versions of Transformers cast FP8, without loss."""
    if not CASTS_FP8 or weight.dim() != 2 or not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
        return weight
    for part in (weight[:1], weight):  # most are told apart by their first row
        if not torch.equal(part.to(torch.float8_e4m3fn).to(part.dtype).nan_to_num(), part.nan_to_num()):
            return weight
    return weight.to(torch.float8_e4m3fn) if weight.any() else weight


class _TakeDense(ConversionOps):
    """A linear layer's weight in its own dtype."""

    def __init__(self, hf_quantizer, format: HubFormat):
        self.hf_quantizer, self.format = hf_quantizer, format

    @noted
    def convert(self, input_dict, *, full_layer_name, model, **kwargs):
        module, name = get_module_from_name(model, full_layer_name)
        parameter, ends = getattr(module, name), ("", *self.format.scales)
        tensors = [found[0] for end in ends if (found := input_dict.get(f"{WEIGHT[1:]}{end}$"))]
        if tensors[0].is_meta:
            return {full_layer_name: torch.empty_like(parameter, device="meta")}
        if self.format.scales == FP8_ENDS:
            tensors[0] = _uncast(tensors[0])
        weight, is_split = tensors[0], hasattr(parameter, "device_mesh")
        is_packed = weight.dtype in (torch.float8_e4m3fn, torch.uint8)
        if is_packed != (len(tensors) > 1) or len(tensors) not in (1, len(ends)):
            raise CheckpointError(
                f"{full_layer_name} is {weight.dtype} with {len(tensors) - 1} of {len(ends) - 1} scales"
            )
        try:
            if is_packed and is_split and self.format.name == "fp8":
                dense = _dense_part_of_fp8(weight, tensors[1], parameter)
            else:
                dense = self.format.dense(*tensors) if is_packed else weight
        except CheckpointError as error:
            raise CheckpointError(f"{full_layer_name}: {error}") from error
        if is_packed and not bool(torch.isfinite(dense).all()):
            raise CheckpointError(f"{full_layer_name} or its scales have NaN or infinite values")
        return {full_layer_name: dense.to(parameter.dtype)}


def with_hub_converters(conversions: list, hf_quantizer, format: HubFormat) -> list:
    """Transformers' conversions of a model, with which experts stay packed and the rest becomes dense."""
    return [
        *([WeightRenaming(*SHORT_NAMES)] if format.scales == FP8_ENDS else []),
        *(_of_experts(converter, hf_quantizer, format) for converter in conversions),
        WeightConverter(
            [f"{WEIGHT[1:]}{end}$" for end in ("", *format.scales)] + [f"{end[1:]}$" for end in format.unused],
            WEIGHT[1:],
            [_TakeDense(hf_quantizer, format)],
        ),
    ]


def _of_experts(converter, hf_quantizer, format: HubFormat):
    if not isinstance(converter, WeightConverter):
        return converter
    sources, targets = converter._original_source_patterns, converter._original_target_patterns
    if len(targets) != 1 or not re.search(r"experts\.\w+$", targets[0]) or not all(map(_is_weight, sources)):
        return converter
    patterns = [f"{source}{end}$" for source in sources for end in ("", *format.scales)]
    patterns += [f"{source.removesuffix(WEIGHT)}{end}$" for source in sources for end in format.unused]
    return WeightConverter(patterns, targets[0], [_TakeExperts(hf_quantizer, format, sources)])


def _is_weight(source: str) -> bool:
    return source.endswith(WEIGHT)
