"""TrainedAdapter: the model that was trained, in memory, and its log-probabilities under each hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .hypotheses import (
    LEFT_OUT,
    SCALED_PART,
    Hypothesis,
    groups_of,
    hypotheses_for,
    layers_of,
    of_targets,
    scale_of,
    wholes_of,
)
from .models import Biases, Scores, rounded, scores_of
from .places import Observation, coarser
from .texts import Text
from .verdict import APPLIED, CANNOT_TELL, IN_PART, OTHER, Reference, Verdict, beside_base, judge, limit_of, rms

STEPS = 8  # by which a scale is found between two of the coarse ones
COARSE = (0.0, 0.5, 0.75, 1.25, 2.0, 4.0)
EXACT = 1e-5  # of a scale: less is no step
AS_TRAINED = Hypothesis("", "the adapter", lambda layer: None)
THE_BASE = Hypothesis(LEFT_OUT, "the base", lambda layer: torch.zeros_like(layer.b.data), lambda name: True)


class JudgedPlace(NamedTuple):
    """A place, the verdict on it, and whether the base was asked there."""

    place: str
    verdict: Verdict
    is_base: bool

    @property
    def is_right(self) -> bool:
        """Tell whether the adapter is where it should be, and nowhere else."""
        return self.verdict.kind not in (APPLIED, IN_PART) if self.is_base else self.verdict.kind == APPLIED

    @property
    def is_unknown(self) -> bool:
        """Tell whether it is unknown where the adapter is."""
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
        self._of_targets: dict[str, list[Hypothesis]] = {}  # by the number of a layer

    def values(
        self,
        observation: Observation,
        hypothesis: Hypothesis = AS_TRAINED,
        known: dict[Hypothesis, Scores] | None = None,
    ) -> torch.Tensor:
        """Return the log-probabilities [T] under a hypothesis; texts whose scores are known are not computed again."""
        scores = (self._scores if known is None else known).setdefault(hypothesis, {})
        if missing := [text for text in observation.texts if text not in scores]:
            with hypothesis.holds(self._layers, self._wholes):
                scores.update(scores_of(self._model, missing, hypothesis.name))
        return observation.of(scores)

    def check(self, observation: Observation) -> JudgedPlace:
        """Judge what a place gives."""
        values = []
        for number, each in enumerate(hypotheses := [THE_BASE, AS_TRAINED, *self._hypotheses]):
            self._say(f"comparing {observation.place} with the adapter, {number} of {len(hypotheses)} readings")
            values.append(self._runs(observation, each))
        base, adapter, *others = values
        alternatives = list(zip(self._hypotheses, others))
        reference = Reference(base, adapter, alternatives)
        found = torch.zeros_like(base[0]) if observation.found is None else observation.found
        noise = self._noise(observation)

        def judged() -> Verdict:
            return judge(found, reference, observation.own_base, noise, observation.if_lost)

        verdict = judged()
        measured, noise_beside = beside_base(found, reference, observation.own_base, noise)
        if verdict.kind in (IN_PART, OTHER) and not observation.is_base:
            alternatives += self._targets_of_nearest_layer(observation, measured, alternatives)
            verdict = judged()
        if verdict.may_be_scaled and not observation.is_base:
            alternatives += self._nearest_scaled(observation, measured, reference, noise_beside)
            verdict = judged()
        return JudgedPlace(observation.place, verdict, observation.is_base)

    def _targets_of_nearest_layer(
        self, observation: Observation, found: torch.Tensor, alternatives: list[tuple[Hypothesis, torch.Tensor]]
    ) -> list[tuple[Hypothesis, torch.Tensor]]:
        """Leave out each target of the layer without which the adapter comes nearest to what a place gives."""
        of_layers = [(rms(found - value[0]), each.number) for each, value in alternatives if each.number]
        if not of_layers:
            return []
        _, number = min(of_layers)
        if number not in self._of_targets:
            self._of_targets[number] = of_targets(self._layers, number)
        return [(each, self._runs(observation, each)) for each in self._of_targets[number]]

    def _runs(self, observation: Observation, hypothesis: Hypothesis) -> torch.Tensor:
        """Return the log-probabilities [2, T] of two runs whose rounding differs; of one, twice, in fp32, where it is
        less than the verdict's FLOOR."""
        value = self.values(observation, hypothesis)
        if torch.finfo(self._dtype).bits >= 32:
            return torch.stack((value, value))
        return torch.stack((value, self._run_again(observation, hypothesis, self._dtype)))

    def _run_again(self, observation: Observation, hypothesis: Hypothesis, dtype: torch.dtype) -> torch.Tensor:
        """Return the log-probabilities [T] of a run with other rounding."""
        with rounded(self._model, dtype):
            return self.values(observation, hypothesis, self._scores_again.setdefault(dtype, {}))

    def _noise(self, observation: Observation) -> float | None:
        """Measure the rms difference that a place's rounding makes, with the adapter: one that changes the weights much
        is rounded much. None where the place's weights are packed, or it does not say their dtype."""
        if observation.dtype is None:
            return None
        again = self._run_again(observation, AS_TRAINED, coarser(observation.dtype, self._dtype))
        return rms(again - self.values(observation))

    def change(self, texts: list[Text]) -> torch.Tensor:
        """Return how much the adapter changes the log-probabilities [T] of texts' tokens."""
        observation = Observation("", texts, torch.empty(0, dtype=torch.float32, device="cpu"))
        return self.values(observation) - self.values(observation, THE_BASE)

    def _nearest_scaled(
        self, observation: Observation, found: torch.Tensor, reference: Reference, noise: float | None
    ) -> list[tuple[Hypothesis, torch.Tensor]]:
        """Find the scale of a group of layers, one that engines treat alike, that explains a place best."""
        self._say(f"comparing {observation.place} with the adapter at other scales")

        def value_at(name: str, scale: float) -> torch.Tensor:
            return self.values(observation, self._at_scale(name, scale))

        coarse, fits = {}, []
        for name in self._groups:
            coarse[name] = {1.0: reference.adapter[0], **{scale: value_at(name, scale) for scale in COARSE}}
            fits.append((min(distance(found, value) for value in coarse[name].values()), name))
        _, name = min(fits)
        scale, value = nearest_scale(found, coarse[name], lambda scale: value_at(name, scale))
        limit = max(limit_of(reference, noise), rms(found - reference.adapter[0]) / 4)
        if rms(found - value) > limit:
            return []
        hypothesis = self._at_scale(name, scale)
        return [(hypothesis, self._runs(observation, hypothesis))]

    def _at_scale(self, name: str, scale: float) -> Hypothesis:
        """Return the hypothesis that a group of layers is scaled; the coarse ones are the same for every place."""
        if (name, scale) not in self._scaled:
            change = scale_of(self._groups[name], scale)
            self._scaled[name, scale] = Hypothesis(SCALED_PART, f"{name} scaled by {scale:.2g}", change)
        return self._scaled[name, scale]


def distance(found: torch.Tensor, value: torch.Tensor) -> float:
    """Return the median |difference| of a token. Routers choose other experts where a scale moves, for a few tokens."""
    return (found - value).abs().median().item()


def nearest_scale(
    found: torch.Tensor, coarse: dict[float, torch.Tensor], value_at: Callable[[float], torch.Tensor]
) -> tuple[float, torch.Tensor]:
    """Find the scale whose value [T] is nearest to `found`; returns both. coarse: values by scale.

    Each step goes between the nearest scale and a neighbour, by their distances.
    """
    values = dict(coarse)
    distances = {scale: distance(found, value) for scale, value in values.items()}
    for _ in range(STEPS):
        scales = sorted(values)
        best = min(scales, key=distances.__getitem__)
        at = scales.index(best)
        beside = min((scales[i] for i in (at - 1, at + 1) if 0 <= i < len(scales)), key=distances.__getitem__)
        total = distances[best] + distances[beside]
        step = (beside - best) * distances[best] / total if total else 0.0
        if abs(step) < EXACT:
            break
        values[best + step] = value_at(best + step)
        distances[best + step] = distance(found, values[best + step])
    best = min(values, key=distances.__getitem__)
    return best, values[best]
