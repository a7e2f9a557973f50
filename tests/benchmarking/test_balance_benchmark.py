"""benchmarks/quality/load_balance.py and benchmarks/step/replay_step.py at a tiny size: what their figures rest on."""

import csv
import dataclasses

import pytest
import torch
from test_quality_benchmark import TINY
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from benchmarks.quality import load_balance, quality_corpus, training
from benchmarks.quality.counting import RowCounter
from benchmarks.step import replay_step
from sonicmoe_hf.patching.moe_layers import find_layers

pytestmark = [pytest.mark.pinned, pytest.mark.slow]

CPU = torch.device("cpu")


TINY = dataclasses.replace(TINY, steps=24)


@pytest.fixture(scope="module")
def corpus():
    """Make a corpus of words of which some are far more frequent than others."""
    draws = torch.distributions.Geometric(0.02).sample((40000,)).clamp(max=2047).short()
    return quality_corpus.Corpus(draws[:36000], draws[36000:], 16000, "geometric")


def measured(preset, corpus, case):
    return load_balance.measure(preset, (case, 0), corpus, CPU, graph=False)


@pytest.mark.parametrize(
    ("router", "balancing", "rate"),
    [
        ("softmax", "layer", 1.0),
        ("softmax", "pooled", 1.0),
        ("sigmoid", "bias", 0.05),
        ("sigmoid", "bias_to_zero", 0.05),
    ],
)
def test_each_way_of_balancing_lowers_the_load_of_the_busiest_expert(corpus, router, balancing, rate):
    plain = measured(TINY, corpus, load_balance.Case(router))
    balanced = measured(TINY, corpus, load_balance.Case(router, balancing, rate))
    assert 1.0 <= balanced["load"] < plain["load"]
    assert balanced["load"] <= balanced["load_worst"] and balanced["load"] <= balanced["load_step"]
    assert plain["rows_ratio"] == balanced["rows_ratio"] == 1.0


def test_all_cases_of_a_router_start_alike_and_the_pooled_loss_is_transformers_own(corpus):
    ids = training.batches(corpus.train, TINY, seed=0)(0)
    losses = {}
    for case in (load_balance.Case("softmax"), load_balance.Case("softmax", "pooled", 0.5)):
        model, _, _ = load_balance.build(TINY, case, 0, CPU)
        out = model.train()(input_ids=ids, labels=ids, use_cache=False, output_router_logits=None)
        losses[case.balancing] = out
    aux = load_balancing_loss_func(losses["pooled"].router_logits, TINY.experts, TINY.top_k)
    torch.testing.assert_close(losses["pooled"].loss, losses["none"].loss + 0.5 * aux)
    rows = [
        layer.router.e_score_correction_bias
        for layer in find_layers(load_balance.build(TINY, load_balance.Case("sigmoid"), 0, CPU)[0])
    ]
    assert len(rows) == TINY.layers, "DeepSeek-V3's router in every layer"


def test_load_is_counted_by_layer_and_by_step():
    assert load_balance.over_mean(torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0]])).tolist() == [1.0, 4.0]
    counter = RowCounter(2, 4, CPU)
    for rows in ([0, 0, 1], [2, 2, 1]):
        counter.count(1, None, (None, torch.tensor([rows])))
    rows, starved, busiest = counter.read_counts()
    assert rows.tolist() == [[0] * 4, [2, 2, 2, 0]] and starved.tolist() == [[0] * 4, [1, 0, 1, 2]]
    assert busiest.tolist() == [0, 4], "2 rows in each call, of another expert"


def test_a_second_call_skips_finished_runs(corpus, tmp_path, monkeypatch, capsys):
    groups = ((load_balance.Case("softmax"), load_balance.Case("softmax", "layer", 0.1, "nearest")),)
    monkeypatch.setattr(load_balance, "GROUPS", groups)
    monkeypatch.setitem(load_balance.PRESETS, "cpu", dataclasses.replace(TINY, batch=8, length=64))
    monkeypatch.setattr(quality_corpus, "load", lambda path: corpus)

    def call(*seeds):
        path = tmp_path / "load_balance.csv"
        load_balance.main(["--preset", "cpu", "--steps", "2", "--csv", str(path), "--seeds", *seeds])
        with path.open() as file:
            return list(csv.DictReader(file)), capsys.readouterr().out

    rows, out = call("0")
    assert "2 runs to do" in out and [row["routing"] for row in rows] == ["top_k", "nearest"]
    again, out = call("0", "1")
    assert "2 runs to do" in out and again[:2] == rows and [row["seed"] for row in again] == ["0", "0", "1", "1"]


def test_replay_is_checked_and_timed_beside_plain_steps(tmp_path, capsys):
    options = ["--device", "cpu", "--tiny", "--tokens", "32", "--layers", "1", "--rounds", "1", "--steps", "1"]
    replay_step.main([*options, "--csv", str(tmp_path / "replay.csv")])
    with (tmp_path / "replay.csv").open() as file:
        rows = {(row["case"], row["metric"]): float(row["median"]) for row in csv.DictReader(file)}
    assert "the same bits" in capsys.readouterr().out
    for case in ("plain", "recording", "replaying", "a host's tensor"):
        assert rows[case, "wall, over plain"] == pytest.approx(
            rows[case, "wall ms"] / rows["plain", "wall ms"], rel=1e-4
        )
