"""Routing decisions: top-k as a model gives it, and token rounding. Pure functions of tensors, on any device.

Letters: T tokens, E experts, K experts per token, P routed pairs, M the tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..kernels.interface import Rows, Weighting
from ..kernels.rounding import rounded_mask, top_k_mask
from . import backends, torch_op
from .config import ROUNDINGS, TokenRounding, check_choice
from .dispatch import fake_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .experts_op import Exchange

__all__ = ["Routing", "TokenRounding", "round_tokens", "rounded_routing"]

MISPLACED = (
    "a Routing made by token rounding reached code that expects a tensor of expert indices: token rounding needs "
    'experts_implementation="sonicmoe_hf", under expert parallelism also ep_implementation="sonicmoe_hf", and does not '
    "work with experts that another package quantized; "
    "set the routing policy to None (top-k) or undo the other setting"
)


class Routing:
    """Pairs of tokens and experts with their weights. A plain class: FSDP2 casts tensors inside tuples.

    Args:
        expert_index: expert ids, int; [T, K], or [P] with `token_index`.
        weights: the same shape; any float dtype, computed with in fp32.
        token_index: the token of each pair, [P], int; None for [T, K].
        sentinels: ids outside 0..E-1 mean "no expert" (zero output, zero gradient) instead of an error.
        rows: the pairs as `dispatch` would sort them, where they are known already; rows_backend: whose rows those are.
        is_local: under expert parallelism, ids count this rank's experts and not all of the layer's.
        exchange: what brings the experts all ranks' tokens, which the pairs name, in place of those that they are given.
    """

    def __init__(
        self,
        expert_index,
        weights,
        token_index=None,
        *,
        sentinels: bool = False,
        rows=None,
        rows_backend=None,
        is_local: bool = False,
        exchange: Exchange | None = None,
    ):
        if weights.shape != expert_index.shape:
            raise ValueError(
                f"routing weights have shape {tuple(weights.shape)}, expert indices {tuple(expert_index.shape)}; "
                "they list the same pairs"
            )
        self.expert_index = expert_index
        self.weights = weights
        self.token_index = token_index
        self.sentinels = sentinels
        self.rows = rows
        self.rows_backend = rows_backend
        self.is_local = is_local
        self.exchange = exchange

    def with_weights(self, weights: torch.Tensor | None) -> Routing:
        """Make this routing with `weights`: its own, which a module got as an argument beside it, as the hooks of
        DeepSpeed and others gave them on.

        Weights in another dtype were cast on the way, as FSDP's mixed precision casts arguments; then the routing keeps
        its own, which are exact.
        """
        if weights is None or weights is self.weights or weights.dtype != self.weights.dtype:
            return self
        return Routing(
            self.expert_index,
            weights,
            self.token_index,
            sentinels=self.sentinels,
            rows=self.rows,
            rows_backend=self.rows_backend,
            is_local=self.is_local,
            exchange=self.exchange,
        )

    def rows_for(self, backend: str, num_tokens: int, num_experts: int) -> Rows | None:
        """Get the rows, where they are known and serve `backend`: the eager backend's have no tiles, the others' serve
        all.

        Raises:
            ValueError: they are those of another number of tokens or experts.
        """
        if self.rows is None or (self.rows_backend == "eager" and backend != "eager"):
            return None
        sizes = self.rows.token_offsets.numel() - 1, self.rows.offsets.numel() - 1
        if sizes != (num_tokens, num_experts):
            raise ValueError(
                f"the routing is of {sizes[0]} tokens and {sizes[1]} experts, but there are {num_tokens} tokens and "
                f"{num_experts} experts"
            )
        return self.rows

    def __repr__(self):
        return f"Routing(expert_index={tuple(self.expert_index.shape)}, sentinels={self.sentinels})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise TypeError(MISPLACED)

    def __getattr__(self, name):
        raise AttributeError(MISPLACED if not name.startswith("_") else name)

    def __floordiv__(self, other):
        raise TypeError(MISPLACED)


def round_tokens(
    scores_TE: torch.Tensor,
    top_k_index_TK: torch.Tensor,
    *,
    tile: int,
    rounding: str = "nearest",
    valid_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round tokens (paper, section 4, algorithm 4): every expert's tokens rounded to a multiple of the tile.

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
        ValueError: unknown rounding, or shapes that disagree.
    """
    check_choice("rounding", rounding, ROUNDINGS)
    if scores_TE.dim() != 2 or top_k_index_TK.dim() != 2 or len(scores_TE) != len(top_k_index_TK):
        raise ValueError(
            f"scores {tuple(scores_TE.shape)} and top_k_index {tuple(top_k_index_TK.shape)} must be [T, E] and [T, K]"
        )
    num_experts, device = scores_TE.shape[1], scores_TE.device
    scores_TE = scores_TE.detach()
    top_k_TE = top_k_mask(scores_TE, top_k_index_TK)
    return rounded_mask(scores_TE, top_k_TE, valid_T, _uniform(rounding, num_experts, device), rounding, tile)


def _uniform(rounding: str, num_experts: int, device: torch.device, batch_group: ProcessGroup | None = None):
    """Draw a number from [0, 1) for every expert, for stochastic rounding, on all ranks of `batch_group` the same; None
    for other roundings."""
    if rounding != "stochastic":
        return None
    uniform_E = torch.rand(num_experts, dtype=torch.float32, device=device)
    if batch_group is not None:
        torch.distributed.broadcast(uniform_E, group=batch_group, group_src=0)
    return uniform_E


class _Rounding(NamedTuple):
    """Arguments of `Backend.round_rows` that are no tensors, but for the weighting."""

    rounding: str
    tile: int
    min_pairs: int
    num_pairs: int
    dtype: torch.dtype
    backend: str
    code_digest: str = torch_op.CODE_DIGEST


def _round_rows(
    scores: torch.Tensor,
    ranking: torch.Tensor,
    top_k_index: torch.Tensor,
    valid: torch.Tensor | None,
    uniform: torch.Tensor | None,
    weighting: Weighting,
    options: _Rounding,
) -> list[torch.Tensor]:
    """Round the rows of every expert: [weight_P, expert_P, *rows], and fell_back after them where `valid` is given."""
    result = backends.load(options.backend).round_rows(
        scores,
        ranking,
        top_k_index,
        valid,
        uniform,
        options.rounding,
        options.tile,
        options.min_pairs,
        options.num_pairs,
        weighting,
        options.dtype,
    )
    tensors = [result.weight_P, result.expert_P, *result.rows]
    if valid is not None:
        assert result.fell_back is not None
        tensors.append(result.fell_back)
    return tensors


def _fake_round_rows(scores, ranking, top_k_index, valid, uniform, weighting, options):
    expert = scores.new_empty(options.num_pairs, dtype=torch.int32)
    num_tokens, num_experts = scores.shape
    rows = fake_rows(expert, num_tokens, num_experts, options.backend)
    tensors = [scores.new_empty(options.num_pairs, dtype=options.dtype), expert, *rows]
    return tensors if valid is None else [*tensors, scores.new_empty((), dtype=torch.bool)]


def _round_rows_backward(
    dweight: torch.Tensor, scores: torch.Tensor, expert: torch.Tensor, rows: Rows, weighting: Weighting, backend: str
) -> list[torch.Tensor]:
    return [backends.load(backend).round_rows_backward(dweight, scores, expert, rows, weighting)]


def _setup_context(ctx, arguments, output):
    scores, *_, ctx.weighting, options = arguments
    ctx.set_materialize_grads(False)
    ctx.backend = options.backend
    ctx.save_for_backward(scores, *output[1 : 2 + len(Rows._fields)])


def _backward(ctx, dweight):
    """Compute the gradient of `scores`."""
    if dweight is None:
        return ()
    scores, expert, *rows = ctx.saved_tensors
    return _BACKWARD.gradients(dweight, scores, expert, Rows(*rows), ctx.weighting, ctx.backend)


_FORWARD = torch_op.Op(_round_rows, _fake_round_rows, "token rounding", _setup_context, _backward)
_BACKWARD = torch_op.GradientOp(
    _round_rows_backward, lambda dweight, scores, *rest: [scores.new_empty(scores.shape)], "token rounding"
)


def rounded_routing(
    family,
    router,
    logits_TE,
    top_k_index_TK,
    policy: TokenRounding,
    valid_T=None,
    *,
    dtype: torch.dtype | None = None,
    batch_group: ProcessGroup | None = None,
):
    """Round tokens as a model's router would have it.

    Args:
        family: a model_patches.Family. router: the model's router module.
        logits_TE, top_k_index_TK: what the router returned. valid_T: bool, or None when every token counts.
        dtype: of the weights, as the family casts them; None: the logits'.
        batch_group: ranks that have the same tokens, and are to round them alike.
    Returns:
        (Routing, fell_back). The pairs are listed as rows are: expert by expert, by rising token; past them, up to the
        policy's `max_rows`, the lists name expert E: no expert. The weights follow the family's formula on each token's
        final set, differentiable; a token without experts gets none.
        fell_back, False or a bool tensor, says that padding left too few tokens and top-k stands.
    """
    num_tokens, num_experts = logits_TE.shape
    top_k, device = top_k_index_TK.shape[1], logits_TE.device
    scores_TE, ranking_TE = family.scores(router, logits_TE)
    backend = backends.choose(device, None).name
    options = _Rounding(
        policy.rounding,
        policy.tile_rows,
        policy.min_pairs(num_experts),
        policy.max_rows(num_tokens, top_k, num_experts),
        logits_TE.dtype if dtype is None else dtype,
        backend,
    )
    uniform_E = _uniform(policy.rounding, num_experts, device, batch_group)
    weight_P, expert_P, *rows = _FORWARD(
        scores_TE.requires_grad and torch.is_grad_enabled(),
        scores_TE,
        ranking_TE.detach(),
        top_k_index_TK,
        valid_T,
        uniform_E,
        family.weighting(router),
        options,
    )
    if valid_T is None:
        fell_back = False
    else:
        *rows, fell_back = rows
    rows = Rows(*rows)
    routing = Routing(expert_P, weight_P, rows.token, sentinels=True, rows=rows, rows_backend=backend)
    return routing, fell_back
