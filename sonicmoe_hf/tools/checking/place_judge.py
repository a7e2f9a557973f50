"""PlaceJudge: the verdict on a place, by as many hypotheses as it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .evidence import Alternatives, Evidence, Reference
from .hypotheses import AS_TRAINED, SCALED, THE_BASE, Hypothesis, groups_of, hypotheses_of_targets, scaled
from .places import Observation
from .trained_adapter import TrainedAdapter
from .verdict import APPLIED, CANNOT_TELL, IN_PART, OTHER, Verdict, judge

STEPS = 8  # at most, from the best of the first scales to the nearest
FIRST_SCALES = (0.0, 0.5, 0.75, 1.25, 2.0, 4.0)  # beside 1
MIN_STEP = 1e-5  # of a scale


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


class PlaceJudge:
    """Judges places beside a trained adapter. say: called with what is computed next."""

    def __init__(self, trained: TrainedAdapter, say: Callable[[str], None]):
        self._trained, self._say = trained, say
        self._groups = groups_of(trained.layers)
        # made once, since the scores under a hypothesis are kept
        self._scaled: dict[tuple[str, float], Hypothesis] = {}
        self._without_targets: dict[str, list[Hypothesis]] = {}  # by decoder layer

    def judge(self, observation: Observation) -> JudgedPlace:
        """Judge what a place gives."""
        return JudgedPlace(observation.place, self._verdict(observation), observation.is_base)

    def _verdict(self, observation: Observation) -> Verdict:
        """Judge by the first hypotheses; where these find something missing, by single targets too; and where it is
        missing by a share, by other scales too."""
        evidence = self._evidence(observation)
        verdict = judge(evidence)
        if observation.is_base or verdict.kind not in (IN_PART, OTHER):
            return verdict
        with_targets = evidence.with_alternatives(self._targets_of_nearest_layer(observation, evidence))
        verdict_by_targets = judge(with_targets)
        if not verdict_by_targets.may_be_scaled:
            return verdict_by_targets
        return judge(with_targets.with_alternatives(self._nearest_scaled(observation, evidence)))

    def _evidence(self, observation: Observation) -> Evidence:
        """Gather the evidence on a place: its log-probabilities, and those by the first hypotheses."""
        hypotheses, all_runs = [THE_BASE, AS_TRAINED, *self._trained.hypotheses], []
        for number, hypothesis in enumerate(hypotheses):
            self._say(f"comparing {observation.place} with the adapter, {number} of {len(hypotheses)} readings")
            all_runs.append(self._trained.runs(observation, hypothesis))
        base, adapter, *others = all_runs
        return Evidence(
            torch.zeros_like(base.first) if observation.log_p is None else observation.log_p,
            Reference(base, adapter, list(zip(self._trained.hypotheses, others))),
            own_base=observation.own_base,
            rounding_noise=self._trained.rounding_noise(observation),
            rounding_remedy=observation.rounding_remedy,
        )

    def _targets_of_nearest_layer(self, observation: Observation, evidence: Evidence) -> Alternatives:
        """Run the hypotheses that a target is left out in the layer whose absence explains a place best."""
        layers = [
            (evidence.rms_from(runs.first), hypothesis.decoder_layer)
            for hypothesis, runs in evidence.reference.alternatives
            if hypothesis.decoder_layer
        ]
        if not layers:
            return []
        _, number = min(layers)
        if number not in self._without_targets:
            self._without_targets[number] = hypotheses_of_targets(self._trained.layers, number)
        self._say(f"comparing {observation.place} with the adapter without single targets of layer {number}")
        return [(each, self._trained.runs(observation, each)) for each in self._without_targets[number]]

    def _nearest_scaled(self, observation: Observation, evidence: Evidence) -> Alternatives:
        """Find the hypothesis that one group of layers is at another scale, where one of these explains a place."""
        self._say(f"comparing {observation.place} with the adapter at other scales")

        def log_p_at(name: str, scale: float) -> torch.Tensor:
            return self._trained.log_p(observation, self._at_scale(name, scale))

        observed, adapter = evidence.observed, evidence.reference.adapter.first
        first_log_p, differences = {}, []
        for name in self._groups:
            first_log_p[name] = {1.0: adapter, **{scale: log_p_at(name, scale) for scale in FIRST_SCALES}}
            differences.append((min(median_difference(observed, each) for each in first_log_p[name].values()), name))
        _, name = min(differences)
        scale, log_p = nearest_scale(observed, first_log_p[name], lambda scale: log_p_at(name, scale))
        if not evidence.is_explained_by(log_p):
            return []
        hypothesis = self._at_scale(name, scale)
        return [(hypothesis, self._trained.runs(observation, hypothesis))]

    def _at_scale(self, name: str, scale: float) -> Hypothesis:
        """Make the hypothesis that a group of layers is at a scale."""
        if (name, scale) not in self._scaled:
            lora_b = scaled(self._groups[name], scale)
            self._scaled[name, scale] = Hypothesis(SCALED, f"{name} scaled by {scale:.2g}", lora_b)
        return self._scaled[name, scale]


def median_difference(observed: torch.Tensor, log_p: torch.Tensor) -> float:
    """Compute the median |difference| of a token: a few tokens, whose routers choose other experts, do not count."""
    return (observed - log_p).abs().median().item()


def nearest_scale(
    observed: torch.Tensor, first_log_p: dict[float, torch.Tensor], log_p_at: Callable[[float], torch.Tensor]
) -> tuple[float, torch.Tensor]:
    """Find the scale whose log_p [T] is nearest to `observed`; returns both. first_log_p: log_p of the first scales.

    Each step tries a scale between the nearest and its nearer neighbour, divided by their differences.
    """
    by_scale = dict(first_log_p)
    differences = {scale: median_difference(observed, log_p) for scale, log_p in by_scale.items()}
    for _ in range(STEPS):
        scales = sorted(by_scale)
        best = min(scales, key=differences.__getitem__)
        index = scales.index(best)
        beside = min((scales[i] for i in (index - 1, index + 1) if 0 <= i < len(scales)), key=differences.__getitem__)
        total = differences[best] + differences[beside]
        step = (beside - best) * differences[best] / total if total else 0.0
        if abs(step) < MIN_STEP:
            break
        by_scale[best + step] = log_p_at(best + step)
        differences[best + step] = median_difference(observed, by_scale[best + step])
    best = min(by_scale, key=differences.__getitem__)
    return best, by_scale[best]
