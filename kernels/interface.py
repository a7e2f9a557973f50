"""The functions that every backend offers, and the words that they share.

Letters: T tokens, H hidden size, I expert intermediate size, E experts, K experts per token, P routed pairs
(token, expert) as the routing lists them, R <= P rows that survive dispatch, sorted by expert.

A backend is a module with the functions of `Backend` (`kernels/eager.py` is the plainest one). J is an adapter's rank,
padded to a multiple of 8 with zeros.

Row buffers have P rows; what those past `rows.offsets[E]` hold is undefined, and no other row depends on it. Weights come
as logical views [E, 2I, H] and [E, H, I]: their strides say whether they are stored transposed. `interleaved` says if the
2I dimension has each gate beside its up, or all gates, then all ups; h and dh keep that order. With an activation that
has no gate, I stands for 2I in every shape, and `interleaved` says nothing. `weight_P` is in the accumulation dtype
(`accumulation_dtype`). What a `want_*` flag leaves out comes back as None. Every function is deterministic.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from .activation import ACTIVATIONS as ACTIVATIONS
from .activation import GATED as GATED
from .activation import UNGATED as UNGATED
from .activation import Activation as Activation
from .activation import is_gated as is_gated
from .scaled import SMALLEST, ScaledRows, ScaledWeight


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
        """View the last entry of `tiles`: (counter, number of row tiles, unused).

        Persistent kernels take their work tiles from the counter. It is 0 between launches, but not during one: that is
        why one Rows is for one stream at a time.
        """
        return self.tiles[-1]


def unwritten_rows(like: torch.Tensor, num_pairs: int, num_tokens: int, num_experts: int, num_tiles: int) -> Rows:
    """Allocate Rows of these sizes on the device of `like`; num_tiles: the backend's `tile_table_length`."""
    sizes = ((num_experts + 1,), (num_pairs,), (num_pairs,), (num_tokens + 1,), (num_pairs,), (num_tiles, 3))
    return Rows(*[like.new_empty(size, dtype=torch.int32) for size in sizes])


class Weighting(NamedTuple):
    """The weighting of a token's experts: S, over its sum on the token's experts (+ epsilon) if `normalised`, * scale."""

    normalised: bool
    epsilon: float = 0.0
    scale: float = 1.0


class RoundedRows(NamedTuple):
    """The result of `round_rows`: token rounding's rows, in buffers of P = `num_pairs`, which is at least their number.

    `round_rows` takes the scores S, a ranking of them (fp32), top-k's choice, which tokens are no padding (bool, or None)
    and, for stochastic rounding, a number from [0, 1) for every expert. Where padding leaves fewer than `min_pairs`
    pairs, top-k stands. Row r is pair r: expert by expert, by rising token.

    weight_P: in `dtype`; 0 past R. expert_P: int32; E past R. fell_back: bool, no dimensions: whether top-k stands; None
        without valid_T.
    """

    weight_P: torch.Tensor
    expert_P: torch.Tensor
    rows: Rows
    fell_back: torch.Tensor | None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype that sums, routing weights and activations are computed in: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class LoraTerm(NamedTuple):
    """An adapter's term of a product with a weight [E, N, K]: shrunk_PJ @ factor_ENJ[e]^T, added to the product in fp32
    before bias and activation. With it the product has more depth: [rows_RK | shrunk_PJ] @ [weight | factor]^T.

    shrunk_PJ: contiguous, in the dtype and the order of the rows; what `lora_shrink` or `lora_b_backward` gave.
    factor_ENJ: in the weight's dtype, without gaps, and in the weight's order: J is contiguous where K is, else N.
    """

    shrunk_PJ: torch.Tensor
    factor_ENJ: torch.Tensor


class PackedOperand(NamedTuple):
    """A weight [E, N, K] that a product reads in 4 bits: a Quantized of packed/ and the name of its format."""

    codes: torch.Tensor
    scales: torch.Tensor
    state: torch.Tensor | None
    format: str


class Backend(Protocol):
    """The functions of a backend. Adapters: h = x W1^T + u B1^T and y = a W2^T + v B2^T with u = scale x A1^T and
    v = scale a A2^T, expert by expert; A [E, J, in] and B [E, out, J]."""

    def tile_table_length(self, num_pairs: int, num_experts: int) -> int:
        """Compute the length of Rows.tiles."""

    def dispatch(self, expert_P, token_P, num_tokens: int, num_experts: int, sentinels: bool) -> Rows:
        """Sort the pairs by expert. token_P: the token of each pair, or None for top-k's [T, K]."""

    def round_rows(
        self,
        scores_TE,
        ranking_TE,
        top_k_index_TK,
        valid_T,
        uniform_E,
        rounding: str,
        tile: int,
        min_pairs: int,
        num_pairs: int,
        weighting: Weighting,
        dtype: torch.dtype,
    ) -> RoundedRows:
        """Round the rows of every expert (token rounding)."""

    def round_rows_backward(self, dweight_P, scores_TE, expert_P, rows: Rows, weighting: Weighting) -> torch.Tensor:
        """Compute dscores_TE."""

    def dequantize(self, codes, scales, state, name: str, dtype: torch.dtype, rows: Rows) -> torch.Tensor:
        """Expand a Quantized in the format `name` of packed/ to the weight [E, N, K], contiguous. The values of
        experts without rows are undefined."""

    def reads_packed(self, format: str, dtype: torch.dtype, rows: Rows, is_expanded: bool = False) -> bool:
        """Tell whether up and down take weights as `PackedOperand`, and are faster so than on expanded weights, the time
        of `dequantize` counted unless `is_expanded`: then the weights are expanded in any case."""

    def decodes(self, weight: PackedOperand, dtype: torch.dtype, rows: Rows, is_expanded: bool = False) -> bool:
        """Tell whether up, down, down_backward and up_backward_input take this weight as it is, and are faster so than on
        an expanded weight, with the time of `dequantize`: once for each of them, or if `is_expanded` once for all."""

    def up(
        self,
        x_TH,
        gate_up_E2IH,
        bias_E2I,
        rows: Rows,
        activation: Activation,
        interleaved: bool,
        want_h: bool,
        want_a: bool,
        lora: LoraTerm | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute h_R2I and a_RI. gate_up_E2IH: a tensor, or where `reads_packed` or `decodes` a PackedOperand. lora: (u,
        B1)."""

    def down(self, a_RI, down_EHI, bias_EH, rows: Rows, lora: LoraTerm | None = None) -> torch.Tensor:
        """Compute y_RH. down_EHI: as gate_up. lora: (v, B2)."""

    def scale_rows(self, x_TH, smallest: float = SMALLEST) -> ScaledRows:
        """Quantize x to FP8 for `scaled_up`, or dout for `scaled_down_backward`."""

    def transposed(self, codes, scales) -> ScaledWeight:
        """Transpose a packed FP8 weight for the products of backward, into memory of its own."""

    def scaled_up(
        self,
        x: ScaledRows,
        gate_up: PackedOperand,
        rows: Rows,
        activation: Activation,
        dtype: torch.dtype,
        want_h: bool,
        want_a: bool,
        want_scaled: bool,
        lora: LoraTerm | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, ScaledRows | None]:
        """Compute `up` with FP8 products (scaled.py) of a packed FP8 weight, gates before ups, without bias: h_R2I and
        a_RI in `dtype`, and a in FP8 for `scaled_down`. a comes from the rounded h. want_a: only beside want_scaled."""

    def scaled_down(
        self,
        a: ScaledRows,
        down: PackedOperand | ScaledWeight,
        rows: Rows,
        dtype: torch.dtype,
        lora: LoraTerm | None = None,
    ) -> torch.Tensor:
        """Compute `down` with FP8 products: y_RH in `dtype`. Or `up_backward_input`: dx_RH, of what
        `scaled_down_backward` gave and gate_up `transposed`."""

    def scaled_down_backward(
        self,
        dout: ScaledRows,
        down: ScaledWeight,
        h_R2I,
        weight_P,
        rows: Rows,
        activation: Activation,
        want_dh: bool,
        want_a: bool,
        want_dw: bool,
        want_scaled: bool,
        lora: LoraTerm | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, ScaledRows | None]:
        """Compute `down_backward` with FP8 products, of `transposed` down; and dh in FP8 (scaled.scale_halves of dh)."""

    def combine(self, y_RH, weight_P, rows: Rows, num_tokens: int) -> torch.Tensor:
        """Sum every token's rows, times their weights unless those are None: out_TH."""

    def down_backward(
        self,
        dout_TH,
        down_EHI,
        bias_EH,
        h_R2I,
        weight_P,
        rows: Rows,
        activation: Activation,
        interleaved: bool,
        want_dh: bool,
        want_a: bool,
        want_dw: bool,
        lora: LoraTerm | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Compute dh_R2I, a' = w a [R, I] and dw_P. down_EHI: a tensor, or where `decodes` a PackedOperand. lora: (dv, A2
        as [E, I, J]), part of da = dout W2 + dv A2."""

    def up_backward_input(self, dh_R2I, gate_up_E2IH, rows: Rows, lora: LoraTerm | None = None) -> torch.Tensor:
        """Compute dx_RH, the gradient of gathered x. gate_up_E2IH: as down_backward's. lora: (du, A1 as [E, H, J])."""

    def gate_up_gradient(self, dh_R2I, x_TH, rows: Rows, like_E2IH) -> torch.Tensor:
        """Compute dh^T x, in the dtype and strides of `like_E2IH`."""

    def down_gradient(self, dout_TH, a_RI, rows: Rows, like_EHI) -> torch.Tensor:
        """Compute dout^T a', in the dtype and strides of `like_EHI`."""

    def gate_up_bias_gradient(self, dh_R2I, rows: Rows, like_E2I) -> torch.Tensor:
        """Sum dh."""

    def down_bias_gradient(self, dout_TH, weight_P, rows: Rows, like_EH) -> torch.Tensor:
        """Sum w dout."""

    def reorder(self, *tensors: torch.Tensor, jobs) -> None:
        """Write each source_ENj, cast, into the first columns of its out_ENJ, and zeros into the rest, for one to four
        such pairs. `jobs` has (dtype, shape, strides) of each tensor, as which it is read."""

    def lora_shrink(self, source, factor_EKJ, rows: Rows, scale: float, gathered: bool) -> torch.Tensor:
        """Compute scale * source @ factor[e] [P, J], in source's dtype, scaled before it is rounded. factor: A^T.

        `gathered`: source is [T, K] and a row reads that of its token (u, of x); else it is [P, K] (v, of a).
        """

    def lora_b_backward(
        self,
        source,
        b_ENJ,
        shrunk_PJ,
        weight_P,
        rows: Rows,
        scale: float,
        gathered: bool,
        want_dshrunk: bool,
        like_ENj,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute both results that read a product's gradient: scale * source @ B[e] [P, J], and dB = source^T shrunk in
        the dtype, shape and strides of `like_ENj`, whose rank j <= J is not padded (None: no dB; either form of
        low_rank.py). Sums in fp32.

        (dv, dB2): source dout_TH, gathered; shrunk v, times weight_P. (du, dB1): source dh_R2I; shrunk u; no weight_P.
        shrunk_PJ may be None where no dB is wanted.
        """

    def lora_a_gradient(self, shrunk_PJ, source, rows: Rows, gathered: bool, like_EjK) -> torch.Tensor:
        """Compute dA = shrunk^T source, summed in fp32, in the dtype, shape and strides of `like_EjK` (either form of
        low_rank.py): of du and gathered x_TH, or of dv and a'_RI."""
