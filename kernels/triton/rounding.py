"""Token rounding on the device: from scores to rows sorted by expert, in three launches and without a host sync.

    rounding_keys_kernel     turns the scores into keys that order as integers, expert by expert, and packs top-k's choice
                             into words of 32 tokens
    rounding_select_kernel   one program per expert: decides how many rows the expert gets, finds the last selected key by
                             bisection, and writes the set as words again, with the number of rows before each word
    rounding_place_kernel    finds every row's place from those; writes the lists of rows, of each token's rows and of
                             tiles, and the rows' weights

Nothing is sorted, and only sums of integers use atomics. The definition is ../rounding.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..interface import RoundedRows, unwritten_rows
from .config import tile_rows
from .dispatch import dispatch
from .launch import cdiv, launch_kernel, next_power_of_2
from .rounding_search import (
    NO_KEY,
    WORD,
    choose,
    count_below,
    count_bits,
    load_chunk,
    nearest_multiple,
    order_key,
    pack,
    search,
    sum_scores,
)
from .tile_table import tile_table_length, write_tile_table

MIN_HELD, MAX_HELD = 1 << 10, 1 << 15  # tokens whose keys a program holds in registers while it searches, at most
MAX_PLACED = 1 << 11  # (token, expert) of which a program finds the rows
FILL = 1 << 10  # entries of the rows' lists that a program completes
T_DEPENDENT = ["num_tokens", "num_words", "num_blocks", "num_pairs", "num_row_tiles", "top_k", "min_pairs"]


@triton.jit(do_not_specialize=T_DEPENDENT)
def rounding_keys_kernel(
    scores,
    index,
    valid,
    keys,
    top_words,
    totals,
    num_tokens,
    num_words,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Write keys [E, 32 W]: NO_KEY where the token is padding, or not top-k's and never to be added. top_words [W, E]:
    top-k's choice. totals [E + 1], where wanted: the rows that top-k gives every expert, and the tokens, without
    padding."""
    word = tl.program_id(0)
    lane = tl.arange(0, WORD)
    token, first_expert = word * WORD + lane, tl.program_id(1) * WORD
    expert = first_expert + lane
    is_token, is_expert = token < num_tokens, expert < NUM_EXPERTS
    offset = token.to(tl.int64)[:, None] * NUM_EXPERTS + expert[None, :]
    score = tl.load(scores + offset, mask=is_token[:, None] & is_expert[None, :], other=float("-inf"))
    chosen = tl.zeros((WORD,), tl.int32)  # a bit for each of the program's experts
    for k in tl.static_range(TOP_K):
        bit = tl.load(index + token * TOP_K + k, mask=is_token, other=-1).to(tl.int32) - first_expert
        chosen |= tl.where((bit >= 0) & (bit < WORD), 1 << (bit & (WORD - 1)), 0)
    is_top = ((chosen[:, None] >> lane[None, :]) & 1) != 0
    real = is_token
    if valid is not None:
        real = real & tl.load(valid + token, mask=is_token, other=0)

    key = order_key(score)
    key = tl.where(real[:, None] & (is_top | (score > float("-inf"))), key, NO_KEY)
    transposed = (expert.to(tl.int64) * num_words * WORD)[:, None] + token[None, :]
    tl.store(keys + transposed, tl.trans(key), mask=is_expert[:, None])
    tl.store(top_words + word * NUM_EXPERTS + expert, pack(is_top, 0), mask=is_expert)
    if totals is not None:
        rows = tl.sum((is_top & real[:, None]).to(tl.int32), axis=0)
        tl.atomic_add(totals + expert, rows, mask=is_expert, sem="relaxed")
        if tl.program_id(1) == 0:
            tl.atomic_add(totals + NUM_EXPERTS, tl.sum(real.to(tl.int32)), sem="relaxed")


@triton.jit(do_not_specialize=T_DEPENDENT)
def rounding_select_kernel(
    keys,
    top_words,
    selection,
    counts,
    totals,
    uniform,
    fell_back,
    num_words,
    top_k,
    min_pairs,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    WORDS: tl.constexpr,
    HELD: tl.constexpr,
    TILE: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Write selection [2, W, E], the expert's tokens as words and the number of its rows before each word; counts [E],
    the number of its rows.

    num_top, num_others: tokens that top-k sends to the expert, and that could be added. below: the multiple of TILE at or
    below num_top, excess: what is above it. num_chosen: the rows that the expert gets, by the formulas of ../rounding.py.
    A program holds the keys of all tokens in registers if HELD, and otherwise loads them anew in each pass.
    """
    expert = tl.program_id(0)
    held_key, held_top = load_chunk(keys, top_words, expert, 0, num_words, NUM_EXPERTS, WORDS)  # all tokens, if HELD
    num_top, num_others = 0, 0
    for first in range(0, WORDS if HELD else num_words, WORDS):
        key, top = held_key, held_top
        if not HELD:
            key, top = load_chunk(keys, top_words, expert, first, num_words, NUM_EXPERTS, WORDS)
        num_top += tl.sum((top & (key > NO_KEY)).to(tl.int32))
        num_others += tl.sum((~top & (key > NO_KEY)).to(tl.int32))
    below = num_top // TILE * TILE
    excess = num_top - below
    if ROUNDING == "balanced":
        each_expert = tl.arange(0, BINS)
        total = tl.load(totals + each_expert, mask=each_expert <= expert, other=0)
        until = tl.sum(total)
        num_chosen = nearest_multiple(until, TILE) - nearest_multiple(until - num_top, TILE)
    elif ROUNDING == "nearest":
        num_chosen = nearest_multiple(num_top, TILE)
    elif ROUNDING == "down":
        num_chosen = below
    else:
        if ROUNDING == "up":
            rounds_up = excess > 0
        elif ROUNDING == "stochastic":
            rounds_up = tl.load(uniform + expert) * TILE < excess
        else:
            low, high, rest = search(
                keys, top_words, held_key, held_top, 1, below, num_top, expert, num_words, NUM_EXPERTS, WORDS, HELD
            )
            lost = sum_scores(keys, top_words, 1, low, high, rest, False, expert, num_words, NUM_EXPERTS, WORDS)
            num_missing = tl.minimum(below + TILE - num_top, num_others)
            low, high, rest = search(
                keys,
                top_words,
                held_key,
                held_top,
                0,
                num_missing,
                num_others,
                expert,
                num_words,
                NUM_EXPERTS,
                WORDS,
                HELD,
            )
            gained = sum_scores(keys, top_words, 0, low, high, rest, True, expert, num_words, NUM_EXPERTS, WORDS)
            rounds_up = (gained < lost) & (excess > 0)
        num_chosen = tl.where(rounds_up, below + TILE, below)
    num_chosen = tl.where(num_chosen - num_top > num_others, below, num_chosen)  # too few tokens to round up
    if fell_back is not None:  # padding left too few tokens: top-k stands, for padding too
        keep_all = tl.load(totals + NUM_EXPERTS).to(tl.int64) * top_k < min_pairs
        num_chosen = tl.where(keep_all, num_top, num_chosen)
        if expert == 0:
            tl.store(fell_back, keep_all)

    from_top = (num_chosen < num_top).to(tl.int32)
    wanted, count = (
        tl.where(num_chosen < num_top, num_chosen, num_chosen - num_top),
        tl.where(num_chosen < num_top, num_top, num_others),
    )
    low, high, rest = search(
        keys, top_words, held_key, held_top, from_top, wanted, count, expert, num_words, NUM_EXPERTS, WORDS, HELD
    )
    rows_before, seen = 0, 0
    for first in range(0, WORDS if HELD else num_words, WORDS):
        key, top = held_key, held_top
        if not HELD:
            key, top = load_chunk(keys, top_words, expert, first, num_words, NUM_EXPERTS, WORDS)
        stays = top & (key > NO_KEY)
        if fell_back is not None:
            stays = tl.where(keep_all, top, stays)
        chosen, seen = choose(tl.where(top.to(tl.int32) == from_top, key, NO_KEY), low, high, rest, seen)
        packed = pack(chosen | (stays & (from_top == 0)), 1)
        rows = count_bits(packed)
        word = first + tl.arange(0, WORDS)
        index = selection + word * NUM_EXPERTS + expert
        tl.store(index, packed, mask=word < num_words)
        tl.store(index + num_words * NUM_EXPERTS, rows_before + tl.cumsum(rows) - rows, mask=word < num_words)
        rows_before += tl.sum(rows)
    tl.store(counts + expert, rows_before)


@triton.jit
def find_rows(
    selection, first_row, block, num_words, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr
):
    """Find the rows of a block of tokens: tokens [TOKENS], experts [EXPERTS]; and of [TOKENS, EXPERTS] whether the token
    goes to the expert, and as which row."""
    lane = block * TOKENS % WORD + tl.arange(0, TOKENS)
    word = block * TOKENS // WORD
    expert = tl.arange(0, EXPERTS)
    index = selection + word * NUM_EXPERTS + expert
    packed = tl.load(index, mask=expert < NUM_EXPERTS, other=0)
    row = tl.load(index + num_words * NUM_EXPERTS, mask=expert < NUM_EXPERTS, other=0) + first_row
    is_pair = ((packed[None, :] >> lane[:, None]) & 1) != 0
    return word * WORD + lane, expert, is_pair, row[None, :] + count_below(packed[None, :], lane[:, None])


@triton.jit(do_not_specialize=T_DEPENDENT)
def rounding_place_kernel(
    scores,
    selection,
    counts,
    weights,
    expert_of_row,
    offsets,
    token_of_row,
    pair_of_row,
    token_offsets,
    token_rows,
    tiles,
    num_tokens,
    num_words,
    num_blocks,
    num_pairs,
    num_row_tiles,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    FILL: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    NORMALISED: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Write the rows that `find_rows` finds, their weights, tiles and lists.

    The first programs take a block of tokens each. Then one an expert writes its row tiles, and one more the rest of the
    tile table. The last ones fill entries of the lists that no row has.
    """
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    count = tl.load(counts + expert, mask=expert < NUM_EXPERTS, other=0)
    end_row = tl.cumsum(count)
    first_row = end_row - count
    num_rows = tl.sum(count)
    if block < num_blocks:
        token, expert, is_pair, row = find_rows(selection, first_row, block, num_words, NUM_EXPERTS, EXPERTS, TOKENS)
        score = tl.load(scores + token.to(tl.int64)[:, None] * NUM_EXPERTS + expert[None, :], mask=is_pair, other=0.0)
        if NORMALISED:
            total = tl.sum(score, axis=1)
            score = score / (tl.where(total > 0, total, 1.0) + EPSILON)[:, None]
        tl.store(weights + row, (score * SCALE).to(weights.dtype.element_ty), mask=is_pair)
        tl.store(token_of_row + row, token[:, None], mask=is_pair)

        entries = is_pair.to(tl.int32)
        rows_of_token = tl.sum(entries, axis=1)
        # the block's first token has, or would have, these rows; an expert's rows before its own are of earlier tokens
        earlier = tl.where(tl.arange(0, TOKENS)[:, None] == 0, row - first_row[None, :], 0)
        first_entry = tl.sum(earlier) + tl.cumsum(rows_of_token) - rows_of_token
        tl.store(token_offsets + token, first_entry, mask=token < num_tokens)
        entry = first_entry[:, None] + tl.cumsum(entries, axis=1) - entries
        tl.store(token_rows + entry, row, mask=is_pair)
    elif block <= num_blocks + NUM_EXPERTS:
        own_expert = block - num_blocks
        write_tile_table(tiles, first_row, end_row, own_expert, num_row_tiles, NUM_EXPERTS, EXPERTS, TILE_ROWS)
        is_own = expert == own_expert
        end = tl.sum(tl.where(is_own, end_row, 0))
        for start in range(tl.sum(tl.where(is_own, first_row, 0)), end, FILL):
            row = start + tl.arange(0, FILL)
            tl.store(expert_of_row + row, own_expert, mask=row < end)
        if own_expert == NUM_EXPERTS:
            tl.store(offsets + expert, first_row, mask=expert < NUM_EXPERTS)
            tl.store(offsets + NUM_EXPERTS, num_rows)
            tl.store(token_offsets + num_tokens, num_rows)
    else:
        row = (block - num_blocks - NUM_EXPERTS - 1) * FILL + tl.arange(0, FILL)
        tl.store(pair_of_row + row, tl.where(row < num_rows, row, num_pairs), mask=row < num_pairs)
        is_left = (row >= num_rows) & (row < num_pairs)
        tl.store(weights + row, tl.zeros((FILL,), weights.dtype.element_ty), mask=is_left)
        tl.store(expert_of_row + row, NUM_EXPERTS, mask=is_left)
        tl.store(token_of_row + row, num_tokens, mask=is_left)
        tl.store(token_rows + row, row, mask=is_left)


def round_rows(
    scores_TE, ranking_TE, top_k_index_TK, valid_T, uniform_E, rounding, tile, min_pairs, num_pairs, weighting, dtype
):
    (num_tokens, num_experts), device = scores_TE.shape, scores_TE.device

    expert_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    new = expert_P.new_empty
    weight_P = new(num_pairs, dtype=dtype)
    if not num_pairs:
        fell_back = None if valid_T is None else torch.ones((), dtype=torch.bool, device=device)
        return RoundedRows(weight_P, expert_P, dispatch(expert_P, None, num_tokens, num_experts, True), fell_back)
    rows = unwritten_rows(expert_P, num_pairs, num_tokens, num_experts, tile_table_length(num_pairs, num_experts))
    fell_back = totals = None
    if valid_T is not None:
        valid_T, fell_back = valid_T.contiguous(), new((), dtype=torch.bool)
    if rounding == "balanced" or valid_T is not None:
        totals = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    num_words, experts, top_k = cdiv(num_tokens, WORD.value), next_power_of_2(num_experts), top_k_index_TK.shape[1]
    keys, top_words = new(num_experts, num_words * WORD.value), new(num_words, num_experts)
    selection, counts = new(2, num_words, num_experts), new(num_experts)

    launch_kernel(
        rounding_keys_kernel,
        (num_words, cdiv(num_experts, WORD.value)),
        (ranking_TE.contiguous(), top_k_index_TK.contiguous(), valid_T, keys, top_words, totals),
        (num_tokens, num_words),
        (num_experts, top_k),
        num_warps=4,
    )
    held = min(max(next_power_of_2(num_tokens), MIN_HELD), MAX_HELD)
    launch_kernel(
        rounding_select_kernel,
        (num_experts,),
        (keys, top_words, selection, counts, totals, uniform_E, fell_back),
        (num_words, top_k, min_pairs),
        (num_experts, experts, held // WORD.value, num_tokens <= held, tile, rounding),
        num_warps=max(held // 1024, 8),
    )
    tokens = max(min(WORD.value, MAX_PLACED // experts), 1)  # a part of a word
    num_blocks = cdiv(num_tokens, tokens)
    launch_kernel(
        rounding_place_kernel,
        (num_blocks + num_experts + 1 + cdiv(num_pairs, FILL),),
        (scores_TE.contiguous(), selection, counts, weight_P, expert_P, *rows),
        (num_tokens, num_words, num_blocks, num_pairs, rows.tiles.shape[0] - 1),
        (num_experts, experts, tokens, FILL, tile_rows(num_pairs, num_experts), *weighting),
        num_warps=2,
    )
    return RoundedRows(weight_P, expert_P, rows, fell_back)
