"""The counts, the loss of a layer and the bias update of balance.py, by hand; in models they are in
tests/trainer/test_balancing.py."""

import pytest
import torch

from sonicmoe_hf.routing.balance import BiasLoad, layer_loss, update_bias
from sonicmoe_hf.routing.expert_load import tokens_per_expert

pytestmark = pytest.mark.pinned
RATE = 0.25  # exact in fp32


def updated(counts, rate=RATE):
    bias_E = torch.tensor([1.0, 2.0, 3.0, 4.0])[: len(counts)].contiguous()
    before_E = bias_E.clone()
    update_bias(bias_E, torch.tensor(counts), rate)
    return ((bias_E - before_E) / rate).tolist()


def test_biases_follow_the_mean_and_stay_where_an_expert_has_it():
    assert updated([1, 1, 1, 9]) == [1, 1, 1, -1], "not the median"
    assert updated([0, 4, 2, 2]) == [1, -1, 0, 0], "a tie stays"
    assert updated([5, 5, 5, 5]) == updated([0, 0, 0, 0]) == [0, 0, 0, 0]
    assert updated([1, 2]) == [1, -1], "a mean that is no whole number"
    assert updated([0, 1], torch.tensor(RATE)) == [1, -1], "a rate that is a tensor"


@pytest.mark.parametrize("num_experts, count", [(60, 1234567), (96, 9999991), (160, 16777215), (3, 2**40 + 1)])
def test_equal_counts_leave_biases_alone_however_large_they_are(num_experts, count):
    bias_E, count_E = torch.zeros(num_experts), torch.full((num_experts,), count)
    update_bias(bias_E, count_E, RATE)
    assert not bias_E.any()
    count_E[0] += 1
    update_bias(bias_E, count_E, RATE)
    assert bias_E[0] == -RATE and (bias_E[1:] == RATE).all(), "one token more"


INDEX_TK = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 0]])


def test_tokens_are_counted_for_every_expert_they_go_to_and_padding_is_not():
    assert tokens_per_expert(INDEX_TK, 5, None, torch.int64).tolist() == [4, 2, 1, 1, 0]
    valid_T = torch.tensor([True, False, True, False])
    assert tokens_per_expert(INDEX_TK, 5, valid_T, torch.int64).tolist() == [2, 2, 0, 0, 0]
    assert tokens_per_expert(INDEX_TK, 5, torch.zeros(4, dtype=torch.bool), torch.int64).tolist() == [0] * 5


def test_micro_batches_add_up_with_one_of_padding_alone_among_them():
    counts = BiasLoad()
    counts.count(INDEX_TK, 5)
    counts.count(INDEX_TK, 5, valid_T=torch.zeros(4, dtype=torch.bool))
    counts.count(INDEX_TK[:1], 5, valid_T=torch.ones(1, dtype=torch.bool))
    assert counts.pairs_E.tolist() == [5, 3, 1, 1, 0] and counts.pairs_E.dtype == torch.int64


def test_the_loss_of_a_layer_is_switch_transformers_over_the_tokens_that_are_no_padding():
    scores_TE = torch.rand(4, 5, dtype=torch.float64)
    valid_T = torch.tensor([True, True, False, True])
    kept = scores_TE[valid_T]
    share_E = torch.bincount(INDEX_TK[valid_T].flatten(), minlength=5) / 3
    expected = 5 * (share_E * (kept / kept.sum(1, keepdim=True)).mean(0)).sum()
    torch.testing.assert_close(layer_loss(scores_TE, INDEX_TK, valid_T), expected)
    torch.testing.assert_close(layer_loss(kept, INDEX_TK[valid_T], None), expected)


def test_a_micro_batch_of_padding_alone_has_no_loss_and_finite_gradients():
    scores_TE = torch.rand(4, 5).requires_grad_()
    loss = layer_loss(scores_TE, INDEX_TK, torch.zeros(4, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0 and not scores_TE.grad.any()
