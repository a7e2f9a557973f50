"""Texts whose tokens' log-probabilities are compared."""

from __future__ import annotations

import argparse
import copy
import socketserver
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CheckpointError

LENGTH = 128  # tokens of a text
CHARACTERS = 64 * LENGTH  # of a file that are read for a text
DOCUMENTED = statistics, socketserver, argparse, copy  # whose documentation is the text, where none is given


class Text(NamedTuple):
    """A text's tokens. Those from `start` on are compared, each by its log-probability after the tokens before it."""

    ids: tuple[int, ...]
    start: int = 1


def texts_for(tokenizer: Any, file: str | None, num_texts: int) -> list[Text]:
    """Cut a file, or documentation of the standard library, into `num_texts` texts of at most LENGTH tokens, which begin
    as the tokenizer begins a text.

    Raises:
        CheckpointError: there are less than two tokens.
    """
    if file is None:
        written = "".join(module.__doc__ or "" for module in DOCUMENTED)
    else:
        with Path(file).open(encoding="utf-8", errors="replace") as opened:
            written = opened.read(CHARACTERS * num_texts)
    prefix = tokenizer("")["input_ids"]
    ids = tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"]
    size = LENGTH - len(prefix)
    texts = [Text((*prefix, *ids[begin : begin + size])) for begin in range(0, len(ids), size)][:num_texts]
    texts = [text for text in texts if len(text.ids) > 1]
    if not texts:
        raise CheckpointError(f"{file or 'the text'} has less than two tokens, so there is nothing to compare")
    return texts
