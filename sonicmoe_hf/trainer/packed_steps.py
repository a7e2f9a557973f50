"""Micro-batches of an optimiser step computed together: padding left out, one row of sequences after one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import TrainerCallback
from transformers.utils import logging

from ..compiling.compiled_module import compiled_modules
from ..errors import UnlikeApartError
from ..kernels.announce import is_first_rank
from ..routing.patched_model import find_state
from .few_lengths import aligned_length, few_length, why_not_plain
from .methods import find_callback
from .packing_checks import check_automatic, check_routers, check_rows_apart, check_steps

logger = logging.get_logger(__name__)

AUTOMATIC_TOKENS = 4096  # of a row: attention with a mask of more takes the GPU longer than it saves the host
PACKED = (
    "sonicmoe_hf: micro-batches of a step are computed as rows without padding, of at most as many tokens as the "
    f"largest so far has with padding, and {AUTOMATIC_TOKENS}; attach(trainer, packed_tokens=False) leaves that out"
)
APART = "sonicmoe_hf: micro-batches of a step are computed one by one, not as rows without padding: {reason}"
PADDED_FIRST = "padding comes before tokens, or has labels"


class Row(NamedTuple):
    """Sequences after one another: the model's inputs, and which tokens are no padding [1, N]."""

    inputs: dict[str, Any]
    token_mask: torch.Tensor


class PackedSteps(TrainerCallback):
    """Computes the micro-batches of an optimiser step as rows. `attach` adds it to a Trainer.

    The Trainer still counts each micro-batch, and the first ones of a row have no loss of their own: the last one's is
    the sum of all. Where a loss is the sum over the step's tokens divided by their number, that is what they add up to.

    Rows have at most as many tokens as `attach` was given. Where it was given none and layers are compiled, they have at
    most as many as the largest micro-batch so far, the step's own included, has with padding, so that they take no
    memory that the run does not take anyway; and what forbids rows is said, not raised. Once a step has needed fewer
    rows than it has micro-batches, or left padding out, all that follow are rows, which run the same compiled code.
    """

    def __init__(self) -> None:
        # as `attach` was given them
        self.packed_tokens: int | None = None
        self.few_lengths: bool | None = None
        self.has_compiled_layers = False
        self._forget_run()
        self._forget_rows()

    def _forget_run(self) -> None:
        self.reason: str | None = None  # why there are no rows in this run
        self.reason_of_batches: str | None = None  # why a step had none, by what is in its batches
        self.checks_passed: set[Callable] = set()
        self.largest = 0  # tokens of a micro-batch, with padding
        self.has_rows = self.has_announced = False

    def _forget_rows(self) -> None:
        self.without_loss: set[int] = set()  # ids of micro-batches in the row of a later one
        self.rows: dict[int, Row] = {}  # by the id of the last micro-batch of each

    def choose(self, packed_tokens: int | None, has_compiled_layers: bool, few_lengths: bool | None) -> None:
        """Choose by what `attach` was given; None leaves what was chosen before."""
        self.packed_tokens = self.packed_tokens if packed_tokens is None else int(packed_tokens)
        self.has_compiled_layers = has_compiled_layers
        self.few_lengths = self.few_lengths if few_lengths is None else few_lengths

    @property
    def is_automatic(self) -> bool:
        """Tell whether rows, which nobody asked for, go with compiled layers."""
        return self.packed_tokens is None and self.has_compiled_layers

    @property
    def is_on(self) -> bool:
        """Tell whether steps are packed, as far as is known."""
        return bool(self.packed_tokens) or (self.is_automatic and self.reason is None)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Forget a run that ended inside a step, and look whether `compile_layers` was called before it."""
        self._forget_run()
        self._forget_rows()
        self.has_compiled_layers = self.has_compiled_layers or (model is not None and bool(compiled_modules(model)))

    def arrange(self, trainer: Any, batches: list, num_items: Any) -> None:
        """Make the rows of a step.

        Raises:
            ValueError: rows were asked for, and would not be as their micro-batches.
        """
        self._forget_rows()
        if max(len(batches), trainer.args.gradient_accumulation_steps) < 2 or not self.is_on:
            return
        max_tokens = self.packed_tokens or AUTOMATIC_TOKENS  # of this run; a row of this step may have fewer at most
        if num_items is None:  # the check says why
            self._allows_rows_once(check_steps, trainer, max_tokens)
            return
        counts, reason = _counts(batches)
        if reason is not None:
            self.reason_of_batches = reason
            if not (self.is_automatic and any("position_ids" in batch for batch in batches)):  # such are rows already
                logger.warning_once(APART.format(reason=reason))
            return
        self.largest = max(self.largest, *(batch["input_ids"].numel() for batch in batches))
        max_row_tokens = min(aligned_length(self.largest), AUTOMATIC_TOKENS) if self.is_automatic else max_tokens
        groups = _group(batches, counts, max_row_tokens)
        has_padding = any(count < batch["input_ids"].numel() for batch, count in zip(batches, counts))
        is_less = has_padding or len(groups) < len(batches)
        if (self.has_rows or is_less) and self._can_pack(trainer, max_tokens):
            self.has_rows = True
            for group in groups:
                self._add(group, max_row_tokens)

    def _can_pack(self, trainer: Any, max_tokens: int) -> bool:
        """Tell whether rows of at most so many tokens, in any step of this run, are as their micro-batches one by one. A
        check that fails raises its error where rows were asked for, and else leaves this run without them."""
        return (
            self._allows_rows_once(check_steps, trainer, max_tokens)
            and (not self.is_automatic or self._allows_rows_once(check_automatic, trainer))
            and self._allows_rows_once(check_rows_apart, trainer.model)
        )

    def keep_or_drop_rows(self, model: Any) -> None:
        """Check inside a step, at a micro-batch of a row, what callbacks ask of the routers in it. Where rows cannot give
        that, drop this step's, and make none in the rest of the run; else say once that there are rows, if nobody asked.

        Raises:
            ValueError: rows were asked for, and cannot give it.
        """
        if not self._allows_rows(check_routers, model):
            self.has_rows = False
            self._forget_rows()
        elif self.is_automatic and not self.has_announced:
            self.has_announced = True
            if is_first_rank():
                logger.warning(PACKED)

    def _allows_rows_once(self, check: Callable, *args) -> bool:
        """Make a check in a run until it allows rows, and tell whether it does."""
        if check not in self.checks_passed and self._allows_rows(check, *args):
            self.checks_passed.add(check)
        return check in self.checks_passed

    def _allows_rows(self, check: Callable, *args) -> bool:
        """Make a check, and tell whether it allows rows. Its error is raised where rows were asked for; else it is said,
        and is the reason why this run makes no further ones."""
        try:
            check(*args)
        except ValueError as error:  # of the model too, which a check calls
            if not self.is_automatic:
                raise
            self.reason = error.reason if isinstance(error, UnlikeApartError) else str(error)
            logger.warning_once(APART.format(reason=self.reason))
            return False
        return True

    def _add(self, group: list, max_tokens: int) -> None:
        """Make a row of these micro-batches, unless it is one that has more tokens."""
        row = packed(group)
        tokens = row["input_ids"].shape[1]
        if tokens <= max_tokens:
            self.without_loss |= {id(batch) for batch in group[:-1]}
            self.rows[id(group[-1])] = filled(row, max(tokens, min(self._length(tokens), max_tokens)))

    def _length(self, tokens: int) -> int:
        """Round a row up. Few lengths come again; more than 4,096 tokens keep the GPU busy, however many they are."""
        has_few = tokens <= AUTOMATIC_TOKENS if self.few_lengths is None else self.few_lengths
        return few_length(tokens) if has_few else aligned_length(tokens)


def packed(batches: list[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Make one row of batches [B, L] that are padded at the end: input_ids, labels and position_ids [1, N].

    The first label of each sequence is -100, since no token of its own predicts it.
    """
    columns: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "position_ids": []}
    for batch in batches:
        ids, labels, is_token = batch["input_ids"], batch["labels"].clone(), _is_token(batch)
        labels[:, 0] = -100
        positions = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device).expand_as(ids)
        for name, values in (("input_ids", ids), ("labels", labels), ("position_ids", positions)):
            columns[name].append(values[is_token])
    # with a cache Transformers takes no notice of sequences in a row
    return {name: torch.cat(values)[None] for name, values in columns.items()} | {"use_cache": False}


def filled(row: dict[str, Any], length: int) -> Row:
    """Add tokens to a row without labels, as a sequence of its own: attention that keeps sequences apart by position_ids
    takes no mask of padding beside them."""
    ids = row["input_ids"]
    more = length - ids.shape[1]
    columns = {name: row[name] for name in ("input_ids", "labels", "position_ids")}
    columns = {name: pad(column, (0, more), value=-100 * (name == "labels")) for name, column in columns.items()}
    columns["position_ids"][0, ids.shape[1] :] = torch.arange(more, dtype=torch.int64, device=ids.device)
    return Row({**row, **columns}, pad(torch.ones_like(ids), (0, more)))


def packed_step(trainer: Any, training_step, model, inputs, *args, **kwargs):
    """Call `trainer.training_step` with the row that a micro-batch is the last of; others have no loss."""
    callback = find_callback(trainer, PackedSteps)
    if callback is None or not (id(inputs) in callback.without_loss or id(inputs) in callback.rows):
        return training_step(model, inputs, *args, **kwargs)
    callback.keep_or_drop_rows(trainer.model)
    if id(inputs) in callback.without_loss:
        return torch.zeros((), dtype=torch.float32, device=trainer.args.device)
    row = callback.rows.pop(id(inputs), None)
    if row is None:  # since this step's routers allow none
        return training_step(model, inputs, *args, **kwargs)
    state = find_state(trainer.model)
    if state is not None:
        state.step.token_mask = row.token_mask
    try:
        return training_step(model, row.inputs, *args, **kwargs)
    finally:
        if state is not None:
            state.step.token_mask = None


def _counts(batches: list) -> tuple[list[int], str | None]:
    """Count the tokens of each micro-batch that are no padding; or say why they can be no rows."""
    reason = next((why for batch in batches if (why := why_not_plain(batch)) is not None), None)
    if reason is not None:
        return [], reason
    counted = torch.stack([_count_and_check(batch) for batch in batches]).tolist()
    if not all(is_packable for _, is_packable in counted):
        return [], PADDED_FIRST
    return [count for count, _ in counted], None


def _group(batches: list, counts: list[int], max_tokens: int) -> list[list]:
    """Group micro-batches that follow one another and together have at most so many tokens."""
    groups: list[list] = []
    tokens = 0
    for batch, count in zip(batches, counts):
        if not groups or tokens + count > max_tokens:
            groups.append([])
            tokens = 0
        groups[-1].append(batch)
        tokens += count
    return groups


def _is_token(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def _count_and_check(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute (the tokens that are no padding, whether padding comes after them and has no labels) as int64 [2]."""
    is_token = _is_token(batch)
    is_last = (is_token[:, 1:] <= is_token[:, :-1]).all()
    has_no_labels = (is_token | (batch["labels"] == -100)).all()
    return torch.stack([is_token.sum(), (is_last & has_no_labels).long()])
