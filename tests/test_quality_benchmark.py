"""benchmarks/token_rounding_quality.py at a tiny size: what its figures rest on."""

import csv
import dataclasses
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def quality():
    """The two modules, (training, command line)."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import quality_training
        import token_rounding_quality
    finally:
        sys.path.remove(str(BENCHMARKS))
    return quality_training, token_rounding_quality


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of Python sources: our own tests."""
    folder = tmp_path_factory.mktemp("sources")
    for path in Path(__file__).parent.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    return folder


@pytest.fixture(scope="module")
def tiny(quality):
    training, _ = quality
    return dataclasses.replace(
        training.PRESETS["cpu"], vocab_size=300, hidden_size=32, layers=2, heads=2, experts=8, top_k=2, expert_size=16,
        batch=4, length=32, steps=3, tile=8, held_out_windows=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def corpus(quality, tiny, sources):
    return quality[0].read_corpus(tiny, sources)


def test_every_method_starts_from_the_same_loss_and_trains(quality, tiny, corpus):
    training, command = quality
    runs = command.planned_runs(tiny, training.METHODS, seeds=1, sweep=False, pooled=False)
    figures = {run.method: training.measure(tiny, run, corpus, CPU) for run in runs}
    # same weights and batch; routing differs from the first step on, and a random start makes little of it
    first = [row["first_loss"] for row in figures.values()]
    assert max(first) - min(first) < 1e-2
    assert figures["top_k"]["train_loss"] not in [figures[name]["train_loss"] for name in figures if name != "top_k"]
    assert figures["expert_choice"]["rows_ratio"] == 1.0
    assert figures["down"]["rows_ratio"] < 1.0 < figures["up"]["rows_ratio"]
    assert figures["token_drop"]["rows_ratio"] <= 1.0


def test_a_seed_fixes_a_run(quality, tiny, corpus):
    training, _ = quality
    run = training.Run("stochastic", tiny.tile, "layer", 0)
    first, again, other = (
        training.measure(tiny, each, corpus, CPU)
        for each in (run, run, training.Run("stochastic", tiny.tile, "layer", 1))
    )
    del first["seconds"], again["seconds"]
    assert first == again
    assert first["first_loss"] != other["first_loss"]


def test_batches_and_start_do_not_depend_on_the_method(quality, tiny, corpus):
    training, _ = quality
    models = [
        training.build_model(tiny, training.Run(method, tiny.tile, "layer", 0), CPU)[0]
        for method in ("top_k", "stochastic")
    ]
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models)))
    drawn = [list(training.batches(corpus.train, tiny, seed=0)) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*drawn))


@pytest.mark.parametrize("method", ["nearest", "token_drop", "expert_choice"])
def test_evaluation_uses_top_k(quality, tiny, corpus, method):
    training, _ = quality
    tile = tiny.tile if method == "nearest" else 0
    model, counters = training.build_model(tiny, training.Run(method, tile, "layer", 0), CPU)
    plain, plain_counters = training.build_model(tiny, training.Run("top_k", 0, "layer", 0), CPU)
    plain.set_experts_implementation("eager")
    loss, rows = training.evaluate(model, counters, tiny, corpus.held_out)
    expected, expected_rows = training.evaluate(plain, plain_counters, tiny, corpus.held_out)
    assert loss == pytest.approx(expected, rel=1e-5)  # fp32: Transformers' own experts sum in another order
    assert torch.equal(rows, expected_rows)


def test_evaluation_refuses_any_other_routing(quality, tiny, corpus):
    training, _ = quality
    model, counters = training.build_model(tiny, training.Run("token_drop", 0, "layer", 0), CPU)
    model.eval = lambda: model  # as if somebody forgot to switch to evaluation
    with pytest.raises(RuntimeError, match="not 2 a token"):
        training.evaluate(model, counters, tiny, corpus.held_out)


def test_expert_choice_gives_every_expert_its_best_tokens(quality, tiny):
    training, _ = quality
    model, _ = training.build_model(tiny, training.Run("top_k", 0, "layer", 0), CPU)
    router = next(training.find_layers(model)).router.train()
    x = torch.randn(32, tiny.hidden_size)
    logits_TE, _, index_TK = router(x)
    scores_TE = logits_TE.softmax(-1)
    routing = training.CapacityRouting(1.0, only_top_k=False)(router, (x,), (logits_TE, None, index_TK))[2]
    for expert in range(tiny.experts):
        chosen = routing.token_index[routing.expert_index == expert]
        assert set(chosen.tolist()) == set(scores_TE[:, expert].topk(8).indices.tolist())  # 32 tokens * 2 / 8 experts
    total = torch.zeros(32).index_add_(0, routing.token_index, routing.weights.detach())
    chosen_once = torch.zeros(32).index_fill_(0, routing.token_index, 1.0)
    torch.testing.assert_close(total, chosen_once)  # Qwen3's weights sum to 1 over whatever set a token has


def test_token_drop_keeps_the_best_of_top_k_up_to_the_capacity(quality, tiny):
    training, _ = quality
    model, _ = training.build_model(tiny, training.Run("top_k", 0, "layer", 0), CPU)
    router = next(training.find_layers(model)).router.train()
    x = torch.randn(32, tiny.hidden_size)
    logits_TE, _, index_TK = router(x)
    routing = training.CapacityRouting(0.5, only_top_k=True)(router, (x,), (logits_TE, None, index_TK))[2]
    for expert in range(tiny.experts):
        named = (index_TK == expert).any(1).nonzero().flatten()
        best = named[logits_TE.softmax(-1)[named, expert].argsort(descending=True)[:4]]  # 0.5 * 32 * 2 / 8
        assert set(routing.token_index[routing.expert_index == expert].tolist()) == set(best.tolist())


def test_a_second_call_skips_finished_runs(quality, tiny, sources, tmp_path, monkeypatch, capsys):
    _, command = quality
    monkeypatch.setitem(command.PRESETS, "cpu", tiny)

    def call(*methods):
        command.main(["--preset", "cpu", "--device", "cpu", "--seeds", "1", "--corpus", str(sources),
                      "--out", str(tmp_path), "--methods", *methods])  # fmt: skip
        with (tmp_path / "token_rounding_quality.csv").open() as file:
            return list(csv.DictReader(file)), capsys.readouterr().out

    rows, out = call("top_k")
    assert "1 of 1 runs to do" in out and [row["method"] for row in rows] == ["top_k"]
    again, out = call("top_k", "nearest")
    assert "1 of 2 runs to do" in out and again[0] == rows[0] and again[1]["method"] == "nearest"
    assert (tmp_path / "token_rounding_quality_cpu.png").exists()
    assert "to do" not in call("top_k", "nearest")[1]


def test_the_sweep_shares_runs_with_the_table(quality):
    training, command = quality
    gpu = training.PRESETS["gpu"]
    runs = command.planned_runs(gpu, training.METHODS, seeds=3, sweep=True, pooled=True)
    assert len(runs) == len(set(runs)) == 3 * (len(training.METHODS) + 2 * 3 + 3)
    assert {gpu.mean_rows / run.tile for run in runs if run.method == "nearest"} == {8, 4, 2, 1}
    assert [run.seed for run in runs if run.balancing == "pooled" and run.method == "top_k"] == [0, 1, 2]
