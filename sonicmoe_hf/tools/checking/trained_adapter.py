"""TrainedAdapter: the model that was trained, in memory, and its log-probabilities under each hypothesis."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from .adapted_model import Biases
from .hypotheses import AS_TRAINED, THE_BASE, Hypothesis, hypotheses_for, layers_of, whole_weights_of
from .places import Observation
from .regression import Runs, rms
from .rounding import coarser, rounded
from .scores import Scores, log_p_of, scores_of
from .texts import Text


class TrainedAdapter:
    """The base with its adapter in PEFT, while it is in memory. Has its adapted `layers` and the `hypotheses` that are
    tried first.

    Args:
        model: PEFT's. biases: of the base that the adapter changes. dtype: in which the base computes.
    """

    def __init__(self, model: Any, biases: Biases, dtype: torch.dtype):
        self._model, self._dtype = model, dtype
        self.layers, self._whole_weights = layers_of(model), whole_weights_of(model, biases)
        self.hypotheses = hypotheses_for(model, self.layers, self._whole_weights)
        self._known_scores: dict[tuple[Hypothesis, torch.dtype | None], Scores] = {}

    def change(self, texts: list[Text]) -> torch.Tensor:
        """Compute how much the adapter changes the log-probabilities [T] of texts' tokens."""
        adapter, base = (log_p_of(self._scores(each, texts), texts) for each in (AS_TRAINED, THE_BASE))
        return adapter - base

    def log_p(
        self, observation: Observation, hypothesis: Hypothesis, rounded_in: torch.dtype | None = None
    ) -> torch.Tensor:
        """Compute the log-probabilities [T] of a place's tokens under a hypothesis. rounded_in: a dtype by whose rounding
        the run differs from that without."""
        return observation.select(self._scores(hypothesis, observation.texts, rounded_in))

    def runs(self, observation: Observation, hypothesis: Hypothesis) -> Runs:
        """Compute the log-probabilities of two runs whose rounding differs; in fp32, whose rounding is below the
        verdict's floor, of one run twice."""
        log_p = self.log_p(observation, hypothesis)
        is_exact = torch.finfo(self._dtype).bits >= 32
        return Runs(log_p, log_p if is_exact else self.log_p(observation, hypothesis, self._dtype))

    def rounding_noise(self, observation: Observation) -> float | None:
        """Measure the rms difference that a place's rounding makes, with the adapter in, since large changes are rounded
        more. None where the place's weights are packed, or their dtype is not known."""
        if observation.dtype is None:
            return None
        again = self.log_p(observation, AS_TRAINED, coarser(observation.dtype, self._dtype))
        return rms(again - self.log_p(observation, AS_TRAINED))

    def _scores(self, hypothesis: Hypothesis, texts: list[Text], rounded_in: torch.dtype | None = None) -> Scores:
        """Compute the scores of these texts that are not known yet; returns all that are known."""
        scores = self._known_scores.setdefault((hypothesis, rounded_in), {})
        if missing := [text for text in texts if text not in scores]:
            rounding = nullcontext() if rounded_in is None else rounded(self._model, rounded_in)
            with rounding, hypothesis.simulated(self.layers, self._whole_weights):
                scores.update(scores_of(self._model, missing, hypothesis.name))
        return scores
