"""patch_model / unpatch_model, patch / unpatch, from_pretrained: Transformers models with SonicMoE experts.

The mechanism: (1) experts_implementation = "sonicmoe_hf" in the config of every experts module, after the model got
configs of its own; (2) a forward hook on every router, which under token rounding returns a Routing in place of the
indices (every block hands its router's third output to its experts and does nothing else with it); (3) hooks on the
model, which note gradients and padding. No forward is rewritten.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..attention.models import NAME as ATTENTION
from ..attention.models import runs_here as attention_runs_here
from ..errors import UnsupportedModelError
from ..formats.loading_errors import named_errors
from ..formats.quantizer import ignore_packed_in_ddp
from ..formats.refusals import guard_deepspeed
from ..layer.config import COMPUTE as COMPUTE_CHOICES
from ..layer.config import SAVE_POLICIES, TokenRounding, as_routing_policy, check_choice
from ..layer.experts_module import IMPLEMENTATION
from ..model_patches import FAMILIES, Family
from ..private.torch import forward_hooks, forward_pre_hooks, guard_module_hooks, remove_hooks
from ..private.transformers import (
    experts_implementation,
    loaded_one_by_one,
    parallel_mesh,
    set_experts_implementation,
)
from ..streaming.placement import LoadingPlacement, check_memory, place_experts
from . import calls
from .calls import PatchState
from .experts import COMPUTE, KNOWN, SAVE, is_fp8_experts
from .forwards import restore
from .fp8_experts import give_back_weights, take_weights
from .hooks import FirstUseHook, ModelEntryHook, ModelExitHook, RouterHook, check_live, find_hook
from .layer_ranges import collapse
from .own_configs import use_own_configs
from .quantize import check_not_packed, config_for, with_packed_experts
from .ranks import check_ranks
from .support import (
    REMEDIES,
    LayerSupport,
    every_copy,
    every_experts,
    experts_and_wrappers,
    find_layers,
    load_family_class,
    undo_liger_and_check,
)

PREVIOUS = "_sonicmoe_hf_previous"  # attribute of experts: their config's implementation before patching
HOOKS = (RouterHook, FirstUseHook, ModelEntryHook, ModelExitHook)


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
    entries = (find_hook(forward_pre_hooks(module), ModelEntryHook) for module in root.modules())
    return next((entry.state for entry in entries if entry is not None), None)


def _remove_hooks(module: nn.Module, kinds: tuple[type, ...]) -> None:
    remove_hooks(module, lambda hook: isinstance(hook, kinds))


def _parameters(model: nn.Module) -> list[str]:
    """The names of the parameters of the model's forward."""
    return list(inspect.signature(type(model).forward).parameters)[1:]


def _use_our_experts(root: PreTrainedModel, save: str, compute: str | None) -> None:
    """On every experts module's own config: Transformers' setter asks the source file of the model's class."""
    every: list[Any] = every_experts(root)
    before = {id(experts.config): vars(experts)[PREVIOUS] for experts in every if PREVIOUS in vars(experts)}
    for experts in every:
        implementation = experts_implementation(experts.config)
        setattr(experts, PREVIOUS, before.setdefault(id(experts.config), implementation))
        setattr(experts, SAVE, save)
        setattr(experts, COMPUTE, compute)
        _remove_hooks(experts, (FirstUseHook,))
        experts.register_forward_hook(FirstUseHook("forward" in vars(experts)))
    root.get_correct_experts_implementation(IMPLEMENTATION)  # tells registration.py of the model
    for experts in every:
        set_experts_implementation(experts.config, IMPLEMENTATION)


def _fp8_experts(root: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in root.named_modules() if is_fp8_experts(module)]


def _dtype(root: PreTrainedModel) -> torch.dtype:
    """What the model computes in: the dtype of the first of its parameters that no quantizer stores."""
    dtypes = (parameter.dtype for name, parameter in root.named_parameters() if not name.endswith("_scale_inv"))
    return next((dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1), torch.bfloat16)


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
        hook = find_hook(forward_hooks(router), RouterHook)
        if hook is None:
            hook = RouterHook(family.name, layer_name)
            router.register_forward_hook(hook)
        hook.layer_name = layer_name
        hook.join(state)
    every = set(every_experts(root))
    for name, module in root.named_modules():
        if isinstance(module, PreTrainedModel) and not every.isdisjoint(module.modules()):
            if find_hook(forward_pre_hooks(module), ModelEntryHook) is None:
                module.register_forward_pre_hook(ModelEntryHook(_parameters(module)), with_kwargs=True)
                module.register_forward_hook(ModelExitHook(), always_call=True)
            find_hook(forward_pre_hooks(module), ModelEntryHook).join(state, name)
            find_hook(forward_hooks(module), ModelExitHook).join(state, name)


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
            its own, so that other models built from the same config object stay as they are. Experts that Transformers
            loaded in FP8 (its FP8Experts, with blocks of 128 x 128) or in DeepSeek-V4's FP4 stay in these bytes, frozen.
        routing: None or "top_k"; "token_rounding"; or a `TokenRounding`. Token rounding is active only in training.
        save: what the layers keep for backward, "preactivation" or "input" (see `moe_experts`).
        experts_memory: the experts are frozen, so many bytes of them stay on the GPU ("8GiB", a number, or "auto": what
            the card holds), and the others move to pinned host memory, from where they are copied one layer ahead of
            their use. None: they stay where they are.
        experts_compute: None, or "fp8": experts that are packed as fp8 multiply in FP8 in forward (see `moe_experts`).
    Returns:
        What was patched.
    Raises:
        UnsupportedModelError: a layer cannot be accelerated, or cannot do the routing asked for; nothing is changed.
        UnsupportedExpertsError: FP8 experts that Transformers loaded have a scale or a value that is not finite; or
            experts for host memory are shared or sharded by ranks, or on several devices.
        ValueError: `model` holds several models with experts; or experts_memory says no number of bytes.
        MemoryError: host memory does not hold the experts.
    """
    policy = as_routing_policy(routing)
    check_choice("save", save, SAVE_POLICIES)
    check_choice("experts_compute", experts_compute, COMPUTE_CHOICES)
    root = _root(model)
    layers = undo_liger_and_check(root, policy)
    fp8_experts = _fp8_experts(root)
    if fp8_experts:
        take_weights(fp8_experts, _dtype(root))
        ignore_packed_in_ddp(root)
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
    """Undo patch_model: hooks gone, the experts implementation and forwards as they were; the model keeps configs of its
    own. Does nothing to a model not patched."""
    root = _root(model)
    if _state(root) is None:
        return
    for module in root.modules():
        _remove_hooks(module, HOOKS)
    for module in experts_and_wrappers(root):
        restore(module)
    experts: Any
    for experts in every_experts(root):
        give_back_weights(experts)
        vars(experts).pop(SAVE, None)
        vars(experts).pop(COMPUTE, None)
        vars(experts).pop(KNOWN, None)
        if PREVIOUS in vars(experts):
            set_experts_implementation(experts.config, vars(experts).pop(PREVIOUS))


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
    check_live(list(find_layers(root)))


def router_hooks(model: nn.Module) -> list[RouterHook]:
    """The hooks of a patched model's routers in use, in the order of its layers, under the names of these layers."""
    hooks = []
    for layer in find_layers(_root(model)):
        hook = None if layer.router is None else find_hook(forward_hooks(layer.router), RouterHook)
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
        find_hook(forward_hooks(router), RouterHook).load.start(router.num_experts, router.weight.device)


def start_counting(model: nn.Module) -> None:
    """Have the routers of a patched model count their loads, from zero. Raises what `clear_counts` does."""
    clear_counts(model)
    patch_state(model).counting = True


def set_routing(model: nn.Module, routing) -> None:
    """Change a patched model's routing policy: None, "top_k", "token_rounding" or a `TokenRounding`.

    Raises:
        ValueError: the model is not patched, or an unknown routing. UnsupportedModelError: a layer cannot do it.
    """
    state, policy = patch_state(model), as_routing_policy(routing)
    undo_liger_and_check(_root(model), policy)
    state.policy = policy
    state.before_step.pop("policy", None)


def from_pretrained(
    pretrained_model_name_or_path,
    *args,
    routing=None,
    save: str = "preactivation",
    experts_quantization: str | None = None,
    experts_memory: str | int | None = None,
    experts_compute: str | None = None,
    auto_class=AutoModelForCausalLM,
    **kwargs,
) -> PreTrainedModel:
    """`auto_class.from_pretrained(...)` followed by `patch_model(model, routing, save=save)`.

    A model with attention sinks gets attn_implementation="torch_sinks" where it runs (docs/attention.md), unless
    attn_implementation is given.

    Args:
        pretrained_model_name_or_path, args, kwargs: as `auto_class.from_pretrained` takes them.
        routing, save: see `patch_model`.
        experts_quantization: "nf4", "mxfp4", "fp8" or "nvfp4": experts are packed and frozen, one weight after the other
            as the checkpoint streams in (see `quantize_experts`). Experts that the checkpoint has in that format (FP8 in
            DeepSeek-V3's blocks of 128 x 128, gpt-oss's MXFP4, ModelOpt's NVFP4) are taken as they are, bit for bit, and
            its linear layers become dense. FP8 experts are packed again if another format is asked for, one expert
            after the other. A BitsAndBytesConfig given as quantization_config is for the linear layers.
        experts_memory: the experts are frozen, so many bytes of them stay on the GPU, and the others live in host memory
            (see `patch_model`), where each weight goes as soon as it is loaded. Without device_map the model is loaded on
            the current GPU, where there is one.
        experts_compute: "fp8" beside experts_quantization="fp8": see `patch_model`.
        auto_class: the Auto class that loads the model.
    Returns:
        The patched model; with output_loading_info=True, (model, what Transformers says of the names).
    Raises:
        ValueError: experts_implementation names another implementation, or the checkpoint is quantized otherwise; or
            experts_compute without experts in FP8.
        UnsupportedModelError: as patch_model; or the checkpoint is in FP8 or NVFP4, and experts_quantization is None; or
            distributed_config has experts shared by ranks whose number does not divide them.
        UnsupportedExpertsError: experts of a size that the format does not take, or that experts_memory does not.
        MemoryError: host memory does not hold the experts.
    """
    policy = as_routing_policy(routing)
    check_choice("experts_compute", experts_compute, COMPUTE_CHOICES)
    if experts_compute == "fp8" and experts_quantization != "fp8":
        raise ValueError(
            f"experts_compute='fp8' takes experts_quantization='fp8', not {experts_quantization!r}; leave it out"
        )
    asked = kwargs.setdefault("experts_implementation", IMPLEMENTATION)
    if asked != IMPLEMENTATION:
        raise ValueError(
            f"experts_implementation={asked!r} contradicts sonicmoe_hf.from_pretrained; leave it out, or load with "
            f"{auto_class.__name__}.from_pretrained"
        )
    if kwargs.get("distributed_config") is not None:
        check_ranks(config_for(pretrained_model_name_or_path, kwargs), kwargs["distributed_config"])
    if experts_quantization is None:
        check_not_packed(pretrained_model_name_or_path, kwargs)
    else:
        kwargs = with_packed_experts(pretrained_model_name_or_path, kwargs, experts_quantization)
    loading = None
    if experts_memory is not None:
        kwargs, loading = with_experts_memory(kwargs, experts_memory)
    with named_errors(), contextlib.nullcontext() if loading is None else loaded_one_by_one(loading.take):
        loaded: Any = auto_class.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
    if experts_quantization is None and not os.path.isdir(pretrained_model_name_or_path):
        check_not_packed(pretrained_model_name_or_path, kwargs)  # now that the hub's files are here
    if any(map(is_fp8_experts, model.modules())):
        raise UnsupportedModelError(f"{pretrained_model_name_or_path} has FP8 experts: {REMEDIES['fp8']}")
    if not _asks_for_attention(kwargs) and attention_runs_here(model):
        model.set_attn_implementation(ATTENTION)
    if loading is not None:
        loading.finish(model)
        guard_streamed(model)
    patch_model(model, policy, save=save, experts_compute=experts_compute)
    return loaded


def with_experts_memory(kwargs: dict[str, Any], experts_memory: str | int) -> tuple[dict[str, Any], LoadingPlacement]:
    """The keyword arguments of from_pretrained(**kwargs) for a model on one device, and what places its experts.

    Raises:
        UnsupportedModelError: ranks share or shard the model. ValueError: experts_memory.
    """
    check_memory(experts_memory)
    if kwargs.get("distributed_config") is not None or is_deepspeed_zero3_enabled():
        raise UnsupportedModelError(
            "experts_memory takes experts that ranks neither share nor shard (distributed_config, DeepSpeed's ZeRO-3); "
            "leave it out, or let each rank hold the whole model (DDP)"
        )
    if kwargs.get("device_map") is None and torch.cuda.is_available():
        kwargs = {**kwargs, "device_map": {"": torch.cuda.current_device()}}
    return kwargs, LoadingPlacement(experts_memory)


def guard_streamed(model: PreTrainedModel) -> None:
    """Keep DDP and DeepSpeed from experts in host memory."""
    ignore_packed_in_ddp(model)
    guard_deepspeed()


def _asks_for_attention(kwargs: dict[str, Any]) -> bool:
    config = kwargs.get("config")
    return kwargs.get("attn_implementation") is not None or getattr(config, "_attn_implementation", None) is not None


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


_patched_classes: dict[type[Any], _PatchedPostInit] = {}


def _is_in_transformers(family: Family) -> bool:
    """Whether this version has the family."""
    folder, _, _ = family.module.rpartition(".")
    return importlib.util.find_spec(folder) is not None


def patch(families=None, routing=None) -> None:
    """Patch every model of these families that is built from now on, by whatever builds it.

    Use it before something else (TRL, Axolotl) constructs the model. It replaces the experts_implementation given there.

    Args:
        families: a name of `model_patches.FAMILIES`, such as "qwen3_moe", or several; None: all of this Transformers
            version.
        routing: see `patch_model`.
    Raises:
        ValueError: an unknown family, or an unknown routing.
    """
    policy = as_routing_policy(routing)
    every = [name for name, family in FAMILIES.items() if _is_in_transformers(family)]
    names = every if families is None else [families] if isinstance(families, str) else list(families)
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
