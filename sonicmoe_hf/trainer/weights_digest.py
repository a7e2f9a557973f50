"""A digest of the experts' weights in every Trainer checkpoint, and what it says about a model that was resumed.

A callback never learns which folder training resumes from, but it is given the folder's trainer_state.json, in which
callbacks may keep a state of their own.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers.utils import logging

from .resume import RESTORED, conversions, expert_weights, restore, whole_model

logger = logging.get_logger(__name__)

DIGEST = "experts_digest"
VALUES_PER_EXPERT = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REMEDY = (
    "call sonicmoe_hf.attach(trainer) before trainer.train(), or load the model from the checkpoint's folder with "
    "from_pretrained"
)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def experts_digest(model: nn.Module | None) -> dict[str, dict[str, str]] | None:
    """{expert weight: {dtype: hash}} of a fixed sample of the values, 8 of each expert, cast to each of three dtypes.

    A model of 48 layers and 128 experts gives 98,304 values, whatever their size. A model resumed in another dtype
    compares equal: its weights are the saved ones, cast. None where checkpoints do not hold the experts whole (PEFT,
    FSDP, ZeRO-3) or there are none.
    """
    model = whole_model(model)
    weights = {} if model is None else expert_weights(model)
    return {name: _hashes(weight.detach()) for name, weight in weights.items() if weight.is_floating_point()} or None


def _hashes(weight: torch.Tensor) -> dict[str, str]:
    places = torch.linspace(0, weight[0].numel() - 1, VALUES_PER_EXPERT, dtype=torch.float64).long()
    columns: tuple[Any, ...] = torch.unravel_index(places.to(weight.device), weight.shape[1:])
    sample = weight[(slice(None), *columns)].cpu()
    return {
        _name(dtype): hashlib.sha256(sample.to(dtype).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for dtype in DTYPES
    }


def saved_digest(stateful_callbacks: Any, step: int) -> dict | None:
    """The digest of that step among the states of callbacks in a trainer_state.json, whichever callback left it there.

    stateful_callbacks: TrainerState's, {a callback's name: its state, or a list of them}; None where there are none. A
    run without our callbacks hands on, in its own checkpoints, the states that it was resumed with.
    """
    for states in (stateful_callbacks or {}).values():
        for state in states if isinstance(states, list) else [states]:
            digest = state.get("attributes", {}).get(DIGEST)
            if digest is not None and digest["step"] == step:
                return digest["weights"]
    return None


def changed_experts(saved: dict, model: nn.Module) -> list[str]:
    """The expert weights of `model` that are not those of a digest, in the dtype that the model has now."""
    weights, now = expert_weights(model), experts_digest(model) or {}
    dtypes = {name: _name(weights[name].dtype) for name in now}
    dtypes = {name: dtype if dtype in now[name] else _name(torch.float32) for name, dtype in dtypes.items()}
    return [name for name in now if name in saved and now[name][dtypes[name]] != saved[name].get(dtypes[name])]


def _can_lose_experts(model: PreTrainedModel) -> bool:
    return bool(conversions(model) and expert_weights(model))


def check_resumed(wrapped: nn.Module, state: TrainerState) -> None:
    """Compare a resumed model with the digest in its checkpoint; warn where the checkpoint has none.

    Raises:
        RuntimeError: the experts are not the checkpoint's.
    """
    model = whole_model(wrapped)
    if state.global_step == 0 or model is None:
        return
    saved = saved_digest(state.stateful_callbacks, state.global_step)
    if saved is None:
        if _can_lose_experts(model) and not hasattr(model, RESTORED):
            logger.warning(
                "sonicmoe_hf: the checkpoint has no digest of the experts, so nobody can say whether they were restored; "
                f"Transformers' Trainer restores weights by name and leaves fused experts as they are: {REMEDY}"
            )
        return
    changed = changed_experts(saved, model)
    if changed:
        raise RuntimeError(
            f"the experts of the resumed model are not the checkpoint's: {len(changed)} of {len(saved)} expert weights "
            f"differ (first: {changed[0]}). Transformers' Trainer restores weights by name and leaves fused experts as "
            f"they are in memory: {REMEDY}"
        )


def restore_best(wrapped: nn.Module, folder: str, at_end_of_training: dict | None) -> None:
    """After load_best_model_at_end: load the best checkpoint's experts where the Trainer left those of the last step.

    at_end_of_training: the digest of the last step, None if unknown. Experts that are neither the best nor the last ones
    are somebody else's doing (an average, say) and stay.
    """
    model = whole_model(wrapped)
    path = Path(folder) / "trainer_state.json"
    if model is None or at_end_of_training is None or not path.is_file():
        return
    best = TrainerState.load_from_json(str(path))
    saved = saved_digest(best.stateful_callbacks, best.global_step)
    if saved is None:
        if _can_lose_experts(model) and getattr(model, RESTORED, None) != folder:
            logger.warning(
                f"sonicmoe_hf: {folder} has no digest of the experts, so nobody can say whether the best model's were "
                f"loaded: {REMEDY}"
            )
        return
    if changed_experts(saved, model) and not changed_experts(at_end_of_training, model):
        restore(model, folder)
        if changed_experts(saved, model):
            raise RuntimeError(
                f"the experts of the best model could not be loaded from {folder}, and the model in memory has the last "
                "step's; load the folder with from_pretrained"
            )
        logger.warning(f"sonicmoe_hf: loaded the best model's experts from {folder}, which the Trainer leaves out")
