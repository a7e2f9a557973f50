"""TrainedAdapter: the model that was trained, in memory, its log-probabilities under each hypothesis, and the verdict
on a place beside these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .adapted_model import Biases
from .hypotheses import (
    LEFT_OUT,
    SCALED,
    Hypothesis,
    groups_of,
    hypotheses_for,
    hypotheses_of_targets,
    layers_of,
    scaled_by,
    wholes_of,
)
from .hypothesis_tests import Reference
from .places import Observation
from .regression import Runs, rms
from .rounding import coarser, rounded
from .scores import Scores, scores_of
from .texts import Text
from .verdict import APPLIED, CANNOT_TELL, IN_PART, OTHER, Verdict, beside_base, judge, limit_of

STEPS = 8  # at most, from the best of the first scales to the nearest
FIRST_SCALES = (0.0, 0.5, 0.75, 1.25, 2.0, 4.0)
MIN_STEP = 1e-5  # of a scale
AS_TRAINED = Hypothesis("", "the adapter", lambda layer: None)
THE_BASE = Hypothesis(LEFT_OUT, "the base", lambda layer: torch.zeros_like(layer.b.data), lambda name: True)


class JudgedPlace(NamedTuple):
    """A place and the verdict on it. is_base: on its base, which should not have the adapter."""

    place: str
    verdict: Verdict
    is_base: bool

    @property
    def is_right(self) -> bool:
        """Tell whether the adapter is there, or of the base, that it is not."""
        return self.verdict.kind not in (APPLIED, IN_PART) if self.is_base else self.verdict.kind == APPLIED

    @property
    def is_unknown(self) -> bool:
        """Tell whether the texts left open if the adapter is there."""
        return not self.is_base and self.verdict.kind == CANNOT_TELL


class TrainedAdapter:
    """The base with its adapter in PEFT, while it is in memory.

    Args:
        model: PEFT's. biases: of the base that the adapter changes. dtype: in which the base computes. say: called with
            what is computed next.
    """

    def __init__(self, model: Any, biases: Biases, dtype: torch.dtype, say: Callable[[str], None]):
        self._model, self._dtype, self._say = model, dtype, say
        self._layers, self._wholes = layers_of(model), wholes_of(model, biases)
        self._groups = groups_of(self._layers)
        self._hypotheses = hypotheses_for(model, self._layers, self._wholes)
        self._scores: dict[Hypothesis, Scores] = {}
        self._scores_again: dict[torch.dtype, dict[Hypothesis, Scores]] = {}  # of second runs, rounded in this dtype
        self._scaled: dict[tuple[str, float], Hypothesis] = {}
        self._target_hypotheses: dict[str, list[Hypothesis]] = {}  # by decoder layer

    def log_p(
        self,
        observation: Observation,
        hypothesis: Hypothesis = AS_TRAINED,
        known: dict[Hypothesis, Scores] | None = None,
    ) -> torch.Tensor:
        """Compute the log-probabilities [T] under a hypothesis, of texts whose scores are not `known` yet."""
        scores = (self._scores if known is None else known).setdefault(hypothesis, {})
        if missing := [text for text in observation.texts if text not in scores]:
            with hypothesis.simulated(self._layers, self._wholes):
                scores.update(scores_of(self._model, missing, hypothesis.name))
        return observation.select(scores)

    def check(self, observation: Observation) -> JudgedPlace:
        """Judge what a place gives."""
        all_runs = []
        for number, each in enumerate(hypotheses := [THE_BASE, AS_TRAINED, *self._hypotheses]):
            self._say(f"comparing {observation.place} with the adapter, {number} of {len(hypotheses)} readings")
            all_runs.append(self._runs(observation, each))
        base, adapter, *others = all_runs
        reference = Reference(base, adapter, list(zip(self._hypotheses, others)))
        observed = torch.zeros_like(base.first) if observation.log_p is None else observation.log_p
        noise = self._noise(observation)

        def judge_beside(reference: Reference) -> Verdict:
            return judge(observed, reference, observation.own_base, noise, observation.rounding_remedy)

        verdict = judge_beside(reference)
        measured, noise_beside = beside_base(observed, reference, observation.own_base, noise)
        if verdict.kind in (IN_PART, OTHER) and not observation.is_base:
            targets = self._targets_of_nearest_layer(observation, measured, reference.alternatives)
            reference = reference._replace(alternatives=[*reference.alternatives, *targets])
            verdict = judge_beside(reference)
        if verdict.may_be_scaled and not observation.is_base:
            scaled = self._nearest_scaled(observation, measured, reference, noise_beside)
            reference = reference._replace(alternatives=[*reference.alternatives, *scaled])
            verdict = judge_beside(reference)
        return JudgedPlace(observation.place, verdict, observation.is_base)

    def _targets_of_nearest_layer(
        self, observation: Observation, observed: torch.Tensor, alternatives: list[tuple[Hypothesis, Runs]]
    ) -> list[tuple[Hypothesis, Runs]]:
        """Run the hypotheses that a target is left out in the layer whose absence explains a place best."""
        layers = [
            (rms(observed - runs.first), each.decoder_layer) for each, runs in alternatives if each.decoder_layer
        ]
        if not layers:
            return []
        _, number = min(layers)
        if number not in self._target_hypotheses:
            self._target_hypotheses[number] = hypotheses_of_targets(self._layers, number)
        self._say(f"comparing {observation.place} with the adapter without single targets of layer {number}")
        return [(each, self._runs(observation, each)) for each in self._target_hypotheses[number]]

    def _runs(self, observation: Observation, hypothesis: Hypothesis) -> Runs:
        """Compute the log-probabilities of two runs whose rounding differs; in fp32, whose rounding is below the
        verdict's floor, of one run twice."""
        log_p = self.log_p(observation, hypothesis)
        if torch.finfo(self._dtype).bits >= 32:
            return Runs(log_p, log_p)
        return Runs(log_p, self._run_again(observation, hypothesis, self._dtype))

    def _run_again(self, observation: Observation, hypothesis: Hypothesis, dtype: torch.dtype) -> torch.Tensor:
        """Compute the log-probabilities [T] of a run with other rounding."""
        with rounded(self._model, dtype):
            return self.log_p(observation, hypothesis, self._scores_again.setdefault(dtype, {}))

    def _noise(self, observation: Observation) -> float | None:
        """Measure the rms difference that a place's rounding makes, with the adapter in, since large changes are rounded
        more. None where the place's weights are packed, or their dtype is not known."""
        if observation.dtype is None:
            return None
        again = self._run_again(observation, AS_TRAINED, coarser(observation.dtype, self._dtype))
        return rms(again - self.log_p(observation))

    def change(self, texts: list[Text]) -> torch.Tensor:
        """Compute how much the adapter changes the log-probabilities [T] of texts' tokens."""
        observation = Observation("", texts, torch.empty(0, dtype=torch.float32, device="cpu"))
        return self.log_p(observation) - self.log_p(observation, THE_BASE)

    def _nearest_scaled(
        self, observation: Observation, observed: torch.Tensor, reference: Reference, noise: float | None
    ) -> list[tuple[Hypothesis, Runs]]:
        """Find the hypothesis that explains a place best among those that one group of layers is at another scale."""
        self._say(f"comparing {observation.place} with the adapter at other scales")

        def log_p_at(name: str, scale: float) -> torch.Tensor:
            return self.log_p(observation, self._at_scale(name, scale))

        coarse, fits = {}, []
        for name in self._groups:
            coarse[name] = {1.0: reference.adapter.first, **{scale: log_p_at(name, scale) for scale in FIRST_SCALES}}
            fits.append((min(distance(observed, log_p) for log_p in coarse[name].values()), name))
        _, name = min(fits)
        scale, log_p = nearest_scale(observed, coarse[name], lambda scale: log_p_at(name, scale))
        limit = max(limit_of(reference, noise), rms(observed - reference.adapter.first) / 4)
        if rms(observed - log_p) > limit:
            return []
        hypothesis = self._at_scale(name, scale)
        return [(hypothesis, self._runs(observation, hypothesis))]

    def _at_scale(self, name: str, scale: float) -> Hypothesis:
        """Make the hypothesis that a group of layers is at a scale, once, since the first scales are those of every
        place."""
        if (name, scale) not in self._scaled:
            change = scaled_by(self._groups[name], scale)
            self._scaled[name, scale] = Hypothesis(SCALED, f"{name} scaled by {scale:.2g}", change)
        return self._scaled[name, scale]


def distance(observed: torch.Tensor, log_p: torch.Tensor) -> float:
    """Compute the median |difference| of a token: a few tokens, whose routers choose other experts, do not count."""
    return (observed - log_p).abs().median().item()


def nearest_scale(
    observed: torch.Tensor, coarse: dict[float, torch.Tensor], log_p_at: Callable[[float], torch.Tensor]
) -> tuple[float, torch.Tensor]:
    """Find the scale whose log_p [T] is nearest to `observed`; returns both. coarse: log_p of the first scales.

    Each step tries a scale between the nearest and its nearer neighbour, divided by their distances.
    """
    by_scale = dict(coarse)
    distances = {scale: distance(observed, log_p) for scale, log_p in by_scale.items()}
    for _ in range(STEPS):
        scales = sorted(by_scale)
        best = min(scales, key=distances.__getitem__)
        index = scales.index(best)
        beside = min((scales[i] for i in (index - 1, index + 1) if 0 <= i < len(scales)), key=distances.__getitem__)
        total = distances[best] + distances[beside]
        step = (beside - best) * distances[best] / total if total else 0.0
        if abs(step) < MIN_STEP:
            break
        by_scale[best + step] = log_p_at(best + step)
        distances[best + step] = distance(observed, by_scale[best + step])
    best = min(by_scale, key=distances.__getitem__)
    return best, by_scale[best]
