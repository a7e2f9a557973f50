"""patch_model / unpatch_model: Transformers models with SonicMoE experts, whose routers follow a policy.

Experts are patched at once (patching/patch.py). What a router does beside top-k has hooks of its own (routing/hooks.py),
from when it is asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ..layer.config import TokenRounding, as_routing_policy
from ..patching.guard import remove_installed
from ..patching.layer_ranges import collapse
from ..patching.moe_layers import transformers_model
from ..patching.patch import patch_experts, unpatch_experts
from ..patching.support import LayerSupport
from ..private import attributes
from ..routing.patched_model import set_policy
from ..routing.support import undo_liger_and_check_policy, with_rounding_reasons


class PatchReport(NamedTuple):
    """The report of patch_model. Printed, it says which layers are patched and by which routing.

    layers: as `supports` gives them, with the reason where token rounding does not work. routing: the policy in force;
    None: top-k.
    """

    layers: list[LayerSupport]
    routing: TokenRounding | None

    def __str__(self):
        routing = "top-k"
        if self.routing is not None:
            policy = replace(self.routing, tile=self.routing.tile_rows)
            routing = f"{policy} in training, top-k in evaluation"
        lines = [f"{len(self.layers)} mixture-of-experts layers patched; routing: {routing}"]
        for layers in collapse(self.layers, {}):
            lines.append(f"  {layers.name} ({layers.support.family or 'no family'}): {layers.support.reason}")
        return "\n".join(lines)


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
    root = transformers_model(model)
    if policy is not None:
        undo_liger_and_check_policy(root, policy)
    layers = patch_experts(model, save=save, experts_memory=experts_memory, experts_compute=experts_compute)
    set_policy(root, policy)
    return PatchReport(with_rounding_reasons(layers, root), policy)


def unpatch_model(model: nn.Module) -> None:
    """Undo patch_model: hooks gone, the experts implementation as it was; the model keeps configs of its own, and experts
    that Liger had bound its forward to keep Transformers'. Does nothing to a model not patched."""
    root = transformers_model(model)
    remove_installed(root, attributes.HOOK)
    unpatch_experts(root)
