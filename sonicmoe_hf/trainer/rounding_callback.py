"""TokenRoundingCallback: when token rounding is on in training."""

from __future__ import annotations

from dataclasses import replace

from ..layer.config import TokenRounding
from ..routing.patched_model import check_and_hook_routers, routing_policy, routing_state
from .policy_trainers import check_no_policy_trainer
from .step_callback import StepCallback


def _check_moment(name: str, value) -> None:
    is_step = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    is_fraction = isinstance(value, float) and 0.0 <= value <= 1.0
    if not (is_step or is_fraction):
        raise ValueError(
            f"{name} is {value!r}; give an optimiser step (an int, 0 or more) or a fraction of training (a float from "
            "0.0 to 1.0)"
        )


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
