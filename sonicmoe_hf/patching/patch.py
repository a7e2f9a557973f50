"""patch_model / unpatch_model: Transformers models with SonicMoE experts.

The mechanism: (1) experts_implementation = "sonicmoe_hf" in the config of every experts module, after the model got
configs of its own; (2) a forward hook on every router, which under token rounding returns a Routing in place of the
indices (every block hands its router's third output to its experts and does nothing else with it); (3) hooks on the
model, which note gradients and padding. No forward is rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ..formats.quantizer import ignore_packed_in_ddp
from ..formats.refusals import guard_deepspeed
from ..layer.config import COMPUTE as COMPUTE_CHOICES
from ..layer.config import SAVE_POLICIES, TokenRounding, as_routing_policy, check_choice
from ..layer.experts_module import IMPLEMENTATION
from ..model_patches import Family
from ..private import attributes
from ..private.torch import guard_module_hooks
from ..private.transformers import (
    experts_implementation,
    parallel_mesh,
    set_experts_implementation,
)
from ..streaming.placement import place_experts
from . import calls
from .calls import PatchState
from .experts import check_fp8_products, known_facts
from .hooks import ModelHook, RouterHook, check_live, installed, remove_installed
from .layer_ranges import collapse
from .own_configs import use_own_configs
from .support import (
    LayerSupport,
    every_copy,
    every_experts,
    find_layers,
    undo_liger_and_check,
)


class PatchReport(NamedTuple):
    """What patch_model did. Printed, it says which layers are patched and by which routing.

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


def _root(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside wrappers (PEFT, DDP, torch.compile); a model that contains others is one."""
    if isinstance(model, PreTrainedModel):
        return model
    models: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(name.startswith(f"{other}.") for other in models):
            models[name] = module
    if not models:
        raise TypeError(f"{type(model).__name__} holds no Transformers model; pass the PreTrainedModel or its wrapper")
    if len(models) == 1:
        return next(iter(models.values()))
    with_layers = {name: module for name, module in models.items() if any(find_layers(module))}
    if len(with_layers) > 1:
        names = " and ".join(f"{name} ({type(module).__name__})" for name, module in with_layers.items())
        raise ValueError(
            f"{type(model).__name__} holds {len(with_layers)} models with experts: {names}; pass one of them"
        )
    return next(iter((with_layers or models).values()))


def _state(root: nn.Module) -> PatchState | None:
    hooks = map(installed, root.modules())
    return next((hook.state for hook in hooks if isinstance(hook, ModelHook)), None)


def _use_our_experts(root: PreTrainedModel, save: str, compute: str | None) -> None:
    """On every experts module's own config: Transformers' setter asks the source file of the model's class."""
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


def routers(model: nn.Module) -> Iterator[tuple[Family, str, Any]]:
    """Every router of our families, its family and its layer's name; also those that PEFT's modules_to_save keeps and
    does not call now."""
    for layer in find_layers(_root(model), copies=True):
        if layer.family is not None:
            for router in every_copy(getattr(layer.block, layer.family.router_attribute)):
                yield layer.family, layer.name, router


def _install(root: PreTrainedModel, state: PatchState) -> None:
    guard_module_hooks()
    calls.capture()
    for family, layer_name, router in routers(root):
        hook = installed(router)
        if hook is None:
            hook = RouterHook(family.name, layer_name)
            vars(router)[attributes.HOOK] = hook, router.register_forward_hook(hook)
        hook.layer_name, hook.state = layer_name, state
    every = set(every_experts(root))
    for module in root.modules():
        if isinstance(module, PreTrainedModel) and not every.isdisjoint(module.modules()):
            hook = installed(module)
            if hook is None:
                hook = ModelHook()
                before = module.register_forward_pre_hook(hook.enter, with_kwargs=True)
                vars(module)[attributes.HOOK] = (
                    hook,
                    before,
                    module.register_forward_hook(hook.leave, always_call=True),
                )
            hook.bind(state, module)


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
    root = _root(model)
    layers = undo_liger_and_check(root, policy)
    if experts_compute is not None:
        for layer in find_layers(root):
            try:
                check_fp8_products(layer.experts)
            except ValueError as error:
                raise ValueError(f"experts_compute={experts_compute!r} in {layer.name}: {error}") from error
    if experts_memory is not None:
        place_experts(root, experts_memory)
        guard_streamed(root)
    state = _state(root) or PatchState()
    use_own_configs(model, state.configs)
    _use_our_experts(root, save, experts_compute)
    _install(root, state)
    state.policy = policy
    state.before_step.pop("policy", None)
    return PatchReport(layers, policy)


def unpatch_model(model: nn.Module) -> None:
    """Undo patch_model: hooks gone, the experts implementation as it was; the model keeps configs of its own, and experts
    that Liger had bound its forward to keep Transformers'. Does nothing to a model not patched."""
    root = _root(model)
    if _state(root) is None:
        return
    for module in root.modules():
        remove_installed(module)
    experts: Any
    for experts in every_experts(root):
        vars(experts).pop(attributes.SAVE, None)
        vars(experts).pop(attributes.COMPUTE, None)
        vars(experts).pop(attributes.KNOWN_FACTS, None)
        if attributes.UNPATCHED in vars(experts):
            set_experts_implementation(experts.config, vars(experts).pop(attributes.UNPATCHED))


def patch_state(model: nn.Module) -> PatchState:
    """The state that the model's hooks share.

    Raises:
        ValueError: the model is not patched.
    """
    state = _state(_root(model))
    if state is None:
        raise ValueError(f"{type(_root(model)).__name__} is not patched; call sonicmoe_hf.patch_model(model) first")
    return state


def ranks_of_batch(model: nn.Module) -> int:
    """How many ranks have the same batch: those over which Transformers splits the model by tensor parallelism."""
    mesh = parallel_mesh(_root(model), "tp")
    return 1 if mesh is None else mesh.size()


def is_pipelined(model: nn.Module) -> bool:
    """Whether ranks have other layers of this model."""
    return parallel_mesh(_root(model), "pp") is not None


def is_patched(model: nn.Module) -> bool:
    """Whether patch_model was applied to this model."""
    return _state(_root(model)) is not None


def check_routers_live(
    model: nn.Module, policy: TokenRounding | None = None, *, remedy: str = "use routing=None"
) -> None:
    """Check that every layer of a patched model can do what the policy asks, and that every router has its hook.

    remedy: what the error says to do where a layer cannot round tokens.

    Raises:
        UnsupportedModelError: a layer cannot. ValueError: the model is not patched.
        RuntimeError: a router came into the model after patching, without the hook that rounds and counts.
    """
    patch_state(model)
    root = _root(model)
    undo_liger_and_check(root, policy, remedy)
    check_live(root)


def router_hooks(model: nn.Module) -> list[RouterHook]:
    """The hooks of a patched model's routers in use, in the order of its layers, under the names of these layers."""
    hooks = []
    for layer in find_layers(_root(model)):
        hook = None if layer.router is None else installed(layer.router)
        if hook is not None:
            hook.layer_name = layer.name
            hooks.append(hook)
    return hooks


def clear_counts(model: nn.Module) -> None:
    """The routers of a patched model count their loads from zero, once they do.

    Raises:
        UnsupportedModelError, ValueError, RuntimeError: as `check_routers_live`.
    """
    check_routers_live(model)
    for *_, router in routers(model):
        installed(router).load.start(router.num_experts, router.weight.device)


def set_routing(model: nn.Module, routing) -> None:
    """Change a patched model's routing policy: None, "top_k", "token_rounding" or a `TokenRounding`.

    Raises:
        ValueError: the model is not patched, or an unknown routing. UnsupportedModelError: a layer cannot do it.
    """
    state, policy = patch_state(model), as_routing_policy(routing)
    undo_liger_and_check(_root(model), policy)
    state.policy = policy
    state.before_step.pop("policy", None)


def guard_streamed(model: PreTrainedModel) -> None:
    """Keep DDP and DeepSpeed from experts in host memory."""
    ignore_packed_in_ddp(model)
    guard_deepspeed()
