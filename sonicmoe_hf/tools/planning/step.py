"""One step of a model's training: the adapters, what a token leaves for backward, and the rows of its experts.

Letters: T tokens of a step on this GPU, H hidden size, I experts' inner size, E experts, K experts per token, r rank.
Experts that read a latent have its size in place of H.

What a layer keeps for backward was counted by saved-tensor hooks over Transformers' modules, with the op of
`moe_experts` (layer/experts_op.py: x, h and the routing) and PEFT's adapters; norms are Transformers', or Liger's.
What backward of a layer's experts holds at once is dh, a' and dx of its rows (layer/products.py). FP8 products have codes
transposed instead, and dh and dout in FP8, which is not more.
"""

from __future__ import annotations

from typing import NamedTuple

from ...attention.pieces import PIECE_BYTES
from .attention_sizes import AttentionLinear, eager_score_bytes
from .run_time import MAX_ROWS, gathers_tokens, is_in_pieces, makes_room_for_all_ranks
from .sizes import FP32_STREAMS, ModelSizes
from .training import Training

NORM_COPIES = 5 * 4.0  # bytes of a feature in the backward of Transformers' RMSNorm: five tensors in fp32
LIGHTNING = 19.0  # bytes of a feature that lightning attention keeps in fp32, likewise
STREAM_COPIES = 5.5  # of the streams in fp32, that a layer's two hyper-connections keep, by tensors without memory


class Step(NamedTuple):
    """One step of a model of these sizes under these settings, on one of its GPUs."""

    sizes: ModelSizes
    training: Training

    # adapters

    @property
    def adapted(self) -> list[AttentionLinear]:
        """The attention's linear layers that have adapters."""
        targets, r = self.training.targets, self.training.r
        return [each for each in self.sizes.attention.linears if (targets is None or each.name in targets) and r]

    @property
    def adapter_parameters(self) -> tuple[int, int]:
        """Parameters of adapters on the experts and on the attention."""
        sizes, training = self
        if training.full:
            return 0, 0
        on_experts = sum(count * training.experts_r * (out + in_) for count, out, in_ in sizes.expert_weights)
        on_attention = sum(
            training.r * linear.num_layers * (linear.features_in + linear.features_out) for linear in self.adapted
        )
        return on_experts, on_attention

    @property
    def adapter_parameters_of_rank(self) -> float:
        """Parameters of adapters that one GPU has."""
        on_experts, on_attention = self.adapter_parameters
        if self.training.splits_experts:  # the attention's are whole on every rank
            return on_experts / self.training.gpus + on_attention
        return (on_experts + on_attention) / self.training.shards

    # the experts' rows

    @property
    def is_in_pieces(self) -> bool:
        """Tell whether experts are computed in pieces of the tokens."""
        sizes, training = self
        is_top_k = not training.extra_rows and not training.splits_experts
        return is_top_k and is_in_pieces(training.tokens, training.tokens * sizes.top_k)

    @property
    def keeps_h(self) -> bool:
        """Tell whether h stays for backward, which computes it again otherwise."""
        return self.training.save == "preactivation" and not self.is_in_pieces

    @property
    def rows_at_once(self) -> float:
        """The routed rows of a token that are computed at once."""
        return MAX_ROWS / self.training.tokens if self.is_in_pieces else self.rows

    @property
    def rows(self) -> float:
        """The routed rows of a token that there is memory for."""
        sizes, training = self
        rows = sizes.top_k + sizes.num_experts * training.extra_rows / training.tokens
        has_room_for_all = self.gathers_tokens and makes_room_for_all_ranks(self._gathered_bytes)
        return rows * (training.gpus if has_room_for_all else 1)

    @property
    def gathers_tokens(self) -> bool:
        """Tell whether expert parallelism gathers the tokens of all ranks."""
        return self.training.splits_experts and gathers_tokens(self.training.gpus, self._gathered_bytes)

    @property
    def _gathered_bytes(self) -> int:
        return 2 * self.sizes.experts_hidden * self.training.tokens * self.training.gpus

    @property
    def exchanged_bytes(self) -> float:
        """Bytes of the hidden states that a token has from other ranks, of all their tokens where these are gathered."""
        sizes, training = self
        if not training.splits_experts:
            return 0.0
        copies = training.gpus if self.gathers_tokens else min(sizes.top_k, training.gpus)
        return 2.0 * sizes.experts_hidden * (copies - 1)

    # bytes of a token

    @property
    def stream_bytes(self) -> float:
        """Bytes of a token's hidden states between two layers."""
        return (4.0 if self.has_fp32_stream else 2.0) * self.sizes.hidden * self.sizes.streams

    @property
    def has_fp32_stream(self) -> bool:
        """Tell whether hidden states between layers are in fp32: by autocast, or because the model has them so."""
        return self.training.fp32_stream or self.sizes.model_type in FP32_STREAMS

    def norm_bytes(self, features: int, fp32: bool) -> float:
        """Count the bytes that an RMSNorm saves: its input with Liger, else an fp32 copy, and the normalised values where
        its weight is trained. fp32: whether it reads fp32."""
        is_liger = self.training.liger is True
        if fp32:
            return (4.0 if is_liger else 8.0) * features
        return (2.0 if is_liger else 6.0 if self.training.full else 4.0) * features

    @property
    def score_bytes(self) -> tuple[float, float]:
        """Bytes of a query and a key in a layer's attention, (kept for backward, made beside that)."""
        attention, training = self.sizes.attention, self.training
        if training.attention in (None, attention.kind):
            return attention.kept_per_score, attention.made_per_score
        return eager_score_bytes(attention.heads) if training.attention == "eager" else (0.0, 0.0)

    @property
    def layer_bytes(self) -> float:
        """Bytes that a layer keeps of a token for backward."""
        exchanged = 0.0 if self.gathers_tokens else self.exchanged_bytes
        return self._hidden_bytes + self._attention_bytes + self._experts_bytes + self._mlp_bytes + exchanged

    @property
    def _hidden_bytes(self) -> float:
        """Bytes kept of hidden states: by norms, and as inputs of linear layers."""
        sizes, training = self
        hidden = sizes.hidden
        inputs = 5 if training.fp32_stream else 2  # q, k and v share one, but for casts of autocast
        if not training.full:  # each adapter has a copy of its own
            inputs = sum(linear.features_in == hidden and linear.name != "o_proj" for linear in self.adapted)
        kept = sizes.norms * self.norm_bytes(hidden, self.has_fp32_stream) + 2.0 * hidden * inputs
        kept += (4.0 + 2.0) * hidden * sizes.gated_norms  # a gate's sigmoid, in fp32, and what it gates
        return kept + (STREAM_COPIES * 4.0 * hidden * sizes.streams if sizes.streams > 1 else 0.0)

    @property
    def _attention_bytes(self) -> float:
        """Bytes kept by attention, without those of hidden states."""
        attention, training = self.sizes.attention, self.training
        kept = 2.0 * (attention.features + attention.output) + self.norm_bytes(attention.head_norms, fp32=False)
        if training.full or any(linear.name == "o_proj" for linear in self.adapted):
            kept += 2.0 * attention.output  # the contiguous copy that o_proj reads
        reading = attention.linears if training.full else self.adapted
        latents = (linear.features_in for linear in reading if linear.name != "o_proj")
        kept += sum(2.0 * features for features in latents if features != self.sizes.hidden)
        kept += self.score_bytes[0] * training.sequence
        kept += 2 * 2.0 * attention.gated_output  # the gate's sigmoid and what it gates
        return kept + LIGHTNING * attention.lightning

    @property
    def _experts_bytes(self) -> float:
        """Bytes kept by experts and their router, without those that other ranks send."""
        sizes, training = self
        has_adapters, rows = training.experts_r and not training.full, self.rows
        kept = 2.0 * sizes.experts_hidden if has_adapters else 0.0
        if training.full and sizes.experts_hidden != sizes.hidden:
            kept += 2 * 2.0 * sizes.experts_hidden  # latents: what experts read, and what becomes hidden states again
        kept += 2.0 * sizes.up_rows * sizes.inner * rows if self.keeps_h else 0.0
        kept += 2 * 2.0 * max(training.experts_r, 16) * rows if has_adapters else 0.0
        return kept + 4.0 * sizes.num_experts + 28.0 * sizes.top_k  # scores; weights, ids, and where rows stand

    @property
    def _mlp_bytes(self) -> float:
        """Bytes kept by dense and shared MLPs: gate, its activation, up, their product; of clamped ones also both
        clamped, and a sigmoid."""
        return self.sizes.plain_copies * 2.0 * self.sizes.plain_inner / self.sizes.layers

    @property
    def backward_bytes(self) -> tuple[float, float]:
        """Bytes that a layer's backward holds beside those kept, (before, after) the gradients of the experts' weights.

        Its op makes dh and a' and frees h, then makes dx, then the gradients, and frees dh (layer/products.py). Adapters
        need a' only before dx, frozen experts never.
        """
        sizes, training = self
        attention = sizes.attention
        row = 2.0 * self.rows_at_once  # bytes of each of their features
        dh, a, dx = row * sizes.up_rows * sizes.inner, row * sizes.inner, row * sizes.experts_hidden
        a = a if training.full or training.experts_r else 0.0
        h = dh if self.keeps_h else 0.0
        again = self.forward_bytes if training.checkpointing else 0.0
        around = 3 * self.stream_bytes
        if training.splits_experts:  # the output's gradient from all ranks, and x's for them
            around += 2 * (2.0 * sizes.experts_hidden + self.exchanged_bytes)
        before = max(dh + a + dh - h, dh + dx - h + (a if training.full else 0.0)) + around
        if self.is_in_pieces:  # attention's: dq in fp32 too, dk and dv of every query head, and dout
            before = max(before, 12.0 * attention.output)
        before = max(before, self.score_bytes[1] * training.sequence)
        if training.liger is not True:  # a norm's backward: behind the experts beside h; before them; of q and k
            h = 0.0 if sizes.norms > 2 else h
            of_heads = (
                NORM_COPIES * attention.head_norms - 2.0 * (attention.features + attention.output) - 4.0 * sizes.hidden
            )
            before = max(before, max(NORM_COPIES * sizes.hidden, of_heads) - h + 2 * self.stream_bytes)
        return max(before, again), (a - h + around) if training.full else 0.0

    @property
    def forward_bytes(self) -> float:
        """Bytes that a layer's forward holds beside all that it keeps, where backward computes it again.

        The experts' a, y and output (layer/products.py), or before them the scores of an indexer's piece of queries, two
        at once, beside queries before and after RoPE.
        """
        sizes, training = self
        attention = sizes.attention
        row = 2.0 * self.rows_at_once  # bytes of each of their features
        around = 3 * self.stream_bytes + 2.0 * sizes.hidden  # and what the norm before made
        h = row * sizes.up_rows * sizes.inner
        experts = row * (sizes.inner + sizes.experts_hidden) + 2.0 * sizes.experts_hidden + around
        keys = training.sequence / attention.index_rate
        if keys <= attention.index_topk or not attention.index_heads:
            return experts + (0.0 if self.keeps_h else h)
        scores = min(4.0 * attention.index_heads * keys, PIECE_BYTES / training.tokens)
        later = (h if self.keeps_h else 0.0) + self._mlp_bytes
        later += 2.0 * attention.output + self.norm_bytes(sizes.hidden, self.has_fp32_stream)
        return max(experts, 2 * scores + 2.0 * attention.queries + around - later)
