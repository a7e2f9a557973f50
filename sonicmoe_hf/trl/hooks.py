"""The functions of TRL that are called or overridden here, checked by their signatures when a trainer is made: a hook
that TRL no longer calls would be silent."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any, NamedTuple

from ..private.versions import versions

OLDEST, NEWEST = "1.11", "1.16"  # of TRL, with which these were read
GENERATION = "trl.generation.vllm_generation"
CLIENT = "trl.generation.vllm_client"
Theirs: Any = object  # to mypy the class of TRL's that a mixin comes before
ASYNC_GRPO = "trl.experimental.async_grpo.async_grpo_trainer"


class Hook(NamedTuple):
    """A function of TRL. owner: the module, or "module:class", that has it. parameters: the first ones of it."""

    owner: str
    name: str
    parameters: tuple[str, ...]


SYNC = (
    Hook(f"{GENERATION}:VLLMGeneration", "_init_vllm", ("self",)),
    Hook(f"{GENERATION}:VLLMGeneration", "sync_weights", ("self",)),
    Hook(f"{GENERATION}:VLLMGeneration", "generate", ("self", "prompts", "images", "num_generations", "profiler")),
    Hook(f"{CLIENT}:VLLMClient", "_post", ("self", "url")),
    Hook(f"{CLIENT}:VLLMClient", "init_communicator", ("self", "device")),
)
SCORING_PARAMETERS = ("self", "model", "input_ids", "attention_mask", "logits_to_keep")
REPLAY = {  # of TRL's GRPOTrainer
    "_generate": ("self", "prompts"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_get_per_token_logps_and_entropies": SCORING_PARAMETERS,
    "compute_loss": ("self", "model", "inputs"),
}
ASYNC = (
    Hook(ASYNC_GRPO, "validate_lora_for_vllm_sync", ("model",)),
    Hook(ASYNC_GRPO, "save_lora_adapter", ("model", "accelerator", "adapter_name", "dest_dir")),
    Hook(f"{ASYNC_GRPO}:AsyncGRPOTrainer", "_sync_weight", ("self",)),
)


def check_hooks(hooks: tuple[Hook, ...]) -> None:
    """Raise RuntimeError, with the installed versions, where TRL lacks one of these functions or its parameters."""
    for hook in hooks:
        module, _, cls = hook.owner.partition(":")
        owner = importlib.import_module(module)
        _check(getattr(owner, cls, None) if cls else owner, hook)


def check_replay_hooks(trainer_class: type) -> None:
    """Check as `check_hooks` does the methods of TRL's GRPOTrainer that replay overrides. TRL 1.14 hands the positional
    arguments of one on to two functions, of which each computes logits in its own way."""
    owner = next(
        cls for cls in trainer_class.__mro__ if cls.__module__.startswith("trl.") and "_generate" in vars(cls)
    )
    for name, parameters in REPLAY.items():
        if name == "_get_per_token_logps_and_entropies" and _hands_on(getattr(owner, name, None)):
            for each in ("_full_logits_logps", "_chunked_logps"):
                _check(owner, Hook(owner.__name__, each, parameters))
        else:
            _check(owner, Hook(owner.__name__, name, parameters))


def _hands_on(function: Any) -> bool:
    kinds = [each.kind for each in inspect.signature(function).parameters.values()] if function else []
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _check(owner: Any, hook: Hook) -> None:
    function = getattr(owner, hook.name, None)
    found = tuple(inspect.signature(function).parameters) if function is not None else None
    if found is None or found[: len(hook.parameters)] != hook.parameters:
        installed = versions()
        raise RuntimeError(
            f"TRL {installed['trl']} has no {hook.owner.rpartition(':')[2]}.{hook.name}({', '.join(hook.parameters)}, "
            f"...), which sonicmoe-hf {installed['sonicmoe-hf']} needs"
            + (f": its parameters are {', '.join(found)}" if found is not None else "")
            + f"; install trl>={OLDEST},<={NEWEST}.* or a newer sonicmoe-hf"
        )


def builder_of(trainer_class: type, name: str) -> Any:
    """Find the module of TRL in which the constructor of a trainer looks up its global `name`; None without one."""
    modules = (sys.modules[cls.__module__] for cls in trainer_class.__mro__ if cls.__module__.startswith("trl."))
    return next((module for module in modules if name in vars(module)), None)
