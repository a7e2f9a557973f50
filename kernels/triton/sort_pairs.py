"""Dispatch on the device: a stable counting sort of the pairs by expert, in three launches and without a host sync.

Pairs are cut into blocks. `count_kernel` counts the experts of each block, `scan_kernel` turns an expert's counts into
the places of its blocks (its last program the experts' totals into offsets), `place_kernel` ranks the pairs of a block
and writes them, and the tile table. Pairs without an expert are counted as expert E, so that they come last. A general
list of pairs is also grouped by token (integer atomics claim places, `order_kernel` then puts each token's few rows in
order, so the result is deterministic).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..interface import Rows
from .blocks import SMALLEST_TILE, max_row_tiles, tile_rows
from .launch import cdiv, launch, next_power_of_2

BLOCK = 128  # pairs ranked together, each against each
CHUNK = 32
SCAN, WIDE = 2048, 8192  # counts scanned together, counts only added up
T_DEPENDENT = ["num_pairs", "num_blocks", "num_tokens", "num_row_tiles", "top_k"]


@triton.jit(do_not_specialize=T_DEPENDENT)
def count_kernel(
    expert, token, keys, counts, token_counts, ticket, num_pairs, num_blocks, num_tokens,
    NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """keys: expert * BLOCK + place in the block, the expert being E for a pair that is dropped; -1 past the pairs."""
    block = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    pair = block * BLOCK + place
    is_pair = pair < num_pairs
    found = tl.load(expert + pair, mask=is_pair, other=0).to(tl.int64)
    found = tl.where((found < 0) | (found >= NUM_EXPERTS), NUM_EXPERTS, found)
    if token is not None:
        owner = tl.load(token + pair, mask=is_pair, other=0).to(tl.int64)
        found = tl.where((owner < 0) | (owner >= num_tokens), NUM_EXPERTS, found)
        tl.atomic_add(token_counts + owner, 1, mask=is_pair & (found < NUM_EXPERTS), sem="relaxed")
    found = found.to(tl.int32)
    tl.store(keys + pair, tl.where(is_pair, found * BLOCK + place, -1))
    bins = tl.arange(0, BINS)
    tl.store(counts + bins * num_blocks + block, tl.histogram(found, BINS, mask=is_pair), mask=bins <= NUM_EXPERTS)
    if block == 0:
        tl.store(ticket, 0)


@triton.jit(do_not_specialize=T_DEPENDENT)
def scan_kernel(
    counts, totals, offsets, token_counts, token_offsets, cursors, ticket, num_blocks, num_tokens,
    NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, SCAN: tl.constexpr, WIDE: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Exclusive sums in place along each expert's blocks; further programs do the same along the tokens."""
    which = tl.program_id(0)
    running = 0
    if which <= NUM_EXPERTS:
        for start in range(0, num_blocks, SCAN):
            block = start + tl.arange(0, SCAN)
            is_block = block < num_blocks
            count = tl.load(counts + which * num_blocks + block, mask=is_block, other=0)
            tl.store(counts + which * num_blocks + block, running + tl.cumsum(count) - count, mask=is_block)
            running += tl.sum(count)
        tl.store(totals + which, running)
        if CHECKED and which == NUM_EXPERTS:
            tl.device_assert(running == 0, "sonicmoe_hf: the routing names an expert that does not exist")
        if tl.atomic_add(ticket, 1, sem="acq_rel") == NUM_EXPERTS:  # the last of these programs sees all totals
            bins = tl.arange(0, BINS)
            total = tl.load(totals + bins, mask=bins <= NUM_EXPERTS, other=0, volatile=True)
            tl.store(offsets + bins, tl.cumsum(total) - total, mask=bins <= NUM_EXPERTS)
    elif token_counts is not None:
        first_token = (which - NUM_EXPERTS - 1) * SCAN
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
def place_kernel(
    keys, token, counts, cursors, row_of_slot,
    offsets, token_of_row, pair_of_row, token_offsets, token_rows, tiles,
    num_pairs, num_blocks, num_tokens, num_row_tiles, top_k,
    NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < num_blocks:
        place = tl.arange(0, BLOCK)
        pair = block * BLOCK + place
        is_pair = pair < num_pairs
        found = tl.load(keys + pair) // BLOCK
        row = tl.load(counts + found * num_blocks + block, mask=is_pair, other=0)
        row += tl.load(offsets + found, mask=is_pair, other=0)
        for start in tl.static_range(0, BLOCK, CHUNK):
            # The others run along the first axis, so that a thread adds up its own pair. An earlier pair of the same
            # expert has a key between the expert's first and this pair's; others wrap around or lie above.
            other = tl.load(keys + block * BLOCK + start + tl.arange(0, CHUNK))
            above = (other[:, None] - (found * BLOCK)[None, :]).to(tl.uint32, bitcast=True)
            row += tl.sum((above < place.to(tl.uint32)[None, :]).to(tl.int32), axis=0)
        is_row = is_pair & (found < NUM_EXPERTS)
        if token is None:
            owner = pair // top_k
            tl.store(token_rows + pair, row, mask=is_pair)
            tl.store(token_offsets + owner, pair, mask=is_pair & (pair % top_k == 0))
        else:
            owner = tl.load(token + pair, mask=is_row, other=0).to(tl.int32)
            slot = tl.atomic_add(cursors + owner, 1, mask=is_row, sem="relaxed")
            tl.store(row_of_slot + slot, (pair.to(tl.int64) << 32) | row, mask=is_row)
            tl.store(token_rows + row, row, mask=is_pair & (found == NUM_EXPERTS))
        tl.store(token_of_row + row, tl.where(is_row, owner, num_tokens), mask=is_pair)
        tl.store(pair_of_row + row, tl.where(is_row, pair, num_pairs), mask=is_pair)
    else:
        which = block - num_blocks
        bins = tl.arange(0, BINS)
        first = tl.load(offsets + bins, mask=bins < NUM_EXPERTS, other=0)
        end = tl.load(offsets + bins + 1, mask=bins < NUM_EXPERTS, other=0)
        num_tiles = (end - first + TILE_ROWS - 1) // TILE_ROWS
        if which < NUM_EXPERTS:
            tile = tl.sum(tl.where(bins < which, num_tiles, 0))
            last = tl.load(offsets + which + 1)
            for row in range(tl.load(offsets + which), last, TILE_ROWS):
                tl.store(tiles + tile * 3, which)
                tl.store(tiles + tile * 3 + 1, row)
                tl.store(tiles + tile * 3 + 2, tl.minimum(row + TILE_ROWS, last))
                tile += 1
        else:
            for start in range(tl.sum(num_tiles), num_row_tiles, BINS):
                tl.store(tiles + (start + bins) * 3, -1, mask=start + bins < num_row_tiles)
            if token is None:
                tl.store(token_offsets + num_tokens, num_pairs)


@triton.jit(do_not_specialize=T_DEPENDENT)
def order_kernel(row_of_slot, token_offsets, token_rows, num_tokens, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Puts each token's rows into the order of their pairs."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    start = tl.load(token_offsets + token, mask=token < num_tokens, other=0)[:, None]
    end = tl.load(token_offsets + token + 1, mask=token < num_tokens, other=0)[:, None]
    entry = tl.arange(0, BLOCK)[None, :]
    last = 0x7FFFFFFFFFFFFFFF
    longest = tl.max(end - start)
    for first in range(0, longest, BLOCK):
        slot = start + first + entry
        key = tl.load(row_of_slot + slot, mask=slot < end, other=last)
        place = tl.zeros((TOKENS, BLOCK), tl.int32)
        for first_other in range(0, longest, BLOCK):
            other_slot = start + first_other + entry
            other = tl.load(row_of_slot + other_slot, mask=other_slot < end, other=last)
            place += tl.sum((other[:, None, :] < key[:, :, None]).to(tl.int32), axis=2)
        tl.store(token_rows + start + place, (key & 0x7FFFFFFF).to(tl.int32), mask=slot < end)


def tile_table_length(num_pairs, num_experts):
    # for the smallest tile: a length without a branch, so that a symbolic number of pairs brings no guard
    return (num_pairs + SMALLEST_TILE - 1) // SMALLEST_TILE + num_experts


def dispatch(expert_P, token_P, num_tokens, num_experts, sentinels):
    expert_P, device = expert_P.reshape(-1), expert_P.device
    expert_P = expert_P.contiguous()
    num_pairs = expert_P.numel()
    num_row_tiles = max_row_tiles(num_pairs, num_experts)
    if not num_pairs:
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return Rows(
            offsets=torch.zeros(num_experts + 1, dtype=torch.int32, device=device),
            token=empty,
            pair=empty.clone(),
            token_offsets=torch.zeros(num_tokens + 1, dtype=torch.int32, device=device),
            token_rows=empty.clone(),
            tiles=torch.full((num_experts, 3), -1, dtype=torch.int32, device=device),
        )

    def new(*size, dtype=torch.int32):
        return torch.empty(size, dtype=dtype, device=device)

    rows = Rows(new(num_experts + 1), new(num_pairs), new(num_pairs), new(num_tokens + 1), new(num_pairs),
                new(tile_table_length(num_pairs, num_experts), 3))  # fmt: skip
    num_blocks, bins = cdiv(num_pairs, BLOCK), next_power_of_2(num_experts + 1)
    keys, counts = new(num_blocks * BLOCK), new(num_experts + 1, num_blocks)
    totals, ticket = new(num_experts + 1), new(1)
    token_counts = cursors = row_of_slot = None
    if token_P is not None:
        token_P = token_P.reshape(-1).contiguous()
        token_counts = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        cursors, row_of_slot = new(num_tokens), new(num_pairs, dtype=torch.int64)
    launch(
        count_kernel, (num_blocks,), (expert_P, token_P, keys, counts, token_counts, ticket),
        (num_pairs, num_blocks, num_tokens), (num_experts, bins, BLOCK), num_warps=4,
    )  # fmt: skip
    token_blocks = 0 if token_P is None else cdiv(num_tokens + 1, SCAN)
    # An unknown id fails a device-side assertion, as an index out of range does in PyTorch; `debug` compiles it in.
    launch(
        scan_kernel, (num_experts + 1 + token_blocks,),
        (counts, totals, rows.offsets, token_counts, rows.token_offsets, cursors, ticket), (num_blocks, num_tokens),
        (num_experts, bins, SCAN, WIDE, not sentinels), num_warps=8, debug=not sentinels, sanitize_overflow=False,
    )  # fmt: skip
    launch(
        place_kernel, (num_blocks + num_experts + 1,), (keys, token_P, counts, cursors, row_of_slot, *rows),
        (num_pairs, num_blocks, num_tokens, num_row_tiles, max(num_pairs // max(num_tokens, 1), 1)),
        (num_experts, bins, BLOCK, CHUNK, tile_rows(num_pairs, num_experts)), num_warps=4,
    )  # fmt: skip
    if token_P is not None:
        launch(
            order_kernel, (cdiv(num_tokens, 16),), (row_of_slot, rows.token_offsets, rows.token_rows), (num_tokens,),
            (16, 16), num_warps=4,
        )  # fmt: skip
    return rows
