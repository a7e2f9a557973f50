"""Two gloo ranks: the load of the experts, LoadBalancing's scale, counts and biases, under every kind of parallelism."""

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from helpers.adapters import with_lora
from helpers.marks import rest_pinned
from helpers.models import assert_all_close, batch, build, build_patched
from helpers.parallel import (
    HAS_PP_SIZE,
    OWN_BATCH,
    SUMMATION,
    load_parallel,
    mean_of_ranks,
    pretend_to_have_gpus,
    whole_gradients,
)
from helpers.ranks import WORLD
from helpers.training import TILE, Examples, Watch, arguments, callback_in_first_step, logs_of, run_trainer
from torch.distributed.fsdp import fully_shard
from transformers import Trainer

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback, LoadBalancing, TokenRoundingCallback
from sonicmoe_hf.layer.routing import TokenRounding
from sonicmoe_hf.patching.moe_layers import find_layers

# the loss and the biases of all ranks


def balanced_step(rank, family, sharded):
    model = build_patched(family)
    balancing = LoadBalancing(0.5, 1e-3 if family == "deepseek_v3" else None)
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        prepared = model
    else:
        prepared = Accelerator(cpu=True).prepare(model)
    balancing.start(model)
    prepared(**batch(**OWN_BATCH[rank])).loss.backward()
    balancing.step(model)
    return whole_gradients(prepared), biases_of(model) if balancing.bias_update else []


@pytest.mark.parametrize(
    ("family", "sharded"), rest_pinned([("deepseek_v3", True), ("deepseek_v3", False), ("qwen3_moe", True)])
)
def test_balancing_averages_each_ranks_loss_and_counts_all_ranks_tokens(ranks, family, sharded):
    model = build_patched(family)
    balancing = LoadBalancing(0.5, 1e-3 if family == "deepseek_v3" else None)
    balancing.start(model)
    _, expected = mean_of_ranks(model)
    balancing.step(model)
    for actual, biases in ranks.run(balanced_step, family, sharded):
        assert_all_close(actual, expected, 1e-5, SUMMATION)
        for bias, expected_bias in zip(biases, biases_of(model) if balancing.bias_update else [], strict=True):
            assert torch.equal(bias, expected_bias)


# a loss computed outside the model, under DDP with adapters


def adapted():
    return with_lora(build_patched("qwen3_moe"))


def backward_of_another_loss(rank):
    """Differentiate the logits of a model that also returns a loss, as it is given labels."""
    model = adapted()
    prepared = Accelerator(cpu=True).prepare(model)
    LoadBalancing(per_layer_loss=1.0).start(model)
    with pytest.raises(RuntimeError, match=r"call sonicmoe_hf.attach\(trainer\); in a loop of your own"):
        prepared(**batch(**OWN_BATCH[rank])).logits.square().mean().backward()


def test_under_ddp_a_loss_computed_outside_the_model_is_an_error_by_name(ranks):
    ranks.run(backward_of_another_loss)


class OfLogits(Trainer):
    """A trainer whose loss is the mean square of the logits of labelled tokens over the whole step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = sum_of_squares(model(**inputs).logits, inputs["labels"]) / num_items_in_batch
        return loss * self.accelerator.num_processes


def sum_of_squares(logits, labels):
    return (logits[:, :-1].square().mean(-1) * (labels[:, 1:] != -100)).sum()


def gradient_of_a_step(rank, folder):
    model = adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    settings = arguments(folder, max_steps=1, per_device_train_batch_size=2, learning_rate=1.0)
    trainer = OfLogits(model, settings, train_dataset=Examples(4, padding=True), callbacks=[LoadBalancing(0.5)])
    sonicmoe_hf.attach(trainer)
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    return {name: before[name] - p.detach() for name, p in model.named_parameters() if p.requires_grad}


def test_under_ddp_the_trainers_own_loss_scales_each_ranks_batch_by_its_tokens(ranks, tmp_path):
    reference, columns = adapted(), Examples(4, padding=True).columns
    balancing, parts = LoadBalancing(0.5), [slice(0, 2), slice(2, 4)]
    balancing.start(reference)
    total = (columns["labels"][:, 1:] != -100).sum()
    for rows in parts:
        inputs = {name: column[rows] for name, column in columns.items()}
        share = (inputs["labels"][:, 1:] != -100).sum() / total
        loss = sum_of_squares(reference(**inputs).logits, inputs["labels"]) / total
        balancing.scaled_as(reference, loss, share=share).backward()
    for actual in ranks.run(gradient_of_a_step, str(tmp_path)):
        assert_all_close(actual, whole_gradients(reference), 2e-4, f"{SUMMATION}; differences of weights of size 1")


# biases under FSDP1


def steps_of_biases(rank):
    """Compute the biases after three steps, and as they are saved."""
    pretend_to_have_gpus()
    model = with_large_biases()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin)
    prepared, balancing = accelerator.prepare(model), LoadBalancing(bias_update=RATE)
    balancing.start(prepared)
    for _ in range(STEPS):
        accelerator.backward(prepared(**batch(**OWN_BATCH[rank])).loss)
        balancing.step(prepared)
    saved = prepared.state_dict()
    return biases_of(prepared), [value for name, value in saved.items() if "e_score_correction_bias" in name]


RATE, STEPS = 1e-3, 3


def with_large_biases():
    """Build a model with biases at which bf16 has steps of 4e-3 and 8e-3."""
    model = build("deepseek_v3")
    for bias in biases_of(model):
        bias.data += 1
    sonicmoe_hf.patch_model(model)
    return model


def biases_of(model):
    return [layer.router.e_score_correction_bias for layer in find_layers(model)]


def test_under_fsdp1_in_bf16_biases_move_by_less_than_bf16_can_tell_and_are_saved_so(ranks):
    before = biases_of(with_large_biases())
    results = ranks.run(steps_of_biases)
    for found, saved in results:
        for bias, kept, other, old in zip(found, saved, results[0][0], before, strict=True):
            steps = (bias - old) / RATE
            assert bias.dtype == kept.dtype == torch.float32
            assert torch.equal(bias, kept) and torch.equal(bias, other)
            assert torch.allclose(steps, steps.round(), atol=1e-3), "fp32 near 1 tells 1e-7"
            assert steps.abs().max().round() == STEPS, "an expert's load was above or below the mean in every step"


# the load of all ranks


def trained_load(rank, folder):
    model, callback = build("qwen3_moe"), ExpertLoadCallback()
    watch = Watch(model)
    trainer = run_trainer(model, folder, [TokenRoundingCallback(tile=TILE), callback], padding=True, max_steps=2)
    assert trainer.args.world_size == WORLD and trainer.args.parallel_mode.value == "distributed"
    own = [torch.bincount(routing.expert_index.flatten(), minlength=9)[:8] for _, routing in watch.calls]
    return own, callback.history, logs_of(trainer)


def test_the_experts_load_is_summed_over_ranks(ranks, tmp_path):
    (own_0, history_0, logs_0), (own_1, history_1, logs_1) = ranks.run(trained_load, str(tmp_path))
    assert history_0 == history_1 and logs_0 == logs_1, "every rank knows the sum"
    assert not all(torch.equal(a, b) for a, b in zip(own_0, own_1)), "each rank has tokens of its own"
    for step, log in enumerate(history_0):
        for layer, rows in enumerate(log["rows_per_expert"].values()):
            assert rows == (own_0[2 * step + layer] + own_1[2 * step + layer]).tolist()
        assert log["moe/load_cv"] == logs_0[step]["moe/load_cv"]


def load_under_expert_parallelism(rank, folder):
    model = load_parallel(folder, "expert")
    callback = callback_in_first_step(model)
    model(**batch()).loss.backward()
    return callback.collect(model, step=1)


def test_ranks_that_share_their_tokens_count_nothing(ranks, tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    assert ranks.run(load_under_expert_parallelism, str(tmp_path)) == [{}, {}]


# ranks that have the same batch, or other layers


def counted(model, **own):
    callback = callback_in_first_step(model)
    model(**batch(**own))
    callback.collect(model, step=1)
    return callback.history


def counted_in_parallel(rank, folder, kind):
    return counted(load_parallel(folder, kind))


@pytest.mark.parametrize("family", rest_pinned(["qwen3_moe", "gpt_oss"]))
def test_ranks_of_tensor_parallelism_count_their_common_tokens_once(ranks, family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    expected = counted(model)
    for history in ranks.run(counted_in_parallel, str(tmp_path), "tensor"):
        assert history == expected and len(history) == 1


def refused_in_a_pipeline(rank, folder):
    model = load_parallel(folder, "pipeline")
    callback_in_first_step(model)
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match="does not work under pipeline parallelism"):
        LoadBalancing(per_layer_loss=1.0).start(model)
    return sonicmoe_hf.routing.patched_model.routing_state(model).counts_load


@pytest.mark.skipif(not HAS_PP_SIZE, reason="this Transformers has no pipeline parallelism of its own")
def test_ranks_of_pipeline_parallelism_count_nothing_as_their_layers_differ(ranks, tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    assert ranks.run(refused_in_a_pipeline, str(tmp_path)) == [False, False]


def rounded_with_another_seed(rank, folder):
    model = load_parallel(folder, "tensor", experts_implementation="sonicmoe_hf")
    sonicmoe_hf.patch_model(model, TokenRounding(tile=TILE, rounding="stochastic"))
    watch = Watch(model)
    torch.manual_seed(rank)
    model(**batch())
    return [routing.expert_index for _, routing in watch.calls]


def test_ranks_of_tensor_parallelism_draw_the_same_stochastic_rounding(ranks, tmp_path):
    build("gpt_oss").save_pretrained(tmp_path)  # Transformers' plan splits its attention alone
    first, second = ranks.run(rounded_with_another_seed, str(tmp_path))
    assert len(first) == 2 and all(torch.equal(a, b) for a, b in zip(first, second))
