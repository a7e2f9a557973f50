"""How tokens reach the experts of other ranks, and what these experts give comes back.

A token is sent to a rank once, however many of its experts live there, and a rank's experts are summed before their
output is sent back. Letters: N ranks, T tokens of this rank, H hidden size, P pairs (token, expert) of a Routing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..layer.dispatch import dispatch
from ..layer.ranks import Ranks
from ..layer.routing import Routing
from ..patching import calls
from .collectives import exchange, gather, max_over_ranks, rows_of_tokens, scatter_sum, sum_of_rows

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


def _max_sizes(num_tokens: int, num_pairs: int, is_list: bool, ranks: Ranks) -> list[int]:
    """The maximum T and P of the ranks, and whether any of them lists its pairs with their tokens.

    Exchanged once for each call of a patched model, whose layers all have the same tokens.
    """
    own = [num_tokens, num_pairs, int(is_list)]
    forward = calls.in_progress()
    if forward is None:
        return max_over_ranks(own, ranks.group)
    if forward.max_sizes is None:
        forward.max_sizes = own, max_over_ranks(own, ranks.group)
    first, maxima = forward.max_sizes
    if first != own:
        raise RuntimeError(
            f"this layer has {own[0]} tokens and {own[1]} pairs, but an earlier one of the same model call had "
            f'{first[0]} and {first[1]}: use ep_implementation="all_to_all" for such a model'
        )
    return maxima


def by_gathering(x_TH: torch.Tensor, routing: Routing, ranks: Ranks, experts: Experts) -> torch.Tensor:
    """Every rank gets all tokens, and the sum over ranks of what their experts give: for two ranks, where few tokens have
    all their experts on one. All shapes are known on the host, so nothing waits for the device."""
    num_tokens, num_pairs = len(x_TH), routing.expert_index.numel()
    max_tokens, max_pairs, is_list = _max_sizes(num_tokens, num_pairs, routing.token_index is not None, ranks)
    if not max_tokens:
        local = ranks.routing(ranks.local(routing.expert_index), routing.weights, routing.token_index, 0)
        return experts(x_TH, local, routing.weights)
    works: list = []
    if is_list:
        expert, token, weight = pairs_of(routing, num_tokens)
        is_pair = (expert >= 0) & (expert < ranks.size * ranks.num_local)
        token = torch.where(is_pair, token.to(torch.int32) + ranks.rank * max_tokens, NOBODY)
        expert = torch.where(is_pair, expert.to(torch.int32), NOBODY)
        pairs = _padded(torch.stack((expert, token), dim=1), max_pairs, NOBODY)
        weight = _padded(weight, max_pairs)
    else:
        pairs = _padded(routing.expert_index.to(torch.int32), max_tokens, NOBODY)
        weight = _padded(routing.weights, max_tokens)
    all_pairs = gather(pairs, ranks.group, works)
    all_weights = gather(weight, ranks.group, works)
    all_x = gather(_padded(x_TH, max_tokens), ranks.group, works)
    for work in works[:-1]:
        work.wait()
    all_experts, all_tokens = all_pairs.unbind(1) if is_list else (all_pairs, None)
    local = ranks.routing(ranks.local(all_experts), all_weights, all_tokens, len(all_x))  # while x is on its way
    works[-1].wait()
    out = scatter_sum(experts(all_x, local, all_weights), ranks.group)
    return out if len(out) == num_tokens else out[:num_tokens]


def by_all_to_all(x_TH: torch.Tensor, routing: Routing, ranks: Ranks, experts: Experts) -> torch.Tensor:
    """Each rank gets the tokens that one of its experts wants: for three ranks or more. Sizes are read on the host."""
    num_tokens, group, num_local = len(x_TH), ranks.group, ranks.num_local
    expert_P, token_P, weight_P = pairs_of(routing, num_tokens)
    is_pair_P = (expert_P >= 0) & (expert_P < ranks.size * num_local)
    rank_P = torch.where(is_pair_P, expert_P // num_local, ranks.size).long()
    token_P = torch.where(is_pair_P, token_P, num_tokens).long()
    is_sent_TN = x_TH.new_zeros(num_tokens + 1, ranks.size + 1, dtype=torch.bool)
    is_sent_TN[token_P, rank_P] = True
    is_sent_TN = is_sent_TN[:num_tokens, : ranks.size]
    place_TN = F.pad(is_sent_TN.cumsum(0) - 1, (0, 1, 0, 1))  # among the tokens that go to the same rank

    to_rank_TN = torch.where(is_sent_TN, torch.arange(ranks.size, dtype=torch.int64, device=x_TH.device), ranks.size)
    rows = dispatch(to_rank_TN, num_tokens, ranks.size, sentinels=True)
    pairs = dispatch(rank_P, num_tokens, ranks.size, token_P, sentinels=True)
    sent = torch.stack((rows.offsets.diff(), pairs.offsets.diff()), dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    tokens_out, pairs_out, tokens_in, pairs_in = torch.cat((sent, received), dim=1).T.tolist()  # waits for the device

    pair_P = pairs.pair[: sum(pairs_out)].long()
    place_P = place_TN[token_P[pair_P], rank_P[pair_P]]
    target = torch.stack((expert_P[pair_P] % num_local, place_P), dim=1).to(torch.int32)
    expert, place = exchange(target, pairs_out, pairs_in, group).unbind(1)
    weights = exchange(weight_P[pair_P], pairs_out, pairs_in, group)
    x = exchange(rows_of_tokens(x_TH, rows, sum(tokens_out)), tokens_out, tokens_in, group)
    counts = received.long()
    first = counts[:, 0].cumsum(0) - counts[:, 0]
    token = place + first.repeat_interleave(counts[:, 1], output_size=len(place))
    out = experts(x, ranks.routing(expert, weights, token.to(torch.int32), len(x)), weights)
    return sum_of_rows(exchange(out, tokens_in, tokens_out, group), rows, num_tokens)
