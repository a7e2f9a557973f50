"""Resumed and best models in a real Trainer: every weight restored, or an error that says so."""

import json
import logging

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from models import CONFIGS, batch, build
from native import native_twin, save_both
from peft import LoraConfig, get_peft_model
from ranks import Ranks
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from training import TILE, Examples, arguments, trainer_for
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainerState

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback, TokenRoundingCallback
from sonicmoe_hf.digest import DIGEST, changed_experts, check_resumed, experts_digest
from sonicmoe_hf.resume import RESTORED, restore

SAVING = {"save_strategy": "steps", "save_steps": 2}
BEST = {
    **SAVING,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "earliness",
    "greater_is_better": True,
}  # step 2 is the best


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(actual, expected):
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def rounding():
    return TokenRoundingCallback(tile=TILE)


def train(model, folder, checkpoint=None, callbacks=None, attach=True, **options):
    """Train four steps, saving at 2 and 4, or resume; returns the Trainer."""
    callbacks = [rounding()] if callbacks is None else callbacks
    options = {"learning_rate": 0.02, "optim": "adamw_torch", "weight_decay": 0.1, **SAVING, **options}
    trainer = trainer_for(model, folder, [*callbacks, Earliness()], count=24, **options)
    if attach:
        sonicmoe_hf.attach(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def shard_checkpoints(model):
    """Have the Trainer write this model's checkpoints in many files with an index."""
    save = model.save_pretrained
    model.save_pretrained = lambda *args, **kwargs: save(*args, **{**kwargs, "max_shard_size": "30KB"})
    return model


class Earliness(TrainerCallback):
    """A metric that the first evaluation wins."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_earliness"] = -state.global_step


class Snapshots(TrainerCallback):
    """The weights after every step."""

    def __init__(self):
        self.at = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.at[state.global_step] = weights(model)


class Messages(logging.Handler):
    """What sonicmoe_hf and the Trainer log."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def about(self, words):
        return [text for text in self.texts if words in text]


@pytest.fixture
def messages():
    handler = Messages()
    loggers = [logging.getLogger(name) for name in ("sonicmoe_hf", "transformers")]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)


# resumed = straight


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(family, sharded, tmp_path, messages):
    model = build(family)
    straight = train(shard_checkpoints(model) if sharded else model, tmp_path / "straight")
    checkpoint = tmp_path / "straight" / "checkpoint-2"
    assert (checkpoint / "model.safetensors.index.json").exists() == sharded
    resumed = train(build(family, seed=5), tmp_path / "resumed", str(checkpoint))
    assert_equal(weights(resumed.model), weights(straight.model))
    assert resumed.state.log_history[-2]["loss"] == straight.state.log_history[-2]["loss"]
    assert not messages.about("missing keys") and not messages.about("unexpected keys")


def test_resume_true_takes_the_last_checkpoint_of_the_output_folder(tmp_path):
    straight = train(build("qwen3_moe"), tmp_path, save_total_limit=1)
    assert not (tmp_path / "checkpoint-2").exists()
    resumed = train(build("qwen3_moe", seed=5), tmp_path, True, max_steps=6)
    assert resumed.state.global_step == 6
    further = train(build("qwen3_moe"), tmp_path / "further", max_steps=6)
    assert_equal(weights(resumed.model), weights(further.model))
    assert_equal(weights(restored(build("qwen3_moe", seed=7), tmp_path / "checkpoint-6")), weights(further.model))
    assert straight.state.global_step == 4


def restored(model, folder):
    restore(model, folder)
    return model


@pytest.mark.parametrize("shards", [1, 2])
def test_checkpoints_in_pickle_files_are_restored_too(shards, tmp_path):
    straight = train(build("qwen3_moe"), tmp_path / "straight")
    checkpoint = tmp_path / "straight" / "checkpoint-2"
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, checkpoint / "pytorch_model.bin")
    else:  # every other tensor, so that each expert is torn apart
        files = {name: f"pytorch_model-{number % 2}.bin" for number, name in enumerate(tensors)}
        for file in set(files.values()):
            torch.save({name: tensors[name] for name in tensors if files[name] == file}, checkpoint / file)
        (checkpoint / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    resumed = train(build("qwen3_moe", seed=5), tmp_path / "resumed", str(checkpoint))
    assert_equal(weights(resumed.model), weights(straight.model))


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, {"save_only_model": True, "optim": "sgd"}, {"bf16": True}],
    ids=["plain", "accumulation", "model only", "bf16 autocast"],
)
@pytest.mark.parametrize("attach", [True, False])
def test_ways_to_train_resume_without_a_false_alarm(options, attach, tmp_path):
    """Without attach the model comes from the checkpoint's folder: the callback alone must let it pass."""
    straight = train(build("qwen3_moe"), tmp_path / "straight", attach=attach, **options)
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")
    model = build("qwen3_moe", seed=5) if attach else AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    resumed = train(model, tmp_path / "resumed", checkpoint, attach=attach, **options)
    assert_equal(weights(resumed.model), weights(straight.model))
    assert_equal(
        weights(restored(build("qwen3_moe"), checkpoint)), weights(AutoModelForCausalLM.from_pretrained(checkpoint))
    )


@pytest.mark.parametrize("attach", [True, False])
def test_tied_weights_stay_tied(attach, tmp_path):
    straight = train(build("qwen3_moe", tie_word_embeddings=True), tmp_path / "straight", attach=attach)
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")
    model = build("qwen3_moe", seed=5, tie_word_embeddings=True)
    if not attach:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
    resumed = train(model, tmp_path / "resumed", checkpoint, attach=attach)
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight
    assert_equal(weights(resumed.model), weights(straight.model))


def test_frozen_experts_stay_frozen_and_an_optimizer_of_the_users_keeps_its_parameters(tmp_path):
    def frozen(seed):
        model = build("qwen3_moe", seed=seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." not in name)
        return model

    def run(folder, model, checkpoint=None):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        trainer = Trainer(model, arguments(folder, **SAVING), train_dataset=Examples(24), callbacks=[rounding()],
                          optimizers=(optimizer, None))  # fmt: skip
        sonicmoe_hf.attach(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert [p for p in model.parameters() if p.requires_grad] == trained
        return weights(model)

    straight = run(tmp_path / "straight", frozen(0))
    resumed = run(tmp_path / "resumed", frozen(5), str(tmp_path / "straight" / "checkpoint-2"))
    assert_equal(resumed, straight)
    assert_equal(
        {name: w for name, w in straight.items() if ".experts." in name},
        {name: w for name, w in weights(build("qwen3_moe")).items() if ".experts." in name},
    )


@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_lora_adapters_resume_and_find_their_best_as_before(family, attach, tmp_path, messages):
    def adapted():
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"],
                            target_parameters=["experts.gate_up_proj", "experts.down_proj"], lora_dropout=0.0)  # fmt: skip
        torch.manual_seed(3)
        return get_peft_model(build(family), config)

    snapshots = Snapshots()
    best = train(adapted(), tmp_path / "straight", callbacks=[snapshots, rounding()], attach=attach, **BEST)
    assert_equal(weights(best.model), snapshots.at[2])
    resumed = train(adapted(), tmp_path / "resumed", str(tmp_path / "straight" / "checkpoint-2"), attach=attach)
    assert_equal(weights(resumed.model), snapshots.at[4])
    state = json.loads((tmp_path / "straight" / "checkpoint-2" / "trainer_state.json").read_text())
    assert DIGEST not in json.dumps(state) and not messages.about("digest")


@pytest.mark.parametrize("family", CONFIGS)
def test_native_models_resume_and_find_their_best_with_a_plain_trainer(family, tmp_path, messages):
    start = native_twin(build(family), tmp_path)
    again = native_twin(build(family, seed=5), tmp_path / "other")
    straight = train(start, tmp_path / "straight", attach=False)
    resumed = train(again, tmp_path / "resumed", str(tmp_path / "straight" / "checkpoint-2"), attach=False)
    assert_equal(weights(resumed.model), weights(straight.model))
    assert not messages.about("missing keys")


def test_a_model_loaded_from_the_hub_layout_and_from_fused_weights_resumes(tmp_path):
    hub, _ = save_both(build("qwen3_moe"), tmp_path)
    build("qwen3_moe").save_pretrained(tmp_path / "fused", save_original_format=False)
    for source in (hub, tmp_path / "fused"):
        straight = train(AutoModelForCausalLM.from_pretrained(source), tmp_path / "straight")
        checkpoint = str(tmp_path / "straight" / "checkpoint-2")
        for model in (build("qwen3_moe", seed=5), AutoModelForCausalLM.from_pretrained(source)):
            resumed = train(model, tmp_path / "resumed", checkpoint)
            assert_equal(weights(resumed.model), weights(straight.model))
            resumed.model.save_pretrained(tmp_path / "again")
            assert_equal(weights(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), weights(straight.model))


def test_trl_resumes_a_straight_run(tmp_path):
    from trl import SFTConfig, SFTTrainer

    def run(folder, model, checkpoint=None):
        settings = SFTConfig(str(folder), use_cpu=True, bf16=False, max_steps=4, report_to=[], disable_tqdm=True,
                             learning_rate=0.02, per_device_train_batch_size=4, **SAVING)  # fmt: skip
        rows = [{"input_ids": ids} for ids in Examples(24).columns["input_ids"].tolist()]
        trainer = SFTTrainer(model, args=settings, train_dataset=Dataset.from_list(rows), callbacks=[rounding()],
                             processing_class=tokenizer(tmp_path))  # fmt: skip
        sonicmoe_hf.attach(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        return weights(model)

    straight = run(tmp_path / "straight", build("qwen3_moe"))
    resumed = run(tmp_path / "resumed", build("qwen3_moe", seed=5), str(tmp_path / "straight" / "checkpoint-2"))
    assert_equal(resumed, straight)


def tokenizer(folder):
    from sonicmoe_hf.demo.corpus import train_tokenizer

    return train_tokenizer(["a b c d e f g"], 300)


# best = best


@pytest.mark.parametrize("callbacks", ["attached", "rounding alone", "load alone"])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_best_model_is_the_best_one(family, callbacks, tmp_path):
    snapshots = Snapshots()
    ours = ExpertLoadCallback() if callbacks == "load alone" else rounding()
    trainer = train(build(family), tmp_path, callbacks=[snapshots, ours], attach=callbacks == "attached", **BEST)
    assert trainer.state.best_global_step == 2
    assert_equal(weights(trainer.model), snapshots.at[2])


def test_the_best_model_of_a_resumed_run_may_lie_before_it(tmp_path):
    snapshots = Snapshots()
    train(build("qwen3_moe"), tmp_path, callbacks=[snapshots, rounding()], **{**BEST, "load_best_model_at_end": False})
    resumed = train(build("qwen3_moe", seed=5), tmp_path, True, max_steps=6, **BEST)
    assert resumed.state.best_global_step == 2
    assert_equal(weights(resumed.model), snapshots.at[2])


@pytest.mark.parametrize("attach", [True, False])
def test_what_another_callback_makes_of_the_weights_at_the_end_stays(attach, tmp_path):
    class Average(TrainerCallback):
        def on_train_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)

    trainer = train(build("qwen3_moe"), tmp_path, callbacks=[Average(), rounding()], attach=attach, **BEST)
    best = restored(build("qwen3_moe"), tmp_path / "checkpoint-2")
    down = "model.layers.0.mlp.experts.down_proj"
    if attach:
        assert torch.equal(weights(trainer.model)[down], 0.5 * weights(best)[down])
    else:
        assert not torch.equal(weights(trainer.model)[down], weights(best)[down])


# ranks, and other ways to save and load


def resume_on_a_rank(rank, folder):
    """DDP: a straight run, a resumed one with attach, and the error of one without."""
    # without an optimiser's state, which Transformers 5.17 cannot load on CPU ranks
    options = {"save_only_model": True, "optim": "sgd", "learning_rate": 0.1}
    straight = train(build("qwen3_moe"), f"{folder}/straight", **BEST, **options)
    best = weights(straight.model)
    checkpoint = f"{folder}/straight/checkpoint-2"
    resumed = train(build("qwen3_moe", seed=5), f"{folder}/resumed", checkpoint, **options)
    last = weights(restored(build("qwen3_moe", seed=6), f"{folder}/straight/checkpoint-4"))
    try:
        train(build("qwen3_moe", seed=5), f"{folder}/lost", checkpoint, attach=False, **options)
    except RuntimeError as error:
        return weights(resumed.model), last, best, weights(restored(build("qwen3_moe"), checkpoint)), str(error)


def shard_on_a_rank(rank):
    """FSDP2: whether its sharded experts have a digest, and what a resumed state makes of them."""
    model = build("qwen3_moe")
    saved = experts_digest(model)
    fully_shard(model)
    state = TrainerState(
        global_step=2,
        stateful_callbacks={"ExpertLoadCallback": {"attributes": {DIGEST: {"step": 2, "weights": saved}}}},
    )
    check_resumed(model, state)
    return saved is not None, experts_digest(model)


def test_two_ranks(tmp_path):
    ranks = Ranks(tmp_path)
    try:
        for resumed, last, best_model, best, error in ranks.run(resume_on_a_rank, str(tmp_path)):
            assert_equal(resumed, last)
            assert_equal(best_model, best)
            assert "experts of the resumed model" in error
        assert ranks.run(shard_on_a_rank) == [(True, None)] * 2
    finally:
        ranks.close()


@pytest.mark.parametrize("family", CONFIGS)
def test_accelerate_averages_and_save_pretrained_keep_a_patched_models_experts(family, tmp_path):
    model = build(family)
    sonicmoe_hf.patch_model(model, "token_rounding")
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


# a callback alone


@pytest.mark.parametrize("callback", [rounding, ExpertLoadCallback])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_callback_alone_stops_a_resume_that_lost_the_experts(family, callback, tmp_path):
    straight = train(build(family), tmp_path / "straight", callbacks=[callback()], attach=False)
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")

    def resume():
        return train(build(family), tmp_path / "resumed", checkpoint, callbacks=[callback()], attach=False)

    if family == "gpt_oss":  # the hub's layout is the model's: nothing is lost
        assert_equal(weights(resume().model), weights(straight.model))
    else:
        with pytest.raises(
            RuntimeError,
            match=r"the experts of the resumed model are not the checkpoint's: \d of \d .*attach\(trainer\)",
        ):
            resume()


def test_one_expert_that_differs_is_enough(tmp_path):
    train(build("qwen3_moe"), tmp_path / "straight", attach=False)
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3].mul_(1.001)
    with pytest.raises(
        RuntimeError, match=r"1 of 4 expert weights differ \(first: model.layers.1.mlp.experts.down_proj\)"
    ):
        train(model, tmp_path / "resumed", checkpoint, attach=False)


@pytest.mark.parametrize("saved, resumed", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")])
def test_another_dtype_is_no_difference(saved, resumed, tmp_path):
    model = build("qwen3_moe").to(getattr(torch, saved))
    train(model, tmp_path / "straight", attach=False)
    checkpoint = str(tmp_path / "straight" / "checkpoint-4")
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=resumed)
    assert changed_experts(experts_digest(model), loaded) == []
    train(loaded, tmp_path / "resumed", checkpoint, attach=False, max_steps=5)
    with pytest.raises(RuntimeError, match="experts of the resumed model"):
        train(build("qwen3_moe").to(getattr(torch, resumed)), tmp_path / "lost", checkpoint, attach=False, max_steps=5)


@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_checkpoint_without_a_digest_is_warned_of_only_where_experts_may_be_lost(family, attach, tmp_path, messages):
    train(build(family), tmp_path, callbacks=[], attach=False, max_steps=2)
    resumed = train(build(family), tmp_path, True, attach=attach)
    assert len(messages.about("no digest of the experts")) == (family == "qwen3_moe" and not attach)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert set(state["stateful_callbacks"]["TokenRoundingCallback"]["attributes"][DIGEST]["weights"]) == {
        name for name, _ in resumed.model.named_parameters() if ".experts." in name
    }


def test_checkpoints_resume_without_our_callbacks_and_with_restored_ones(tmp_path):
    straight = train(build("gpt_oss"), tmp_path / "straight")
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")
    train(build("gpt_oss"), tmp_path / "bare", checkpoint, callbacks=[], attach=False)
    other = TokenRoundingCallback(tile=4, start=3)
    restored_callbacks = train(build("gpt_oss"), tmp_path / "restored", checkpoint, callbacks=[other],
                               restore_callback_states_from_checkpoint=True)  # fmt: skip
    assert_equal(weights(restored_callbacks.model), weights(straight.model))
    assert any("moe/load_cv" in log for log in restored_callbacks.state.log_history if log["step"] == 4)


def test_of_two_callbacks_of_one_class_the_digest_of_the_checkpoint_counts(tmp_path):
    def stretches():
        return [TokenRoundingCallback(tile=TILE, end=3), ExpertLoadCallback(), TokenRoundingCallback(tile=4, start=3)]

    train(build("qwen3_moe"), tmp_path, callbacks=stretches(), attach=False)
    checkpoint = str(tmp_path / "checkpoint-4")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    train(model, tmp_path / "resumed", checkpoint, callbacks=stretches(), attach=False, max_steps=6)
    old = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    with pytest.raises(RuntimeError, match="experts of the resumed model"):
        train(old, tmp_path / "lost", checkpoint, callbacks=[rounding()], attach=False, max_steps=6)


def test_a_digest_of_an_earlier_step_handed_on_by_a_run_without_us_counts_for_nothing(tmp_path, messages):
    train(build("qwen3_moe"), tmp_path, attach=False, max_steps=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    train(model, tmp_path, True, callbacks=[], attach=False)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["TokenRoundingCallback"]["attributes"][DIGEST]["step"] == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    train(model, tmp_path, True, attach=False, max_steps=6)
    assert len(messages.about("no digest of the experts")) == 1


def test_a_callback_added_while_training_does_not_stop_the_trainer_from_saving(tmp_path):
    class AddLate(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.add_callback(ExpertLoadCallback())

    model = build("qwen3_moe")
    sonicmoe_hf.patch_model(model)
    trainer = trainer_for(model, tmp_path, [AddLate()], **SAVING)
    trainer.train()
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").is_file()


def test_a_digest_is_small_whatever_the_experts_size():
    sizes = [len(json.dumps(experts_digest(build("qwen3_moe", moe_intermediate_size=size)))) for size in (16, 64)]
    assert sizes[0] == sizes[1] < 1000


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
    assert not hasattr(model, RESTORED) and not hasattr(model, "_weight_conversions")


def test_a_version_of_transformers_that_lacks_what_we_use_is_named(tmp_path, monkeypatch):
    from transformers import modeling_utils

    class NewTrainer(Trainer):
        _load_best_model = property(lambda self: (_ for _ in ()).throw(AttributeError("gone")))

    with pytest.raises(RuntimeError, match="NewTrainer of this version of Transformers has no _load_best_model"):
        sonicmoe_hf.attach(NewTrainer(build("qwen3_moe"), arguments(tmp_path)))
    build("qwen3_moe").save_pretrained(tmp_path / "saved")
    monkeypatch.delattr(modeling_utils, "LoadStateDictConfig")
    with pytest.raises(RuntimeError, match=r"no LoadStateDictConfig, .* load the model from the checkpoint's folder"):
        restore(build("qwen3_moe"), tmp_path / "saved")
