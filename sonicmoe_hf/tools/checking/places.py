"""Observations: what the places give where an adapter went, servers and folders, for the texts' tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...checkpoints.writing.model_card import is_dithered
from ...checkpoints.writing.rounding_effects import REMEDY, TO_NEAREST
from .models import Loading, Scores, adapted, scores_of, stored_dtype
from .server import Server
from .texts import Text
from .verdict import rms


class Observation(NamedTuple):
    """The answer of one place. found: log-probabilities [T] of the texts' tokens; None where each is the first choice.

    own_base: what it gives for the same tokens without the adapter, where that is known. is_base: asked without it.
    dtype: the coarser of those that it is stored and computed in; None where it is not known. if_lost: what helps
    where rounding dropped the change, of a checkpoint of packed weights.
    """

    place: str
    texts: list[Text]
    found: torch.Tensor | None
    own_base: torch.Tensor | None = None
    is_base: bool = False
    dtype: torch.dtype | None = None
    if_lost: str | None = None

    def of(self, scores: Scores) -> torch.Tensor:
        """Select a model's log-probabilities [T] of these tokens, less the first choices' where these are observed."""
        return torch.cat([scores[text][int(self.found is None)] for text in self.texts])

    def of_first(self, num_texts: int) -> Observation:
        """Leave out all but the first texts."""
        texts = self.texts[:num_texts]
        size = sum(len(text.ids) - text.start for text in texts)
        found, own_base = (None if values is None else values[:size] for values in (self.found, self.own_base))
        return self._replace(texts=texts, found=found, own_base=own_base)

    def with_nearer_base(self, unpacked: Scores, packed: Scores) -> Observation:
        """Note the base as it is stored, for a merged checkpoint that is nearer to it than to packed experts."""
        if self.dtype is None or self.found is None:
            return self
        stored, loaded = self.of(unpacked), self.of(packed)
        is_nearer = rms(self.found - stored) < rms(self.found - loaded)
        return self._replace(own_base=stored) if is_nearer else self


def observed_by_server(
    server: Server, model: str, texts: list[Text], say: Callable[[str], None]
) -> Iterator[Observation]:
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


def observed_merged(
    base: Path, folders: dict[str, Path], loading: Loading, texts: list[Text], say: Callable[[str], None]
) -> Iterator[Observation]:
    """Load merged checkpoints of a base one after the other."""
    for folder, path in folders.items():
        say(f"loading {folder}")
        merged = loading._replace(experts_quantization=None).model(path)
        stored = stored_dtype(path)
        dtype = None if stored is None else coarser(stored, merged.dtype)
        observation = _observed(folder, scores_of(merged, texts, folder), dtype)
        yield observation._replace(if_lost=remedy_of_rounding(base, path)) if stored is None else observation
        del merged
        gc.collect()


def observed_adapted(
    base: Any, base_folder: Path, folders: dict[str, Path], texts: list[Text], new: Path, say: Callable[[str], None]
) -> Iterator[Observation]:
    """Put the adapter in other forms on the loaded base, one after the other. new: an empty folder."""
    for number, (folder, path) in enumerate(folders.items()):
        say(f"reading {folder}")
        with adapted(base, base_folder, path, new / str(number)) as (wrapped, _):
            yield _observed(folder, scores_of(wrapped, texts, folder), base.dtype)


def remedy_of_rounding(base: Path, merged: Path) -> str:
    """Say what helps where rounding packed weights dropped an adapter's change: a dither, unless one did not, or there
    can be none because the base is not packed."""
    return TO_NEAREST if stored_dtype(base) is None and not is_dithered(merged) else REMEDY


def _observed(folder: str, scores: Scores, dtype: torch.dtype | None) -> Observation:
    found = torch.cat([values[0] for values in scores.values()])
    return Observation(folder, list(scores), found, dtype=dtype)


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype with the larger steps."""
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)
