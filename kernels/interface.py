"""What every backend offers, and the words its functions share.

Letters: T tokens, H hidden size, I expert intermediate size, E experts, K experts per token, P routed pairs
(token, expert) as the routing lists them, R <= P rows that survive dispatch, sorted by expert.

A backend is a module with these functions (`kernels/eager.py` is the plainest one):

    dispatch(expert_P, token_P, num_tokens, num_experts, sentinels) -> Rows
    tile_table_length(num_pairs, num_experts) -> length of Rows.tiles
    round_rows(scores_TE, ranking_TE, top_k_index_TK, valid_T, uniform_E, rounding, tile, least_pairs, num_pairs,
               weighting, dtype) -> Rounded
    round_rows_backward(dweight_P, scores_TE, expert_P, rows, weighting) -> dscores_TE
    up(x_TH, gate_up_E2IH, bias_E2I, rows, activation, interleaved, want_h, want_a) -> h_R2I, a_RI
    down(a_RI, down_EHI, bias_EH, rows) -> y_RH
    combine(y_RH, weight_P, rows, num_tokens) -> out_TH
    down_backward(dout_TH, down_EHI, bias_EH, h_R2I, weight_P, rows, activation, interleaved,
                  want_dh, want_a, want_dw) -> dh_R2I, a_RI, dw_P
    input_rows(dh_R2I, gate_up_E2IH, rows) -> dx_RH
    gate_up_gradient(dh_R2I, x_TH, rows, like_E2IH) -> E2IH
    down_gradient(dout_TH, a_RI, rows, like_EHI) -> EHI
    gate_up_bias_gradient(dh_R2I, rows, like_E2I) -> E2I
    down_bias_gradient(dout_TH, weight_P, rows, like_EH) -> EH

Row buffers have P rows; those past `rows.offsets[E]` are never written nor read. Weights come as logical views [E, 2I, H]
and [E, H, I]: their strides say whether they are stored transposed. `interleaved` says whether the 2I dimension holds
(gate, up) pairs or all gates, then all ups; h and dh keep that order. `weight_P` is in the accumulation dtype
(`accumulation_dtype`). What a `want_*` flag leaves out comes back as None. Every function is deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .activation import ACTIVATIONS as ACTIVATIONS
from .activation import Activation as Activation


class Rows(NamedTuple):
    """The routed pairs sorted by expert, and the way back. All int32, on the device of the routing.

    offsets [E+1]: rows of expert e are offsets[e] .. offsets[e+1]; offsets[E] = R.
    token [P]: token of each row; T past R.
    pair [P]: position of each row in the routing's flat list; P past R.
    token_offsets [T+1]: token t's entries in token_rows are token_offsets[t] .. token_offsets[t+1].
    token_rows [P]: rows of each token, in the routing's order; an entry >= R is a dropped pair. The dropped pairs of a
        general list (token_P given) belong to no token: they come last, past token_offsets[T].
    tiles [L, 3]: for a backend that cuts rows into tiles, (expert, first row, end of its rows) of every tile, then
        expert -1; the last entry is `scheduler_state`. L is the backend's `tile_table_length`; 0 for one without tiles.
    """

    offsets: torch.Tensor
    token: torch.Tensor
    pair: torch.Tensor
    token_offsets: torch.Tensor
    token_rows: torch.Tensor
    tiles: torch.Tensor

    @property
    def scheduler_state(self) -> torch.Tensor:
        """(counter, number of tiles, unused), the last entry of `tiles`.

        Persistent kernels take their work tiles from the counter. It is 0 between launches, but not during one: that is
        why one Rows is for one stream at a time.
        """
        return self.tiles[-1]


class Weighting(NamedTuple):
    """How a token's experts are weighted: S, over its sum on the token's experts (+ epsilon) if `normalised`, * scale."""

    normalised: bool
    epsilon: float = 0.0
    scale: float = 1.0


class Rounded(NamedTuple):
    """Token rounding's rows, with P = `num_pairs` at least their number: what `round_rows` gives.

    It takes S, what to rank by (fp32), top-k's choice, which tokens are no padding (bool, or None) and, for stochastic
    rounding, a number from [0, 1) for every expert; with padding and fewer than `least_pairs` pairs left, top-k stands.
    Rows and pairs are one: expert by expert, by rising token.

    weight_P: in `dtype`; 0 past R. expert_P: int32; E past R. fell_back: bool, no dimensions: whether top-k stands; None
        without valid_T.
    """

    weight_P: torch.Tensor
    expert_P: torch.Tensor
    rows: Rows
    fell_back: torch.Tensor | None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums, routing weights and activations are computed in: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
