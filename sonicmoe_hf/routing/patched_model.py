"""Routing of a patched model: the settings that its hooks obey, its routers, and what others ask of them."""

from __future__ import annotations

from torch import nn

from ..layer.config import TokenRounding, as_routing_policy
from ..layer.holding import expert_parallelism
from ..patching.moe_layers import every_experts, find_layers, is_patched, transformers_model
from ..private.transformers import parallel_mesh
from .hooks import ModelHook, RouterHook, hook_of, install_hooks, routers
from .state import RoutingState
from .support import undo_liger_and_check_policy


def find_state(model: nn.Module) -> RoutingState | None:
    """Find the settings that the model's hooks share; None where nothing has asked for hooks."""
    hooks = map(hook_of, transformers_model(model).modules())
    return next((hook.state for hook in hooks if isinstance(hook, ModelHook)), None)


def routing_state(model: nn.Module) -> RoutingState:
    """Find the settings that the model's hooks share, or install these hooks.

    Raises:
        ValueError: the model is not patched.
    """
    return find_state(model) or _install(_patched_root(model))


def _patched_root(model: nn.Module) -> nn.Module:
    """Find Transformers' model inside; raise ValueError where it is not patched."""
    root = transformers_model(model)
    if not is_patched(root):
        raise ValueError(f"{type(root).__name__} is not patched; call sonicmoe_hf.patch_model(model) first")
    return root


def _install(root: nn.Module) -> RoutingState:
    """Install the hooks of routing, if they are not there, and return their state."""
    state = find_state(root) or RoutingState()
    install_hooks(root, state)
    return state


def set_policy(root: nn.Module, policy: TokenRounding | None) -> None:
    """Make a patched model route by this policy, which its layers can do. Top-k needs no hooks, unless there are some, or
    ranks share the experts: they exchange their numbers of tokens once for each call of the model."""
    is_shared = any(expert_parallelism(experts) is not None for experts in every_experts(root))
    if policy is not None or is_shared or find_state(root) is not None:
        state = _install(root)
        state.policy = policy
        state.step.replaced.pop("policy", None)


def set_routing(model: nn.Module, routing) -> None:
    """Change a patched model's routing policy: None, "top_k", "token_rounding" or a `TokenRounding`. Liger's change
    of its experts is undone.

    Raises:
        ValueError: the model is not patched, or an unknown routing. UnsupportedModelError: a layer cannot do it.
    """
    root, policy = _patched_root(model), as_routing_policy(routing)
    undo_liger_and_check_policy(root, policy)
    set_policy(root, policy)


def routing_policy(model: nn.Module) -> TokenRounding | None:
    """Get the policy in force; None: top-k."""
    state = find_state(model)
    return None if state is None else state.policy


def check_and_hook_routers(
    model: nn.Module, policy: TokenRounding | None = None, *, remedy: str = "use routing=None"
) -> RoutingState:
    """Undo Liger's change of a patched model's experts, check that every layer supports the policy, and install the hooks
    of its routers and models.

    remedy: what the error says to do where a layer cannot round tokens.

    Raises:
        UnsupportedModelError: a layer cannot. ValueError: the model is not patched.
    """
    root = _patched_root(model)
    undo_liger_and_check_policy(root, policy, remedy)
    return _install(root)


def router_hooks(model: nn.Module) -> list[RouterHook]:
    """List the hooks of a model's routers in use, in the order of its layers."""
    layers = find_layers(transformers_model(model))
    hooks = [hook_of(layer.router) for layer in layers if layer.router is not None]
    return [hook for hook in hooks if hook is not None]


def clear_counts(model: nn.Module) -> None:
    """Undo Liger's change of a patched model's experts, hook its routers, and have them count their loads from zero, once
    they do.

    Raises:
        UnsupportedModelError, ValueError: as `check_and_hook_routers`.
    """
    check_and_hook_routers(model)
    for *_, router in routers(transformers_model(model)):
        hook_of(router).load.start(router.num_experts, router.weight.device)


def ranks_of_batch(model: nn.Module) -> int:
    """Count the ranks that have the same batch: those over which Transformers splits the model by tensor parallelism."""
    mesh = parallel_mesh(transformers_model(model), "tp")
    return 1 if mesh is None else mesh.size()


def is_pipelined(model: nn.Module) -> bool:
    """Tell whether ranks have other layers of this model."""
    return parallel_mesh(transformers_model(model), "pp") is not None
