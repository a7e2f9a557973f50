"""Transformers' FP8Experts, which a load without us makes of an FP8 checkpoint: their bytes taken as packed weights, in
their place, so that state dicts and save_pretrained stay what they were."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedExpertsError
from ..formats import PACKED
from ..kernels.quantized import FP8_BLOCK, Quantized, stored_shapes
from ..layer.experts_module import IMPLEMENTATION, has_gate
from ..layer.packed_weight import PackedWeight, as_parameter
from ..private import attributes
from ..private.transformers import fp8_experts_functions
from ..streaming.weight import HostWeight
from .experts import sonicmoe_hf_experts_forward

WEIGHTS = {"gate_up_proj": "concatenated", "down_proj": "whole"}  # name: order of ORDERS
SCALES = "_scale_inv"  # what follows a weight's name in that of its scales
FORMAT_OF = {torch.float8_e4m3fn: "fp8", torch.int8: "mxfp4"}  # dtype of the values; int8 are pairs of E2M1


def why_not_taken(experts: Any) -> str | None:
    """Why the weights of an FP8Experts cannot be taken as packed ones; None where they can or are."""
    if attributes.FP8_PARAMETERS in vars(experts):
        return None
    if experts.activation_scheme != "dynamic":
        return (
            f"activation_scheme is {experts.activation_scheme!r}, scales of activations that only FP8 arithmetic uses"
        )
    if not has_gate(experts):
        return "it has no gate, and such experts are taken from the checkpoint alone"
    for name in WEIGHTS:
        weight, scales = getattr(experts, name, None), getattr(experts, name + SCALES, None)
        if weight is None or scales is None:
            return f"it has no {name if weight is None else name + SCALES}"
        if type(weight) is not nn.Parameter or weight.is_meta:
            return f"its {name} is {'on the meta device' if weight.is_meta else 'sharded'}"
        if weight.dtype not in FORMAT_OF:
            return f"its {name} is stored as {weight.dtype}"
        if weight.dtype == torch.float8_e4m3fn and list(experts.block_size or ()) != [FP8_BLOCK, FP8_BLOCK]:
            return f"block_size is {experts.block_size}, not ({FP8_BLOCK}, {FP8_BLOCK})"
        try:
            _packed(name, weight.detach(), scales.detach())
        except ValueError as error:
            return str(error)
    return None


def _packed(name: str, weight: torch.Tensor, scales: torch.Tensor) -> Quantized:
    """The same bytes as a packed weight's. Raises ValueError where the scales are not those of its blocks."""
    num_experts, rows, columns = weight.shape
    columns *= 2 if weight.dtype == torch.int8 else 1
    try:
        shapes = stored_shapes(FORMAT_OF[weight.dtype], (num_experts, rows, columns), WEIGHTS[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    experts, *blocks, last = shapes.scales
    wanted = experts, math.prod(blocks), last
    if tuple(scales.shape) != wanted:
        raise ValueError(
            f"{name}{SCALES} has shape {tuple(scales.shape)}, where blocks that do not cross from gate to up have "
            f"{wanted}"
        )
    stored = scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales.float()
    return Quantized(weight.view(torch.uint8).view(shapes.codes), stored.view(shapes.scales))


def _sound(experts: Any, name: str, dtype: torch.dtype) -> PackedWeight:
    weight, scales = getattr(experts, name).detach(), getattr(experts, name + SCALES).detach()
    packed, format = _packed(name, weight, scales), FORMAT_OF[weight.dtype]
    PACKED[format].check(name, packed)
    return PackedWeight.of(packed, format, dtype)


def take_weights(every: Iterable[tuple[str, Any]], dtype: torch.dtype) -> None:
    """Have these FP8Experts (name, module) hold what they hold as packed weights of `dtype`, without a copy.

    Raises:
        UnsupportedExpertsError: a scale or a value is not finite; nothing is changed.
    """
    found = []
    for place, experts in every:
        if attributes.FP8_PARAMETERS not in vars(experts):
            try:
                found.append((experts, {name: _sound(experts, name, dtype) for name in WEIGHTS}))
            except ValueError as error:
                raise UnsupportedExpertsError(f"{place}: {error}") from error
    if found:
        fp8_experts_functions().register(IMPLEMENTATION, sonicmoe_hf_experts_forward)
    for experts, weights in found:
        taken = {}
        for name, packed in weights.items():
            weight, scales = getattr(experts, name), getattr(experts, name + SCALES)
            taken[name] = weight.dtype, tuple(weight.shape), weight.requires_grad, scales.requires_grad
            scales.requires_grad_(False)
            setattr(experts, name, as_parameter(packed))
        before = experts.register_load_state_dict_pre_hook(_read)
        vars(experts)[attributes.HOOK] = None, before, experts.register_state_dict_post_hook(_write)
        setattr(experts, attributes.FP8_PARAMETERS, taken)


def give_back_weights(experts: nn.Module) -> None:
    """Undo `take_weights`, but for its hooks; nothing where it was not called."""
    for name, (dtype, shape, requires_grad, of_scales) in vars(experts).pop(attributes.FP8_PARAMETERS, {}).items():
        weight: Any = getattr(experts, name)
        weight = weight.resident() if isinstance(weight, HostWeight) else weight
        values = weight.codes.view(shape).view(dtype)
        setattr(experts, name, nn.Parameter(values, requires_grad))
        getattr(experts, name + SCALES).requires_grad_(of_scales)


def _write(experts, state_dict, prefix, local_metadata):
    for name, (dtype, shape, *_) in vars(experts)[attributes.FP8_PARAMETERS].items():
        if isinstance(weight := state_dict.get(prefix + name), PackedWeight):
            state_dict[prefix + name] = weight.codes.view(shape).view(dtype)


def _read(experts, state_dict, prefix, *_):
    for name in vars(experts)[attributes.FP8_PARAMETERS]:
        values, scales = (state_dict.get(prefix + name + end) for end in ("", SCALES))
        own = experts._parameters[name]
        if isinstance(own, PackedWeight) and values is not None and scales is not None:
            packed = _packed(name, values, scales)
            PACKED[own.format].check(prefix + name, packed)
            state_dict[prefix + name] = PackedWeight.of(packed, own.format, own.dtype)
