"""Scores of texts' tokens: the log-probabilities that a model in memory gives them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError
from .texts import Text

BATCH_SIZE = 8  # texts of a forward


class TokenScores(NamedTuple):
    """Scores [T] of a text's tokens, on the CPU. beside_likeliest: log_p less that of the likeliest token."""

    log_p: torch.Tensor
    beside_likeliest: torch.Tensor


Scores = dict[Text, TokenScores]


def log_p_of(scores: Scores, texts: list[Text]) -> torch.Tensor:
    """Join the log-probabilities [T] of these texts' tokens."""
    return torch.cat([scores[text].log_p for text in texts])


@torch.no_grad()
def scores_of(
    model: Any, texts: Iterable[Text], place: str, say: Callable[[str], None] = lambda sentence: None
) -> Scores:
    """Compute the scores of each text's tokens from its `start` on. say: called before each forward.

    Raises:
        CheckpointError: the model of `place` has no such token, or its scores are not finite.
    """
    by_length: dict[int, list[Text]] = collections.defaultdict(list)
    last = len(model.get_input_embeddings().weight) - 1
    for text in texts:
        if max(text.ids) > last:
            raise CheckpointError(
                f"{place} ends at token {last} and the texts have {max(text.ids)}: another vocabulary"
            )
        by_length[len(text.ids)].append(text)
    scores: Scores = {}
    groups = by_length.values()  # of one length each, so that none is padded
    num_texts = sum(map(len, groups))
    batches = (group[first : first + BATCH_SIZE] for group in groups for first in range(0, len(group), BATCH_SIZE))
    for batch in batches:
        say(f"computing the texts with {place}, {len(scores)} of {num_texts}")
        ids = torch.tensor([text.ids for text in batch], dtype=torch.int64, device=model.device)
        all_logits = getattr(model(input_ids=ids, use_cache=False), "logits", None)
        if all_logits is None or all_logits.shape[:-1] != ids.shape or all_logits.shape[-1] <= last:
            raise CheckpointError(
                f"{place} is a {type(model).__name__}, which gives no probabilities of tokens; check compares language "
                "models"
            )
        for text, text_ids, logits in zip(batch, ids, all_logits):
            of_vocabulary = logits[text.start - 1 : -1].float().log_softmax(-1)
            log_p = of_vocabulary.gather(-1, text_ids[text.start :, None].to(of_vocabulary.device))[:, 0]
            scores[text] = TokenScores(log_p.double().cpu(), (log_p - of_vocabulary.amax(-1)).double().cpu())
            if not all(vector.isfinite().all() for vector in scores[text]):
                raise CheckpointError(f"{place} gives log-probabilities that are not finite, in {model.dtype}")
    return scores
