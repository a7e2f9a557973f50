"""Stochastic rounding in a real Trainer: the same draws from the same seed, whatever recomputes or resumes."""

import pytest
import torch
from helpers.marks import rest_pinned
from helpers.models import build
from helpers.resuming import weights as weights_of
from helpers.training import CHECKPOINTED_TRAINING, CHECKPOINTING, TILE, Watch, run_trainer

from sonicmoe_hf import TokenRoundingCallback


def train(folder, checkpoint=None, **options):
    """Train (routed pairs of every call of the experts, weights at the end)."""
    model = build("qwen3_moe")
    watch = Watch(model)
    callback = TokenRoundingCallback(rounding="stochastic", tile=TILE)
    run_trainer(model, folder, [callback], checkpoint=checkpoint, padding=True, learning_rate=0.1, **options)
    pairs = [torch.stack([routing.token_index, routing.expert_index]) for _, routing in watch.calls]
    return pairs, weights_of(model)


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.pinned
def test_the_trainers_seed_decides(tmp_path):
    pairs, weights = train(tmp_path, seed=3)
    again, again_weights = train(tmp_path, seed=3)
    assert same(pairs, again) and all(torch.equal(weights[name], again_weights[name]) for name in weights)
    assert not same(pairs, train(tmp_path, seed=4)[0])


@pytest.mark.parametrize("kind", rest_pinned(CHECKPOINTING))
def test_recomputed_layers_of_accumulated_micro_batches_round_as_in_their_forward(kind, tmp_path):
    options = {"seed": 3, "gradient_accumulation_steps": 2, "max_steps": 2, "per_device_train_batch_size": 4}
    _, plain = train(tmp_path, **options)
    pairs, weights = train(tmp_path, **options, **CHECKPOINTED_TRAINING[kind])
    micro_batches, layers = 4, 2
    assert len(pairs) == 2 * micro_batches * layers, "every layer runs twice"
    for start in range(0, len(pairs), 2 * layers):
        forward, recomputed = pairs[start : start + layers], pairs[start + layers : start + 2 * layers]
        assert same(forward, recomputed[::-1]), "backward recomputes the last layer first"
    for name, expected in plain.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.pinned
def test_a_resumed_run_draws_what_the_uninterrupted_one_did(tmp_path):
    whole, _ = train(tmp_path / "whole", seed=3, save_strategy="steps", save_steps=2)
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    resumed, _ = train(tmp_path / "resumed", checkpoint, seed=3)
    assert same(resumed, whole[len(whole) // 2 :])
