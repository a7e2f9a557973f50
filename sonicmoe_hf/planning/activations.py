"""What a layer keeps for backward, and what its backward holds beside that. memory.py has the letters and the sources."""

from __future__ import annotations

from dataclasses import replace

from .sizes import ModelSizes
from .training import Training


def stream_bytes(sizes: ModelSizes, training: Training) -> float:
    """A token's hidden state between two layers."""
    return (4.0 if training.fp32_stream else 2.0) * sizes.hidden


def norm_bytes(width: int, training: Training) -> float:
    """Of an RMSNorm over `width` features: without Liger an fp32 copy, and the normalised values where its weight is
    trained; with Liger its input."""
    if training.fp32_stream:
        return (4.0 if training.liger else 8.0) * width
    if training.liger:
        return 2.0 * width
    return (6.0 if training.full else 4.0) * width


def layer_bytes(sizes: ModelSizes, training: Training) -> float:
    """What a layer keeps for backward, for each token: its attention's tensors, norms, router, h and adapters' rows."""
    hidden, full = sizes.hidden, training.full
    adapted = training.adapted(sizes)
    read_hidden = [p for p in adapted if p.features_in == hidden and p.name != "o_proj"]
    total = 2 * norm_bytes(hidden, training)
    # inputs of linear layers: one for q, k and v, or in fp32 and before adapters a cast for each
    if training.fp32_stream:
        total += 2.0 * hidden * 5
    elif full:
        total += 2.0 * hidden * 2
    else:
        total += 2.0 * hidden * len(read_hidden) + (2.0 * sizes.experts_hidden if training.experts_r else 0.0)
    if full and sizes.experts_hidden != hidden:  # latents: what the experts read, and what becomes hidden states again
        total += 2 * 2.0 * sizes.experts_hidden
    total += _attention_bytes(sizes, training)
    read = sizes.projections if full else adapted
    total += sum(2.0 * p.features_in for p in read if p.features_in != hidden and p.name != "o_proj")  # latents
    if full or any(p.name == "o_proj" for p in adapted):
        total += 2.0 * sizes.output  # the contiguous copy that o_proj reads
    if training.save == "preactivation":
        total += 2.0 * sizes.up_rows * sizes.inner * _rows(sizes, training)
    if training.experts_r and not full:
        total += 2 * 2.0 * max(training.experts_r, 16) * _rows(sizes, training)
    total += 4.0 * sizes.num_experts + 28.0 * sizes.top_k  # the router's scores; weights, ids, and where rows stand
    total += (
        4 * 2.0 * sizes.plain_inner / sizes.layers
    )  # dense and shared MLPs: gate, its activation, up, their product
    return total + _exchanged(sizes, training)


def attention_of(sizes: ModelSizes, training: Training) -> str:
    """The attention's implementation: what is asked for, or the model's own."""
    return training.attention or sizes.attention


def _attention_bytes(sizes: ModelSizes, training: Training) -> float:
    """q and k before and after their norms and positions, v, and the output."""
    total = 2.0 * (sizes.query + sizes.key + sizes.value + sizes.output) + 12.0 * sizes.heads
    if sizes.head_norms:
        inside = replace(training, weights="bf16")  # autocast has q and k in bf16
        total += norm_bytes(sizes.query, inside) + norm_bytes(sizes.key, inside)
    if attention_of(sizes, training) == "eager":  # probabilities of every pair of tokens
        total += 2.0 * sizes.heads * training.sequence
    return total


def _rows(sizes: ModelSizes, training: Training) -> float:
    """Routed rows for each token that there is memory for."""
    rows = sizes.top_k + sizes.num_experts * training.extra_rows / training.tokens
    return rows * (2 if _gathers_tokens(training) else 1)


def _gathers_tokens(training: Training) -> bool:
    return training.parallel == "expert parallelism" and training.gpus == 2


def _exchanged(sizes: ModelSizes, training: Training) -> float:
    """Under expert parallelism: hidden states that came from other ranks."""
    if training.parallel != "expert parallelism":
        return 0.0
    others = 1 if _gathers_tokens(training) else min(sizes.top_k, training.gpus) - 1
    return 2.0 * sizes.experts_hidden * others


def cast_bytes(sizes: ModelSizes, training: Training) -> float:
    """fp32 weights in bf16, which autocast keeps for backward."""
    if not training.fp32_stream or training.checkpointing:
        return 0.0
    head = 0 if training.liger else sizes.vocabulary * sizes.hidden
    return 2.0 * (sizes.total - sizes.embeddings + head)


def backward_bytes(sizes: ModelSizes, training: Training) -> tuple[float, float]:
    """(before, after) the gradients of the experts' weights: what the backward of a layer holds beside what was kept.

    Its op makes dh and a' and frees h, then makes dx, then the gradients, and frees dh (layer/experts_op.py). Adapters
    need a' only before dx.
    """
    rows = 2.0 * _rows(sizes, training)
    dh, a, dx = rows * sizes.up_rows * sizes.inner, rows * sizes.inner, rows * sizes.experts_hidden
    kept_h = dh if training.save == "preactivation" else 0.0
    made_h = dh - kept_h
    around = 3 * stream_bytes(sizes, training)
    if training.parallel == "expert parallelism":  # the output's gradient from all ranks, and x's for them
        around += 2 * (2.0 * sizes.experts_hidden + _exchanged(sizes, training))
    while_dx = dh + dx - kept_h + (a if training.full else 0.0)
    before = max(dh + a + made_h, while_dx) + around
    after = (a - kept_h + around) if training.full else 0.0
    if attention_of(sizes, training) == "eager":  # gradients of scores and probabilities, of every pair of tokens
        before = max(before, 3 * 2.0 * sizes.heads * training.sequence)
    return before, after
