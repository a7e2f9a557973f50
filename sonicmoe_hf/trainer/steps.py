"""The work that callbacks ask of a model's routers, from the beginning of an optimiser step to its end and no longer."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..private.torch import has_checkpointing, has_compiled_modules
from ..routing.patched_model import find_state, router_hooks, routing_state

WORK = {"policy": "token rounding", "counts_load": "counting", "balancing": "balancing"}
NOT_REPORTED = (
    "a training step ended, and no router of the model has done the {work} that callbacks ask for: the step did not run "
    "the patched model's own layers. If it ran code compiled for another model, something set "
    "torch._dynamo.config.skip_nnmodule_hook_guards to True after patch_model; if it trained another model, give the "
    "Trainer that one"
)


def routers_can_report(model: nn.Module, args: Any) -> bool:
    """Tell whether routers can say that they did their work: torch allows no effects inside a compiled checkpoint."""
    modules = list(model.modules())
    return not (has_checkpointing(modules) and (args.torch_compile or has_compiled_modules(modules)))


def begin_step(model: nn.Module, reports: bool, **settings) -> None:
    """Set these attributes of the model's RoutingState until `end_step`."""
    state = routing_state(model)
    for name, value in settings.items():
        state.step.replaced.setdefault(name, getattr(state, name))
        setattr(state, name, value)
    state.step.reports, state.step.reported = reports, False


def end_step(model: nn.Module) -> None:
    """Put the model's RoutingState back as between steps, after a step that ran to its end.

    Raises:
        RuntimeError: none of the routers has been called in training since it began.
    """
    state = find_state(model)
    if state is None:
        return
    work = [WORK[name] for name in state.step.replaced if getattr(state, name)]
    is_silent = state.step.reports and not state.step.reported
    clear_step(model)
    if work and is_silent and router_hooks(model):
        raise RuntimeError(NOT_REPORTED.format(work=", ".join(work)))


def clear_step(model: nn.Module) -> None:
    """Put the model's RoutingState back as between steps: with the settings from before, and without a last call."""
    state = find_state(model)
    if state is not None:
        vars(state).update(state.between_steps())
