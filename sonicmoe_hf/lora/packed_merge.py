"""Adapters of packed experts merged in memory, where PEFT's merge_and_unload and merge_adapter get to them.

W + sum of s B A is dithered in the format that W has, to the codes that `merge_adapter` writes of the same files. Ranks
that share experts round their own, by the numbers that these have among all.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from ..errors import UnsupportedModelError
from ..kernels.low_rank import by_expert
from ..kernels.packed import FORMATS
from ..kernels.packed.dither import Dither
from ..kernels.packed.format import in_fp32
from ..layer.experts_module import is_transposed
from ..layer.holding import Holder, holding_of, local_tensor
from ..layer.packed_weight import PackedWeight
from ..patching.moe_layers import WRAPPERS
from .dithering import dither_of
from .factors import Factors

NOT_UNMERGED = (
    "adapters merged into packed experts cannot be taken out again, since what rounding did is not kept; load the base "
    "and the adapter anew"
)
NOT_NAMED = "adapters of packed experts are merged by their model: call its merge_and_unload or merge_adapter"
_dithers: weakref.WeakKeyDictionary[nn.Module, Dither] = weakref.WeakKeyDictionary()  # by wrapper
_PEFTS_MERGE, _PEFTS_UNMERGE = ParamWrapper.merge, ParamWrapper.unmerge


def packed_weight(wrapper: ParamWrapper) -> PackedWeight | None:
    """Find the packed weight that a wrapper adapts; None of a dense one."""
    weight = getattr(wrapper.get_base_layer(), wrapper.parameter_name)
    return weight if isinstance(weight, PackedWeight) and weight.format else None


def name_weights(model: nn.Module) -> None:
    """Note by which names the packed weights of a Transformers model with adapters are dithered."""
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper) and packed_weight(module) is not None:
            name = WRAPPERS.sub("", f"{name}.{module.parameter_name}")  # which files do not have
            _dithers[module] = dither_of(name, module.get_base_layer(), seed=0)


def merge(wrapper: ParamWrapper, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
    """Merge adapters as ParamWrapper.merge does. Raises ValueError where a sum is not finite, and the weight stays."""
    weight = packed_weight(wrapper)
    if weight is None:
        return _PEFTS_MERGE(wrapper, safe_merge=safe_merge, adapter_names=adapter_names)
    if wrapper not in _dithers:
        raise UnsupportedModelError(NOT_NAMED)
    names = [name for name in check_adapters_to_merge(wrapper, adapter_names) if name in wrapper.lora_A]
    if names:
        _add(weight, [_factors(wrapper, name, len(weight)) for name in names], wrapper)
        wrapper.merged_adapters.extend(names)


def unmerge(wrapper: ParamWrapper) -> None:
    """Unmerge as ParamWrapper.unmerge does. Raises UnsupportedModelError where the weight is packed."""
    if wrapper.merged and packed_weight(wrapper) is not None:
        raise UnsupportedModelError(NOT_UNMERGED)
    _PEFTS_UNMERGE(wrapper)


def _factors(wrapper: ParamWrapper, adapter: str, num_experts: int) -> Factors:
    """View an adapter's A [E, r, in] and B [E, out, r] of all experts."""
    sides: Any = wrapper.lora_A, wrapper.lora_B
    a, b = (local_tensor(side[adapter].weight.detach()) for side in sides)
    a, b = by_expert(a, b, num_experts)
    return Factors(a, b, wrapper.scaling[adapter])


@torch.no_grad()
def _add(weight: PackedWeight, adapters: list[Factors], wrapper: ParamWrapper) -> None:
    experts = wrapper.get_base_layer()
    assert weight.is_transposed == is_transposed(experts)
    format, holding = FORMATS[weight.format], holding_of(experts)
    first = holding.experts.start if holding.by is Holder.EXPERT_PARALLEL else 0
    packed: Any = weight.resident()
    for expert in range(len(weight)):
        exact = format.expert(packed.packed, expert)
        for factors in adapters:
            own = factors.expert(expert)
            exact = own._replace(a=own.a.to(exact), b=own.b.to(exact)).product().add_(exact)
        uniform = _dithers[wrapper].uniform(first + expert, exact.shape, exact.device)
        rounded = format.round_expert(packed.packed, expert, in_fp32(exact), uniform)
        packed.codes[expert], packed.scales[expert] = rounded.codes, rounded.scales
    weight.copy_(packed)
