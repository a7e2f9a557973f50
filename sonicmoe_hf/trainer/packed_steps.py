"""Micro-batches of an optimiser step computed together: padding left out, one row of sequences after one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.functional import pad
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from ..layer.holding import expert_parallelism
from ..patching.support import every_experts
from ..routing.model import find_state
from .few_lengths import aligned_length, few_length, why_not_plain
from .methods import find_callback, wrap_method

logger = logging.get_logger(__name__)

PROBE_TOKENS = 8
LEAK = 2e-2  # of logits' norm: bf16 rounds to 0.4%, and other tokens in the same attention move it by tens of percent
REMEDY = "leave packed_tokens of attach(trainer) out"


class Row(NamedTuple):
    """Sequences after one another: the model's inputs, and which tokens are no padding [1, N]."""

    inputs: dict[str, Any]
    token_mask: torch.Tensor


class PackedSteps(TrainerCallback):
    """Computes the micro-batches of an optimiser step as rows of at most `max_tokens` tokens.

    The Trainer still counts each micro-batch, and the first ones of a row have no loss of their own: the last one's is
    the sum of all. Where a loss is the sum over the step's tokens divided by their number, that is what they add up to.
    """

    def __init__(self, max_tokens: int):
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(
                f"packed_tokens is {max_tokens!r}; give the largest number of tokens of a row, such as 8192"
            )
        self.max_tokens, self.few_lengths = max_tokens, False
        self.has_probed = False
        self.later: set[int] = set()  # ids of micro-batches that a later one's row holds
        self.rows: dict[int, Row] = {}  # by the id of the last micro-batch of each

    def on_train_begin(self, args, state, control, **kwargs):
        """Forget a run that ended inside a step."""
        self.has_probed = False
        self.later, self.rows = set(), {}

    def arrange(self, trainer: Any, batches: list, num_items: Any) -> None:
        """Make the rows of a step."""
        self.later, self.rows = set(), {}
        if len(batches) < 2 or num_items is None:
            return
        reason = next((why for batch in batches if (why := why_not_plain(batch)) is not None), None)
        if reason is None:
            facts = torch.stack([_facts(batch) for batch in batches]).tolist()
            if not all(is_packable for _, is_packable in facts):
                reason = "padding comes before tokens, or has labels"
        if reason is not None:
            logger.warning_once(
                f"sonicmoe_hf: micro-batches are computed one by one, as without packed_tokens: {reason}"
            )
            return
        group: list = []
        tokens = 0
        for batch, (count, _) in zip(batches, facts):
            if group and tokens + count > self.max_tokens:
                self._add(group)
                group, tokens = [], 0
            group.append(batch)
            tokens += count
        self._add(group)

    def check(self, trainer: Any) -> None:
        """Check, inside a step, that its micro-batches may be packed."""
        check_routers(trainer.model)
        if not self.has_probed:
            check_steps(trainer)
            check_rows_apart(trainer.model)
            self.has_probed = True

    def _add(self, group: list) -> None:
        if len(group) > 1:
            self.later |= {id(batch) for batch in group[:-1]}
            row = packed(group)
            tokens = row["input_ids"].shape[1]
            wanted = few_length(tokens) if self.few_lengths else aligned_length(tokens)
            self.rows[id(group[-1])] = filled(row, max(tokens, min(wanted, self.max_tokens)))


def has_packed_steps(trainer: Any, max_tokens: int | None, few_lengths: bool) -> bool:
    """Pack a Trainer's steps in rows of at most `max_tokens` tokens, if given, and tell whether they are packed."""
    callbacks = trainer.callback_handler.callbacks
    if max_tokens is not None:
        callbacks[:] = [each for each in callbacks if not isinstance(each, PackedSteps)] + [PackedSteps(max_tokens)]
    callback = find_callback(trainer, PackedSteps)
    if callback is None:
        return False
    callback.few_lengths = few_lengths
    wrap_method(trainer, "training_step", packed_step)
    return True


def packed(batches: list[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Make one row of batches [B, L] that are padded at the end: input_ids, labels and position_ids [1, N].

    The first label of each sequence is -100, since no token of its own predicts it.
    """
    rows: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "position_ids": []}
    for batch in batches:
        ids, labels, is_token = batch["input_ids"], batch["labels"].clone(), _is_token(batch)
        labels[:, 0] = -100
        positions = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device).expand_as(ids)
        for name, values in (("input_ids", ids), ("labels", labels), ("position_ids", positions)):
            rows[name].append(values[is_token])
    # with a cache Transformers takes no notice of sequences in a row
    return {name: torch.cat(values)[None] for name, values in rows.items()} | {"use_cache": False}


def filled(row: dict[str, Any], length: int) -> Row:
    """Add tokens to a row without labels, as a sequence of its own: attention that keeps sequences apart by position_ids
    takes no mask of padding beside them."""
    ids = row["input_ids"]
    more = length - ids.shape[1]
    columns = {name: row[name] for name in ("input_ids", "labels", "position_ids")}
    columns = {name: pad(column, (0, more), value=-100 * (name == "labels")) for name, column in columns.items()}
    columns["position_ids"][0, ids.shape[1] :] = torch.arange(more, dtype=torch.int64, device=ids.device)
    return Row({**row, **columns}, pad(torch.ones_like(ids), (0, more)))


def check_steps(trainer: Any) -> None:
    """Check what a Trainer's loss and ranks need so that rows give the gradients of micro-batches.

    Raises:
        ValueError: they would differ, or ranks with different numbers of rows would wait for each other.
    """
    reasons = {
        "the loss is not the Trainer's own": type(trainer).compute_loss is not Trainer.compute_loss,
        "compute_loss_func may not be a sum over tokens": trainer.compute_loss_func is not None,
        "label_smoothing_factor is another loss": trainer.label_smoother is not None,
        "the model's loss is a mean of each micro-batch": not trainer.model_accepts_loss_kwargs,
    }
    model = trainer.accelerator.unwrap_model(trainer.model)
    records = getattr(model.config.get_text_config(), "output_router_logits", False)
    reasons["the auxiliary loss is not a sum over tokens (output_router_logits)"] = records
    kinds = DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU
    shared = any(expert_parallelism(experts) is not None for experts in every_experts(model))
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    reasons["ranks with different numbers of rows would wait for each other"] = (
        trainer.accelerator.distributed_type not in kinds or shared or parallelism is not None
    )
    _refuse(reasons)


def check_routers(model: nn.Module) -> None:
    """Check what callbacks ask of a model's routers in this step.

    Raises:
        ValueError: it depends on which tokens are computed together.
    """
    state = find_state(model)
    if state is not None:
        balances = state.balancing is not None and bool(state.balancing.loss_weight)
        rounds = state.policy is not None
        _refuse(
            {
                "the balancing loss is not a sum over tokens": balances,
                "token rounding depends on which tokens are computed together": rounds,
            }
        )


@torch.no_grad()
def check_rows_apart(model: Any) -> None:
    """Check, by two forwards of a few random tokens, that a sequence's logits are the same whatever comes before it.

    Raises:
        ValueError: they are not. Linear attention, convolutions and attention without position_ids reach over borders.
    """
    device, was_training = next(model.parameters()).device, model.training
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(size, (3, PROBE_TOKENS), generator=generator, dtype=torch.int64, device="cpu").to(device)
    rows = (torch.cat([ids[first], ids[2]])[None] for first in (0, 1))
    positions = torch.arange(PROBE_TOKENS, dtype=torch.int64, device=device).repeat(2)[None]
    model.eval()
    try:
        first, second = (
            model(input_ids=row, position_ids=positions, use_cache=False).logits[0, PROBE_TOKENS:].float()
            for row in rows
        )
    finally:
        model.train(was_training)
    change = ((first - second).norm() / first.norm()).item()
    if not change <= LEAK:
        raise ValueError(
            f"micro-batches cannot be packed: tokens of one sequence change the logits of the next one in its row by "
            f"{change:.0%} in {type(model).__name__}, as linear attention, convolutions and attention "
            f"{model.config._attn_implementation!r} without regard to position_ids do; {REMEDY}"
        )


def packed_step(trainer: Any, training_step, model, inputs, *args, **kwargs):
    """Call `trainer.training_step` with the row that a micro-batch is the last of; others have no loss."""
    callback = find_callback(trainer, PackedSteps)
    if callback is not None and (id(inputs) in callback.later or id(inputs) in callback.rows):
        callback.check(trainer)
    if callback is not None and id(inputs) in callback.later:
        return torch.zeros((), dtype=torch.float32, device=trainer.args.device)
    row = None if callback is None else callback.rows.pop(id(inputs), None)
    if row is None:
        return training_step(model, inputs, *args, **kwargs)
    state = find_state(trainer.model)
    if state is not None:
        state.token_mask = row.token_mask
    try:
        return training_step(model, row.inputs, *args, **kwargs)
    finally:
        if state is not None:
            state.token_mask = None


def _refuse(reasons: dict[str, bool]) -> None:
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise ValueError(f"micro-batches cannot be packed: {reason}; {REMEDY}")


def _is_token(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def _facts(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute (the tokens that are no padding, whether padding comes after them and has no labels) as int64 [2]."""
    is_token = _is_token(batch)
    is_last = (is_token[:, 1:] <= is_token[:, :-1]).all()
    has_no_labels = (is_token | (batch["labels"] == -100)).all()
    return torch.stack([is_token.sum(), (is_last & has_no_labels).long()])
