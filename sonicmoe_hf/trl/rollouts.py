"""The experts of rollouts: paired with final sequences by their tokens, and laid over the batch that is trained.

A tool loop calls the engine several times, with some of the sequences each time, so that order tells nothing.

Letters: B sequences of S positions, L layers with experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ..routing.recorded import RecordedRouting
from ..routing.server_arrays import experts_array

DTYPE = torch.int16  # on the host: a rollout of 48 layers with K = 8 takes 768 bytes a token
AT_ONCE = 16  # sequences that are laid out together, in int32


class Generated(NamedTuple):
    """A prompt with its completion, and what vLLM returned as routed_experts."""

    ids: list[int]
    experts: Any


class GeneratedSequences:
    """Sequences that an engine generated in one rollout."""

    def __init__(self) -> None:
        self._by_hash: dict[int, list[Generated]] = {}

    def clear(self) -> None:
        """Forget the experts of a rollout, as a new one begins."""
        self._by_hash = {}

    def add(self, prompt: Sequence[int], completion: Sequence[int], experts: Any) -> None:
        """Keep a completion."""
        ids = [*prompt, *completion]
        *_, last = _hashes(ids)
        self._by_hash.setdefault(last, []).append(Generated(ids, experts))

    def experts_of(self, ids: list[int]) -> torch.Tensor:
        """Gather the experts [tokens - 1, layers, K], int16, of a final sequence.

        They are those of the longest generated one that it begins with, -1 behind it, for what a tool answered last; or
        of a longer one, of which its tokens were cut off. Equal sequences get their own in the order of generation.

        Raises:
            RuntimeError: none of them was generated.
        """
        generated = self._take_prefix_of(ids) or self._continuation_of(ids)
        if generated is None:
            raise RuntimeError(
                "a completion is none that vLLM generated in this rollout, so its experts are not known; leave out what "
                "rewrites completions, have rollout_func sample by trainer.vllm_generation.generate or return vLLM's "
                "arrays as routed_experts, or give replay=False"
            )
        rows = experts_array(generated.experts).to(DTYPE)
        if len(rows) != len(generated.ids) - 1:
            raise RuntimeError(
                f"vLLM returned the experts of {len(rows)} tokens for a sequence of {len(generated.ids)}, of which it "
                "computes all but the last; start it with prefix caching, and without what leaves tokens out"
            )
        rows = rows[: len(ids) - 1]
        unknown = rows.new_full((len(ids) - 1 - len(rows), *rows.shape[1:]), -1)
        return torch.cat([rows, unknown])

    def _take_prefix_of(self, ids: list[int]) -> Generated | None:
        """Find the longest sequence that `ids` begins with, and take it out of those kept unless no equal one is left.

        None where there is none, or where it is shorter than `ids` and a longer one begins with all of `ids`.
        """
        hashes = list(_hashes(ids))
        for length in range(len(ids), 0, -1):
            same = self._by_hash.get(hashes[length], [])
            for number, each in enumerate(same):
                if each.ids != ids[:length]:
                    continue
                if length < len(ids) and self._continuation_of(ids) is not None:
                    return None
                if len(same) > 1:
                    del same[number]
                return each
        return None

    def _continuation_of(self, ids: list[int]) -> Generated | None:
        """Find a sequence that begins with `ids`."""
        every = (each for same in self._by_hash.values() for each in same)
        return next((each for each in every if each.ids[: len(ids)] == ids), None)


def _hashes(ids: Sequence[int]) -> Iterator[int]:
    """Yield a hash of each beginning of `ids`, the empty one first."""
    return accumulate(ids, lambda before, token: hash((before, token)), initial=0)


class Rollout(NamedTuple):
    """Sequences that are trained together. prompts, completions: their numbers of tokens. experts: of each, [tokens - 1,
    layers, K]."""

    prompts: list[int]
    completions: list[int]
    experts: list[Any]

    def mask(self, width: int, completion_width: int) -> torch.Tensor:
        """Make the mask [B, S] of all tokens in a batch of prompts padded on the left and completions on the right:
        also of those that TRL hides because their completion was cut off."""
        begin = width - completion_width
        positions = torch.arange(width, dtype=torch.int64, device="cpu")
        before, behind = torch.tensor([self.prompts, self.completions], dtype=torch.int64, device="cpu").unsqueeze(-1)
        first, end = begin - before, begin + behind
        return ((positions >= first) & (positions < end)).long()

    def aligned(self, width: int, completion_width: int) -> torch.Tensor:
        """Gather the experts [B, S, L, K], int16 on the host."""
        mask, pieces = self.mask(width, completion_width), []
        for start in range(0, len(mask), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            routing = RecordedRouting.from_server(self.experts[some], mask[some])
            index_LTK = routing.tensors()[0].to(DTYPE)
            pieces.append(index_LTK.unflatten(1, (-1, width)).permute(1, 2, 0, 3))
        return torch.cat(pieces)


def as_calls(experts_BSLK: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Split the experts [L, tokens, K] of each call with so many sequences."""
    return [some.permute(2, 0, 1, 3).flatten(1, 2) for some in experts_BSLK.split(rows)]
