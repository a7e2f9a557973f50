"""patch_model / unpatch_model, patch / unpatch, from_pretrained: Transformers models with SonicMoE experts.

The mechanism: (1) experts_implementation = "sonicmoe_hf"; (2) a forward hook on every router, which under token rounding
returns a Routing in place of the indices (every block hands its router's third output to its experts and does nothing
else with it); (3) hooks on the model, which note gradients and padding. No forward is rewritten.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from .config import SAVE_POLICIES, TokenRounding, as_routing_policy, check_choice
from .experts import IMPLEMENTATION
from .hooks import ModelEntryHook, ModelExitHook, PatchState, RouterHook
from .layer_ranges import collapse
from .model_patches import FAMILIES
from .support import (
    LayerSupport,
    UnsupportedModelError,
    check_accelerated,
    check_rounding,
    find_layers,
    load_family_class,
    supports,
)
from .top_k import FastTopKEntry, FastTopKExit

STATE = "_sonicmoe_hf_state"
SAVE = "_sonicmoe_hf_save"
HOOKS = (RouterHook, ModelEntryHook, ModelExitHook, FastTopKEntry, FastTopKExit)


class PatchReport(NamedTuple):
    """What patch_model did: the layers, and the routing policy in force (None: top-k)."""

    layers: list[LayerSupport]
    routing: TokenRounding | None

    def __str__(self):
        routing = "top-k" if self.routing is None else f"{self.routing}, in training"
        lines = [f"{len(self.layers)} mixture-of-experts layers patched; routing: {routing}"]
        for layers in collapse(self.layers, {}):
            lines.append(f"  {layers.name} ({layers.support.family or 'no family'}): {layers.support.reason}")
        return "\n".join(lines)


def _root(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside wrappers (PEFT, DDP, torch.compile)."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(f"{type(model).__name__} holds no Transformers model; pass the PreTrainedModel or its wrapper")


def _state(root: nn.Module) -> PatchState | None:
    return next((vars(module)[STATE] for module in root.modules() if STATE in vars(module)), None)


def _hook_dicts(module: nn.Module):
    return module._forward_hooks, module._forward_pre_hooks


def _has(module: nn.Module, kind: type) -> bool:
    return any(isinstance(hook, kind) for hooks in _hook_dicts(module) for hook in hooks.values())


def _remove_hooks(module: nn.Module) -> None:
    for hooks in _hook_dicts(module):
        for key in [k for k, hook in hooks.items() if isinstance(hook, HOOKS)]:
            del hooks[key]
            for extra in (
                "_forward_pre_hooks_with_kwargs",
                "_forward_hooks_with_kwargs",
                "_forward_hooks_always_called",
            ):
                getattr(module, extra).pop(key, None)


def _mask_position(model: nn.Module) -> int | None:
    """Where `attention_mask` stands among the positional arguments of the model's forward."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return names.index("attention_mask") if "attention_mask" in names else None


def _install(root: PreTrainedModel, state: PatchState) -> None:
    routers = set()
    for layer in find_layers(root):
        if layer.router is not None:
            routers.add(layer.router)
            if not _has(layer.router, RouterHook):
                entry = FastTopKEntry()
                layer.router.register_forward_pre_hook(entry)
                layer.router.register_forward_hook(FastTopKExit(entry), always_call=True)
                hook = RouterHook(layer.family.name, layer.name, layer.experts.config, state)
                layer.router.register_forward_hook(hook)
    for module in root.modules():
        contains_routers = isinstance(module, PreTrainedModel) and not routers.isdisjoint(module.modules())
        if contains_routers and not _has(module, ModelEntryHook):
            module.register_forward_pre_hook(ModelEntryHook(state, _mask_position(module)), with_kwargs=True)
            module.register_forward_hook(ModelExitHook(state))


def patch_model(model: nn.Module, routing=None, *, save: str = "preactivation") -> PatchReport:
    """Make this model compute its experts with SonicMoE.

    Args:
        model: a Transformers model, or one inside PEFT or DDP. Patching again changes the settings.
        routing: None or "top_k"; "token_rounding"; or a `TokenRounding`. Token rounding is active only in training.
        save: what the layers keep for backward, "preactivation" or "input" (see `moe_experts`).
    Returns:
        What was patched.
    Raises:
        UnsupportedModelError: a layer cannot be accelerated, or cannot do the routing asked for; nothing is changed.
    """
    policy = as_routing_policy(routing)
    check_choice("save", save, SAVE_POLICIES)
    root = _root(model)
    layers = check_accelerated(root)
    check_rounding(layers, policy)
    state = _state(root)
    if state is None:
        state = PatchState(root.get_experts_implementation())
        setattr(root, STATE, state)
    root.set_experts_implementation(IMPLEMENTATION)
    _install(root, state)
    for layer in find_layers(root):
        setattr(layer.experts, SAVE, save)
    state.policy = policy
    return PatchReport(layers, policy)


def unpatch_model(model: nn.Module) -> None:
    """Undo patch_model: hooks gone, the experts implementation as it was. Does nothing to a model not patched."""
    root = _root(model)
    state = _state(root)
    if state is None:
        return
    for module in root.modules():
        _remove_hooks(module)
        vars(module).pop(STATE, None)
        vars(module).pop(SAVE, None)
    root.set_experts_implementation(state.previous_implementation)


def patch_state(model: nn.Module) -> PatchState:
    """The state that the model's hooks share.

    Raises:
        ValueError: the model is not patched.
    """
    state = _state(_root(model))
    if state is None:
        raise ValueError(f"{type(_root(model)).__name__} is not patched; call sonicmoe_hf.patch_model(model) first")
    return state


def is_patched(model: nn.Module) -> bool:
    """Whether patch_model was applied to this model."""
    return _state(_root(model)) is not None


def router_hooks(model: nn.Module) -> list[RouterHook]:
    """The router hooks of a patched model, in the order of its layers."""
    return [hook for m in model.modules() for hook in m._forward_hooks.values() if isinstance(hook, RouterHook)]


def start_counting(model: nn.Module) -> None:
    """Have the routers of a patched model count their loads, from zero."""
    for layer in find_layers(_root(model)):
        for hook in () if layer.router is None else layer.router._forward_hooks.values():
            if isinstance(hook, RouterHook):
                hook.load.start(layer.router.num_experts, layer.router.weight.device)  # the weight may be a shard
    patch_state(model).counting = True


def set_routing(model: nn.Module, routing) -> None:
    """Change a patched model's routing policy: None, "top_k", "token_rounding" or a `TokenRounding`.

    Raises:
        ValueError: the model is not patched, or an unknown routing. UnsupportedModelError: a layer cannot do it.
    """
    state, policy = patch_state(model), as_routing_policy(routing)
    check_rounding(supports(_root(model)), policy)
    state.policy = policy


def from_pretrained(
    pretrained_model_name_or_path,
    *args,
    routing=None,
    save: str = "preactivation",
    auto_class=AutoModelForCausalLM,
    **kwargs,
) -> PreTrainedModel:
    """`auto_class.from_pretrained(...)` followed by `patch_model(model, routing, save=save)`.

    Raises:
        ValueError: experts_implementation names another implementation. UnsupportedModelError: as patch_model.
    """
    policy = as_routing_policy(routing)
    asked = kwargs.setdefault("experts_implementation", IMPLEMENTATION)
    if asked != IMPLEMENTATION:
        raise ValueError(
            f"experts_implementation={asked!r} contradicts sonicmoe_hf.from_pretrained; leave it out, or load with "
            f"{auto_class.__name__}.from_pretrained"
        )
    model = auto_class.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
    patch_model(model, policy, save=save)
    return model


class _PatchedPostInit:
    """`post_init` of a family's base class while `patch` is on: Transformers calls it when a model has been built."""

    def __init__(self, routing: TokenRounding | None):
        self.routing = routing

    def __get__(self, instance, owner=None):
        return self if instance is None else lambda: self._run(instance)

    def _run(self, model: PreTrainedModel) -> None:
        PreTrainedModel.post_init(model)
        if next(find_layers(model), None) is not None:
            patch_model(model, self.routing)


_patched_classes: dict[type, _PatchedPostInit] = {}


def patch(families=None, routing=None) -> None:
    """Patch every model of these families (default: all four) that is built from now on, by whatever builds it.

    Use it before something else (TRL, Axolotl) constructs the model. It wins over the experts_implementation given there.

    Raises:
        ValueError: an unknown family, or an unknown routing.
    """
    policy = as_routing_policy(routing)
    names = list(FAMILIES) if families is None else [families] if isinstance(families, str) else list(families)
    for name in names:
        check_choice("family", name, FAMILIES)
    for name in names:
        cls = load_family_class(FAMILIES[name], "pretrained")
        if "post_init" in vars(cls) and cls not in _patched_classes:
            raise UnsupportedModelError(f"{cls.__name__} of this Transformers version has a post_init of its own")
        _patched_classes[cls] = cls.post_init = _PatchedPostInit(policy)


def unpatch() -> None:
    """Undo `patch`. Models built meanwhile stay patched until unpatch_model."""
    for cls in list(_patched_classes):
        del cls.post_init
        del _patched_classes[cls]
