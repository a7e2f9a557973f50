"""Experts of rollouts are paired with final sequences by their tokens, and laid over padded batches."""

import numpy
import pytest
import torch

from sonicmoe_hf.trl.rollouts import GeneratedSequences, Rollout, as_calls


def experts(length, first=0):
    """Make vLLM's array of a sequence of so many tokens, in two layers with K = 2; rows name their number."""
    rows = (first + numpy.arange(length - 1))[:, None, None]
    return (rows + numpy.array([[0, 100], [0, 100]])).astype(numpy.int32)


def test_a_tools_loop_gets_the_experts_of_its_last_turn_and_none_for_what_comes_behind():
    sequences = GeneratedSequences()
    sequences.add([1, 2], [3, 4], experts(4))
    sequences.add([1, 2, 3, 4, 9, 9], [5, 6], experts(8, 40))
    sequences.add([1, 2], [3, 7], experts(4, 20))
    assert sequences.experts_of([1, 2, 3, 7])[:, 0, 0].tolist() == [20, 21, 22]
    assert sequences.experts_of([1, 2, 3, 4, 9, 9, 5, 6])[:, 0, 0].tolist() == list(range(40, 47))
    found = sequences.experts_of([1, 2, 3, 4, 9, 9, 5, 6, 8, 8])
    assert found[:, 0, 0].tolist() == [*range(40, 47), -1, -1] and found.dtype == torch.int16


def test_a_sequence_that_was_cut_off_gets_the_experts_of_the_longer_one():
    sequences = GeneratedSequences()
    sequences.add([1, 2], [3, 4], experts(4))
    sequences.add([1, 2, 3, 4, 9], [5, 6, 7], experts(8, 40))
    assert sequences.experts_of([1, 2, 3, 4, 9, 5])[:, 0, 0].tolist() == list(range(40, 45))


def test_equal_sequences_get_their_own_in_order_and_others_are_an_error():
    sequences = GeneratedSequences()
    for first in (0, 50):
        sequences.add([1], [2, 3], experts(3, first))
    assert [sequences.experts_of([1, 2, 3])[0, 0, 0].item() for _ in range(2)] == [0, 50]
    with pytest.raises(RuntimeError, match=r"none that vLLM generated .* replay=False"):
        sequences.experts_of([4, 2, 3])
    sequences.add([1], [2, 4], experts(2))
    with pytest.raises(RuntimeError, match=r"the experts of 1 tokens for a sequence of 3, .* with prefix caching"):
        sequences.experts_of([1, 2, 4])
    sequences.add([1], [2, 5], experts(3, 70))
    assert sequences.experts_of([1, 2, 5])[:, 0, 0].tolist() == [70, 71], "what a server with prefix caching returns"


def test_experts_lie_over_prompts_padded_on_the_left_and_completions_on_the_right():
    """Batches may have more sequences than are laid out at once."""
    rollout = Rollout([2, 1] * 10, [1, 3] * 10, [experts(3), experts(4, 50)] * 10)
    assert rollout.mask(6, 3)[:2].tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]
    aligned = rollout.aligned(6, 3)
    assert aligned.shape == (20, 6, 2, 2) and aligned.dtype == torch.int16
    assert aligned[18:, :, 1, 0].tolist() == [[-1, 0, 1, -1, -1, -1], [-1, -1, 50, 51, 52, -1]]
    first, second = as_calls(aligned, 10)
    assert first.shape == second.shape == (2, 60, 2) and first[1, 6:12, 1].tolist() == [-1, -1, 150, 151, 152, -1]
