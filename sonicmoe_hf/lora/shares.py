"""PEFT's LoRA on a model whose ranks share its experts (our expert parallelism).

Factors of experts are sharded with them: each is a DTensor of which a rank holds its own experts' share, as PEFT's whole
factor has it. Whole factors appear one at a time, where PEFT makes one, and where an adapter is saved or loaded.
The gradient of the mean of all batches' losses is complete when backward returns: experts' factors see all ranks' tokens,
and all other adapters are whole on every rank and averaged over the ranks.

Letters: E experts of the layer, r an adapter's rank. PEFT's private names here are ParamWrapper and, since 0.21,
_reshard_dtensor_values_for_load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import save_and_load
from torch import nn

from ..errors import UnsupportedModelError
from ..kernels.low_rank import a_as_peft, a_of_experts, b_as_peft, b_of_experts
from ..layer.holding import ExpertParallelism, Holder, expert_parallelism, holding_of, mesh_of
from ..private import attributes
from ..private.torch import strided_shard
from ..private.transformers import REPLICATED_HOOK

NOT_MERGED = (
    "adapters of experts {kind} cannot be merged in memory; save the adapter, and merge it into the checkpoint: "
    "sonicmoe-hf merge BASE ADAPTER DST"
)
SIDES = {"lora_A": (a_of_experts, a_as_peft), "lora_B": (b_of_experts, b_as_peft)}  # to [E, ...] and back
_PEFTS_UPDATE = ParamWrapper.update_layer
_PEFTS_DELTA = ParamWrapper.get_delta_weight
_PEFTS_RESHARD: Any = getattr(save_and_load, "_reshard_dtensor_values_for_load", None)  # since 0.21


def own_share(whole: torch.Tensor, side: str, parallelism: ExpertParallelism) -> Any:
    """Take this rank's experts of PEFT's whole factor, as a DTensor of the whole one's shape."""
    from torch.distributed.tensor import DTensor, Shard

    (of_experts, as_peft), holding = SIDES[side], parallelism.holding
    own = as_peft(of_experts(whole, holding.num_experts)[holding.experts])
    placement = Shard(0) if side == "lora_A" else strided_shard(1, whole.shape[1] // holding.num_experts)
    local = own.clone(memory_format=torch.contiguous_format)  # nothing holds the whole factor
    return DTensor.from_local(
        local, parallelism.ep_mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def whole_factor(factor: Any, side: str, parallelism: ExpertParallelism) -> torch.Tensor:
    """Gather PEFT's factor of all experts in the memory of the host. All ranks of the group call it."""
    (of_experts, as_peft), holding = SIDES[side], parallelism.holding
    own = of_experts(factor.to_local().detach(), holding.num_local).contiguous()
    shares = [torch.empty_like(own) for _ in range(holding.size)]
    dist.all_gather(shares, own, group=holding.group)
    return as_peft(torch.cat([share.cpu() for share in shares]))


def _factors(wrapper: Any, prefix: str) -> Iterator[tuple[str, str, Any]]:
    """List (name in a state dict, side, parameter) of the factors of every adapter of a wrapper."""
    for side in SIDES:
        for adapter, linear in getattr(wrapper, side).items():
            yield f"{prefix}{side}.{adapter}.weight", side, linear.weight


def _sharded_factors(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """List (name in a state dict, side, the experts' parallelism) of the factors of experts that ranks share."""
    for prefix, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            parallelism = expert_parallelism(module.get_base_layer())
            if parallelism is not None:
                for name, side, _ in _factors(module, f"{prefix}." if prefix else ""):
                    yield name, side, parallelism


def _take_own_share(wrapper, state_dict, prefix, *_):
    parallelism = cast(
        ExpertParallelism, expert_parallelism(wrapper.get_base_layer())
    )  # ranks share what this is put on
    for name, side, factor in _factors(wrapper, prefix):
        given = state_dict.get(name)
        if given is not None and given.shape == factor.shape and mesh_of(given) is None:
            state_dict[name] = own_share(given.to(factor.device), side, parallelism)


def _update_layer(self, adapter_name, *args, **kwargs):
    """Make the factors of an adapter as ParamWrapper does, for all experts, and keep this rank's."""
    parallelism = expert_parallelism(self.get_base_layer())
    if parallelism is None:
        return _PEFTS_UPDATE(self, adapter_name, *args, **kwargs)
    self.num_experts = parallelism.holding.num_experts
    is_first = not self.lora_A
    result = _PEFTS_UPDATE(self, adapter_name, *args, **kwargs)
    for side in SIDES:
        linear: Any = getattr(self, side)[adapter_name]
        share = own_share(linear.weight.detach(), side, parallelism)
        parallelism.take_values_of_first_rank(share.to_local())
        linear.weight = nn.Parameter(share, requires_grad=linear.weight.requires_grad)
    if is_first:
        self.register_load_state_dict_pre_hook(_take_own_share)
    return result


def _get_delta_weight(self, adapter_name, *args, **kwargs):
    """Form W + BA for merging as ParamWrapper does; raise UnsupportedModelError where ranks share the experts."""
    if holding_of(self.get_base_layer()).by is Holder.EXPERT_PARALLEL:
        raise UnsupportedModelError(NOT_MERGED.format(kind="that ranks share"))
    return _PEFTS_DELTA(self, adapter_name, *args, **kwargs)


def _shares_experts(model: nn.Module) -> bool:
    return any(expert_parallelism(module) is not None for module in model.modules())


def reshard_root(model: nn.Module) -> None:
    """Shard FSDP2's root again, where ranks share experts: after a forward it is whole, and PEFT would freeze what is
    thrown away."""
    modules: Any = model.modules() if _shares_experts(model) else ()
    for module in modules:
        if hasattr(module, "reshard"):
            module.reshard()


def average_other_adapters(model: nn.Module) -> None:
    """Average the adapters that every rank has whole, from the model's next forward on, where ranks share experts."""
    if _shares_experts(model) and not hasattr(model, attributes.HAS_AVERAGED_ADAPTERS):
        setattr(model, attributes.HAS_AVERAGED_ADAPTERS, True)
        model.register_forward_pre_hook(_average_replicated)


@torch.compiler.disable
def _average_replicated(model: nn.Module, args: Any) -> None:
    """Begin each trainable parameter that is whole on every rank alike, and average its gradient from now on."""
    if not torch.is_grad_enabled():
        return
    for parameter in model.parameters():
        is_replicated = parameter.requires_grad and mesh_of(parameter) is None
        if is_replicated and not hasattr(parameter, REPLICATED_HOOK):  # the Trainer's hook does the same
            dist.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(_average_gradient)
            setattr(parameter, REPLICATED_HOOK, True)


def _average_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad /= dist.get_world_size()
    dist.all_reduce(parameter.grad)


def with_whole_factors(model: nn.Module, state_dict: dict[str, Any] | None) -> dict[str, Any] | None:
    """Select the entries of a model's state dict that may belong to an adapter, with the factors of all experts, where
    ranks share these; elsewhere give `state_dict` as it is. Nothing is made whole that is not the adapter's."""
    if not _shares_experts(model):
        return state_dict
    given = _of_adapters(model, model.state_dict() if state_dict is None else state_dict)
    for name, side, parallelism in _sharded_factors(model):
        if mesh_of(given.get(name)) is not None:
            given[name] = whole_factor(given[name], side, parallelism)
    return given


def _of_adapters(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Select the entries of a state dict that may belong to an adapter: no experts, and no frozen weights of sharded
    layers. PEFT makes all that it is given whole, in each rank's memory, before it looks for the adapter."""
    experts = tuple(f"{name}." for name, module in model.named_modules() if expert_parallelism(module) is not None)
    frozen = {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and mesh_of(parameter) is not None and ".layers." in f".{name}"
    }
    return {
        name: tensor
        for name, tensor in state_dict.items()
        if "lora_" in name or not (name.startswith(experts) or name in frozen)
    }


def _reshard_dtensor_values_for_load(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Shard loaded tensors as PEFT does, and leave the factors to `_take_own_share`."""
    ours = {name: state_dict.pop(name) for name, *_ in _sharded_factors(model) if name in state_dict}
    return {**_PEFTS_RESHARD(model, state_dict), **ours}


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """List the replacements by which PEFT makes and loads factors so, as in peft_wrapper.py."""
    yield ParamWrapper, "update_layer", _update_layer
    yield ParamWrapper, "get_delta_weight", _get_delta_weight
    if _PEFTS_RESHARD is not None:
        yield save_and_load, "_reshard_dtensor_values_for_load", _reshard_dtensor_values_for_load
