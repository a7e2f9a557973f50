"""ExpertLoadCallback: what the experts' load looks like in training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging

from ..kernels.announce import is_first_rank
from ..layer.holding import Holder, expert_parallel_remedy, holding_of
from ..patching.moe_layers import find_layers
from ..routing.expert_load import TOTALS, split_counts, summed_over_ranks
from ..routing.patched_model import clear_counts, is_pipelined, ranks_of_batch, router_hooks, routing_policy
from .load_reports import check_drawable, draw_history
from .policy_trainers import check_no_policy_trainer
from .step_callback import StepCallback

logger = logging.get_logger(__name__)
OF_ROUNDING = ("rows_added", "rows_dropped", "padded_rows_avoided", "top_k_fallbacks")


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
