"""The metrics of ExpertLoadCallback in a real Trainer: what counting by hand gives, and who hears of them."""

import json

import pytest
from helpers.marks import crossed
from helpers.models import build, build_patched
from helpers.training import (
    CHECKPOINTED_TRAINING,
    TILE,
    Routers,
    Watch,
    logs_of,
    rounded_rows,
    run_trainer,
    trainer_for,
)
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback, TokenRoundingCallback
from sonicmoe_hf.trainer.gpu_advice import GpuAdvice
from sonicmoe_hf.trainer.liger_loss import LigerLoss
from sonicmoe_hf.trainer.loss_filter import LossFilter
from sonicmoe_hf.trainer.methods import find_callback
from sonicmoe_hf.trainer.packed_steps import PackedSteps

LOAD = {f"moe/{name}" for name in ("load_max_over_mean", "load_cv", "dead_experts")}
METRICS = LOAD | {f"moe/{name}" for name in ("rows_added", "rows_dropped", "padded_rows_avoided", "top_k_fallbacks")}


class Reporter(TrainerCallback):
    """A reporter registered with the Trainer, and what it receives."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def by_hand(logits, masks, tile):
    """Compute the metrics of one log, from the router logits {layer: [one per forward]} and the attention masks."""
    totals = dict.fromkeys(("added", "dropped", "avoided"), 0)
    rows = {}
    for name, forwards in logits.items():
        for logits_TE, mask in zip(forwards, masks):
            before, after = rounded_rows(logits_TE, 2, tile, mask.flatten() != 0)
            totals["added"] += int((after - before).clamp(min=0).sum())
            totals["dropped"] += int((before - after).clamp(min=0).sum())
            totals["avoided"] += int(((-before) % tile).sum() - ((-after) % tile).sum())
            rows[name] = rows.get(name, 0) + after
    load = {name: row.double() for name, row in rows.items()}
    return rows, {
        "moe/load_max_over_mean": max((row.max() / row.mean()).item() for row in load.values()),
        "moe/load_cv": sum((row.std(correction=0) / row.mean()).item() for row in load.values()) / len(load),
        "moe/dead_experts": sum(int((row == 0).sum()) for row in load.values()),
        "moe/rows_added": totals["added"],
        "moe/rows_dropped": totals["dropped"],
        "moe/padded_rows_avoided": totals["avoided"],
        "moe/top_k_fallbacks": 0,
    }


@pytest.mark.parametrize("kind, padding", crossed(CHECKPOINTED_TRAINING, [True, False], everywhere=1))
def test_the_metrics_are_what_counting_by_hand_gives_and_reach_every_listener(kind, padding, tmp_path):
    model = build("qwen3_moe")
    logits, reporter = Routers(model), Reporter()
    trainer = trainer_for(
        model,
        tmp_path,
        [TokenRoundingCallback(tile=TILE), reporter],
        padding,
        logging_steps=2,
        eval_on_start=True,
        save_strategy="steps",
        save_steps=4,
        report_to=["tensorboard"],
        **CHECKPOINTED_TRAINING[kind],
    )
    callback = sonicmoe_hf.attach(trainer)
    trainer.train()

    masks = [trainer.train_dataset.columns["attention_mask"][4 * step : 4 * step + 4] for step in range(4)]
    calls = len(next(iter(logits.by_layer.values())))
    assert calls == (4 if kind == "none" else 8), "recomputed layers call their router again"
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    listeners = {"log_history": trainer.state.log_history, "trainer_state.json": saved, "reporter": reporter.logs}
    for number, steps in enumerate((slice(0, 2), slice(2, 4))):
        once = {name: forwards[:: calls // 4][steps] for name, forwards in logits.by_layer.items()}
        rows, metrics = by_hand(once, masks[steps], TILE)
        for name, logs in listeners.items():
            found = [log for log in logs if "loss" in log][number]
            assert {key: found[key] for key in METRICS} == pytest.approx(metrics), name
        assert callback.history[number]["rows_per_expert"] == {name: row.tolist() for name, row in rows.items()}
        assert callback.history[number]["step"] == 2 * number + 2

    events = EventAccumulator(str(next(tmp_path.rglob("events*")).parent)).Reload()
    assert {f"train/{name}" for name in METRICS} <= set(events.Tags()["scalars"])
    assert len(events.Scalars("train/moe/load_cv")) == 2


def test_metrics_of_rounding_are_there_where_it_is_on_and_none_grows_with_the_model(tmp_path):
    keys = []
    for changes in ({}, {"num_hidden_layers": 4, "num_experts": 4}):
        callback = TokenRoundingCallback(tile=TILE, end=1)
        trainer = run_trainer(build("qwen3_moe", **changes), tmp_path, [callback], max_steps=2)
        keys.append([{key for key in log if key.startswith("moe/")} for log in logs_of(trainer)])
    assert keys == [[METRICS, LOAD]] * 2


def test_too_few_tokens_fall_back_to_top_k_and_are_counted_as_such(tmp_path):
    model = build("qwen3_moe")
    watch = Watch(model)
    logs = logs_of(run_trainer(model, tmp_path, [TokenRoundingCallback(tile=128)], max_steps=2))
    assert not any(watch.rounded())
    assert [log["moe/top_k_fallbacks"] for log in logs] == [2, 2], "two layers a step"
    assert all(log["moe/rows_added"] == log["moe/rows_dropped"] == 0 for log in logs)


@pytest.mark.pinned
def test_padding_that_leaves_too_few_tokens_falls_back_to_top_k_on_the_device(tmp_path):
    # 96 tokens would do for tiles of 6 (24 rows per expert), but only 78 are real (19.5)
    callback = ExpertLoadCallback()
    run_trainer(build("qwen3_moe"), tmp_path, [TokenRoundingCallback(tile=6), callback], padding=True, max_steps=2)
    assert [log["moe/top_k_fallbacks"] for log in callback.history] == [2, 2]
    assert all(sum(rows) == 78 * 2 for log in callback.history for rows in log["rows_per_expert"].values())


@pytest.mark.pinned
def test_without_attach_the_metrics_stay_in_history(tmp_path):
    callback, reporter = ExpertLoadCallback(), Reporter()
    run_trainer(build("qwen3_moe"), tmp_path, [callback, reporter], attach=False, max_steps=3)
    assert [log["step"] for log in callback.history] == [1, 2, 3] and set(callback.history[0]) > LOAD
    assert not any(key.startswith("moe/") for log in reporter.logs for key in log)
    assert all(sum(rows) == 96 * 2 for log in callback.history for rows in log["rows_per_expert"].values())


def test_attaching_twice_counts_once_takes_the_callback_that_is_there_and_reports_once(tmp_path, capsys):
    callback, model = ExpertLoadCallback(), build("qwen3_moe", num_hidden_layers=1)
    trainer = trainer_for(model, tmp_path, [callback], max_steps=2)
    assert sonicmoe_hf.attach(trainer) is callback is sonicmoe_hf.attach(trainer)
    trainer.train()
    assert len(callback.history) == 2
    said = capsys.readouterr().err
    assert said.count("sonicmoe-hf: Qwen3MoeForCausalLM: 1 mixture-of-experts layers patched; routing: top-k") == 1
    assert "\nsonicmoe-hf:   backend: eager (" in said and said.endswith("experts: trained\n")
    with pytest.raises(TypeError, match=r"takes a Trainer and got a Qwen3MoeForCausalLM: attach\(trainer\) before"):
        sonicmoe_hf.attach(model)


@pytest.mark.pinned
@pytest.mark.parametrize("removed", [PackedSteps, LossFilter, LigerLoss, GpuAdvice])
def test_attaching_again_adds_what_was_removed_and_nothing_twice(removed, tmp_path):
    trainer = trainer_for(build("qwen3_moe", num_hidden_layers=1), tmp_path)
    callbacks = trainer.callback_handler.callbacks
    sonicmoe_hf.attach(trainer)
    expected = [type(each) for each in callbacks]
    trainer.remove_callback(removed)
    sonicmoe_hf.attach(trainer)
    found = [type(each) for each in callbacks]
    assert found[:4] == expected[:4] and sorted(found, key=str) == sorted(expected, key=str)
    assert find_callback(trainer, GpuAdvice).packed_steps is find_callback(trainer, PackedSteps)


def test_balancing_is_told_and_that_routers_are_frozen(tmp_path, capsys):
    for freeze, words in ((False, ""), (True, "; the routers are frozen, so it reaches what they read")):
        model = build("qwen3_moe", num_hidden_layers=1)
        model.model.layers[0].mlp.gate.requires_grad_(not freeze)
        run_trainer(model, tmp_path, [sonicmoe_hf.LoadBalancing(per_layer_loss=0.05)], max_steps=1)
        assert capsys.readouterr().err.endswith(f"balancing: by a loss of weight 0.05{words}\n")


def test_a_cpu_whose_waiting_threads_spin_is_told_of_the_variable_that_stops_it(tmp_path, capsys, monkeypatch):
    for policy in (None, "ACTIVE"):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if policy is not None:
            monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        run_trainer(build("qwen3_moe", num_hidden_layers=1), tmp_path, max_steps=1)
        assert ("threads: OMP_WAIT_POLICY=PASSIVE, before" in capsys.readouterr().err) is (policy is None)


def test_a_router_loss_of_the_models_or_trainers_own_is_told(tmp_path, capsys):
    for returns_logits, owner in ((True, "model"), (False, "trainer")):
        model = build("qwen3_moe", num_hidden_layers=1, output_router_logits=returns_logits)
        trainer = trainer_for(model, tmp_path, max_steps=1)
        if owner == "trainer":  # as TRL's, which take the weight of the model's config for None
            trainer.args.router_aux_loss_coef = None
        sonicmoe_hf.attach(trainer)
        trainer.train()
        said = capsys.readouterr().err
        assert said.endswith(f"balancing: by a loss of the {owner}'s own, router_aux_loss_coef=0.001\n")


def test_experts_that_a_lora_leaves_out_are_told_with_the_remedy(tmp_path, capsys):
    model = get_peft_model(build_patched("qwen3_moe", num_hidden_layers=1), LoraConfig(target_modules=["q_proj"]))
    run_trainer(model, tmp_path, max_steps=1)
    expected = "frozen, beside LoRA that leaves them out; sonicmoe_hf.lora_config(model) adapts them too"
    said = capsys.readouterr().err
    assert f"experts: {expected}\n" in said and said.endswith("LoRA beside the experts: on q_proj\n")


@pytest.mark.parametrize(
    ("patterns", "words"), [({}, "rank 3"), ({"down_proj": 2}, "rank 2 on down_proj and rank 3 on gate_up_proj")]
)
def test_ranks_of_adapters_and_what_else_they_adapt_are_told(patterns, words, tmp_path, capsys):
    config = LoraConfig(
        r=3,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={rf".*\.experts\.{name}": rank for name, rank in patterns.items()},
    )
    run_trainer(get_peft_model(build_patched("qwen3_moe", num_hidden_layers=1), config), tmp_path, max_steps=1)
    said = capsys.readouterr().err
    assert f"experts: frozen, with LoRA of {words}\n" in said
    assert said.endswith("LoRA beside the experts: on o_proj, q_proj\n")


def test_a_callback_is_attached_to_every_trainer_that_it_is_given_to(tmp_path):
    callback, model = ExpertLoadCallback(), build("qwen3_moe")
    for _ in range(2):
        assert set(run_trainer(model, tmp_path, [callback], max_steps=1).state.log_history[0]) > LOAD


@pytest.mark.pinned
def test_a_second_training_starts_counting_from_zero(tmp_path):
    model = build("qwen3_moe")
    histories = []
    for _ in range(2):
        callback = ExpertLoadCallback()
        run_trainer(model, tmp_path, [callback], attach=False, max_steps=3, logging_steps=2)
        histories.append(callback.history)  # the third step is counted and never logged
    for history in histories:
        assert [sum(rows) for rows in history[0]["rows_per_expert"].values()] == [2 * 96 * 2] * 2
