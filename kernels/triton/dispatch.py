"""Dispatch on the device: a stable counting sort of the pairs by expert, in three launches and without a host sync.

A few pairs of top-k take one launch, `dispatch_few_kernel`, in which every program looks at all of them. Others are cut
into blocks.

    dispatch_count_kernel   counts the pairs of each expert in each block
    dispatch_scan_kernel    turns an expert's counts into the first row of each block; its last program turns the experts'
                            totals into offsets
    dispatch_place_kernel   ranks the pairs of a block, writes their rows, and writes the tile table
    dispatch_order_kernel   only for a general list of pairs: sorts each token's few rows

Pairs without an expert are counted as expert E, so that they come last. A general list of pairs is also grouped by token:
integer atomics assign the slots, and the sort by `dispatch_order_kernel` makes the result deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..interface import Rows, unwritten_rows
from ..tape import Taped
from .config import tile_rows
from .launch import cdiv, launch_kernel, next_power_of_2
from .tile_table import tile_table_length, write_tile_table

BLOCK = 128  # pairs ranked together, each against each
CHUNK = 32  # pairs that those of a block are compared with at a time
# where one launch sorts: pairs at most, pairs of a program, and others that these are compared with at a time
FEW_PAIRS, FEW_BLOCK, FEW_CHUNK = 512, 32, 64
SCAN, WIDE = 2048, 8192  # counts that are scanned together, and counts that are only summed
T_DEPENDENT = ["num_pairs", "num_blocks", "num_tokens", "num_row_tiles", "top_k"]


@triton.jit
def _experts_of(expert, pair, num_pairs, NUM_EXPERTS: tl.constexpr):
    """Load the experts of pairs; E for a pair that is dropped."""
    expert_of_pair = tl.load(expert + pair, mask=pair < num_pairs, other=0).to(tl.int64)
    return tl.where((expert_of_pair < 0) | (expert_of_pair >= NUM_EXPERTS), NUM_EXPERTS, expert_of_pair).to(tl.int32)


@triton.jit
def _write_rows(row, pair, owner, is_pair, is_row, token_of_row, pair_of_row, num_pairs, num_tokens):
    """Write the pair and the token of each row."""
    tl.store(token_of_row + row, tl.where(is_row, owner, num_tokens), mask=is_pair)
    tl.store(pair_of_row + row, tl.where(is_row, pair, num_pairs), mask=is_pair)


@triton.jit
def _write_rows_of_tokens(row, pair, is_pair, token_offsets, token_rows, top_k):
    """Write each token's rows under top-k, where pair p is token p // top_k's."""
    tl.store(token_rows + pair, row, mask=is_pair)
    tl.store(token_offsets + pair // top_k, pair, mask=is_pair & (pair % top_k == 0))


@triton.jit
def split_scratch(scratch, num_blocks, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Split one buffer into keys [blocks, BLOCK], counts [E + 1, blocks] and totals [E + 1], behind which the ticket
    lies: how many programs have written their total."""
    counts = scratch + num_blocks * BLOCK
    return scratch, counts, counts + (NUM_EXPERTS + 1) * num_blocks


@triton.jit(do_not_specialize=T_DEPENDENT)
def dispatch_count_kernel(
    expert,
    token,
    scratch,
    token_counts,
    num_pairs,
    num_blocks,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write keys: expert * BLOCK + position in the block, the expert being E for a pair that is dropped; -1 past the
    pairs."""
    keys, counts, totals = split_scratch(scratch, num_blocks, NUM_EXPERTS, BLOCK)
    block = tl.program_id(0)
    position = tl.arange(0, BLOCK)
    pair = block * BLOCK + position
    is_pair = pair < num_pairs
    expert_of_pair = _experts_of(expert, pair, num_pairs, NUM_EXPERTS)
    if token is not None:
        owner = tl.load(token + pair, mask=is_pair, other=0).to(tl.int64)
        is_token = (owner >= 0) & (owner < num_tokens)
        is_known = is_token | (expert_of_pair == NUM_EXPERTS) | ~is_pair
        tl.device_assert(is_known, "sonicmoe_hf: the routing names a token that does not exist")
        expert_of_pair = tl.where(is_token, expert_of_pair, NUM_EXPERTS)
        tl.atomic_add(token_counts + owner, 1, mask=is_pair & (expert_of_pair < NUM_EXPERTS), sem="relaxed")
    tl.store(keys + pair, tl.where(is_pair, expert_of_pair * BLOCK + position, -1))
    bins = tl.arange(0, BINS)
    tl.store(
        counts + bins * num_blocks + block, tl.histogram(expert_of_pair, BINS, mask=is_pair), mask=bins <= NUM_EXPERTS
    )
    if block == 0:
        tl.store(totals + NUM_EXPERTS + 1, 0)  # the ticket


@triton.jit(do_not_specialize=T_DEPENDENT)
def dispatch_scan_kernel(
    scratch,
    offsets,
    token_counts,
    token_offsets,
    cursors,
    num_blocks,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    WIDE: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Compute exclusive sums in place along each expert's blocks; further programs do the same along the tokens."""
    _, counts, totals = split_scratch(scratch, num_blocks, NUM_EXPERTS, BLOCK)
    program = tl.program_id(0)
    running = 0
    if program <= NUM_EXPERTS:
        for start in range(0, num_blocks, SCAN):
            block = start + tl.arange(0, SCAN)
            is_block = block < num_blocks
            count = tl.load(counts + program * num_blocks + block, mask=is_block, other=0)
            tl.store(counts + program * num_blocks + block, running + tl.cumsum(count) - count, mask=is_block)
            running += tl.sum(count)
        tl.store(totals + program, running)
        if CHECKED and program == NUM_EXPERTS:
            tl.device_assert(running == 0, "sonicmoe_hf: the routing names an expert that does not exist")
        ticket = totals + NUM_EXPERTS + 1
        if tl.atomic_add(ticket, 1, sem="acq_rel") == NUM_EXPERTS:  # the last of these programs sees all totals
            bins = tl.arange(0, BINS)
            total = tl.load(totals + bins, mask=bins <= NUM_EXPERTS, other=0, volatile=True)
            tl.store(offsets + bins, tl.cumsum(total) - total, mask=bins <= NUM_EXPERTS)
    elif token_counts is not None:
        first_token = (program - NUM_EXPERTS - 1) * SCAN
        before = tl.zeros((WIDE,), tl.int32)
        for start in range(0, first_token, WIDE):
            token = start + tl.arange(0, WIDE)
            before += tl.load(token_counts + token, mask=token < first_token, other=0)
        token = first_token + tl.arange(0, SCAN)
        count = tl.load(token_counts + token, mask=token < num_tokens, other=0)
        first = tl.sum(before) + tl.cumsum(count) - count
        tl.store(token_offsets + token, first, mask=token <= num_tokens)
        tl.store(cursors + token, first, mask=token < num_tokens)


@triton.jit(do_not_specialize=T_DEPENDENT)
def dispatch_place_kernel(
    scratch,
    token,
    cursors,
    row_of_slot,
    offsets,
    token_of_row,
    pair_of_row,
    token_offsets,
    token_rows,
    tiles,
    num_pairs,
    num_blocks,
    num_tokens,
    num_row_tiles,
    top_k,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Write the rows of a block of pairs; programs after those of the blocks write an expert's row tiles each."""
    keys, counts, _ = split_scratch(scratch, num_blocks, NUM_EXPERTS, BLOCK)
    block = tl.program_id(0)
    if block < num_blocks:
        position = tl.arange(0, BLOCK)
        pair = block * BLOCK + position
        is_pair = pair < num_pairs
        expert_of_pair = tl.load(keys + pair) // BLOCK
        row = tl.load(counts + expert_of_pair * num_blocks + block, mask=is_pair, other=0)
        row += tl.load(offsets + expert_of_pair, mask=is_pair, other=0)
        for start in tl.static_range(0, BLOCK, CHUNK):
            # The others run along the first axis, so that a thread adds up its own pair. An earlier pair of the same
            # expert has a key between the expert's first and this pair's; others wrap around or lie above.
            other = tl.load(keys + block * BLOCK + start + tl.arange(0, CHUNK))
            above = (other[:, None] - (expert_of_pair * BLOCK)[None, :]).to(tl.uint32, bitcast=True)
            row += tl.sum((above < position.to(tl.uint32)[None, :]).to(tl.int32), axis=0)
        is_row = is_pair & (expert_of_pair < NUM_EXPERTS)
        if token is None:
            owner = pair // top_k
            _write_rows_of_tokens(row, pair, is_pair, token_offsets, token_rows, top_k)
        else:
            owner = tl.load(token + pair, mask=is_row, other=0).to(tl.int32)
            slot = tl.atomic_add(cursors + owner, 1, mask=is_row, sem="relaxed")
            tl.store(row_of_slot + slot, (pair.to(tl.int64) << 32) | row, mask=is_row)
            tl.store(token_rows + row, row, mask=is_pair & (expert_of_pair == NUM_EXPERTS))
        _write_rows(row, pair, owner, is_pair, is_row, token_of_row, pair_of_row, num_pairs, num_tokens)
    else:
        own_expert = block - num_blocks
        bins = tl.arange(0, BINS)
        first = tl.load(offsets + bins, mask=bins < NUM_EXPERTS, other=0)
        end = tl.load(offsets + bins + 1, mask=bins < NUM_EXPERTS, other=0)
        write_tile_table(tiles, first, end, own_expert, num_row_tiles, NUM_EXPERTS, BINS, TILE_ROWS)
        if token is None and own_expert == NUM_EXPERTS:
            tl.store(token_offsets + num_tokens, num_pairs)


@triton.jit(do_not_specialize=T_DEPENDENT)
def dispatch_few_kernel(
    expert,
    offsets,
    token_of_row,
    pair_of_row,
    token_offsets,
    token_rows,
    tiles,
    num_pairs,
    num_blocks,
    num_tokens,
    num_row_tiles,
    top_k,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Do all of top-k's dispatch, of up to PAIRS pairs. A pair's row is the number of pairs that come before it."""
    block = tl.program_id(0)
    if block < num_blocks:
        pair = block * BLOCK + tl.arange(0, BLOCK)
        is_pair = pair < num_pairs
        expert_of_pair = _experts_of(expert, pair, num_pairs, NUM_EXPERTS)
        key = expert_of_pair * PAIRS + pair
        before = tl.zeros((BLOCK, CHUNK), tl.int32)  # a thread has few of the others, and so few loads
        for start in tl.static_range(0, PAIRS, CHUNK):
            other = start + tl.arange(0, CHUNK)
            other_key = _experts_of(expert, other, num_pairs, NUM_EXPERTS) * PAIRS + other
            before += ((other < num_pairs)[None, :] & (other_key[None, :] < key[:, None])).to(tl.int32)
        row = tl.sum(before, axis=1)
        _write_rows_of_tokens(row, pair, is_pair, token_offsets, token_rows, top_k)
        is_row = is_pair & (expert_of_pair < NUM_EXPERTS)
        _write_rows(row, pair, pair // top_k, is_pair, is_row, token_of_row, pair_of_row, num_pairs, num_tokens)
    else:
        own_expert = block - num_blocks
        every_pair, bins = tl.arange(0, PAIRS), tl.arange(0, BINS)
        every_expert = _experts_of(expert, every_pair, num_pairs, NUM_EXPERTS)
        count = tl.histogram(every_expert, BINS, mask=every_pair < num_pairs)
        count = tl.where(bins < NUM_EXPERTS, count, 0)
        end = tl.cumsum(count)
        write_tile_table(tiles, end - count, end, own_expert, num_row_tiles, NUM_EXPERTS, BINS, TILE_ROWS)
        if own_expert == NUM_EXPERTS:
            tl.store(offsets + bins, end - count, mask=bins <= NUM_EXPERTS)
            tl.store(token_offsets + num_tokens, num_pairs)
            if CHECKED:
                is_known = tl.sum(count) == num_pairs
                tl.device_assert(is_known, "sonicmoe_hf: the routing names an expert that does not exist")


@triton.jit(do_not_specialize=T_DEPENDENT)
def dispatch_order_kernel(
    row_of_slot, token_offsets, token_rows, num_tokens, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """Put each token's rows into the order of their pairs."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    start = tl.load(token_offsets + token, mask=token < num_tokens, other=0)[:, None]
    end = tl.load(token_offsets + token + 1, mask=token < num_tokens, other=0)[:, None]
    entry = tl.arange(0, BLOCK)[None, :]
    last = 0x7FFFFFFFFFFFFFFF
    longest = tl.max(end - start)
    for first in range(0, longest, BLOCK):
        slot = start + first + entry
        key = tl.load(row_of_slot + slot, mask=slot < end, other=last)
        position = tl.zeros((TOKENS, BLOCK), tl.int32)
        for first_other in range(0, longest, BLOCK):
            other_slot = start + first_other + entry
            other = tl.load(row_of_slot + other_slot, mask=other_slot < end, other=last)
            position += tl.sum((other[:, None, :] < key[:, :, None]).to(tl.int32), axis=2)
        tl.store(token_rows + start + position, (key & 0x7FFFFFFF).to(tl.int32), mask=slot < end)


def dispatch(expert_P, token_P, num_tokens, num_experts, sentinels):
    return Rows._make(_TAPES([expert_P, token_P, num_tokens, num_experts, sentinels]))


def _dispatch(arguments):
    """Run `dispatch` of a list of its arguments, which is emptied; returns a list of Rows' fields."""
    expert_P, token_P, num_tokens, num_experts, sentinels = arguments
    arguments.clear()
    expert_P, device = expert_P.reshape(-1).contiguous(), expert_P.device
    num_pairs = expert_P.shape[0]
    num_tiles = tile_table_length(num_pairs, num_experts)
    if not num_pairs:
        rows = unwritten_rows(expert_P, 0, num_tokens, num_experts, num_tiles)
        return [*(tensor.zero_() for tensor in rows[:-1]), rows.tiles.fill_(-1)]
    is_few = token_P is None and num_pairs <= FEW_PAIRS
    num_blocks, bins = cdiv(num_pairs, FEW_BLOCK if is_few else BLOCK), next_power_of_2(num_experts + 1)
    rows_of_tile = tile_rows(num_pairs, num_experts)
    # of the kernels that write rows and tiles, which take as many programs as blocks and experts, and one more
    top_k = max(num_pairs // max(num_tokens, 1), 1)
    numbers = num_pairs, num_blocks, num_tokens, num_tiles - 1, top_k
    # An unknown id fails a device-side assertion, as an index out of range does in PyTorch; `debug` compiles it in.
    checked = {"debug": not sentinels, "sanitize_overflow": False}
    size = 0 if is_few else num_blocks * (BLOCK + num_experts + 1) + num_experts + 2
    scratch = torch.empty(size, dtype=torch.int32, device=device)
    rows, new = unwritten_rows(scratch, num_pairs, num_tokens, num_experts, num_tiles), scratch.new_empty
    if is_few:
        constants = num_experts, bins, FEW_PAIRS, FEW_BLOCK, FEW_CHUNK, rows_of_tile, not sentinels
        launch_kernel(
            dispatch_few_kernel,
            (num_blocks + num_experts + 1,),
            (expert_P, *rows),
            numbers,
            constants,
            num_warps=4,
            **checked,
        )
        return list(rows)
    token_counts = cursors = row_of_slot = None
    token_blocks = 0
    if token_P is not None:
        token_P = token_P.reshape(-1).contiguous()
        token_counts = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        cursors, row_of_slot = new(num_tokens), new(num_pairs, dtype=torch.int64)
        token_blocks = cdiv(num_tokens + 1, SCAN)
    launch_kernel(
        dispatch_count_kernel,
        (num_blocks,),
        (expert_P, token_P, scratch, token_counts),
        (num_pairs, num_blocks, num_tokens),
        (num_experts, bins, BLOCK),
        num_warps=4,
        debug=token_P is not None,
        sanitize_overflow=False,
    )
    launch_kernel(
        dispatch_scan_kernel,
        (num_experts + 1 + token_blocks,),
        (scratch, rows.offsets, token_counts, rows.token_offsets, cursors),
        (num_blocks, num_tokens),
        (num_experts, bins, BLOCK, SCAN, WIDE, not sentinels),
        num_warps=8,
        **checked,
    )
    launch_kernel(
        dispatch_place_kernel,
        (num_blocks + num_experts + 1,),
        (scratch, token_P, cursors, row_of_slot, *rows),
        numbers,
        (num_experts, bins, BLOCK, CHUNK, rows_of_tile),
        num_warps=4,
    )
    if token_P is not None:
        launch_kernel(
            dispatch_order_kernel,
            (cdiv(num_tokens, 16),),
            (row_of_slot, rows.token_offsets, rows.token_rows),
            (num_tokens,),
            (16, 16),
            num_warps=4,
        )
    return list(rows)


_TAPES = Taped(_dispatch)
