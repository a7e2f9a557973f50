"""The exchange of tokens between ranks: each token to the ranks that have its experts, and the experts' output back.

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

from ..layer import backends
from ..layer.dispatch import dispatch
from ..layer.experts_op import Exchange
from ..layer.holding import Holding
from ..layer.routing import Routing
from ..routing import calls
from .collectives import Gathering, all_to_all, gather, max_over_ranks, rows_of_tokens, sum_of_rows

NOBODY = -1  # the expert of a pair that is none


Experts = Callable[[torch.Tensor, Routing, torch.Tensor], torch.Tensor]


def local_ids(expert_index: torch.Tensor, holding: Holding) -> torch.Tensor:
    """Count expert ids from this rank's first; those of others lie outside 0 .. num_local - 1."""
    return expert_index - holding.experts.start


def local_routing(
    expert_index: torch.Tensor,
    weights: torch.Tensor,
    token_index: torch.Tensor | None,
    num_tokens: int,
    holding: Holding,
    exchange: Exchange | None = None,
) -> Routing:
    """Make the Routing of the pairs with this rank's experts, sorted, whose ids are `local_ids`. exchange: the
    Routing's."""
    backend = backends.choose(weights.device, None).name
    rows = dispatch(expert_index, num_tokens, holding.num_local, token_index, sentinels=True, backend=backend)
    return Routing(
        expert_index,
        weights,
        token_index,
        sentinels=True,
        rows=rows,
        rows_backend=backend,
        is_local=True,
        exchange=exchange,
    )


def pairs_of(routing: Routing, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """List the pairs of any Routing: expert_P, token_P and weight_P."""
    expert_P, weight_P = routing.expert_index.reshape(-1), routing.weights.reshape(-1)
    if routing.token_index is not None:
        return expert_P, routing.token_index.reshape(-1), weight_P
    token_P = torch.arange(expert_P.numel(), dtype=torch.int64, device=expert_P.device) // max(
        expert_P.numel() // max(num_tokens, 1), 1
    )
    return expert_P, token_P, weight_P


def _pad(tensor: torch.Tensor, length: int, value: float = 0) -> torch.Tensor:
    """Pad the first dimension at its end to this length."""
    missing = length - len(tensor)
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing), value=value) if missing else tensor


EXCHANGES = ("gathering", "all_to_all")
MAX_RANKS_GATHERING = 4
MANY_BYTES = 2**26  # of gathered tokens: with fewer, the host's time counts more than memory and links
LENGTHS = 16  # lists of a rank's pairs have multiples of 1/16 of the pairs that each rank has on average
_exchange_in_use: str | None = None  # no thread's own: checkpointing runs layers again in a thread of autograd's


class MaxSizes(NamedTuple):
    """The maximum T and P of the ranks, and whether any of them lists its pairs with their tokens."""

    num_tokens: int
    num_pairs: int
    is_list: int


def choose_exchange(num_ranks: int, gathered_bytes: int) -> str:
    """Choose how tokens reach the experts of other ranks, the same on all ranks: one of EXCHANGES. gathered_bytes: of the
    tokens of all ranks, each with as many as the longest.

    Gathering sends every token to N - 1 ranks five times a layer, partly beside products. An all-to-all sends a token
    with K experts to 1 - (1 - 1 / N)^K of them four times, and waits for the device before anything is sent. On four
    H100s with NVLink (eight layers of Qwen3-30B-A3B, 16,384 tokens a rank, K = 8) a step takes 169 ms by gathering and
    182 by an all-to-all, 15 of them at least idle: 1.9 a layer. Eight ranks would gather for 12 ms a layer
    at that all-to-all's 190 GB/s, and exchange for 6, which is worth the wait. Few tokens never are: gathered five times,
    64 MiB take 1.8 ms. Gathering in two chunks, one beside the other's products, took 10% longer than in one.
    """
    is_gathered = num_ranks <= MAX_RANKS_GATHERING or gathered_bytes < MANY_BYTES
    return "gathering" if is_gathered else "all_to_all"


@contextlib.contextmanager
def use_exchange(kind: str | None) -> Iterator[None]:
    """Bring tokens to experts by this exchange, one of EXCHANGES, inside `with`, forward and backward of a step; None:
    the one that `choose_exchange` chooses. For measurements and tests; all ranks do the same."""
    global _exchange_in_use
    before, _exchange_in_use = _exchange_in_use, kind
    try:
        yield
    finally:
        _exchange_in_use = before


def reach_experts(x_TH: torch.Tensor, routing: Routing, holding: Holding, experts: Experts) -> torch.Tensor:
    """Compute this rank's tokens with the experts of all ranks: [T, H]. All ranks of the group call it.

    Args:
        routing: with ids of all experts of the layer.
        experts: x, a Routing of this rank's experts with ids counted from its first, and the weights -> their output.
    """
    sizes = _max_sizes(len(x_TH), routing.expert_index.numel(), routing.token_index is not None, holding)
    gathered_bytes = holding.size * sizes.num_tokens * x_TH.shape[1] * x_TH.element_size()
    kind = _exchange_in_use or choose_exchange(holding.size, gathered_bytes)
    if kind == "all_to_all":
        return by_all_to_all(x_TH, routing, holding, experts)
    return by_gathering(x_TH, routing, holding, experts, sizes)


def _max_sizes(num_tokens: int, num_pairs: int, is_list: bool, holding: Holding) -> MaxSizes:
    """Exchange sizes, once for each forward of a patched model, whose layers all have the same tokens."""
    own = [num_tokens, num_pairs, int(is_list)]
    forward = calls.in_progress()
    if forward is None:
        return MaxSizes(*max_over_ranks(own, holding.group))
    if forward.max_sizes is None:
        forward.max_sizes = own, max_over_ranks(own, holding.group)
    first, maxima = forward.max_sizes
    if first != own:
        raise RuntimeError(
            f"this layer has {own[0]} tokens and {own[1]} pairs, but an earlier one of the same forward had "
            f'{first[0]} and {first[1]}: use ep_implementation="all_to_all" for such a model'
        )
    return MaxSizes(*maxima)


def _pad_pairs(routing: Routing, num_tokens: int, holding: Holding, sizes: MaxSizes):
    """Pad the pairs and weights of a rank to the length of all ranks': experts and weights [T, K]; or, where a rank lists
    its pairs, (expert, token of all ranks' tokens) [P, 2] and weights [P]."""
    if not sizes.is_list:
        expert_TK = _pad(routing.expert_index.to(torch.int32), sizes.num_tokens, NOBODY)
        return expert_TK, _pad(routing.weights, sizes.num_tokens)
    expert_P, token_P, weight_P = pairs_of(routing, num_tokens)
    is_pair_P = (expert_P >= 0) & (expert_P < holding.num_experts)
    token_P = token_P + holding.rank * sizes.num_tokens
    expert_P, token_P = (torch.where(is_pair_P, ids.to(torch.int32), NOBODY) for ids in (expert_P, token_P))
    pairs_P2 = torch.stack((expert_P, token_P), dim=1)
    return _pad(pairs_P2, sizes.num_pairs, NOBODY), _pad(weight_P, sizes.num_pairs)


def by_gathering(
    x_TH: torch.Tensor, routing: Routing, holding: Holding, experts: Experts, sizes: MaxSizes
) -> torch.Tensor:
    """Gather all tokens on every rank, and sum the outputs of the experts over the ranks. With few tokens all shapes are
    known on the host, so that nothing waits for the device. With many, experts have room for their own pairs alone,
    whose number the host reads while x is on its way."""
    num_tokens, group = len(x_TH), holding.group
    if not sizes.num_tokens:
        expert = local_ids(routing.expert_index, holding)
        local = local_routing(expert, routing.weights, routing.token_index, 0, holding)
        return experts(x_TH, local, routing.weights)
    pairs, weights = (gather(tensor, group) for tensor in _pad_pairs(routing, num_tokens, holding, sizes))
    x_TH = _pad(x_TH, sizes.num_tokens)
    are_many = x_TH.nbytes * holding.size >= MANY_BYTES
    gathering = Gathering(x_TH, group, are_many)
    expert, token = pairs.unbind(1) if sizes.is_list else (pairs, None)
    expert = local_ids(expert, holding)
    if are_many:
        expert, weights, token = _own_pairs(expert, weights, token, holding)
    local = local_routing(expert, weights, token, gathering.num_tokens, holding, gathering)
    return experts(x_TH, local, weights)[:num_tokens]


def _own_pairs(expert: torch.Tensor, weights: torch.Tensor, token: torch.Tensor | None, holding: Holding):
    """Take this rank's pairs out of all ranks', as a list: expert, weights, token. A few pairs of nobody come after them,
    so that lists of the same length come again, for which launches are recorded."""
    is_own = (expert >= 0) & (expert < holding.num_local)
    pair = is_own.flatten().nonzero().squeeze(1)  # waits for the device
    step = max(is_own.numel() // (LENGTHS * holding.size), 1)
    length = -(-len(pair) // step) * step
    token = pair // is_own.shape[1] if token is None else token[pair]
    weights = _pad(weights.flatten().index_select(0, pair), length)
    return _pad(expert.flatten()[pair], length, NOBODY), weights, _pad(token.to(torch.int32), length)


def by_all_to_all(x_TH: torch.Tensor, routing: Routing, holding: Holding, experts: Experts) -> torch.Tensor:
    """Send each rank the tokens that are routed to one of its experts. Sizes are read on the host, which waits for the
    device."""
    num_tokens, group, num_local = len(x_TH), holding.group, holding.num_local
    expert_P, token_P, weight_P = pairs_of(routing, num_tokens)
    is_pair_P = (expert_P >= 0) & (expert_P < holding.size * num_local)
    rank_P = torch.where(is_pair_P, expert_P // num_local, holding.size).long()
    token_P = torch.where(is_pair_P, token_P, num_tokens).long()
    is_sent_TN = x_TH.new_zeros(num_tokens + 1, holding.size + 1, dtype=torch.bool)
    is_sent_TN[token_P, rank_P] = True
    is_sent_TN = is_sent_TN[:num_tokens, : holding.size]
    to_rank_TN = torch.where(
        is_sent_TN, torch.arange(holding.size, dtype=torch.int64, device=x_TH.device), holding.size
    )
    rows = dispatch(to_rank_TN, num_tokens, holding.size, sentinels=True)
    pairs = dispatch(rank_P, num_tokens, holding.size, token_P, sentinels=True)
    sent = torch.stack((rows.offsets.diff(), pairs.offsets.diff()), dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    tokens_out, pairs_out, tokens_in, pairs_in = torch.cat((sent, received), dim=1).T.tolist()  # waits for the device

    pair_P = pairs.pair[: sum(pairs_out)].long()
    token_P, rank_P = token_P[pair_P], rank_P[pair_P]
    position_P = rows.token_rows[token_P * holding.size + rank_P] - rows.offsets[rank_P]  # among the rank's tokens
    target = torch.stack((expert_P[pair_P] % num_local, position_P), dim=1).to(torch.int32)
    expert, position = all_to_all(target, pairs_out, pairs_in, group).unbind(1)
    weights = all_to_all(weight_P[pair_P], pairs_out, pairs_in, group)
    x = all_to_all(rows_of_tokens(x_TH, rows, sum(tokens_out)), tokens_out, tokens_in, group)
    counts = received.long()
    first = counts[:, 0].cumsum(0) - counts[:, 0]
    token = position + first.repeat_interleave(counts[:, 1], output_size=len(position))
    out = experts(x, local_routing(expert, weights, token.to(torch.int32), len(x), holding), weights)
    return sum_of_rows(all_to_all(out, tokens_in, tokens_out, group), rows, num_tokens)
