"""patch_experts / unpatch_experts: Transformers models with SonicMoE experts.

The mechanism: (1) experts_implementation = "sonicmoe_hf" in the config of every experts module, after the model got
configs of its own; (2) a hook on the model, which checks that calls reach the experts. No forward of a block is
rewritten; indexers of sparse attention run theirs for some queries at a time (attention/indexers.py), and attention that
counts keys from a row's start one packed sequence at a time (attention/boundaries.py).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..attention.indexers import leave_our_forwards, use_our_forwards
from ..formats.distribution_checks import guard_deepspeed
from ..formats.quantizer import ignore_packed_in_ddp
from ..layer.config import COMPUTE_CHOICES, SAVE_CHOICES, check_choice
from ..layer.experts_module import IMPLEMENTATION
from ..private import attributes
from ..private.transformers import experts_implementation, forget_dequantization, set_experts_implementation
from ..streaming.placement import place_experts
from .adopted import adopt_experts, release_experts
from .beside_bitsandbytes import warn_of_dense_experts
from .experts import check_fp8_products, known_facts
from .guard import guard_of, install_guards, remove_installed
from .moe_layers import every_experts, find_layers, transformers_model
from .own_configs import use_own_configs
from .support import LayerSupport, undo_liger_and_check


def _use_our_experts(root: PreTrainedModel, save: str, compute: str | None) -> None:
    """Set our implementation on every experts module's own config: Transformers' setter would ask the source file of the
    model's class."""
    every: list[Any] = every_experts(root)
    before = {
        id(experts.config): vars(experts)[attributes.UNPATCHED]
        for experts in every
        if attributes.UNPATCHED in vars(experts)
    }
    for experts in every:
        implementation = experts_implementation(experts.config)
        setattr(experts, attributes.UNPATCHED, before.setdefault(id(experts.config), implementation))
        setattr(experts, attributes.SAVE, save)
        setattr(experts, attributes.COMPUTE, compute)
    for experts in every:
        set_experts_implementation(experts.config, IMPLEMENTATION)
        known_facts(experts)  # compiled code looks at what is kept, and else at all that it follows from


def patch_experts(
    model: nn.Module,
    *,
    save: str = "preactivation",
    experts_memory: str | int | None = None,
    experts_compute: str | None = None,
) -> list[LayerSupport]:
    """Make a Transformers model compute its experts with SonicMoE, as `patch_model` says, whatever routes to them.

    Returns:
        What was patched, as `supports` gives it.
    """
    check_choice("save", save, SAVE_CHOICES)
    check_choice("experts_compute", experts_compute, COMPUTE_CHOICES)
    root = transformers_model(model)
    layers = undo_liger_and_check(root)
    if experts_compute is not None:
        for layer in find_layers(root):
            check_fp8_products(layer.experts)
    if experts_memory is not None:
        place_experts(root, experts_memory)
        guard_streamed(root)
    adopt_experts(root)  # once nothing is refused
    guard = guard_of(root)
    own_configs = {} if guard is None else guard.own_configs
    use_own_configs(model, own_configs)
    forget_dequantization(model)
    _use_our_experts(root, save, experts_compute)
    install_guards(root, own_configs)
    use_our_forwards(root)
    warn_of_dense_experts(root)
    return layers


def unpatch_experts(root: PreTrainedModel) -> None:
    """Undo patch_experts."""
    remove_installed(root, attributes.GUARD)
    leave_our_forwards(root)
    experts: Any
    for experts in every_experts(root):
        vars(experts).pop(attributes.SAVE, None)
        vars(experts).pop(attributes.COMPUTE, None)
        vars(experts).pop(attributes.KNOWN_FACTS, None)
        if attributes.UNPATCHED in vars(experts):
            set_experts_implementation(experts.config, vars(experts).pop(attributes.UNPATCHED))
    release_experts(root)


def guard_streamed(model: PreTrainedModel) -> None:
    """Keep DDP and DeepSpeed from experts in host memory."""
    ignore_packed_in_ddp(model)
    guard_deepspeed()
