"""StepCallback: a Trainer callback that changes what routers do in its training steps."""

from __future__ import annotations

from transformers import TrainerCallback

from ..models.patch import patch_model
from ..patching.moe_layers import is_patched
from .resume import check_experts_restored
from .steps import begin_step, clear_step, end_step, routers_can_report


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
