"""The exchange of tokens between ranks: to the experts that they want, and the experts' output back.

A token is sent to a rank at most once, however many of its experts live there, and a rank's experts are summed before
their output is sent back. Letters: N ranks, T tokens of this rank, H hidden size, P pairs (token, expert) of a Routing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..layer.dispatch import dispatch
from ..layer.ranks import Ranks
from ..layer.routing import Routing
from ..patching import calls
from .collectives import begin_gather, begin_scatter_sum, exchange, max_over_ranks, rows_of_tokens, sum_of_rows

NOBODY = -1  # the expert of a pair that is none


Experts = Callable[[torch.Tensor, Routing, torch.Tensor], torch.Tensor]


def pairs_of(routing: Routing, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """expert_P, token_P and weight_P of any Routing."""
    expert_P, weight_P = routing.expert_index.reshape(-1), routing.weights.reshape(-1)
    if routing.token_index is not None:
        return expert_P, routing.token_index.reshape(-1), weight_P
    token_P = torch.arange(expert_P.numel(), dtype=torch.int64, device=expert_P.device) // max(
        expert_P.numel() // max(num_tokens, 1), 1
    )
    return expert_P, token_P, weight_P


def _padded(tensor: torch.Tensor, length: int, value: float = 0) -> torch.Tensor:
    missing = length - len(tensor)
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing), value=value) if missing else tensor


WAYS = ("gathering", "chunked", "all_to_all")
NUM_CHUNKS = 2  # of "chunked"
MAX_RANKS_GATHERING, MAX_GATHERED_BYTES, MIN_SHARE = 4, 2**28, 0.5
_way_in_use: str | None = None  # no thread's own: checkpointing runs layers again in a thread of autograd's


class MaxSizes(NamedTuple):
    """The maximum T and P of the ranks, and whether any of them lists its pairs with their tokens."""

    num_tokens: int
    num_pairs: int
    is_list: int


def choose_way(num_ranks: int, sizes: MaxSizes, token_bytes: int) -> str:
    """Choose how tokens reach the experts of other ranks, the same on all ranks: one of WAYS.

    Gathering sends every token to N - 1 ranks, and the host knows all shapes. An all-to-all sends a token with K experts
    to 1 - (1 - 1 / N)^K of them: with K = 8 to 0.90 of 3, 0.66 of 7, 0.40 of 15. It waits for the device once a layer, so
    that the host prepares nothing ahead, and packs what it sends. On four H200s with NVLink (eight layers of
    Qwen3-30B-A3B, 16,384 tokens a rank) a step took 162 ms by gathering, 30 of them in NCCL, and 198 by all-to-all, 69 of
    them in NCCL: a byte took more than twice as long. So up to four ranks gather, and more ranks do, where both hold:

    - An all-to-all would send more than half as much (MIN_SHARE). From 16 ranks on, with K = 8, it sends less.
    - The tokens of all ranks take little memory (MAX_GATHERED_BYTES a layer), since experts reserve rows for all of them:
      eight ranks have up to 8,192 tokens of 4 KiB each. With few tokens, waiting for the device costs most, too.

    Args:
        token_bytes: of x of one token.
    """
    num_experts_per_token = sizes.num_pairs / max(sizes.num_tokens, 1)
    share = 1 - (1 - 1 / num_ranks) ** num_experts_per_token
    gathered_bytes = num_ranks * sizes.num_tokens * token_bytes
    is_cheap = share > MIN_SHARE and gathered_bytes <= MAX_GATHERED_BYTES
    return "gathering" if num_ranks <= MAX_RANKS_GATHERING or is_cheap else "all_to_all"


@contextlib.contextmanager
def use_way(way: str | None) -> Iterator[None]:
    """Bring tokens to experts in this way, one of WAYS, inside `with`, forward and backward of a step; None: the one that
    `choose_way` chooses. For measurements and tests; all ranks do the same."""
    global _way_in_use
    before, _way_in_use = _way_in_use, way
    try:
        yield
    finally:
        _way_in_use = before


def reach_experts(x_TH: torch.Tensor, routing: Routing, ranks: Ranks, experts: Experts) -> torch.Tensor:
    """Have the ranks' experts compute with this rank's tokens: [T, H]. All ranks of the group call it.

    Args:
        routing: with ids of all experts of the layer.
        experts: x, a Routing of this rank's experts with ids counted from its first, and the weights -> their output.
    """
    sizes = _max_sizes(len(x_TH), routing.expert_index.numel(), routing.token_index is not None, ranks)
    way = _way_in_use or choose_way(ranks.size, sizes, x_TH.shape[1] * x_TH.itemsize)
    if way == "all_to_all":
        return by_all_to_all(x_TH, routing, ranks, experts)
    return by_gathering(x_TH, routing, ranks, experts, sizes, NUM_CHUNKS if way == "chunked" else 1)


def _max_sizes(num_tokens: int, num_pairs: int, is_list: bool, ranks: Ranks) -> MaxSizes:
    """Exchange sizes, once for each call of a patched model, whose layers all have the same tokens."""
    own = [num_tokens, num_pairs, int(is_list)]
    forward = calls.in_progress()
    if forward is None:
        return MaxSizes(*max_over_ranks(own, ranks.group))
    if forward.max_sizes is None:
        forward.max_sizes = own, max_over_ranks(own, ranks.group)
    first, maxima = forward.max_sizes
    if first != own:
        raise RuntimeError(
            f"this layer has {own[0]} tokens and {own[1]} pairs, but an earlier one of the same model call had "
            f'{first[0]} and {first[1]}: use ep_implementation="all_to_all" for such a model'
        )
    return MaxSizes(*maxima)


def _in_chunk(expert_NP, token_NP, weight_NP, start: int, stop: int):
    """The ranks' lists of pairs as one; of tokens outside start .. stop - 1 no pair has an expert."""
    is_in_chunk_NP = (token_NP >= start) & (token_NP < stop)
    expert_NP = torch.where(is_in_chunk_NP, expert_NP, NOBODY)
    first_N = torch.arange(len(token_NP), device=token_NP.device, dtype=token_NP.dtype) * (stop - start) - start
    return expert_NP.flatten(), (token_NP + first_N[:, None]).flatten(), weight_NP.flatten()


def by_gathering(
    x_TH: torch.Tensor, routing: Routing, ranks: Ranks, experts: Experts, sizes: MaxSizes, max_num_chunks: int
) -> torch.Tensor:
    """Every rank gets all tokens, and the sum over ranks of what their experts give. All shapes are known on the host, so
    nothing waits for the device.

    Of several chunks, each with the same part of every rank's tokens, one is gathered while the one before it is computed
    with, and a chunk's outputs are summed while the next is; in backward likewise.
    """
    num_tokens, (max_tokens, max_pairs, is_list) = len(x_TH), sizes
    if not max_tokens:
        local = ranks.routing(ranks.local(routing.expert_index), routing.weights, routing.token_index, 0)
        return experts(x_TH, local, routing.weights)
    if is_list:
        expert, token, weight = pairs_of(routing, num_tokens)
        is_pair = (expert >= 0) & (expert < ranks.size * ranks.num_local)
        expert, token = (torch.where(is_pair, ids.to(torch.int32), NOBODY) for ids in (expert, token))
        pairs = _padded(torch.stack((expert, token), dim=1), max_pairs, NOBODY)
        weight = _padded(weight, max_pairs)
    else:
        pairs = _padded(routing.expert_index.to(torch.int32), max_tokens, NOBODY)
        weight = _padded(routing.weights, max_tokens)
    pairs, weight = begin_gather(pairs, ranks.group), begin_gather(weight, ranks.group)
    chunks = _padded(x_TH, max_tokens).tensor_split(min(max_num_chunks, max_tokens))
    gathered = [begin_gather(chunk, ranks.group) for chunk in chunks]
    shape = ranks.size, max_pairs if is_list else max_tokens
    all_pairs, all_weights = (wait().unflatten(0, shape) for wait in (pairs, weight))
    sums, stop = [], 0
    for chunk, x in zip(chunks, gathered):
        start, stop = stop, stop + len(chunk)
        if is_list:
            expert, token, weight = _in_chunk(*all_pairs.unbind(2), all_weights, start, stop)
        else:
            expert, weight = (of_all[:, start:stop].flatten(0, 1) for of_all in (all_pairs, all_weights))
            token = None
        local = ranks.routing(ranks.local(expert), weight, token, ranks.size * len(chunk))  # while x is on its way
        sums.append(begin_scatter_sum(experts(x(), local, weight), ranks.group))
    out = torch.cat([wait() for wait in sums]) if len(sums) > 1 else sums[0]()
    return out if len(out) == num_tokens else out[:num_tokens]


def by_all_to_all(x_TH: torch.Tensor, routing: Routing, ranks: Ranks, experts: Experts) -> torch.Tensor:
    """Each rank gets the tokens that one of its experts wants. Sizes are read on the host, which waits for the device."""
    num_tokens, group, num_local = len(x_TH), ranks.group, ranks.num_local
    expert_P, token_P, weight_P = pairs_of(routing, num_tokens)
    is_pair_P = (expert_P >= 0) & (expert_P < ranks.size * num_local)
    rank_P = torch.where(is_pair_P, expert_P // num_local, ranks.size).long()
    token_P = torch.where(is_pair_P, token_P, num_tokens).long()
    is_sent_TN = x_TH.new_zeros(num_tokens + 1, ranks.size + 1, dtype=torch.bool)
    is_sent_TN[token_P, rank_P] = True
    is_sent_TN = is_sent_TN[:num_tokens, : ranks.size]
    to_rank_TN = torch.where(is_sent_TN, torch.arange(ranks.size, dtype=torch.int64, device=x_TH.device), ranks.size)
    rows = dispatch(to_rank_TN, num_tokens, ranks.size, sentinels=True)
    pairs = dispatch(rank_P, num_tokens, ranks.size, token_P, sentinels=True)
    sent = torch.stack((rows.offsets.diff(), pairs.offsets.diff()), dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    tokens_out, pairs_out, tokens_in, pairs_in = torch.cat((sent, received), dim=1).T.tolist()  # waits for the device

    pair_P = pairs.pair[: sum(pairs_out)].long()
    token_P, rank_P = token_P[pair_P], rank_P[pair_P]
    place_P = rows.token_rows[token_P * ranks.size + rank_P] - rows.offsets[rank_P]  # among the rank's tokens
    target = torch.stack((expert_P[pair_P] % num_local, place_P), dim=1).to(torch.int32)
    expert, place = exchange(target, pairs_out, pairs_in, group).unbind(1)
    weights = exchange(weight_P[pair_P], pairs_out, pairs_in, group)
    x = exchange(rows_of_tokens(x_TH, rows, sum(tokens_out)), tokens_out, tokens_in, group)
    counts = received.long()
    first = counts[:, 0].cumsum(0) - counts[:, 0]
    token = place + first.repeat_interleave(counts[:, 1], output_size=len(place))
    out = experts(x, ranks.routing(expert, weights, token.to(torch.int32), len(x)), weights)
    return sum_of_rows(exchange(out, tokens_in, tokens_out, group), rows, num_tokens)
