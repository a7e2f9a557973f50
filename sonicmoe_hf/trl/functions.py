"""The functions of TRL that are called or overridden here, checked by their signatures when a trainer is made: one
that TRL calls no longer would stay silent."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any, NamedTuple

from ..private.versions import versions

OLDEST, NEWEST = "1.11", "1.16"  # of TRL, with which these were read
GENERATION = "trl.generation.vllm_generation"
CLIENT = "trl.generation.vllm_client"
TrlClass: Any = object  # the base of our mixins, which stand before a class of TRL's; Any to mypy
ASYNC_GRPO = "trl.experimental.async_grpo.async_grpo_trainer"


class TrlFunction(NamedTuple):
    """A function of TRL. owner: the module, or "module:class", that has it. parameters: the first ones of it."""

    owner: str
    name: str
    parameters: tuple[str, ...]


SYNC = (
    TrlFunction(f"{GENERATION}:VLLMGeneration", "_init_vllm", ("self",)),
    TrlFunction(f"{GENERATION}:VLLMGeneration", "sync_weights", ("self",)),
    TrlFunction(
        f"{GENERATION}:VLLMGeneration", "generate", ("self", "prompts", "images", "num_generations", "profiler")
    ),
    TrlFunction(f"{CLIENT}:VLLMClient", "_post", ("self", "url")),
    TrlFunction(f"{CLIENT}:VLLMClient", "init_communicator", ("self", "device")),
)
SCORING_PARAMETERS = ("self", "model", "input_ids", "attention_mask", "logits_to_keep")
REPLAY = {  # of TRL's GRPOTrainer
    "_generate": ("self", "prompts"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_get_per_token_logps_and_entropies": SCORING_PARAMETERS,
    "compute_loss": ("self", "model", "inputs"),
}
ASYNC = (
    TrlFunction(ASYNC_GRPO, "validate_lora_for_vllm_sync", ("model",)),
    TrlFunction(ASYNC_GRPO, "save_lora_adapter", ("model", "accelerator", "adapter_name", "dest_dir")),
    TrlFunction(f"{ASYNC_GRPO}:AsyncGRPOTrainer", "_sync_weight", ("self",)),
)


def check_functions(functions: tuple[TrlFunction, ...]) -> None:
    """Raise RuntimeError, with the installed versions, where TRL lacks one of these functions or its parameters."""
    for wanted in functions:
        module, _, cls = wanted.owner.partition(":")
        owner = importlib.import_module(module)
        _check(getattr(owner, cls, None) if cls else owner, wanted)


def check_replay_functions(trainer_class: type) -> None:
    """Check, as `check_functions`, the methods of TRL's GRPOTrainer that replay overrides. TRL 1.14 hands the positional
    arguments of one on to two functions, of which each computes logits in its own way."""
    owner = next(
        cls for cls in trainer_class.__mro__ if cls.__module__.startswith("trl.") and "_generate" in vars(cls)
    )
    for name, parameters in REPLAY.items():
        if name == "_get_per_token_logps_and_entropies" and _hands_on(getattr(owner, name, None)):
            for each in ("_full_logits_logps", "_chunked_logps"):
                _check(owner, TrlFunction(owner.__name__, each, parameters))
        else:
            _check(owner, TrlFunction(owner.__name__, name, parameters))


def _hands_on(function: Any) -> bool:
    kinds = [each.kind for each in inspect.signature(function).parameters.values()] if function else []
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _check(owner: Any, wanted: TrlFunction) -> None:
    function = getattr(owner, wanted.name, None)
    parameters = tuple(inspect.signature(function).parameters) if function is not None else None
    if parameters is None or parameters[: len(wanted.parameters)] != wanted.parameters:
        installed, name = versions(), f"{wanted.owner.rpartition(':')[2]}.{wanted.name}"
        raise RuntimeError(
            f"TRL {installed['trl']} has no {name}({', '.join(wanted.parameters)}, ...), which sonicmoe-hf "
            f"{installed['sonicmoe-hf']} needs"
            + (f": its parameters are {', '.join(parameters)}" if parameters is not None else "")
            + f"; install trl>={OLDEST},<={NEWEST}.* or a newer sonicmoe-hf"
        )


def module_with(trainer_class: type, name: str) -> Any:
    """Find TRL's module, of those with a trainer's class and its bases, that has the global `name`; None without one."""
    modules = (sys.modules[cls.__module__] for cls in trainer_class.__mro__ if cls.__module__.startswith("trl."))
    return next((module for module in modules if name in vars(module)), None)
