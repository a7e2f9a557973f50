"""The demo's text, the standard library's sources, and its tokenizer."""

import torch
from helpers.examples import TEXT

from sonicmoe_hf.tools.demo import corpus


def test_the_standard_library_is_split_without_overlap_and_in_the_same_way_every_time():
    texts, held_out = corpus.standard_library()
    assert len(texts) > 10 * len(held_out) > 0
    assert not set(texts) & set(held_out)
    assert corpus.standard_library() == (texts, held_out)


def test_the_tokenizer_gives_back_any_text_and_trains_the_same_way_every_time():
    text = "def naïve():\n\treturn '雪 = snow'\r\n"
    tokenizer = corpus.train_tokenizer([TEXT, text], 300)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert corpus.train_tokenizer([TEXT, text], 300).get_vocab() == tokenizer.get_vocab()


def test_blocks_are_one_stream_without_padding():
    tokenizer = corpus.train_tokenizer([TEXT], 300)
    rows = corpus.blocks([TEXT, TEXT], tokenizer, 8)
    stream = 2 * [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
    assert torch.cat([row["input_ids"] for row in rows]).tolist() == stream[: 8 * len(rows)]
