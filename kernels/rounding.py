"""Token rounding in plain PyTorch, on any device and without a host sync: the definition, which the GPU's kernels follow.

Letters: T tokens, E experts, K experts per token, P pairs, M the tile; `keys`: integers that order as scores do.
"""

from __future__ import annotations

import torch


def _order_keys(scores_TE: torch.Tensor) -> torch.Tensor:
    """Compute int64 keys, all different within an expert: a higher fp32 score first, then the lower token index."""
    bits = (scores_TE.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 tie
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    token_T1 = torch.arange(scores_TE.shape[0], dtype=torch.int64, device=scores_TE.device).unsqueeze(1)
    return (ordered << 32) | (scores_TE.shape[0] - 1 - token_T1)


def _take_best(keys_TE, eligible_TE, count):
    """Take, per expert, the `count` eligible tokens with the highest keys, best first: tokens [E, count]."""
    keys_ET = torch.where(eligible_TE, keys_TE, torch.iinfo(torch.int64).min).T.contiguous()
    return keys_ET.topk(count, dim=1).indices


def _score_mass(scores_TE, token_EN, count_E):
    """Sum S in fp64 over the first `count_E` tokens of each expert's list."""
    score_EN = scores_TE.T.gather(1, token_EN).double()
    first = torch.arange(token_EN.shape[1], dtype=torch.int64, device=token_EN.device) < count_E.unsqueeze(1)
    return torch.where(first, score_EN, 0.0).sum(1)


def _rounded_counts(f_E, tile, rounding, uniform_E=None, gained_E=None, lost_E=None):
    """Compute n_E, f_E rounded to multiples of the tile, whether or not there are tokens enough."""
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
        go_up = uniform_E * tile < rest_E
    elif rounding == "nearest_score":
        go_up = (gained_E < lost_E) & (rest_E > 0)
    else:
        go_up = (rest_E > 0) & (rounding == "up")
    return below_E + tile * go_up


def top_k_mask(scores_TE, top_k_index_TK):
    """Convert the model's own top-k to mask_TE, bool."""
    return torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(1, top_k_index_TK.long(), True)


def rounded_mask(scores_TE, top_k_TE, valid_T, uniform_E, rounding, tile):
    """Compute mask_TE after token rounding; see sonicmoe_hf.routing.round_tokens. No expert's column is sorted."""
    num_tokens = scores_TE.shape[0]
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
    n_E = _rounded_counts(f_E, tile, rounding, uniform_E, gained_E, lost_E)
    n_E = torch.where(n_E - f_E > others_E, below_E, n_E)

    rank_N = torch.arange(most, dtype=torch.int64, device=scores_TE.device)
    mask_ET = top_k_TE.T.contiguous()
    drop_EN = rank_N < (f_E - n_E).unsqueeze(1)
    mask_ET.scatter_(1, worst_EN, mask_ET.gather(1, worst_EN) & ~drop_EN)
    add_EN = rank_N < (n_E - f_E).unsqueeze(1)
    mask_ET.scatter_(1, best_EN, mask_ET.gather(1, best_EN) | add_EN)
    return mask_ET.T.contiguous()


def pairs_of_mask(mask_TE, num_pairs):
    """List the pairs of a mask as (expert_P, token_P), expert by expert and by rising token; past them expert E, token
    T."""
    num_tokens = mask_TE.shape[0]
    mask_ET = mask_TE.T.reshape(-1)
    place = torch.where(mask_ET, mask_ET.cumsum(0) - 1, num_pairs)
    flat = torch.arange(mask_ET.numel(), dtype=torch.int64, device=mask_TE.device)
    # every unset entry writes to place num_pairs, which is cut off
    pair_P = flat.new_full((num_pairs + 1,), mask_ET.numel()).scatter_(0, place, flat)[:num_pairs]
    token_P = torch.where(pair_P < mask_ET.numel(), pair_P % max(num_tokens, 1), num_tokens)
    return pair_P // max(num_tokens, 1), token_P


def _divisor(chosen, epsilon: float):
    """Sum a token's chosen scores, in the last dimension, + epsilon; 1 + epsilon where that sum is 0."""
    total = chosen.sum(-1, keepdim=True)
    return torch.where(total > 0, total, 1.0) + epsilon


def chosen_weights(chosen, normalised: bool, epsilon: float, scale: float):
    """Compute the weights of a token's chosen scores, which the last dimension has beside zeros: the scores, over their
    sum (+ epsilon) if `normalised`, times `scale`. A token without any gets zeros, and finite gradients."""
    return (chosen / _divisor(chosen, epsilon) if normalised else chosen) * scale


def set_weights(scores_TE, mask_TE, normalised: bool, epsilon: float, scale: float):
    """Compute weights_TE: `chosen_weights` of S on the set, a mask; elsewhere 0."""
    return chosen_weights(torch.where(mask_TE, scores_TE, 0.0), normalised, epsilon, scale)


def set_weights_gradient(gradient_TE, scores_TE, mask_TE, normalised: bool, epsilon: float, scale: float):
    """Compute the gradient of `scores_TE`, where `gradient_TE` is that of `set_weights` on the mask and zero
    elsewhere."""
    gradient_TE = gradient_TE * scale
    if not normalised:
        return gradient_TE
    chosen_TE = torch.where(mask_TE, scores_TE, 0.0)
    divisor_T1 = _divisor(chosen_TE, epsilon)
    share_T1 = torch.where(
        chosen_TE.sum(-1, keepdim=True) > 0, (gradient_TE * chosen_TE).sum(-1, keepdim=True) / divisor_T1, 0.0
    )
    return torch.where(mask_TE, (gradient_TE - share_T1) / divisor_T1, 0.0)
