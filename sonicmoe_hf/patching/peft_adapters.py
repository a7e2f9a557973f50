"""PEFT's LoRA on experts' parameters, computed by `moe_experts` on the rows. The one module that touches PEFT's private
parts: ParamWrapper (its `_activate_lora`, `num_experts`, `_did_swap_in_out_features`), fsdp_auto_wrap_policy and
get_tp_plan_and_mesh, of PEFT 0.19 to 0.21.

PEFT registers W + BA as a parametrization of the weight around each call of the experts; here the factors are handed to
the experts' forward instead. Imported when PEFT is (registration.py).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from peft.tuners.lora import model as peft_model
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import other as peft_other
from torch import nn

from ..functional import FLOAT_DTYPES
from ..low_rank import LowRank
from .adapters import Given
from .experts import (
    IMPLEMENTATION,
    expert_parallelism,
    experts_facts,
    is_expert_parallel,
    is_tensor_parallel,
    weight_names,
)
from .forwards import why_not_reached

logger = logging.getLogger(__name__)
_PEFTS_ACTIVATE = ParamWrapper._activate_lora
_PEFTS_PLAN: Any = getattr(peft_model, "get_tp_plan_and_mesh", None)  # since 0.21
_PEFTS_POLICY = peft_other.fsdp_auto_wrap_policy
_said: set[str] = set()


def _is_ours(experts: nn.Module) -> bool:
    """Whether a call of these experts reaches sonicmoe_hf."""
    if getattr(getattr(experts, "config", None), "_experts_implementation", None) != IMPLEMENTATION:
        return False
    return torch.compiler.is_compiling() or why_not_reached(experts) is None  # compiled calls are checked by hooks


def _obstacle(wrapper: ParamWrapper, experts: nn.Module) -> str | None:
    """Why we leave this adapter of our experts to PEFT, or None."""
    name = wrapper.parameter_name
    if name not in weight_names(experts):
        return f"{name} is not a weight of the experts' products"
    if wrapper.num_experts == 1:
        return "there is one expert"
    if expert_parallelism(experts) is None and (is_expert_parallel(experts) or is_tensor_parallel(experts)):
        return "the experts are split over ranks"
    dtype = getattr(experts, name).dtype
    return None if dtype in FLOAT_DTYPES else f"{name} is stored as {dtype}"


def _low_rank(wrapper: ParamWrapper, adapter: str, is_transposed: bool) -> LowRank:
    """One adapter: views of lora_A [r*E, .], the expert slowest, and of lora_B [., r*E], the expert fastest."""
    num_experts, rank = wrapper.num_experts, wrapper.r[adapter]
    linear_a: Any = wrapper.lora_A[adapter]
    linear_b: Any = wrapper.lora_B[adapter]
    slow, fast = linear_a.weight, linear_b.weight
    parallelism = expert_parallelism(wrapper.get_base_layer())
    if parallelism is not None:
        # each rank has the gradients of its own experts' factors; ranks with other batches are averaged by whoever
        # averages the other adapters
        slow, fast = parallelism.with_summed_gradient(slow), parallelism.with_summed_gradient(fast)
    a = slow.reshape(num_experts, rank, slow.shape[1])
    b = fast.reshape(fast.shape[0], rank, num_experts).permute(2, 0, 1)
    # PEFT 0.19.0 takes a weight's dimensions the other way round
    if wrapper._did_swap_in_out_features == is_transposed:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    if parallelism is not None:
        a, b = a[parallelism.ranks.experts], b[parallelism.ranks.experts]
    return LowRank(a, b, wrapper.scaling[adapter])


def _activate_lora(self, active_adapters):
    """In place of ParamWrapper's: the context in which a call of the experts computes with these adapters."""
    adapters = [name for name in active_adapters if name in self.lora_A]
    experts = self.get_base_layer()
    if not adapters or not _is_ours(experts):
        return _PEFTS_ACTIVATE(self, active_adapters)
    obstacle = _obstacle(self, experts)
    if obstacle is not None:
        _say(f"{type(experts).__name__}.{self.parameter_name}", obstacle)
        return _PEFTS_ACTIVATE(self, active_adapters)
    is_transposed = experts_facts(experts).layout.startswith("transposed")
    factors = [_low_rank(self, name, is_transposed) for name in adapters]
    return Given(experts, self.parameter_name, factors)


def _say(parameter: str, obstacle: str) -> None:
    if parameter not in _said and not torch.compiler.is_compiling():
        _said.add(parameter)
        logger.warning(
            f"sonicmoe_hf: PEFT itself computes the adapter of {parameter}, forming all adapted weights at each call: "
            f"{obstacle}"
        )


class _ExceptFactors:
    """An auto-wrap policy of FSDP that leaves some modules to the unit around them."""

    def __init__(self, policy, factors: set[nn.Module]):
        self.policy, self.factors = policy, factors

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if not recurse and module in self.factors:
            return False
        return self.policy(module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)


def _fsdp_auto_wrap_policy(model: nn.Module):
    """PEFT's policy makes a unit of every Linear that trains; a ParamWrapper reads its Linears' weights without calling
    them, so they would still be sharded then."""
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    factors = {linear for wrapper in wrappers for linear in (*wrapper.lora_A.values(), *wrapper.lora_B.values())}
    policy = _PEFTS_POLICY(model)
    return _ExceptFactors(policy, factors) if factors else policy


def _get_tp_plan_and_mesh(model: nn.Module, current_key: str):
    """PEFT asks the tensor-parallel plan of the model how to split an adapter, but the plan's rules for experts do not
    count where expert parallelism splits them."""
    plan, mesh = _PEFTS_PLAN(model, current_key)
    if plan is None:
        return plan, mesh
    module: Any = model.get_submodule(current_key.rpartition(".")[0])
    module = module.get_base_layer() if isinstance(module, ParamWrapper) else module
    return (None, None) if getattr(module, "_is_expert_parallel", False) else (plan, mesh)


def install() -> None:
    """Have PEFT's ParamWrapper hand the factors to our experts, its policy for FSDP leave them in their layer, and its
    hooks for tensor parallelism leave them whole under expert parallelism."""
    setattr(ParamWrapper, "_activate_lora", _activate_lora)  # noqa: B010  (mypy refuses an assignment)
    peft_other.fsdp_auto_wrap_policy = _fsdp_auto_wrap_policy
    if _PEFTS_PLAN is not None:
        peft_model.get_tp_plan_and_mesh = _get_tp_plan_and_mesh


install()
