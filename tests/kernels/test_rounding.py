"""Token rounding in Triton, interpreted on a CPU (or run, where there is a GPU), against the eager
backend's definition."""

import pytest
import torch
from helpers.marks import rest_pinned
from rounding_problems import KINDS, check_against_definition, matrix

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Weighting
from sonicmoe_hf.kernels.triton import rounding as rounding_kernels
from sonicmoe_hf.layer.config import ROUNDINGS

SIZES = {"odd": (70, 5, 2, 8), "one token": (1, 4, 2, 1), "every expert": (33, 3, 3, 4), "one expert": (40, 1, 1, 16)}


@pytest.mark.parametrize("size", rest_pinned(SIZES))
@pytest.mark.parametrize("rounding", rest_pinned(ROUNDINGS, 3))
def test_it_rounds_by_the_definition(device, rounding, size):
    num_tokens, num_experts, top_k, tile = SIZES[size]
    kind = KINDS[(ROUNDINGS.index(rounding) + list(SIZES).index(size)) % len(KINDS)]
    problem = matrix(kind, num_tokens, num_experts, top_k)
    check_against_definition(kernels, device, problem, rounding, tile)
    valid = torch.rand(num_tokens) > 0.3
    check_against_definition(kernels, device, problem, rounding, tile, valid)


@pytest.mark.pinned
@pytest.mark.parametrize("kind", KINDS)
def test_ties_and_forbidden_tokens_are_no_matter(device, kind):
    check_against_definition(kernels, device, matrix(kind, 50, 4, 2), "up", 16)
    check_against_definition(kernels, device, matrix(kind, 50, 4, 2), "down", 16)


def test_padding_that_leaves_too_few_tokens_keeps_top_k(device):
    valid = torch.arange(60) < 20
    problem = matrix("probabilities", 60, 4, 2)
    assert check_against_definition(kernels, device, problem, "nearest", 8, valid, min_pairs=41).fell_back
    assert not check_against_definition(kernels, device, problem, "nearest", 8, valid, min_pairs=40).fell_back


@pytest.mark.slow
def test_more_tokens_than_registers_hold(device, monkeypatch):
    monkeypatch.setattr(rounding_kernels, "MIN_HELD", 32)
    monkeypatch.setattr(rounding_kernels, "MAX_HELD", 32)
    for rounding in ("nearest", "nearest_score"):
        check_against_definition(kernels, device, matrix("few levels", 70, 2, 1), rounding, 16)


def test_tokens_of_more_experts_than_the_gradient_takes_in_one_step(device):
    check_against_definition(kernels, device, matrix("probabilities", 20, 24, 20), "nearest", 4)


def test_no_tokens_leave_no_rows(device):
    found = check_against_definition(kernels, device, matrix("probabilities", 0, 4, 2), "nearest", 8)
    assert (found.rows.tiles == -1).all()


def test_the_tiles_are_those_of_dispatch(device):
    found = check_against_definition(kernels, device, matrix("probabilities", 400, 4, 2), "nearest", 128)
    rows = kernels.dispatch(found.expert_P, found.rows.token, 400, 4, True)
    tiles, expected = found.rows.tiles[:-1], rows.tiles[:-1]
    real = expected[:, 0] >= 0
    assert real.any() and torch.equal(tiles[:, 0], expected[:, 0]) and torch.equal(tiles[real], expected[real])
    assert torch.equal(found.rows.scheduler_state[:2], rows.scheduler_state[:2])


def test_weights_that_are_not_normalised_in_another_dtype(device):
    scores, ranking, index = (t.to(device) for t in matrix("probabilities", 60, 4, 2))
    weighting = Weighting(False, 0.0, 1.5)
    given = scores, ranking, index, None, None, "nearest", 8, 0, 200, weighting, torch.float16
    found, expected = kernels.round_rows(*given), eager.round_rows(*given)
    assert torch.equal(found.weight_P, expected.weight_P)
    dweight = torch.randn(200, device=device, dtype=torch.float16)
    of_pairs = scores, expected.expert_P, expected.rows, weighting
    assert torch.equal(kernels.round_rows_backward(dweight, *of_pairs), eager.round_rows_backward(dweight, *of_pairs))
