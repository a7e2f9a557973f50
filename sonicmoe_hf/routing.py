"""Routing decisions: top-k as a model gives it, and token rounding. Pure functions of tensors, on any device.

Letters: T tokens, E experts, K experts per token, P routed pairs, M the tile.
"""

from __future__ import annotations

import torch

from .config import ROUNDINGS, TokenRounding, check_choice

__all__ = ["Routing", "TokenRounding", "round_tokens", "rounded_routing"]

MISPLACED = (
    "a Routing made by token rounding reached code that wants a tensor of expert indices: token rounding needs "
    'experts_implementation="sonicmoe_hf" and does not work under expert parallelism or with quantised experts; '
    "set the routing policy to None (top-k) or undo the other setting"
)


class Routing:
    """Which token goes to which expert, with which weight. A plain class: FSDP2 casts tensors inside tuples.

    Args:
        expert_index: expert ids, int; [T, K], or [P] with `token_index`.
        weights: the same shape; any float dtype, computed with in fp32.
        token_index: the token of each pair, [P], int; None for [T, K].
        sentinels: ids outside 0..E-1 mean "no expert" (zero output, zero gradient) instead of an error.
    """

    def __init__(self, expert_index, weights, token_index=None, *, sentinels: bool = False):
        if weights.shape != expert_index.shape:
            raise ValueError(
                f"routing weights have shape {tuple(weights.shape)}, expert indices {tuple(expert_index.shape)}; "
                "they list the same pairs"
            )
        self.expert_index = expert_index
        self.weights = weights
        self.token_index = token_index
        self.sentinels = sentinels

    def __repr__(self):
        return f"Routing(expert_index={tuple(self.expert_index.shape)}, sentinels={self.sentinels})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise TypeError(MISPLACED)

    def __getattr__(self, name):
        raise AttributeError(MISPLACED if not name.startswith("_") else name)

    def __floordiv__(self, other):
        raise TypeError(MISPLACED)


def _order_keys(scores_TE: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different within an expert: a higher fp32 score first, then the lower token index."""
    bits = (scores_TE.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 tie
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    token_T1 = torch.arange(scores_TE.shape[0], device=scores_TE.device).unsqueeze(1)
    return (ordered << 32) | (scores_TE.shape[0] - 1 - token_T1)


def _take_best(keys_TE, eligible_TE, count):
    """Per expert, the `count` eligible tokens with the highest keys, best first: tokens [E, count]."""
    keys_ET = torch.where(eligible_TE, keys_TE, torch.iinfo(torch.int64).min).T.contiguous()
    return keys_ET.topk(count, dim=1).indices


def _score_mass(scores_TE, token_EN, count_E):
    """Sum of S over the first `count_E` tokens of each expert's list."""
    score_EN = scores_TE.T.gather(1, token_EN).double()
    first = torch.arange(token_EN.shape[1], device=token_EN.device) < count_E.unsqueeze(1)
    return torch.where(first, score_EN, 0.0).sum(1)


def _rounded_counts(f_E, tile, rounding, gained_E=None, lost_E=None):
    """n_E: f_E rounded to multiples of the tile, whether or not there are tokens enough."""
    below_E = f_E // tile * tile
    rest_E = f_E - below_E
    if rounding == "balanced":
        # the multiples nearest to the running sums (ties down): their differences are the greedy choice, expert by
        # expert, that keeps |sum n - sum f| <= M/2
        nearest = (2 * f_E.cumsum(0) + tile - 1) // (2 * tile) * tile
        return nearest.diff(prepend=nearest.new_zeros(1))
    if rounding == "nearest":
        go_up = 2 * rest_E > tile
    elif rounding == "stochastic":
        go_up = torch.rand(f_E.shape, device=f_E.device) * tile < rest_E
    elif rounding == "nearest_score":
        go_up = (gained_E < lost_E) & (rest_E > 0)
    else:
        go_up = (rest_E > 0) & (rounding == "up")
    return below_E + tile * go_up


def round_tokens(
    scores_TE: torch.Tensor,
    top_k_index_TK: torch.Tensor,
    *,
    tile: int,
    rounding: str = "nearest",
    valid_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token rounding (paper, section 4, algorithm 4): every expert's tokens rounded to a multiple of the tile.

    An expert that top-k sends f tokens gets n, a multiple of `tile` next to f: for n < f it loses its f - n top-k tokens
    with the lowest scores, for n > f it gains the n - f other tokens with the highest. Where fewer others exist, n is
    rounded down. Between equal scores the lower token index ranks higher. No expert's column is sorted.

    Args:
        scores_TE: S of every expert for every token, ranked in fp32; -inf keeps an expert from being added to a token.
        top_k_index_TK: the model's own top-k, integer.
        tile: M, rows. rounding: see `TokenRounding`.
        valid_T: bool; False marks padding tokens, which are never added, never counted, and get no expert.
    Returns:
        mask_TE, bool: token t goes to expert e.
    Raises:
        ValueError: unknown rounding, bad tile, or shapes that disagree.
    """
    check_choice("rounding", rounding, ROUNDINGS)
    if tile < 1:
        raise ValueError(f"tile is {tile}; it counts rows and must be at least 1")
    if scores_TE.dim() != 2 or top_k_index_TK.dim() != 2 or len(scores_TE) != len(top_k_index_TK):
        raise ValueError(
            f"scores {tuple(scores_TE.shape)} and top_k_index {tuple(top_k_index_TK.shape)} must be [T, E] and [T, K]"
        )
    num_tokens = scores_TE.shape[0]
    if valid_T is not None and tuple(valid_T.shape) != (num_tokens,):
        raise ValueError(f"valid_T has shape {tuple(valid_T.shape)}; it must be ({num_tokens},), one per token")
    scores_TE = scores_TE.detach()
    top_k_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(1, top_k_index_TK.long(), True)
    other_TE = ~top_k_TE & (scores_TE > float("-inf"))
    if valid_T is not None:
        valid_T1 = valid_T.to(torch.bool).unsqueeze(1)
        top_k_TE, other_TE = top_k_TE & valid_T1, other_TE & valid_T1

    most = min(tile - 1, num_tokens)
    keys_TE = _order_keys(scores_TE)
    worst_EN = _take_best(~keys_TE, top_k_TE, most)  # ~ reverses the order of the keys
    best_EN = _take_best(keys_TE, other_TE, most)
    f_E, others_E = top_k_TE.sum(0), other_TE.sum(0)
    below_E = f_E // tile * tile
    gained_E = lost_E = None
    if rounding == "nearest_score":
        gained_E = _score_mass(scores_TE, best_EN, below_E + tile - f_E)
        lost_E = _score_mass(scores_TE, worst_EN, f_E - below_E)
    n_E = _rounded_counts(f_E, tile, rounding, gained_E, lost_E)
    n_E = torch.where(n_E - f_E > others_E, below_E, n_E)

    rank_N = torch.arange(most, device=scores_TE.device)
    mask_ET = top_k_TE.T.contiguous()
    drop_EN = rank_N < (f_E - n_E).unsqueeze(1)
    mask_ET.scatter_(1, worst_EN, mask_ET.gather(1, worst_EN) & ~drop_EN)
    add_EN = rank_N < (n_E - f_E).unsqueeze(1)
    mask_ET.scatter_(1, best_EN, mask_ET.gather(1, best_EN) | add_EN)
    return mask_ET.T.contiguous()


def routing_from_mask(mask_TE: torch.Tensor, weights_TE: torch.Tensor, max_rows: int) -> Routing:
    """The pairs of a mask, expert by expert and by rising token, in lists of `max_rows` entries (no host sync).

    `weights_TE` gets gradients where the mask is set. Entries past the mask's pairs name expert E: no expert.
    """
    num_tokens, num_experts = mask_TE.shape
    mask_ET = mask_TE.T.reshape(-1)
    place = torch.where(mask_ET, mask_ET.cumsum(0) - 1, max_rows)
    flat = torch.arange(mask_ET.numel(), device=mask_TE.device)
    # every unset entry writes to place max_rows, which is cut off
    pair_P = flat.new_full((max_rows + 1,), mask_ET.numel()).scatter_(0, place, flat)[:max_rows]
    is_pair_P = torch.arange(max_rows, device=mask_TE.device) < mask_ET.sum()
    expert_P = torch.where(is_pair_P, pair_P // max(num_tokens, 1), num_experts)
    token_P = torch.where(is_pair_P, pair_P % max(num_tokens, 1), 0)
    source_P = torch.where(is_pair_P, token_P * num_experts + expert_P, 0)
    weight_P = torch.where(is_pair_P, weights_TE.reshape(-1).gather(0, source_P), 0.0)
    return Routing(expert_P, weight_P, token_P, sentinels=True)


def rounded_routing(family, router, logits_TE, top_k_index_TK, policy: TokenRounding, valid_T=None):
    """Token rounding as a model's router would have it.

    Args:
        family: a model_patches.Family. router: the model's router module.
        logits_TE, top_k_index_TK: what the router returned. valid_T: bool, or None when every token counts.
    Returns:
        (Routing, mask_TE, fell_back). The weights follow the family's formula on each token's final set, in the logits'
        dtype as the family casts them, differentiable; a token without experts gets none. fell_back, a bool or a bool
        tensor, says that padding left too few tokens and top-k stands.
    """
    num_tokens, num_experts = logits_TE.shape
    top_k = top_k_index_TK.shape[1]
    scores_TE, ranking_TE = family.scores(router, logits_TE)
    fell_back = False
    with torch.no_grad():
        mask_TE = round_tokens(
            ranking_TE, top_k_index_TK, tile=policy.tile_rows, rounding=policy.rounding, valid_T=valid_T
        )
        if valid_T is not None:
            # padding can leave too few real tokens; only the device knows, so it chooses
            fell_back = valid_T.sum() * top_k < policy.min_tiles_per_expert * policy.tile_rows * num_experts
            top_k_TE = torch.zeros_like(mask_TE).scatter_(1, top_k_index_TK.long(), True)
            mask_TE = torch.where(fell_back, top_k_TE, mask_TE)
    weights_TE = family.weights(router, scores_TE, mask_TE).to(logits_TE.dtype)
    routing = routing_from_mask(mask_TE, weights_TE, policy.max_rows(num_tokens, top_k, num_experts))
    return routing, mask_TE, fell_back
