"""check_adapter: the log-probabilities that places give with an adapter, beside those of the model that was trained."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from ...adapters.convert import is_adapter
from ...checkpoints.companions import has_tokenizer
from ...checkpoints.hub import local_folder
from ...errors import CheckpointError
from .hypotheses import SCALED, Hypothesis, groups_of, hypotheses_for, layers_of, scale_of, wholes_of
from .models import Loading, Scores, adapted, rounded, scores_of, stored_dtype
from .server import Server
from .texts import NUM_TEXTS, Text, texts_for
from .verdict import APPLIED, CANNOT_TELL, IN_PART, Reference, Verdict, judge, limit_of, rms

MORE = 4  # times as many texts, where those of the first time do not tell
STEPS = 8  # by which a scale is found between two of the coarse ones
COARSE = (0.0, 0.5, 0.75, 1.25, 2.0, 4.0)
EXACT = 1e-5  # of a scale: less is no step


class Observation(NamedTuple):
    """The answer of one place. found: log-probabilities [T] of the texts' tokens; None where each is the first choice.

    own_base: what it gives for the same tokens without the adapter, where it was asked. is_base: asked without it.
    dtype: the coarser of those that it is stored and computed in; None where it is not known. is_rounded: whether its
    weights are packed.
    """

    place: str
    texts: list[Text]
    found: torch.Tensor | None
    own_base: torch.Tensor | None = None
    is_base: bool = False
    dtype: torch.dtype | None = None
    is_rounded: bool = False

    def of(self, scores: Scores) -> torch.Tensor:
        """Select a model's log-probabilities [T] of these tokens, less the first choices' where these are observed."""
        return torch.cat([scores[text][int(self.found is None)] for text in self.texts])


class Checked(NamedTuple):
    """A place, the verdict on it, and whether the base was asked there."""

    place: str
    verdict: Verdict
    is_base: bool

    @property
    def is_right(self) -> bool:
        """Whether the adapter is where it should be, and nowhere else."""
        return self.verdict.kind not in (APPLIED, IN_PART) if self.is_base else self.verdict.kind == APPLIED

    @property
    def is_unknown(self) -> bool:
        """Whether it cannot be told."""
        return not self.is_base and self.verdict.kind == CANNOT_TELL


class Check(NamedTuple):
    """The result of a check. change: mean |difference| of log p between adapter and base; tokens: of how many."""

    change: float
    tokens: int
    places: list[Checked]


def check_adapter(
    base: str,
    adapter: str,
    folders: list[str],
    server: str | None = None,
    model: str = "",
    text: str | None = None,
    loading: Loading | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Check:
    """Compare what an adapter does in each place with what it does on its base under PEFT.

    Args:
        base, adapter: folders or hub ids. folders: merged checkpoints, and the adapter in other forms.
        server, model: the URL of an OpenAI-compatible server, and the adapter's or merged model's name there.
        text: a file with text. loading: of models. say: called with what is done next.
    Raises:
        CheckpointError: a folder cannot be read, or the server does not answer; the message has its words. Or there is
            neither, or no tokenizer, or a model's log-probabilities are not finite.
    """
    if not folders and server is None:
        raise CheckpointError(
            "there is nothing to compare with the adapter: name a FOLDER where it went, or a --server"
        )
    options = (base, adapter, folders, server, model, text, loading or Loading(), say)
    result = _checked(*options, NUM_TEXTS)
    if any(place.is_unknown for place in result.places):
        again = _checked(*options, MORE * NUM_TEXTS)
        result = again if again.tokens > result.tokens else result
    return result


def _checked(
    base: str,
    adapter: str,
    folders: list[str],
    server: str | None,
    model: str,
    text: str | None,
    loading: Loading,
    say: Callable[[str], None],
    num_texts: int,
) -> Check:
    base_folder, adapter_folder = local_folder(base), local_folder(adapter)
    places = {folder: local_folder(folder) for folder in folders}
    with_tokenizer = [folder for folder in (adapter_folder, base_folder) if has_tokenizer(folder)]
    if not with_tokenizer:
        raise CheckpointError(f"neither {base} nor {adapter} has a tokenizer; save the model's into one of them")
    tokenizer = AutoTokenizer.from_pretrained(with_tokenizer[0])
    texts = texts_for(tokenizer, text, num_texts)
    observations = [] if server is None else list(_asked(Server(server, tokenizer), model, texts, say))
    for folder, path in places.items():
        if not is_adapter(path):  # first, so that one model is in memory at a time
            say(f"loading {folder}")
            merged = loading._replace(experts_quantization=None).model(path)
            stored = stored_dtype(path)
            dtype = None if stored is None else _coarser(stored, merged.dtype)
            observations.append(_observed(folder, scores_of(merged, texts, folder), dtype, stored is None))
            del merged
            gc.collect()
    say(f"loading {base}")
    trained = loading.model(base_folder)
    every = dict.fromkeys((*texts, *(each for observation in observations for each in observation.texts)))
    base_scores = scores_of(trained, every, base)
    with tempfile.TemporaryDirectory(prefix="sonicmoe-hf-check-") as temporary:
        for number, (folder, path) in enumerate(places.items()):
            if is_adapter(path):
                say(f"reading {folder}")
                with adapted(trained, base_folder, path, Path(temporary) / str(number)) as (wrapped, _):
                    observations.append(_observed(folder, scores_of(wrapped, texts, folder), trained.dtype))
        noises = {}
        for dtype in {each.dtype for each in observations if each.dtype is not None}:
            say(f"measuring what rounding to {dtype} changes")
            with rounded(trained, _coarser(dtype, trained.dtype)):
                noises[dtype] = scores_of(trained, every, base)
        say(f"comparing with {adapter}")
        with adapted(trained, base_folder, adapter_folder, Path(temporary) / "adapter") as (wrapped, biases):
            adapter_scores, layers, alternatives = scores_of(wrapped, every, adapter), layers_of(wrapped), []
            wholes = wholes_of(wrapped, biases)

            def scores_under(hypothesis: Hypothesis) -> Scores:
                with hypothesis.holds(layers, wholes):
                    return scores_of(wrapped, every, hypothesis.name)

            for hypothesis in hypotheses_for(wrapped, layers, wholes):
                alternatives.append((hypothesis, scores_under(hypothesis)))

            groups = groups_of(layers)

            @cache  # the coarse ones are the same for every place
            def scores_at(name: str, scale: float) -> Scores:
                return scores_under(Hypothesis(SCALED, name, scale_of(groups[name], scale)))

            def checked(observation: Observation) -> Checked:
                values = [(hypothesis, observation.of(scores)) for hypothesis, scores in alternatives]
                of_base, of_adapter = observation.of(base_scores), observation.of(adapter_scores)
                reference = Reference(of_base, of_adapter, values)
                found = torch.zeros_like(of_base) if observation.found is None else observation.found
                rounding = noises.get(observation.dtype)
                noise = None if rounding is None else rms(observation.of(rounding) - of_base)
                verdict = judge(found, reference, observation.own_base, noise, observation.is_rounded)
                if verdict.may_be_scaled and not observation.is_base:
                    values += _scaled(observation, found, reference, noise)
                    verdict = judge(found, reference, observation.own_base, noise, observation.is_rounded)
                return Checked(observation.place, verdict, observation.is_base)

            def _scaled(
                observation: Observation, found: torch.Tensor, reference: Reference, noise: float | None
            ) -> list[tuple[Hypothesis, torch.Tensor]]:
                """Find the scale of a group of layers, one that engines treat alike, that explains a place best."""
                if observation.own_base is not None:
                    noise = rms(observation.own_base - reference.base)
                    found = found - observation.own_base + reference.base
                before, limit, fits = rms(found - reference.adapter), limit_of(reference, noise), []
                coarse = {}
                for name in groups:
                    points = {scale: observation.of(scores_at(name, scale)) for scale in COARSE}
                    coarse[name] = {1.0: reference.adapter, **points}
                    fits.append((min(distance(found, value) for value in coarse[name].values()), name))
                _, name = min(fits)
                scale, value = nearest_scale(found, coarse[name], lambda scale: observation.of(scores_at(name, scale)))
                reading = Hypothesis(SCALED, f"{name} scaled by {scale:.2g}", scale_of(groups[name], scale))
                return [(reading, value)] if rms(found - value) <= max(limit, before / 4) else []

            results = [checked(observation) for observation in observations]
    change = torch.cat([adapter_scores[each][0] - base_scores[each][0] for each in texts])
    results.sort(key=lambda each: folders.index(each.place) if each.place in folders else -1)
    return Check(change.abs().mean().item(), len(change), results)


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


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)


def _observed(folder: str, scores: Scores, dtype: torch.dtype | None, is_rounded: bool = False) -> Observation:
    found = torch.cat([values[0] for values in scores.values()])
    return Observation(folder, list(scores), found, dtype=dtype, is_rounded=is_rounded)


def _asked(server: Server, model: str, texts: list[Text], say: Callable[[str], None]):
    """Ask a server for the base, where it has that beside the adapter, and for the adapter."""
    own, base = None, server.base_of(model)
    for name in [model] if base is None else [base, model]:
        say(f"asking {server.url} for {name}")
        observed, found = server.observe(name, texts)
        is_base = name == base
        beside = own.found if own is not None and own.texts == observed else None
        observation = Observation(f"{name} of {server.url}", observed, found, beside, is_base)
        own = observation if is_base else own
        yield observation
