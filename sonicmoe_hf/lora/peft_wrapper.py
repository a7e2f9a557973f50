"""PEFT's LoRA on experts' parameters, computed by `moe_experts` on the rows. PEFT's private parts here, of 0.20 and
0.21: ParamWrapper (its `forward`, `num_experts`), `_check_merge_allowed`, `_inject_parameters`, Linear's
`_cast_input_dtype`, fsdp_auto_wrap_policy and get_tp_plan_and_mesh.

PEFT registers W + BA as a parametrization of the weight around each call of the experts; here the factors are handed to
the experts' forward instead. registration.py puts that in PEFT's place. shares.py has the adapters of experts
that ranks share, whole_adapter.py what concerns those of a whole model.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from peft.config import PeftConfigMixin
from peft.tuners.lora import model as peft_model
from peft.tuners.lora.layer import Linear, LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import other as peft_other
from torch import nn
from transformers import PreTrainedConfig

from ..errors import UnsupportedModelError
from ..layer.adapters_argument import KEYWORD, Adapters
from ..layer.experts_module import IMPLEMENTATION, weight_names
from ..layer.holding import (
    ExpertParallelism,
    Holder,
    expert_parallel_remedy,
    expert_parallelism,
    has_share,
    holding_of,
    mesh_of,
)
from ..layer.packed_weight import PackedWeight
from ..layer.projection import LowRank
from ..patching.forwards import why_not_reached
from ..patching.moe_layers import every_experts
from ..private import attributes
from ..private.torch import call_of
from ..private.transformers import experts_implementation, experts_implementation_at_once
from . import dropout, packed_base, packed_merge, shares, tied_head, whole_adapter

logger = logging.getLogger(__name__)
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DROPPED = (
    "{kind}: a forward pre-hook took their adapters away; have it return the keyword arguments that it gets, of which "
    f"{KEYWORD} is one"
)
_PEFTS_FORWARD = ParamWrapper.forward
_PEFTS_CAST = Linear._cast_input_dtype
_PEFTS_PLAN: Any = getattr(peft_model, "get_tp_plan_and_mesh", None)  # since 0.21
_PEFTS_POLICY = peft_other.fsdp_auto_wrap_policy
_PEFTS_CHECK = peft_model.LoraModel._check_merge_allowed
_PEFTS_SAVE = PeftConfigMixin.save_pretrained
_PEFTS_PARAMETERS = BaseTuner._inject_parameters
_said: set[str] = set()


class _CheckedWrapper(NamedTuple):
    """The result of checking a wrapper and its experts, and what it depends on.

    obstacle: why we leave the adapter to PEFT, or None; parallelism: ours, or None.
    """

    depends_on: tuple
    obstacle: str | None
    parallelism: ExpertParallelism | None


_checked: weakref.WeakKeyDictionary[ParamWrapper, _CheckedWrapper] = weakref.WeakKeyDictionary()


def _base_layer(wrapper: ParamWrapper) -> Any:
    """Get wrapper.get_base_layer(), which takes long; modules that look into others, as FSDP1's do, have a
    __getattr__."""
    module: nn.Module = wrapper
    while (inner := module._modules.get("base_layer")) is not None:
        module = inner
    return module if type(module).__getattr__ is nn.Module.__getattr__ else wrapper.get_base_layer()


def _implementation(experts: Any) -> str | None:
    config = getattr(experts, "config", None)
    if torch.compiler.is_compiling() or not isinstance(config, PreTrainedConfig):
        return experts_implementation(config)
    return experts_implementation_at_once(config)


def _check(wrapper: ParamWrapper, experts: Any, depends_on: tuple = ()) -> _CheckedWrapper:
    # compiled calls are checked by hooks
    obstacle = None if torch.compiler.is_compiling() else why_not_reached(experts) or _why_not_taken(experts)
    return _CheckedWrapper(depends_on, obstacle or _obstacle(wrapper, experts), expert_parallelism(experts))


def _why_not_taken(experts: Any) -> str | None:
    """Say why the forward that somebody put around the experts' own cannot take adapters; None where it can."""
    forward = vars(experts).get("forward")
    if forward is None:
        return None
    parameters = inspect.signature(forward, follow_wrapped=False).parameters
    if KEYWORD in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return None
    return f"{type(experts).__name__}: the forward around its own hands on no keyword arguments; let it take **kwargs"


def _check_once(wrapper: ParamWrapper, experts: Any) -> _CheckedWrapper:
    """Call `_check`, which takes long, where something has changed since the last call."""
    if torch.compiler.is_compiling():
        return _check(wrapper, experts)
    instance, weight = vars(experts), experts._parameters.get(wrapper.parameter_name)
    if weight is None or "forward" in instance:
        return _check(wrapper, experts)
    depends_on = (
        experts,
        type(experts),
        has_share(experts, None),
        instance.get(attributes.PARALLELISM),
        weight.dtype,
    )
    checked = _checked.get(wrapper)
    if checked is None or checked.depends_on != depends_on:
        checked = _checked[wrapper] = _check(wrapper, experts, depends_on)
    return checked


def _check_split(experts: nn.Module, name: str) -> None:
    """Raise UnsupportedModelError where experts are split over ranks and nobody can adapt their parameter `name`: PEFT
    has none for a rank's shard."""
    holder = holding_of(experts).by
    if holder is Holder.EXPERT_PARALLEL and name not in weight_names(experts):
        reason = (
            "under expert parallelism adapters work on the experts' weights alone; "
            f"leave {name} out of target_parameters"
        )
    elif holder in (Holder.THEIR_EXPERT_PARALLEL, Holder.TENSOR_PARALLEL):
        reason = (
            "adapters of experts do not work under Transformers' own expert and tensor parallelism; "
            f"{expert_parallel_remedy()}, or shard it by FSDP, or adapt no experts: target_parameters=[]"
        )
    else:
        return
    raise UnsupportedModelError(f"{type(experts).__name__}.{name}: {reason}")


def _obstacle(wrapper: ParamWrapper, experts: nn.Module) -> str | None:
    """Tell why we leave this adapter of experts that we compute to PEFT, or None. Raises as `_check_split`."""
    name = wrapper.parameter_name
    _check_split(experts, name)
    if name not in weight_names(experts):
        return f"{name} is not a weight of the experts' products"
    if wrapper.num_experts == 1:
        return "there is one expert"
    dtype = getattr(experts, name).dtype
    return None if dtype in FLOAT_DTYPES else f"{name} is stored as {dtype}"


def _weight(linears: Any, adapter: str) -> Any:
    """Get the weight of a Linear without Module.__getattr__, which takes ten times as long."""
    linear = linears._modules[adapter]
    parameters = linear._parameters
    if "weight" not in parameters:
        return linear.weight
    return parameters["weight"]  # by [], where DeepSpeed's ZeRO-3 gathers it


def _low_rank(wrapper: ParamWrapper, adapter: str, checked: _CheckedWrapper) -> LowRank:
    """Read one adapter of a wrapper, as PEFT stores it."""
    a, b = (_weight(wrapper._modules[name], adapter) for name in ("lora_A", "lora_B"))
    if checked.parallelism is not None:
        a, b = (checked.parallelism.with_mean_gradient(factor.to_local()) for factor in (a, b))
    return LowRank(a, b, wrapper.scaling[adapter])


def _adapters(wrapper: ParamWrapper, experts: Any) -> list[LowRank]:
    """Select the wrapper's active adapters, where our experts compute with them; none where PEFT does, or nobody."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    factors: Any = wrapper._modules["lora_A"]
    names = [name for name in wrapper.active_adapters if name in factors._modules]
    if not names:
        return []
    checked = _check_once(wrapper, experts)
    if checked.obstacle is not None:
        _say(f"{type(experts).__name__}.{wrapper.parameter_name}", checked.obstacle)
        return []
    return [_low_rank(wrapper, name, checked) for name in names]


def _forward(self, x, *args, **kwargs):
    """Call the experts as ParamWrapper.forward does, with the active adapters beside their arguments where they
    compute these, those of wrappers inside this one too. Of two adapters of one weight a wrapper further out counts.

    Raises RuntimeError where a hook of the experts takes the adapters away."""
    experts = _base_layer(self)
    is_ours = not kwargs.get("adapter_names") and _implementation(experts) == IMPLEMENTATION
    adapters = _adapters(self, experts) if is_ours else []
    if not adapters:
        return _PEFTS_FORWARD(self, x, *args, **kwargs)
    wrapper, handed = self, kwargs.setdefault(KEYWORD, Adapters())
    while adapters:
        handed.by_weight.setdefault(wrapper.parameter_name, adapters)
        wrapper = wrapper.base_layer
        call = call_of(wrapper)
        adapters = _adapters(wrapper, experts) if getattr(call, "__func__", None) is _forward else []
    output = call(x, *args, **kwargs)
    if not handed.are_taken:
        raise RuntimeError(DROPPED.format(kind=type(experts).__name__))
    return output


def _say(parameter: str, obstacle: str) -> None:
    if parameter not in _said and not torch.compiler.is_compiling():
        _said.add(parameter)
        logger.warning(
            f"sonicmoe_hf: PEFT itself computes the adapter of {parameter}, forming all adapted weights at each call: "
            f"{obstacle}"
        )


def _fsdp_auto_wrap_policy(model: nn.Module):
    """Keep PEFT's policy from making a unit of a ParamWrapper's Linears, as of every Linear that trains: the wrapper
    reads their weights without calling them, so they would still be sharded then."""
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    factors = {linear for wrapper in wrappers for linear in (*wrapper.lora_A.values(), *wrapper.lora_B.values())}
    policy = _PEFTS_POLICY(model)

    def policy_without_factors(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return (recurse or module not in factors) and policy(
            module, recurse=recurse, nonwrapped_numel=nonwrapped_numel
        )

    return policy_without_factors if factors else policy


def _get_tp_plan_and_mesh(model: nn.Module, current_key: str):
    """Answer PEFT, which reads from the model's tensor-parallel plan how to split an adapter: the plan's rules for
    experts do not count where expert parallelism splits them. Raises as `_check_split`: PEFT comes here before it
    makes an adapter."""
    prefix, _, name = current_key.rpartition(".")
    module: Any = model.get_submodule(prefix)
    module = module.get_base_layer() if isinstance(module, ParamWrapper) else module
    if name in module._parameters and _implementation(module) == IMPLEMENTATION:
        _check_split(module, name)
    return (None, None) if holding_of(module).is_share else _PEFTS_PLAN(model, current_key)


def _check_merge_allowed(self) -> None:
    """Refuse a merge in memory before it begins, as LoraModel's method does: else all but the experts would be merged by
    the time that their error comes. Once nothing refuses it, do what merging needs of the whole model."""
    has_shares = any(expert_parallelism(module) is not None for module in self.model.modules())
    for module in self.model.modules():
        if isinstance(module, LoraLayer) and module.lora_A:  # active or not: PEFT does not say which it merges
            reason = _why_not_merged(module) if isinstance(module, ParamWrapper) else None
            if has_shares and mesh_of(getattr(module.get_base_layer(), "weight", None)) is not None:
                reason = "that ranks share, and of layers that they shard beside them,"
            if reason is not None:
                raise UnsupportedModelError(shares.NOT_MERGED.format(kind=reason))
    packed_merge.name_weights(self.model)
    if not _has_our_experts(self.model):
        _PEFTS_CHECK(self)
        return
    with tied_head.without_warning(self.model):
        _PEFTS_CHECK(self)
    tied_head.untie_adapted_head(self.model)


def _has_our_experts(model: nn.Module) -> bool:
    return any(_implementation(experts) == IMPLEMENTATION for experts in every_experts(model))


def _why_not_merged(wrapper: ParamWrapper) -> str | None:
    """Say which experts an adapter cannot be merged into in memory; None of others."""
    experts: Any = wrapper.get_base_layer()
    weight, is_packed = getattr(experts, wrapper.parameter_name), packed_merge.packed_weight(wrapper) is not None
    if not is_packed and holding_of(experts).by is Holder.EXPERT_PARALLEL:
        return "that ranks share"
    if not is_packed:
        return "in host memory" if isinstance(weight, PackedWeight) else None
    is_one_copy = getattr(getattr(weight, "layer", None), "has_one_copy", False)
    return "in host memory that ranks share" if is_one_copy else None


def _cast_input_dtype(self, x, dtype):
    """Cast the input of an adapter as LoRA's Linear does, but not to fp32 where autocast casts it back to what it was;
    backward would cast the gradient twice, too."""
    if x is not None and not (x.is_meta or self.lora_variant):  # the meta device has no autocast
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype == torch.get_autocast_dtype(kind):
            return x
    return _PEFTS_CAST(self, x, dtype)


def _inject_parameters(self, peft_config, model, **options):
    """Adapt parameters as BaseTuner does, without the dropout of linear layers where some are of our experts."""
    if _has_our_experts(model):
        peft_config = dropout.without_dropout(peft_config)
    return _PEFTS_PARAMETERS(self, peft_config=peft_config, model=model, **options)


def _save_pretrained(self, save_directory, **kwargs):
    """Save an adapter's config as PEFT does, with what its packed base was, and a dropout that PEFT loads."""
    mapping = packed_base.with_packing(self, kwargs.pop("auto_mapping_dict", None) or self.auto_mapping)
    config, mapping = dropout.config_to_save(self, mapping)
    return _PEFTS_SAVE(config, save_directory, auto_mapping_dict=mapping, **kwargs)


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield (where it stands, its name, what stands there instead) of each function of PEFT's that registration.py
    replaces.

    ParamWrapper then hands the factors to our experts, Linear casts no input twice, the policy for FSDP leaves them in
    their layer, the hooks for tensor parallelism leave them alone under expert parallelism, merging asks first whether it
    can, unties a head that is adapted and rounds packed experts by their dither, dropout is of linear layers alone, a
    config is saved with its base's packing, `whole_adapter` makes adapters and collects them, and `shares` shards
    factors."""
    yield ParamWrapper, "forward", _forward
    yield Linear, "_cast_input_dtype", _cast_input_dtype
    yield peft_model.LoraModel, "_check_merge_allowed", _check_merge_allowed
    yield ParamWrapper, "merge", packed_merge.merge
    yield ParamWrapper, "unmerge", packed_merge.unmerge
    yield BaseTuner, "_inject_parameters", _inject_parameters
    yield PeftConfigMixin, "save_pretrained", _save_pretrained
    yield peft_other, "fsdp_auto_wrap_policy", _fsdp_auto_wrap_policy
    if _PEFTS_PLAN is not None:
        yield peft_model, "get_tp_plan_and_mesh", _get_tp_plan_and_mesh
    yield from whole_adapter.replacements()
    yield from shares.replacements()
