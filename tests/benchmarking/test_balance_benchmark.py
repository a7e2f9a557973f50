"""benchmarks/quality/load_balance.py and benchmarks/step/replay_step.py at a tiny size: what their figures rest on."""

import csv
import dataclasses

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from sonicmoe_hf.patching.support import find_layers

pytestmark = [pytest.mark.pinned, pytest.mark.slow]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def modules():
    """(load_balance, training, replay_step)."""
    from benchmarks.quality import load_balance, training
    from benchmarks.step import replay_step

    return load_balance, training, replay_step


@pytest.fixture(scope="module")
def tiny(modules):
    return dataclasses.replace(
        modules[1].PRESETS["cpu"], hidden_size=32, layers=2, heads=2, experts=8, top_k=2, expert_size=16,
        batch=4, length=32, steps=24, tile=8, held_out_windows=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def corpus(modules):
    """Words of which some are far more frequent than others."""
    module = modules[0].quality_corpus
    draws = torch.distributions.Geometric(0.02).sample((40000,)).clamp(max=2047).short()
    return module.Corpus(draws[:36000], draws[36000:], 16000, "geometric")


def measured(modules, preset, corpus, case):
    return modules[0].measure(preset, (case, 0), corpus, CPU, graph=False)


@pytest.mark.parametrize(
    ("router", "balancing", "rate"),
    [
        ("softmax", "layer", 1.0),
        ("softmax", "pooled", 1.0),
        ("sigmoid", "bias", 0.05),
        ("sigmoid", "bias_to_zero", 0.05),
    ],
)
def test_each_way_of_balancing_lowers_the_load_of_the_busiest_expert(modules, tiny, corpus, router, balancing, rate):
    case = modules[0].Case
    plain = measured(modules, tiny, corpus, case(router))
    balanced = measured(modules, tiny, corpus, case(router, balancing, rate))
    assert 1.0 <= balanced["load"] < plain["load"]
    assert balanced["load"] <= balanced["load_worst"] and balanced["load"] <= balanced["load_step"]
    assert plain["rows_ratio"] == balanced["rows_ratio"] == 1.0


def test_all_cases_of_a_router_start_alike_and_the_pooled_loss_is_transformers_own(modules, tiny, corpus):
    load_balance, training, _ = modules
    ids = training.batches(corpus.train, tiny, seed=0)(0)
    losses = {}
    for case in (load_balance.Case("softmax"), load_balance.Case("softmax", "pooled", 0.5)):
        model, _, _ = load_balance.build(tiny, case, 0, CPU)
        out = model.train()(input_ids=ids, labels=ids, use_cache=False, output_router_logits=None)
        losses[case.balancing] = out
    aux = load_balancing_loss_func(losses["pooled"].router_logits, tiny.experts, tiny.top_k)
    torch.testing.assert_close(losses["pooled"].loss, losses["none"].loss + 0.5 * aux)
    rows = [
        layer.router.e_score_correction_bias
        for layer in find_layers(load_balance.build(tiny, load_balance.Case("sigmoid"), 0, CPU)[0])
    ]
    assert len(rows) == tiny.layers, "DeepSeek-V3's router in every layer"


def test_load_is_counted_by_layer_and_by_step(modules):
    load_balance = modules[0]
    assert load_balance.over_mean(torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0]])).tolist() == [1.0, 4.0]
    from benchmarks.quality.counting import RowCounter

    counter = RowCounter(4, CPU)
    for rows in ([0, 0, 1], [2, 2, 1]):
        counter(None, (None, torch.tensor([rows])))
    assert counter.rows_E.tolist() == [2, 2, 2, 0] and counter.starved_E.tolist() == [1, 0, 1, 2]
    assert counter.busiest == 4, "2 rows in each call, of another expert"


def test_a_second_call_skips_finished_runs(modules, tiny, corpus, tmp_path, monkeypatch, capsys):
    load_balance = modules[0]
    plan = ((load_balance.Case("softmax"), load_balance.Case("softmax", "layer", 0.1, "nearest")),)
    monkeypatch.setattr(load_balance, "PLAN", plan)
    monkeypatch.setitem(load_balance.PRESETS, "cpu", dataclasses.replace(tiny, batch=8, length=64))
    monkeypatch.setattr(load_balance.quality_corpus, "load", lambda path: corpus)

    def call(*seeds):
        path = tmp_path / "load_balance.csv"
        load_balance.main(["--preset", "cpu", "--steps", "2", "--csv", str(path), "--seeds", *seeds])
        with path.open() as file:
            return list(csv.DictReader(file)), capsys.readouterr().out

    rows, out = call("0")
    assert "2 runs to do" in out and [row["routing"] for row in rows] == ["top_k", "nearest"]
    again, out = call("0", "1")
    assert "2 runs to do" in out and again[:2] == rows and [row["seed"] for row in again] == ["0", "0", "1", "1"]


def test_replay_is_checked_and_timed_beside_plain_steps(modules, tmp_path, capsys):
    options = ["--device", "cpu", "--tiny", "--tokens", "32", "--layers", "1", "--rounds", "1", "--steps", "1"]
    modules[2].main([*options, "--csv", str(tmp_path / "replay.csv")])
    with (tmp_path / "replay.csv").open() as file:
        rows = {(row["case"], row["metric"]): float(row["median"]) for row in csv.DictReader(file)}
    assert "the same bits" in capsys.readouterr().out
    for case in ("plain", "recording", "replaying", "a host's tensor"):
        assert rows[case, "wall, over plain"] == pytest.approx(
            rows[case, "wall ms"] / rows["plain", "wall ms"], rel=1e-4
        )
