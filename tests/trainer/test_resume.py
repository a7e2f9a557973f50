"""Resumed and best models in a real Trainer: every weight restored, or an error that says so."""

import json
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from helpers.adapters import EXPERTS
from helpers.marks import rest_pinned, rest_slow
from helpers.models import CONFIGS, batch, build, build_patched
from helpers.native import native_twin, save_both
from helpers.resuming import (
    BEST,
    Snapshots,
    assert_equal,
    restore_model,
    rounding,
    shard_checkpoints,
    train_and_save,
    weights,
)
from helpers.training import arguments, trainer_for
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, TrainerState

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback, LoadBalancing
from sonicmoe_hf.trainer.rank_states import RankStates
from sonicmoe_hf.trainer.resume import check_experts_restored, restore

# resumed = straight


def straight_and_resumed(make, folder, change=lambda checkpoint: None, **options):
    """Train the run of one model, the run of another that resumes it after two steps, which ends with the same
    weights, and the checkpoint in between, after `change`."""
    straight = train_and_save(make(seed=0), folder / "straight", **options)
    checkpoint = folder / "straight" / "checkpoint-2"
    change(checkpoint)
    resumed = train_and_save(make(seed=5), folder / "resumed", str(checkpoint), **options)
    assert_equal(weights(resumed.model), weights(straight.model))
    return straight, resumed, checkpoint


@pytest.mark.parametrize("sharded", rest_pinned([True, False]))
@pytest.mark.parametrize("family", rest_slow(CONFIGS, 1))
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(family, sharded, tmp_path, messages):
    def make(seed):
        return shard_checkpoints(build(family, seed=seed)) if sharded else build(family, seed=seed)

    straight, resumed, checkpoint = straight_and_resumed(make, tmp_path)
    assert (checkpoint / "model.safetensors.index.json").exists() == sharded
    assert resumed.state.log_history[-2]["loss"] == straight.state.log_history[-2]["loss"]
    assert not messages.about("missing keys") and not messages.about("unexpected keys")


@pytest.mark.parametrize("shards", rest_pinned([2, 1]))
def test_checkpoints_in_pickle_files_are_restored_too(shards, tmp_path):
    def in_pickle_files(checkpoint):
        tensors = load_file(checkpoint / "model.safetensors")
        (checkpoint / "model.safetensors").unlink()
        if shards == 1:
            torch.save(tensors, checkpoint / "pytorch_model.bin")
            return
        files = {name: f"pytorch_model-{number % 2}.bin" for number, name in enumerate(tensors)}
        for file in set(files.values()):  # every other tensor, so that each expert is torn apart
            torch.save({name: tensors[name] for name in tensors if files[name] == file}, checkpoint / file)
        (checkpoint / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    straight_and_resumed(partial(build, "qwen3_moe"), tmp_path, in_pickle_files)


@pytest.mark.parametrize(
    "options",
    rest_pinned([{"gradient_accumulation_steps": 2}, {"save_only_model": True, "optim": "sgd"}, {"bf16": True}]),
    ids=["accumulation", "model only", "bf16 autocast"],
)
def test_ways_to_train_resume(options, tmp_path):
    _, _, checkpoint = straight_and_resumed(partial(build, "qwen3_moe"), tmp_path, **options)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert_equal(weights(restore_model(build("qwen3_moe"), checkpoint)), weights(loaded))


@pytest.mark.pinned
def test_tied_weights_stay_tied_and_the_name_that_is_not_saved_is_not_missed(tmp_path, messages):
    _, resumed, _ = straight_and_resumed(partial(build, "qwen3_moe", tie_word_embeddings=True), tmp_path)
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight
    assert not messages.about("missing keys") and not messages.about("lm_head")


@pytest.mark.pinned
def test_frozen_experts_stay_frozen_and_an_optimizer_of_the_users_keeps_its_parameters(tmp_path):
    def frozen(seed):
        model = build("qwen3_moe", seed=seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." not in name)
        return model

    def run(folder, model, checkpoint=None):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        train_and_save(model, folder, checkpoint, optimizers=(torch.optim.SGD(trained, lr=0.1, momentum=0.9), None))
        assert [p for p in model.parameters() if p.requires_grad] == trained
        return weights(model)

    straight = run(tmp_path / "straight", frozen(0))
    resumed = run(tmp_path / "resumed", frozen(5), str(tmp_path / "straight" / "checkpoint-2"))
    assert_equal(resumed, straight)
    assert_equal(
        {name: w for name, w in straight.items() if ".experts." in name},
        {name: w for name, w in weights(build("qwen3_moe")).items() if ".experts." in name},
    )


@pytest.mark.parametrize("attach", rest_pinned([True, False]))
@pytest.mark.parametrize("family", rest_pinned(["qwen3_moe", "gpt_oss"]))
def test_lora_adapters_resume_and_find_their_best_as_before(family, attach, tmp_path, messages):
    def adapted():
        torch.manual_seed(3)
        options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "target_parameters": EXPERTS}
        return get_peft_model(build(family), LoraConfig(r=2, **options))

    snapshots = Snapshots()
    best = train_and_save(adapted(), tmp_path / "straight", callbacks=[snapshots, rounding()], attach=attach, **BEST)
    assert_equal(weights(best.model), snapshots.at[2])
    resumed = train_and_save(
        adapted(), tmp_path / "resumed", str(tmp_path / "straight" / "checkpoint-2"), attach=attach
    )
    assert_equal(weights(resumed.model), snapshots.at[4])


@pytest.mark.parametrize("family", rest_pinned(CONFIGS))
def test_native_models_resume_and_find_their_best_with_a_plain_trainer(family, tmp_path, messages):
    def make(seed):
        return native_twin(build(family, seed=seed), tmp_path / f"{seed}")

    straight_and_resumed(make, tmp_path, attach=False)
    assert not messages.about("missing keys")


def test_a_model_loaded_from_the_hub_layout_and_from_fused_weights_resumes(tmp_path):
    hub, _ = save_both(build("qwen3_moe"), tmp_path)
    build("qwen3_moe").save_pretrained(tmp_path / "fused", save_original_format=False)
    for source in (hub, tmp_path / "fused"):
        straight = train_and_save(AutoModelForCausalLM.from_pretrained(source), tmp_path / "straight")
        checkpoint = str(tmp_path / "straight" / "checkpoint-2")
        for model in (build("qwen3_moe", seed=5), AutoModelForCausalLM.from_pretrained(source)):
            resumed = train_and_save(model, tmp_path / "resumed", checkpoint)
            assert_equal(weights(resumed.model), weights(straight.model))
            resumed.model.save_pretrained(tmp_path / "again")
            assert_equal(weights(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), weights(straight.model))


# best = best


@pytest.mark.parametrize("family", rest_pinned(CONFIGS))
def test_the_best_model_is_the_best_one(family, tmp_path):
    snapshots = Snapshots()
    trainer = train_and_save(build(family), tmp_path, callbacks=[snapshots, rounding()], **BEST)
    assert trainer.state.best_global_step == 2
    assert_equal(weights(trainer.model), snapshots.at[2])


def test_the_best_model_of_a_resumed_run_may_lie_before_it(tmp_path):
    snapshots = Snapshots()
    train_and_save(
        build("qwen3_moe"), tmp_path, callbacks=[snapshots, rounding()], **{**BEST, "load_best_model_at_end": False}
    )
    resumed = train_and_save(build("qwen3_moe", seed=5), tmp_path, True, max_steps=6, **BEST)
    assert resumed.state.best_global_step == 2
    assert_equal(weights(resumed.model), snapshots.at[2])


# ranks, and other ways to save and load


def resume_on_a_rank(rank, folder):
    """Train under DDP: a straight run, a resumed one with attach, and the error of one without."""
    # without an optimiser's state, which Transformers 5.17 cannot load on CPU ranks
    options = {"save_only_model": True, "optim": "sgd", "learning_rate": 0.1}
    straight = train_and_save(build("qwen3_moe"), f"{folder}/straight", **BEST, **options)
    best = weights(straight.model)
    checkpoint = f"{folder}/straight/checkpoint-2"
    resumed = train_and_save(build("qwen3_moe", seed=5), f"{folder}/resumed", checkpoint, **options)
    last = weights(restore_model(build("qwen3_moe", seed=6), f"{folder}/straight/checkpoint-4"))
    try:
        train_and_save(build("qwen3_moe", seed=5), f"{folder}/lost", checkpoint, attach=False, **options)
    except RuntimeError as error:
        return weights(resumed.model), last, best, weights(restore_model(build("qwen3_moe"), checkpoint)), str(error)


def shard_on_a_rank(rank, folder):
    """Train under FSDP2, whose checkpoints hold the experts under their own names: no error without attach."""
    model = build("qwen3_moe")
    fully_shard(model)
    check_experts_restored(model, arguments(folder), TrainerState(global_step=2), attached=False)


# without attach


@pytest.mark.parametrize(
    "family, callback",
    [
        ("qwen3_moe", lambda: LoadBalancing(per_layer_loss=0.1)),
        *rest_pinned([("gpt_oss", rounding), ("deepseek_v3", ExpertLoadCallback)], 0),
        *rest_slow([(family, rounding) for family in CONFIGS if family != "gpt_oss"], 0),
    ],
)
def test_a_callback_alone_stops_a_run_that_would_lose_the_experts(family, callback, tmp_path):
    """The hub's layout of gpt-oss is the model's: there nothing is lost."""
    straight = train_and_save(build(family), tmp_path / "straight", callbacks=[callback()], attach=False)
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")
    runs = {
        "resumes at step 2": {"folder": tmp_path / "resumed", "checkpoint": checkpoint},
        "ends with load_best_model_at_end": {"folder": tmp_path / "best", **BEST},
    }
    for what, options in runs.items():
        if family == "gpt_oss":
            resumed = train_and_save(build(family), callbacks=[callback()], attach=False, **options)
        else:
            with pytest.raises(RuntimeError, match=rf"training {what}, but .*call sonicmoe_hf.attach\(trainer\)"):
                train_and_save(build(family), callbacks=[callback()], attach=False, **options)
            continue
        if "checkpoint" in options:
            assert_equal(weights(resumed.model), weights(straight.model))


def test_two_ranks(ranks, tmp_path):
    for resumed, last, best_model, best, error in ranks.run(resume_on_a_rank, str(tmp_path)):
        assert_equal(resumed, last)
        assert_equal(best_model, best)
        assert "training resumes at step 2" in error
    ranks.run(shard_on_a_rank, str(tmp_path))


@pytest.mark.parametrize("family", rest_pinned(CONFIGS))
def test_accelerate_averages_and_save_pretrained_keep_a_patched_models_experts(family, tmp_path):
    model = build_patched(family, "token_rounding")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    saved = weights(model)
    accelerator.save_state(str(tmp_path / "state"))
    model.save_pretrained(tmp_path / "saved")
    accelerator.save_model(model, str(tmp_path / "fused"))
    model.config.save_pretrained(tmp_path / "fused")
    average.module.save_pretrained(tmp_path / "average")
    model(**batch()).loss.backward()
    optimizer.step()
    assert not any(torch.equal(saved[name], p) for name, p in model.named_parameters() if ".experts." in name)
    accelerator.load_state(str(tmp_path / "state"))
    assert_equal(weights(model), saved)
    for folder in ("saved", "fused", "average"):
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert_equal(weights(loaded), saved)
        assert not any(report.values())
    assert "sonicmoe" not in (tmp_path / "saved" / "config.json").read_text()


def test_a_trainer_that_only_evaluates_needs_no_training(tmp_path):
    trainer = trainer_for(build("qwen3_moe"), tmp_path, [rounding(), ExpertLoadCallback()])
    sonicmoe_hf.attach(trainer)
    loss = trainer.evaluate()["eval_loss"]
    assert loss == trainer_for(build("qwen3_moe"), tmp_path).evaluate()["eval_loss"]
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == pytest.approx(loss)


# what cannot be restored


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path):
    build("qwen3_moe", moe_intermediate_size=8).save_pretrained(tmp_path / "narrow")
    build("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path / "shallow")
    model = build("qwen3_moe", seed=5)
    before, slots = weights(model), dict(model.named_parameters())
    for folder, first in (("narrow", "layers.0"), ("shallow", "layers.1")):
        with pytest.raises(RuntimeError, match=rf"does not hold the experts .*first: model.{first}.mlp.experts"):
            restore(model, tmp_path / folder)
        assert_equal(weights(model), before)
        assert all(parameter is slots[name] for name, parameter in model.named_parameters())
    assert not hasattr(model, "_weight_conversions")
    trainer = trainer_for(model, tmp_path)
    sonicmoe_hf.attach(trainer)
    with pytest.raises(RuntimeError, match="does not hold the experts"):
        trainer._load_from_checkpoint(str(tmp_path / "narrow"))
    assert_equal(weights(model), before)


# what ranks write beside sharded models


def test_a_rank_on_a_node_without_the_checkpoints_folder_makes_it(tmp_path):
    trainer = trainer_for(build("qwen3_moe"), tmp_path)
    trainer.create_optimizer_and_scheduler(1)
    state = TrainerState(global_step=1)
    RankStates(trainer).on_save(
        trainer.args, state, None, optimizer=trainer.optimizer, lr_scheduler=trainer.lr_scheduler
    )
    assert {file.name for file in (tmp_path / "checkpoint-1").iterdir()} == {"rank0-of-1.pt", "rng_state.pth"}
