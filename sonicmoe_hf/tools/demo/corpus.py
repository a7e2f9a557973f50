"""Real text that every machine has: the sources of the running Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_EVERY = 12  # every twelfth file is kept for evaluation


def standard_library() -> tuple[list[str], list[str]]:
    """Read the texts of the standard library's top-level modules, as (training files, held-out files)."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    return held_out_apart([text for text in texts if text.strip()])


def held_out_apart(texts: list[str]) -> tuple[list[str], list[str]]:
    """Split texts into (training texts, held-out texts)."""
    return [text for index, text in enumerate(texts) if index % HELD_OUT_EVERY], texts[::HELD_OUT_EVERY]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of `vocab_size` entries on `texts`; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def blocks(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> list[dict[str, torch.Tensor]]:
    """Join the texts into one stream of tokens, cut into examples of `length` tokens; the remainder is left out."""
    stream: list[int] = []
    for ids in tokenizer(texts, verbose=False)["input_ids"]:
        stream += [*ids, tokenizer.eos_token_id]
    whole = len(stream) // length * length
    rows = torch.tensor(stream[:whole], dtype=torch.int64, device="cpu").view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]
