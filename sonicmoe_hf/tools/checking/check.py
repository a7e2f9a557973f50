"""check_adapter: the log-probabilities that places give with an adapter, beside those of the model that was trained."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from ...checkpoints.hub import local_folder
from ...errors import CheckpointError
from ...lora.convert import is_adapter
from .hypotheses import hypotheses_for, layers_of
from .models import Loading, Scores, adapted, scores_of
from .server import Server
from .texts import Text, texts_for
from .verdict import APPLIED, IN_PART, Reference, Verdict, judge


class Observation(NamedTuple):
    """The answer of one place. found: log-probabilities [T] of the texts' tokens; None where each is the first choice.

    own_base: what it gives for the same tokens without the adapter, where it was asked. is_base: asked without it.
    """

    place: str
    texts: list[Text]
    found: torch.Tensor | None
    own_base: torch.Tensor | None = None
    is_base: bool = False

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
    loading = loading or Loading()
    base_folder, adapter_folder = local_folder(base), local_folder(adapter)
    places = {folder: local_folder(folder) for folder in folders}
    with_tokenizer = [folder for folder in (base_folder, adapter_folder) if any(folder.glob("tokenizer*"))]
    if not with_tokenizer:
        raise CheckpointError(f"neither {base} nor {adapter} has a tokenizer; save the model's into one of them")
    tokenizer = AutoTokenizer.from_pretrained(with_tokenizer[0])
    texts = texts_for(tokenizer, text)
    observations = [] if server is None else list(_asked(Server(server, tokenizer), model, texts, say))
    for folder, path in places.items():
        if not is_adapter(path):  # first, so that one model is in memory at a time
            say(f"loading {folder}")
            merged = loading._replace(experts_quantization=None).model(path)
            observations.append(_observed(folder, scores_of(merged, texts, folder)))
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
                with adapted(trained, base_folder, path, Path(temporary) / str(number)) as wrapped:
                    observations.append(_observed(folder, scores_of(wrapped, texts, folder)))
        say(f"comparing with {adapter}")
        with adapted(trained, base_folder, adapter_folder, Path(temporary) / "adapter") as wrapped:
            adapter_scores, layers, alternatives = scores_of(wrapped, every, adapter), layers_of(wrapped), []
            for hypothesis in hypotheses_for(wrapped, layers):
                with hypothesis.holds(layers):
                    alternatives.append((hypothesis, scores_of(wrapped, every, hypothesis.name)))

    def checked(observation: Observation) -> Checked:
        values = [(hypothesis, observation.of(scores)) for hypothesis, scores in alternatives]
        reference = Reference(observation.of(base_scores), observation.of(adapter_scores), values)
        found = torch.zeros_like(reference.base) if observation.found is None else observation.found
        return Checked(observation.place, judge(found, reference, observation.own_base), observation.is_base)

    change = torch.cat([adapter_scores[text][0] - base_scores[text][0] for text in texts])
    observations.sort(key=lambda each: folders.index(each.place) if each.place in folders else -1)
    return Check(change.abs().mean().item(), len(change), [checked(observation) for observation in observations])


def _observed(folder: str, scores: Scores) -> Observation:
    return Observation(folder, list(scores), torch.cat([values[0] for values in scores.values()]))


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
