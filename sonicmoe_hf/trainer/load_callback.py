"""Trainer callbacks: when token rounding is on, and what the experts' load looks like."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ..kernels.announce import is_first_rank
from ..layer.config import TokenRounding
from ..layer.holding import Holder, expert_parallel_remedy, holding_of
from ..models.patch import patch_model
from ..patching.moe_layers import find_layers, is_patched
from ..routing.expert_load import TOTALS, split_counts, summed_over_ranks
from ..routing.patched_model import (
    check_and_hook_routers,
    clear_counts,
    is_pipelined,
    ranks_of_batch,
    router_hooks,
    routing_policy,
    routing_state,
)
from .load_reports import check_drawable, draw_history
from .policy_trainers import check_no_policy_trainer
from .resume import check_experts_restored
from .steps import begin_step, clear_step, end_step, routers_can_report

logger = logging.get_logger(__name__)
OF_ROUNDING = ("rows_added", "rows_dropped", "padded_rows_avoided", "top_k_fallbacks")


def _check_moment(name: str, value) -> None:
    is_step = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    is_fraction = isinstance(value, float) and 0.0 <= value <= 1.0
    if not (is_step or is_fraction):
        raise ValueError(
            f"{name} is {value!r}; give an optimiser step (an int, 0 or more) or a fraction of training (a float from "
            "0.0 to 1.0)"
        )


class StepCallback(TrainerCallback):
    """Callback that changes what routers do during every training step. A run that is interrupted inside a step leaves
    that on until the next one, or, after `attach`, until `trainer.train` ends.

    attached: whether `attach` was called on the Trainer.
    """

    attached = False

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Patch the model if it is not patched.

        Raises:
            RuntimeError: without `attach` the Trainer would resume, or end, without its checkpoint's experts.
        """
        check_experts_restored(model, args, state, self.attached)
        if not is_patched(model):
            patch_model(model)
        clear_step(model)
        self._routers_can_report = routers_can_report(model, args)

    def begin_step(self, model, **settings) -> None:
        """Set these attributes of the model's RoutingState for this step."""
        begin_step(model, self._routers_can_report, **settings)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Raise RuntimeError where no router did what it was to do."""
        end_step(model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        """Put the model back as it was before."""
        clear_step(model)


class TokenRoundingCallback(StepCallback):
    """Switches token rounding on for a stretch of training. Evaluation, prediction and generation use top-k always.

    The stretch is looked up from `state.global_step` before every optimiser step, so a resumed run continues it. A model
    that is not patched yet is patched when training begins.

    Several of them take turns; where stretches overlap, the last one counts.

    Args:
        rounding, tile, min_tiles_per_expert: the policy, see `sonicmoe_hf.routing.TokenRounding`. Without a tile that of
            the model's own policy (from_pretrained(routing=...)) counts, or else 128.
        start, end: from when and until when; an int is an optimiser step, a float a fraction of training.
        allow_policy_optimization: train with GRPO, DPO and the like all the same. They compare log-probabilities of calls
            of which only one is rounded.
    Raises, from the Trainer:
        ValueError: it is a trainer of reinforcement learning or preference optimization; or the model has another tile.
        RuntimeError: training resumes from a checkpoint, and needs `attach` to restore its experts.
    Example:
        Trainer(..., callbacks=[sonicmoe_hf.TokenRoundingCallback(rounding="nearest", end=0.9)])
    """

    def __init__(
        self,
        rounding="nearest",
        tile=None,
        start=0.0,
        end=1.0,
        min_tiles_per_expert=TokenRounding.min_tiles_per_expert,
        allow_policy_optimization=False,
    ):
        self.policy = TokenRounding(rounding=rounding, tile=tile, min_tiles_per_expert=min_tiles_per_expert)
        _check_moment("start", start)
        _check_moment("end", end)
        if type(start) is type(end) and start >= end:
            raise ValueError(f"start {start!r} must come before end {end!r}")
        self._policy_with_tile = self.policy  # with the tile of the model that is trained
        self.start = start
        self.end = end
        self.allow_policy_optimization = allow_policy_optimization

    def check_trainer(self, *objects) -> None:
        """Raise ValueError if a Trainer, or its arguments, compares log-probabilities of a policy."""
        if not self.allow_policy_optimization:
            check_no_policy_trainer(
                *objects, remedy="leave TokenRoundingCallback out, or give it allow_policy_optimization=True"
            )

    def is_active(self, global_step: int, max_steps: int) -> bool:
        """Tell whether optimiser step `global_step` (counted from 0) of `max_steps` rounds tokens."""

        def step(moment):
            return moment * max_steps if isinstance(moment, float) else moment

        return step(self.start) <= global_step < step(self.end)

    def on_init_end(self, args, state, control, **kwargs):
        """Raise an error in trainers of reinforcement learning and preference optimization."""
        self.check_trainer(args)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Patch the model if it is not patched, and check that it can round."""
        self.check_trainer(args)
        super().on_train_begin(args, state, control, model, **kwargs)
        self._policy_with_tile = self._with_tile_of(routing_policy(model))
        check_and_hook_routers(model, self._policy_with_tile, remedy="leave TokenRoundingCallback out")

    def _with_tile_of(self, own: TokenRounding | None) -> TokenRounding:
        """Make the policy of this callback with the tile of the model's own, where it was given none."""
        if own is None or own.tile is None or own.tile == self.policy.tile:
            return self.policy
        if self.policy.tile is not None:
            raise ValueError(
                f"TokenRoundingCallback has tile={self.policy.tile}, and the model has tile={own.tile}, of "
                "from_pretrained or patch_model(routing=...): give one of them"
            )
        return replace(self.policy, tile=own.tile)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Set the policy for this optimiser step, unless it is another TokenRoundingCallback's turn."""
        settings = routing_state(model)
        if self.is_active(state.global_step, state.max_steps):
            self.begin_step(model, policy=self._policy_with_tile)
        elif settings.policy is self._policy_with_tile or "policy" not in settings.step.replaced:
            self.begin_step(model, policy=None)


class ExpertLoadCallback(StepCallback):
    """Counts the routers' work in training, and sums it up at every log.

    With `sonicmoe_hf.attach(trainer)` the metrics go through `trainer.log`, so that reporters and trainer_state.json
    have them; without it they are only in `history`. All refer to the training forwards since the last log, over all
    ranks; layers recomputed by gradient checkpointing count once; under Transformers' own expert parallelism nothing is
    counted. An expert's load is the number of its pairs, each a token and one of its experts; keys call them rows, as
    kernels do:

        moe/load_max_over_mean  load of the busiest expert over the mean, in the worst layer
        moe/load_cv             standard deviation of the experts' loads over the mean, averaged over layers
        moe/dead_experts        experts without load, over all layers

    and where token rounding was on:

        moe/rows_added, moe/rows_dropped   pairs more and fewer than by top-k
        moe/padded_rows_avoided kernels' rows of padding to full tiles that top-k would have needed and rounding did not
        moe/top_k_fallbacks     layer forwards that fell back to top-k for want of pairs

    history: one dict a log, with "step", "rows_per_expert" ({layer: [load of each expert]}) and the metrics.

    Args:
        plot: file for the picture that `draw` makes; the first rank draws it at the end of training.
        histograms: after `attach`, give TensorBoard and W&B a histogram of each layer's loads at every log.
    Raises:
        ImportError: plot without matplotlib. ValueError: plot has no ending of a picture's file.
    Example:
        Trainer(..., callbacks=[sonicmoe_hf.ExpertLoadCallback(plot="outputs/expert_load.png")])
    """

    def __init__(self, plot: str | os.PathLike | None = None, histograms: bool = True) -> None:
        self.plot = None if plot is None else Path(plot)
        if self.plot is not None:
            check_drawable(self.plot)
        self.histograms = histograms
        self.history: list[dict] = []
        self._is_counting = False
        self._num_earlier_logs = 0  # in history, of earlier trainings

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Start counting, from zero."""
        super().on_train_begin(args, state, control, model, **kwargs)
        self._is_counting = False
        if routing_policy(model) is not None:  # set by patch_model or set_routing
            check_no_policy_trainer(args, remedy='sonicmoe_hf.set_routing(model, "top_k")')
        if is_pipelined(model):
            logger.warning_once(
                "ExpertLoadCallback: nothing is counted under pipeline parallelism, whose ranks have different layers"
            )
            return
        if any(holding_of(layer.experts).by is Holder.THEIR_EXPERT_PARALLEL for layer in find_layers(model)):
            logger.warning_once(
                "ExpertLoadCallback: nothing is counted under expert parallelism of Transformers' own, whose ranks may "
                f"share their tokens; {expert_parallel_remedy()}"
            )
            return
        clear_counts(model)
        self._is_counting = True
        self._num_earlier_logs = len(self.history)
        if not self.attached:
            logger.warning_once(
                "ExpertLoadCallback: call sonicmoe_hf.attach(trainer) to send its metrics to reporters and log_history"
            )

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Count in this step."""
        if self._is_counting:
            self.begin_step(model, counts_load=True)

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        """Collect the counts, unless `attach` already did."""
        if not self.attached and "loss" in (logs or {}):
            self.collect(model, state.global_step)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        """Draw the picture."""
        super().on_train_end(args, state, control, model, **kwargs)
        if self.plot is not None and is_first_rank():
            try:  # what is wrong with a picture must not end the program before its model is saved
                self.draw(self.plot)
            except (OSError, ValueError) as error:
                logger.warning(f"ExpertLoadCallback: no picture in {self.plot}: {error}")

    def draw(self, path: str | os.PathLike) -> None:
        """Draw the `history` of the last training: the load of every expert over its steps, and of the busiest.

        Args:
            path: of the picture (PNG, PDF, SVG, ...); its folder is made.
        Raises:
            ImportError: without matplotlib. ValueError: the name has no ending of a picture's file, or nothing was
            counted up to a log. OSError: the file cannot be written.
        """
        check_drawable(Path(path))
        history = self.history[self._num_earlier_logs :]
        if not history:
            raise ValueError("nothing was counted up to a log: train at least logging_steps steps first")
        draw_history(Path(path), history)

    def collect(self, model, step: int) -> dict[str, float]:
        """Sum the counts over layers and ranks, append them to `history`, start again; {} where nothing was counted."""
        hooks = router_hooks(model)
        counts = [count for hook in hooks if (count := hook.load.take()) is not None]
        if not counts or len(counts) < len(hooks):
            return {}
        per_layer = [split_counts((total // ranks_of_batch(model)).cpu()) for total in summed_over_ranks(counts)]
        loads, totals_of_layers = zip(*per_layer)
        totals = dict(zip(TOTALS, torch.stack(totals_of_layers).sum(0).tolist()))
        if totals["calls"] == 0:
            return {}
        metrics = _load_metrics(loads, totals)
        by_layer = {hook.layer_name: load_E.tolist() for hook, load_E in zip(hooks, loads)}
        self.history.append({"step": step, "rows_per_expert": by_layer, **metrics})
        return metrics


def _load_metrics(loads: Sequence[torch.Tensor], totals: dict[str, int]) -> dict[str, float]:
    """Compute the metrics of a log. loads: int64 [E], of each layer; totals: TOTALS, of all layers."""
    means = [load_E.double().mean().clamp(min=1e-9) for load_E in loads]
    deviations = [load_E.double().std(correction=0) for load_E in loads]
    metrics = {
        "moe/load_max_over_mean": max((load_E.max() / mean).item() for load_E, mean in zip(loads, means)),
        "moe/load_cv": sum((deviation / mean).item() for deviation, mean in zip(deviations, means)) / len(loads),
        "moe/dead_experts": sum(int((load_E == 0).sum()) for load_E in loads),
    }
    return metrics | ({f"moe/{name}": totals[name] for name in OF_ROUNDING} if totals["rounding_calls"] else {})
