"""Score matrices for token rounding, random and adversarial, and the comparison of a backend with the definition."""

from __future__ import annotations

import torch
from moe_problems import poisoned

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels.interface import Weighting
from sonicmoe_hf.layer.config import TokenRounding

KINDS = ("probabilities", "few levels", "all equal", "signed zeros", "wide", "forbidden", "few others", "one expert")
EVERYTHING_COUNTS = 0  # of `min_pairs`: padding never makes it fall back


def matrix(kind, num_tokens, num_experts, top_k):
    """Draw (S, what to rank by, top-k's choice), fp32 and int64."""
    shape = num_tokens, num_experts
    scores = torch.randn(shape).softmax(-1)
    index = scores.topk(top_k, dim=1).indices
    if kind == "few levels":
        scores = torch.randint(0, 3, shape) / 4
        index = torch.rand(shape).topk(top_k, dim=1).indices  # top-k's choice need not be the highest scores
    elif kind == "all equal":
        scores = torch.full(shape, 1 / num_experts)
    elif kind == "signed zeros":
        scores = torch.where(torch.rand(shape) < 0.5, 0.0, -0.0)
        scores = torch.where(torch.rand(shape) < 0.1, torch.rand(shape) - 0.5, scores)
    elif kind == "wide":  # subnormal numbers too
        scores = torch.exp2(torch.randint(-149, 100, shape).float())
    elif kind == "one expert":
        index = torch.arange(top_k).expand(num_tokens, top_k)
    ranking = scores
    if kind == "forbidden":
        columns = torch.rand(num_experts) < 0.3
        ranking = scores.masked_fill(columns | (torch.rand(shape) < 0.5), float("-inf"))
    elif kind == "few others":
        ranking = scores.masked_fill(torch.rand(shape) < 0.97, float("-inf"))
    return scores, ranking, index


def gradient_terms(dweight, scores, expert_P, rows, weighting):
    """Compute |minuend| + |subtrahend| of the gradient of every chosen pair's score, where weights are normalised."""
    pairs = expert_P < scores.shape[1]
    token, expert, dweight = rows.token[pairs].long(), expert_P[pairs].long(), dweight[pairs].abs()
    score = scores[token, expert]
    total, product = (torch.zeros(len(scores)).double().index_add(0, token, t) for t in (score, dweight * score.abs()))
    divisor = torch.where(total > 0, total, 1.0) + weighting.epsilon
    return weighting.scale * (dweight + (product / divisor)[token]) / divisor[token]


def check_against_definition(kernels, device, problem, rounding, tile, valid_T=None, min_pairs=EVERYTHING_COUNTS):
    """Check that round_rows and its backward equal the eager backend's on the CPU, poisoned buffers notwithstanding."""
    scores, ranking, index = problem
    (num_tokens, num_experts), top_k = scores.shape, index.shape[1]
    num_pairs = TokenRounding(rounding=rounding, tile=tile).max_rows(num_tokens, top_k, num_experts)
    weighting = Weighting(True, 1e-20, 2.5)
    given = scores, ranking, index, valid_T, torch.rand(num_experts)
    options = rounding, tile, min_pairs, num_pairs, weighting, torch.float32
    expected = eager.round_rows(*given, *options)
    on_device = [tensor if tensor is None else tensor.to(device) for tensor in given]
    with poisoned():
        found = kernels.round_rows(*on_device, *options)
    for name in ("offsets", "token", "pair", "token_offsets", "token_rows"):
        assert torch.equal(getattr(found.rows, name).cpu(), getattr(expected.rows, name)), name
    assert torch.equal(found.expert_P.cpu(), expected.expert_P)
    assert (found.fell_back is None and valid_T is None) or found.fell_back.item() == expected.fell_back.item()
    torch.testing.assert_close(found.weight_P.cpu(), expected.weight_P)

    dweight = torch.randn(num_pairs)
    exact = eager.round_rows_backward(dweight.double(), scores.double(), expected.expert_P, expected.rows, weighting)
    with poisoned():
        gradient = kernels.round_rows_backward(dweight.to(device), on_device[0], found.expert_P, found.rows, weighting)
    # a dozen fp32 roundings, 2^-24 each, of terms whose difference may be far smaller
    allowed = (
        1e-6 * gradient_terms(dweight.double(), scores.double(), expected.expert_P, expected.rows, weighting).norm()
    )
    assert (gradient.cpu() - exact).norm() <= allowed, "gradient"
    return found
