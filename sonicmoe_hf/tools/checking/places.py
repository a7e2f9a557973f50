"""Observations: the log-probabilities of the texts' tokens in each place, a server or a folder, that has the adapter."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...checkpoints.writing.model_card import is_dithered
from ...checkpoints.writing.rounding_effects import SERVE_UNROUNDED, TO_NEAREST
from .adapted_model import adapted
from .models import Loading, stored_dtype
from .regression import rms
from .rounding import coarser
from .scores import Scores, log_p_of, scores_of
from .server import Server
from .texts import Text


class Observation(NamedTuple):
    """The answer of one place to texts.

    log_p: log-probabilities [T] of the texts' tokens; None where the place only says that each token is its first choice.
    own_base: log_p of the same place without the adapter, where it is known. is_base: whether this is of a server's base,
    without the adapter. dtype: the coarser of the dtypes in which the place stores and computes; None where it is not
    known. rounding_remedy: of a checkpoint of packed weights, the remedy where rounding dropped the change.
    """

    place: str
    texts: list[Text]
    log_p: torch.Tensor | None
    own_base: torch.Tensor | None = None
    is_base: bool = False
    dtype: torch.dtype | None = None
    rounding_remedy: str | None = None

    def select(self, scores: Scores) -> torch.Tensor:
        """Select a model's log-probabilities [T] of these tokens; where the place gives first choices, less those of the
        model's own first choices."""
        if self.log_p is None:
            return torch.cat([scores[text].beside_likeliest for text in self.texts])
        return log_p_of(scores, self.texts)

    def cut_to(self, num_texts: int) -> Observation:
        """Leave out what comes after the first `num_texts` texts."""
        texts = self.texts[:num_texts]
        num_tokens = sum(len(text.ids) - text.start for text in texts)
        log_p, own_base = (None if each is None else each[:num_tokens] for each in (self.log_p, self.own_base))
        return self._replace(texts=texts, log_p=log_p, own_base=own_base)

    def with_nearer_base(self, as_stored: Scores, as_loaded: Scores) -> Observation:
        """Add as own_base what the base gives as it is stored, if the place is nearer to that than to the base as it is
        loaded, with packed experts: an adapter of these may have been merged into either."""
        if self.dtype is None or self.log_p is None:
            return self
        stored, loaded = self.select(as_stored), self.select(as_loaded)
        is_nearer = rms(self.log_p - stored) < rms(self.log_p - loaded)
        return self._replace(own_base=stored) if is_nearer else self


def observe_server(server: Server, model: str, texts: list[Text], say: Callable[[str], None]) -> Iterator[Observation]:
    """Observe a server's base, where it has that beside the adapter, and its adapter."""

    def observe(name: str) -> Observation:
        say(f"asking {server.url} for {name}")
        return Observation(f"{name} of {server.url}", *server.observe(name, texts))

    base_name = server.base_of(model)
    if base_name is None:
        yield observe(model)
        return
    base = observe(base_name)
    yield base._replace(is_base=True)
    adapter = observe(model)
    yield adapter._replace(own_base=base.log_p) if base.texts == adapter.texts else adapter


def observe_merged(
    base_folder: Path, folders: dict[str, Path], loading: Loading, texts: list[Text], say: Callable[[str], None]
) -> Iterator[Observation]:
    """Observe merged checkpoints of a base, loaded one after the other."""
    for folder, path in folders.items():
        say(f"loading {folder}")
        merged = loading._replace(experts_quantization=None).load(path)
        observation = _observe(merged, folder, texts, say)
        if (stored := stored_dtype(path)) is None:
            yield observation._replace(rounding_remedy=remedy_of_rounding(base_folder, path))
        else:
            yield observation._replace(dtype=coarser(stored, merged.dtype))
        del merged
        gc.collect()


def observe_adapted(
    base: Any, base_folder: Path, folders: dict[str, Path], texts: list[Text], new: Path, say: Callable[[str], None]
) -> Iterator[Observation]:
    """Observe the adapter in other forms, put on the loaded base one after the other. new: an empty folder."""
    for number, (folder, path) in enumerate(folders.items()):
        say(f"reading {folder}")
        with adapted(base, base_folder, path, new / str(number)) as (wrapped, _):
            yield _observe(wrapped, folder, texts, say)._replace(dtype=base.dtype)


def remedy_of_rounding(base: Path, merged: Path) -> str:
    """Name the remedy where rounding packed weights dropped an adapter's change: a dither, unless the checkpoint had one,
    or the base is not packed, and so cannot be dithered."""
    return TO_NEAREST if stored_dtype(base) is None and not is_dithered(merged) else SERVE_UNROUNDED


def _observe(model: Any, place: str, texts: list[Text], say: Callable[[str], None]) -> Observation:
    """Observe a model in memory: of equal texts, one."""
    scores = scores_of(model, texts, place, say)
    return Observation(place, list(scores), log_p_of(scores, list(scores)))
