"""The search for an expert's highest keys, by which rounding.py selects tokens.

A key is an int32 that orders as the token's fp32 score. A class is the tokens that top-k sends to the expert, or the
others. Words have a bit for each of 32 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORD = tl.constexpr(32)  # tokens in a word
NO_KEY = tl.constexpr(-(1 << 31))  # below the key of every score: not to be chosen
NO_LIMIT = tl.constexpr((1 << 31) - 1)  # above them


@triton.jit
def order_key(score):
    """Convert fp32 scores to int32 keys of the same order; -0.0 and 0.0 tie. NaNs are above or below all else, by their
    sign."""
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where((bits & 0x7FFFFFFF) == 0, 0, key)


@triton.jit
def pack(bits, AXIS: tl.constexpr):
    """Pack 32 truth values along an axis as a word."""
    lane = tl.arange(0, WORD)
    return tl.sum(bits.to(tl.int32) << (lane[None, :] if AXIS == 1 else lane[:, None]), axis=AXIS)


@triton.jit
def count_bits(word):
    """Count the bits of each word that are set."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def count_below(word, lane):
    """Count the set bits of a word before the bit `lane`."""
    one = tl.full([], 1, tl.uint32)
    return count_bits(word.to(tl.uint32, bitcast=True) & ((one << lane.to(tl.uint32)) - 1))


@triton.jit
def load_chunk(keys, top_words, expert, first, num_words, NUM_EXPERTS: tl.constexpr, WORDS: tl.constexpr):
    """Load (keys, whether top-k chose the expert) of the tokens of WORDS words, [WORDS, 32]."""
    word = first + tl.arange(0, WORDS)
    is_word = word < num_words
    packed = tl.load(top_words + word * NUM_EXPERTS + expert, mask=is_word, other=0)
    lane = tl.arange(0, WORD)[None, :]
    offset = (expert.to(tl.int64) * num_words + word)[:, None] * WORD + lane
    return tl.load(keys + offset, mask=is_word[:, None], other=NO_KEY), ((packed[:, None] >> lane) & 1) != 0


@triton.jit
def load_class(keys, top_words, from_top, expert, first, num_words, NUM_EXPERTS: tl.constexpr, WORDS: tl.constexpr):
    """Load the keys of one class, top-k's tokens (from_top = 1) or the others (0); NO_KEY for the rest."""
    key, top = load_chunk(keys, top_words, expert, first, num_words, NUM_EXPERTS, WORDS)
    return tl.where(top.to(tl.int32) == from_top, key, NO_KEY)


@triton.jit
def search(
    keys,
    top_words,
    held_key,
    held_top,
    from_top,
    wanted,
    count,
    expert,
    num_words,
    NUM_EXPERTS: tl.constexpr,
    WORDS: tl.constexpr,
    HELD: tl.constexpr,
):
    """Search the `wanted` highest keys of a class of `count` tokens, by bisection. Returns (low, high, rest): these are
    all keys >= high, and of the tokens with key low = high - 1 the first `rest`; where all of those are among them, high
    = low."""
    held = tl.where(held_top.to(tl.int32) == from_top, held_key, NO_KEY)
    low, high = tl.full([], NO_LIMIT, tl.int64), tl.full([], NO_KEY, tl.int64)
    for first in range(0, WORDS if HELD else num_words, WORDS):
        key = held
        if not HELD:
            key = load_class(keys, top_words, from_top, expert, first, num_words, NUM_EXPERTS, WORDS)
        low = tl.minimum(low, tl.min(tl.where(key > NO_KEY, key, NO_LIMIT)).to(tl.int64))
        high = tl.maximum(high, tl.max(key).to(tl.int64) + 1)
    num_from_high, num_from_low = 0, count  # keys >= high, and keys >= low
    if wanted == 0:
        low = high
    while (high - low > 1) & (num_from_low != wanted):
        middle = low + (high - low) // 2
        num_from_middle = 0
        for first in range(0, WORDS if HELD else num_words, WORDS):
            key = held
            if not HELD:
                key = load_class(keys, top_words, from_top, expert, first, num_words, NUM_EXPERTS, WORDS)
            num_from_middle += tl.sum((key >= middle.to(tl.int32)).to(tl.int32))
        if num_from_middle >= wanted:
            low = middle
            num_from_low = num_from_middle
        else:
            high = middle
            num_from_high = num_from_middle
    if num_from_low == wanted:
        high = low
    return low.to(tl.int32), high.to(tl.int32), wanted - num_from_high


@triton.jit
def choose(key, low, high, rest, seen):
    """Choose the tokens of a chunk that are among the highest that `search` found. seen: tokens with key `low` in the
    chunks before; with those of this one it is the second result."""
    chosen = key >= high
    if high > low:
        ties = pack(key == low, 1)
        count = count_bits(ties)
        rank = (seen + tl.cumsum(count) - count)[:, None] + count_below(ties[:, None], tl.arange(0, WORD)[None, :])
        chosen = chosen | ((key == low) & (rank < rest))
        seen += tl.sum(count)
    return chosen, seen


@triton.jit
def sum_scores(
    keys,
    top_words,
    from_top,
    low,
    high,
    rest,
    sums_chosen,
    expert,
    num_words,
    NUM_EXPERTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Sum a class's scores in fp64: of the tokens that `search` found, or if not `sums_chosen` of the others."""
    total, seen = tl.zeros([], tl.float64), 0
    for first in range(0, num_words, WORDS):
        key = load_class(keys, top_words, from_top, expert, first, num_words, NUM_EXPERTS, WORDS)
        chosen, seen = choose(key, low, high, rest, seen)
        score = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True).to(tl.float64)
        total += tl.sum(tl.where((key > NO_KEY) & (chosen == sums_chosen), score, 0.0))
    return total


@triton.jit
def nearest_multiple(count, TILE: tl.constexpr):
    """Round to the nearest multiple; ties go down."""
    return (2 * count + TILE - 1) // (2 * TILE) * TILE
