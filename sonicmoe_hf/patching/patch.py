"""patch_model / unpatch_model: Transformers models with SonicMoE experts.

The mechanism: (1) experts_implementation = "sonicmoe_hf" in the config of every experts module, after the model got
configs of its own; (2) a hook on the model, which checks that calls reach the experts. No forward is rewritten. What a
router does beside top-k has hooks of its own (routing/hooks.py), from when it is asked for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ..formats.quantizer import ignore_packed_in_ddp
from ..formats.refusals import guard_deepspeed
from ..layer.config import COMPUTE_CHOICES, SAVE_POLICIES, TokenRounding, as_routing_policy, check_choice
from ..layer.experts_module import IMPLEMENTATION
from ..private import attributes
from ..private.transformers import experts_implementation, forget_dequantization, set_experts_implementation
from ..routing.model import set_policy  # of the room above, whose only use here this is
from ..streaming.placement import place_experts
from .experts import check_fp8_products, known_facts
from .guard import guard_of, install_guards, remove_hooks
from .layer_ranges import collapse
from .own_configs import use_own_configs
from .support import (
    LayerSupport,
    every_experts,
    find_layers,
    transformers_model,
    undo_liger_and_check,
)
from .unpacked import warn_of_dense_experts


class PatchReport(NamedTuple):
    """The report of patch_model. Printed, it says which layers are patched and by which routing.

    layers: as `supports` gives them. routing: the policy in force; None: top-k.
    """

    layers: list[LayerSupport]
    routing: TokenRounding | None

    def __str__(self):
        routing = "top-k" if self.routing is None else f"{self.routing}, in training"
        lines = [f"{len(self.layers)} mixture-of-experts layers patched; routing: {routing}"]
        for layers in collapse(self.layers, {}):
            lines.append(f"  {layers.name} ({layers.support.family or 'no family'}): {layers.support.reason}")
        return "\n".join(lines)


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


def patch_model(
    model: nn.Module,
    routing=None,
    *,
    save: str = "preactivation",
    experts_memory: str | int | None = None,
    experts_compute: str | None = None,
) -> PatchReport:
    """Make this model compute its experts with SonicMoE.

    Args:
        model: a Transformers model, or one inside PEFT or DDP. Patching again changes the settings. It gets a config of
            its own, so that other models built from the same config object stay as they are.
        routing: None or "top_k"; "token_rounding"; or a `TokenRounding`. Token rounding is active only in training.
        save: what the layers keep for backward, "preactivation" or "input" (see `moe_experts`).
        experts_memory: the experts are frozen, so many bytes of them stay on the GPU ("8GiB", a number, or "auto": what
            the card holds), and the others move to pinned host memory, from where they are copied one layer ahead of
            their use. None: they stay where they are.
        experts_compute: None, or "fp8": experts that are packed as fp8 multiply in FP8 (see `moe_experts`).
    Returns:
        What was patched.
    Raises:
        UnsupportedModelError: a layer cannot be accelerated, or cannot do the routing asked for; nothing is changed, but
            that Liger's forwards of experts are gone.
        UnsupportedExpertsError: experts for host memory are shared or sharded by ranks, or on several devices.
        ValueError: `model` holds several models with experts; experts_memory says no number of bytes; or
            experts_compute="fp8" with experts that are not packed as fp8, or have biases or no gate.
        MemoryError: host memory does not hold the experts.
    """
    policy = as_routing_policy(routing)
    check_choice("save", save, SAVE_POLICIES)
    check_choice("experts_compute", experts_compute, COMPUTE_CHOICES)
    root = transformers_model(model)
    layers = undo_liger_and_check(root, policy)
    if experts_compute is not None:
        for layer in find_layers(root):
            check_fp8_products(layer.experts)
    if experts_memory is not None:
        place_experts(root, experts_memory)
        guard_streamed(root)
    guard = guard_of(root)
    own_configs = {} if guard is None else guard.own_configs
    use_own_configs(model, own_configs)
    forget_dequantization(model)
    _use_our_experts(root, save, experts_compute)
    install_guards(root, own_configs)
    set_policy(root, policy)
    warn_of_dense_experts(root)
    return PatchReport(layers, policy)


def unpatch_model(model: nn.Module) -> None:
    """Undo patch_model: hooks gone, the experts implementation as it was; the model keeps configs of its own, and experts
    that Liger had bound its forward to keep Transformers'. Does nothing to a model not patched."""
    root = transformers_model(model)
    remove_hooks(root)
    experts: Any
    for experts in every_experts(root):
        vars(experts).pop(attributes.SAVE, None)
        vars(experts).pop(attributes.COMPUTE, None)
        vars(experts).pop(attributes.KNOWN_FACTS, None)
        if attributes.UNPATCHED in vars(experts):
            set_experts_implementation(experts.config, vars(experts).pop(attributes.UNPATCHED))


def guard_streamed(model: PreTrainedModel) -> None:
    """Keep DDP and DeepSpeed from experts in host memory."""
    ignore_packed_in_ddp(model)
    guard_deepspeed()
