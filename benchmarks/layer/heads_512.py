"""Attention with heads of 512 on one key and value: what torch has, beside plain PyTorch in pieces of queries.

    python -m benchmarks.layer.heads_512 [--csv FILE]
    python -m benchmarks.layer.heads_512 --device cpu --csv /tmp/heads_512.csv    # checks the script

DeepSeek-V4's problem, as attention/deepseek_v4.py has it: 64 heads, a window of 128 keys and a compressed key of every
four tokens, of which 512 are picked for a query. bf16, forward and backward of the attention alone. The relative error
is that of head 0's output beside fp32. Kernels that take no mask compute causal attention, which is another problem.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.common.command import Command
from benchmarks.common.table import Rows
from benchmarks.common.timing import release, synchronize, waited_times

RATE, SCALE = 4, 512**-0.5  # tokens of a compressed key; of the scores
SIZES = {"cuda": (64, 4096, 512, 128, 512), "cpu": (4, 256, 512, 32, 16)}  # heads, tokens, size, window, picked


class Problem:
    """Random queries [1, heads, S, 512], keys [1, 1, S, 512], compressed keys [1, 1, S / 4, 512] and what a query sees.

    index: the picked compressed keys [S, picked], -1 where fewer are there. sees: a mask [S, S + S / 4].
    """

    def __init__(self, length: int, device: str):
        self.heads, _, size, self.window, picked = SIZES[device]
        generator, few = torch.Generator(device).manual_seed(0), length // RATE
        shapes = ((self.heads, length), (1, length), (1, few))
        self.q, self.keys, self.compressed = (
            torch.randn(1, *shape, size, generator=generator, device=device).bfloat16().requires_grad_()
            for shape in shapes
        )
        rows = torch.arange(length, device=device)
        ready, ages = (rows + 1) // RATE, rows[:, None] - rows
        scores = torch.rand(length, few, generator=generator, device=device)
        scores = scores.masked_fill(torch.arange(few, device=device) >= ready[:, None], -1)
        value, index = scores.topk(min(picked, few), -1)
        self.index = torch.where(value < 0, -1, index)
        far = torch.zeros(length, few + 1, dtype=torch.bool, device=device)
        far = far.scatter_(1, torch.where(value < 0, few, index), True)[:, :few]
        self.sees = torch.cat([(ages >= 0) & (ages < self.window), far], 1)
        self.dout = torch.randn_like(self.q)

    def all_keys(self) -> torch.Tensor:
        """Concatenate the keys and the compressed keys."""
        return torch.cat([self.keys, self.compressed], 2)

    def reference(self, is_causal: bool) -> torch.Tensor:
        """Compute head 0's output [S, 512] in fp32."""
        keys = (self.keys if is_causal else self.all_keys())[0, 0].float()
        sees = torch.ones_like(self.sees[:, : len(keys)]).tril() if is_causal else self.sees
        return (self.q[0, 0].float() @ keys.t() * SCALE).masked_fill(~sees, -math.inf).softmax(-1) @ keys


def masked(q: torch.Tensor, keys: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    """Compute the output [heads, C, 512] of some queries with scores of all keys."""
    scores = (q @ keys.t()).float().mul(SCALE).masked_fill(~sees, -math.inf)
    return scores.softmax(-1).to(q.dtype) @ keys


def gathered(q, near, compressed, index, sees):
    """Compute the output [heads, C, 512] with the keys of the window and each query's own compressed keys."""
    own = compressed[index.clamp_min(0)]  # [C, picked, 512]
    far = torch.einsum("hcd,cpd->hcp", q, own).float().mul(SCALE).masked_fill(index < 0, -math.inf)
    scores = torch.cat([(q @ near.t()).float().mul(SCALE).masked_fill(~sees, -math.inf), far], -1)
    weights = scores.softmax(-1).to(q.dtype)
    count = near.shape[0]
    return weights[..., :count] @ near + torch.einsum("hcp,cpd->hcd", weights[..., count:], own)


def in_pieces(step: int, gathers: bool):
    """Make attention that is computed, and computed again in backward, for some queries at a time."""

    def run(problem: Problem) -> torch.Tensor:
        out, length, (keys, compressed) = [], problem.q.shape[2], (problem.keys[0, 0], problem.compressed[0, 0])
        for start in range(0, length, step):
            end, first = min(start + step, length), max(0, start - problem.window + 1)
            q, sees = problem.q[0, :, start:end], problem.sees[start:end, first:end]
            if gathers:
                given = (gathered, q, keys[first:end], compressed, problem.index[start:end], sees)
            else:
                few = end // RATE
                sees = torch.cat([sees, problem.sees[start:end, length : length + few]], 1)
                given = (masked, q, torch.cat([keys[first:end], compressed[:few]]), sees)
            out.append(checkpoint(*given, use_reentrant=False))
        return torch.cat(out, 1)[None]

    return run


def by_sdpa(backend: SDPBackend, is_causal: bool = False):
    """Make attention by one of torch's kernels, with an additive mask or causal."""

    def run(problem: Problem) -> torch.Tensor:
        keys = (problem.keys if is_causal else problem.all_keys()).expand(-1, problem.heads, -1, -1)
        bias = torch.zeros_like(problem.sees, dtype=keys.dtype).masked_fill(~problem.sees, -math.inf)
        mask = None if is_causal else bias.expand(1, problem.heads, *bias.shape)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(problem.q, keys, keys, mask, is_causal=is_causal, scale=SCALE)

    return run


def by_flex(problem: Problem) -> torch.Tensor:
    """Compute head 0's output by FlexAttention, with a block mask."""
    keys = problem.all_keys()
    sees = problem.sees
    block = create_block_mask(lambda _, __, i, j: sees[i, j], None, None, *sees.shape, device=keys.device)
    call = torch.compile(flex_attention) if keys.is_cuda else flex_attention
    return call(problem.q, keys, keys, block_mask=block, scale=SCALE, enable_gqa=True)


def eager(problem: Problem) -> torch.Tensor:
    """Compute head 0's output at once, with scores in fp32."""
    return masked(problem.q[0], problem.all_keys()[0, 0], problem.sees)[None]


ATTENTIONS = {  # name -> (what computes it, whether it is causal, whether also at four times the tokens)
    **{
        f"pieces of {step}, keys {'gathered' if gathers else 'masked'}": (in_pieces(step, gathers), False, step == 256)
        for step in (64, 128, 256, 512)
        for gathers in (True, False)
    },
    "eager, fp32 scores": (eager, False, False),
    "SDPA memory-efficient, additive mask": (by_sdpa(SDPBackend.EFFICIENT_ATTENTION), False, True),
    "SDPA memory-efficient, causal, no mask": (by_sdpa(SDPBackend.EFFICIENT_ATTENTION, True), True, False),
    "SDPA cuDNN, additive mask": (by_sdpa(SDPBackend.CUDNN_ATTENTION), False, False),
    "SDPA flash, causal": (by_sdpa(SDPBackend.FLASH_ATTENTION, True), True, False),
    "flex_attention, V4's mask, default tiles": (by_flex, False, False),
}


def measure(table: Rows, name: str, length: int, device: str) -> None:
    """Add a row of one of ATTENTIONS; what torch has no kernel for is printed alone."""
    run, is_causal, _ = ATTENTIONS[name]
    problem = Problem(length, device)
    inputs = (problem.q, problem.keys, problem.compressed)

    def step() -> torch.Tensor:
        for each in inputs:
            each.grad = None
        out = run(problem)
        out.backward(problem.dout)
        return out

    try:
        out = step()[0, 0].detach().float()
    except (RuntimeError, NotImplementedError) as error:
        print(f"{name}  {length}  {' '.join(str(error).split())[:200]}", flush=True)
        return
    with torch.no_grad():
        expected = problem.reference(is_causal)
        error = ((out - expected).norm() / expected.norm()).item()
        del out, expected
    peak = 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    times, _ = waited_times(lambda: (step(), None)[1], 3, 1)
    table.add(
        attention=name,
        tokens=length,
        ms=f"{sorted(times)[1]:.1f}",
        peak_GiB=f"{peak:.2f}",
        relative_error=f"{error:.1e}",
    )


def main() -> None:
    options = Command(__doc__, "heads_512.csv", "--device cpu --csv /tmp/heads_512.csv").parse_args()
    table, length = Rows(options.csv, ("attention", "tokens")), SIZES[options.device][1]
    for name, (_, _, is_long) in ATTENTIONS.items():
        for tokens in (length, 4 * length) if is_long else (length,):
            measure(table, name, tokens, options.device)
            release()
    table.write()


if __name__ == "__main__":
    main()
