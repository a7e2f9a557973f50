"""benchmarks/quality/token_rounding_quality.py at a tiny size: what its figures rest on."""

import csv
import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch

from benchmarks.quality import quality_corpus as texts
from benchmarks.quality import token_rounding_quality as command
from benchmarks.quality import training

pytestmark = [pytest.mark.pinned, pytest.mark.slow]

CPU = torch.device("cpu")


TINY = dataclasses.replace(
    training.PRESETS["cpu"], hidden_size=32, layers=2, heads=2, experts=8, top_k=2, expert_size=16,
    batch=4, length=32, steps=3, tile=8, held_out_windows=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory):
    """Make a corpus of our own tests, as if they were two packages."""
    folder = tmp_path_factory.mktemp("corpus")
    paths = sorted(Path(__file__).parents[1].rglob("*.py"))
    packages = [
        (name, "1.0", "MIT", [(path.name, path.read_text()) for path in paths[start::2]])
        for start, name in enumerate(("one", "two"))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "HELD_OUT_SHARE", 1 / 4)
        texts.build(packages, folder / "corpus.npz", folder / "corpus.csv")
    return folder / "corpus.npz"


@pytest.fixture(scope="module")
def corpus(corpus_file):
    return texts.load(corpus_file)


def measured(preset, corpus, *run):
    return training.measure(preset, training.TrainingRun(*run), corpus, CPU, graph=False)


def test_copies_and_near_copies_of_a_file_are_left_out():
    text = "\n".join(f"    first_variable_{i} = some_function({i})" for i in range(20))
    changed, other = text.replace("variable_2", "value_2"), text.replace("some_function", "another_function")
    kept = texts.drop_near_duplicates([("a", text), ("b", text), ("c", changed), ("d", other)])
    assert [name for name, _ in kept] == ["a", "d"]


def test_the_same_packages_give_the_same_text(tmp_path):
    names = [f"part_{i}.py" for i in range(200)]
    packages = [("one", "1.0", "MIT", [(name, f"print('this is the whole of {name}')") for name in names])]
    texts.build(packages, tmp_path / "first.npz", tmp_path / "first.csv")
    packages[0][3].reverse()
    texts.build(packages, tmp_path / "second.npz", tmp_path / "second.csv")
    first, second = (texts.load(tmp_path / f"{name}.npz") for name in ("first", "second"))
    assert torch.equal(first.train, second.train) and torch.equal(first.held_out, second.held_out)
    assert first.description == second.description
    assert (tmp_path / "first.csv").read_text().splitlines()[1].startswith("one,1.0,MIT,")


def test_every_method_starts_from_the_same_loss_and_trains(corpus):
    figures = {
        method: measured(TINY, corpus, method, TINY.tile if method in training.ROUNDINGS else 0, "layer", 0)
        for method in training.METHODS
    }
    # same weights and batch; routing differs from the first step on, and a random start makes little of it
    first = [row["first_loss"] for row in figures.values()]
    assert max(first) - min(first) < 1e-2
    assert figures["top_k"]["train_loss_100"] not in [
        figures[each]["train_loss_100"] for each in figures if each != "top_k"
    ]
    assert figures["expert_choice"]["rows_ratio"] == 1.0
    assert figures["down"]["rows_ratio"] < 1.0 < figures["up"]["rows_ratio"]
    assert figures["token_drop"]["rows_ratio"] <= 1.0


def test_a_seed_fixes_a_run(corpus):
    first, again, other = (measured(TINY, corpus, "stochastic", TINY.tile, "layer", seed) for seed in (0, 0, 1))
    del first["training_seconds"], again["training_seconds"]
    assert first == again
    assert first["first_loss"] != other["first_loss"]


def test_batches_and_start_do_not_depend_on_the_method(corpus):
    top_k, stochastic, replica = (
        torch.cat(
            [part.flatten() for part in training.build_model(TINY, training.TrainingRun(*run), CPU)[0].parameters()]
        )
        for run in (("top_k", 0, "layer", 0), ("stochastic", TINY.tile, "layer", 0), ("top_k", 0, "layer", 0, 1))
    )
    assert torch.equal(top_k, stochastic)
    assert 0 < (replica - top_k).norm() < 2e-4 * top_k.norm()
    drawn = [training.batches(corpus.train, TINY, seed=0) for _ in range(2)]
    assert all(torch.equal(drawn[0](step), drawn[1](step)) for step in range(TINY.steps))


@pytest.mark.parametrize("method", ["top_k", "nearest", "token_drop", "expert_choice"])
def test_the_balancing_loss_reaches_the_router_under_every_method(corpus, method):
    ids = training.batches(corpus.train, TINY, seed=0)(0)
    gradients = []
    for balancing in ("layer", "none"):
        tile = TINY.tile if method == "nearest" else 0
        model, _ = training.build_model(TINY, training.TrainingRun(method, tile, balancing, 0), CPU)
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(next(training.find_layers(model)).router.weight.grad)
    with_loss, without = gradients
    assert without.norm() > 0 and (with_loss - without).norm() > 1e-3 * without.norm()


@pytest.mark.parametrize("method", ["nearest", "token_drop", "expert_choice"])
def test_evaluation_uses_top_k(corpus, method):
    tile = TINY.tile if method == "nearest" else 0
    model, counters = training.build_model(TINY, training.TrainingRun(method, tile, "layer", 0), CPU)
    plain, plain_counters = training.build_model(TINY, training.TrainingRun("top_k", 0, "layer", 0), CPU)
    plain.set_experts_implementation("eager")
    loss, rows = training.evaluate(model, counters, TINY, corpus.held_out)
    expected, expected_rows = training.evaluate(plain, plain_counters, TINY, corpus.held_out)
    assert loss == pytest.approx(expected, rel=1e-5)  # fp32: Transformers' own experts sum in another order
    assert torch.equal(rows, expected_rows)


def test_evaluation_refuses_any_other_routing(corpus, monkeypatch):
    monkeypatch.setattr(training, "DROP_CAPACITY_FACTOR", 0.5)  # drops half, whatever the corpus is
    model, counters = training.build_model(TINY, training.TrainingRun("token_drop", 0, "layer", 0), CPU)
    model.eval = lambda: model  # as if somebody forgot to switch to evaluation
    with pytest.raises(RuntimeError, match="not 2 a token"):
        training.evaluate(model, counters, TINY, corpus.held_out)


@pytest.mark.parametrize(("factor", "only_top_k"), [(1.0, False), (0.5, True)], ids=["expert choice", "token drop"])
def test_every_expert_takes_its_best_tokens_up_to_the_capacity(factor, only_top_k):
    model, _ = training.build_model(TINY, training.TrainingRun("top_k", 0, "layer", 0), CPU)
    router = next(training.find_layers(model)).router.train()
    x = torch.randn(32, TINY.hidden_size)
    logits_TE, weights_TK, index_TK = router(x)
    scores_TE, capacity = logits_TE.softmax(-1), int(factor * 32 * 2 / 8)
    routing = training.CapacityRouting(factor, only_top_k)(router, (x,), (logits_TE, weights_TK, index_TK))[2]
    for expert in range(TINY.experts):
        eligible = (index_TK == expert).any(1).nonzero().flatten() if only_top_k else torch.arange(32)
        best = eligible[scores_TE[eligible, expert].argsort(descending=True)[:capacity]]
        assert set(routing.token_index[routing.expert_index == expert].tolist()) == set(best.tolist())
    taken = routing.expert_index < TINY.experts
    total = torch.zeros(32).index_add_(0, routing.token_index[taken], routing.weights.detach()[taken])
    chosen_once = torch.zeros(32).index_fill_(0, routing.token_index[taken], 1.0)
    torch.testing.assert_close(total, chosen_once)  # Qwen3's weights sum to 1 over whatever set a token has


def test_a_second_call_skips_finished_runs(corpus_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(command.PRESETS, "cpu", TINY)
    monkeypatch.setattr(command, "GROUPS", ((("top_k", 0, "layer", 0), ("nearest", 4, "none", 0)),))

    def call(*arguments):
        path = tmp_path / "token_rounding_quality.csv"
        common = ("--preset", "cpu", "--seeds", "0", "--corpus", str(corpus_file), "--csv", str(path))
        command.main([*common, *arguments])
        with path.open() as file:
            return list(csv.DictReader(file)), capsys.readouterr().out

    rows, out = call("--methods", "top_k")
    assert "1 runs to do" in out and [row["method"] for row in rows] == ["top_k"]
    again, out = call()
    assert "1 runs to do" in out and again[0] == rows[0] and again[1]["method"] == "nearest"
    assert (tmp_path / "token_rounding_quality_cpu.png").exists()
    assert "to do" not in call()[1]
    assert len(call("--learning-rate", "0.1")[0]) == 4


def test_differences_are_found_where_seeds_are_missing():
    draw = random.Random(0)
    effects = {("top_k", 0): 0.0, ("nearest", 8): 0.02, ("expert_choice", 0): 0.4}
    seeds = {0: 3.0, 1: 3.3, 2: 2.9}
    rows = [
        {
            "method": method,
            "tile": str(tile),
            "balancing": "layer",
            "seed": str(seed),
            "replica": "0",
            "held_out_loss": str(level + effect + draw.gauss(0, 1e-3)),
        }
        for (method, tile), effect in effects.items()
        for seed, level in seeds.items()
        if (method, seed) != ("nearest", 1)
    ]
    table = command.by_method([*rows, {**rows[0], "balancing": "none"}], "layer")
    comparison = command.compare(table)
    assert comparison.freedom == 8 - (3 + 3 - 1)
    for (method, tile), effect in effects.items():
        if method != "top_k":
            difference, error = comparison.over_top_k[method, tile]
            assert difference == pytest.approx(effect, abs=4e-3) and 0 < error < 4e-3
    both = [*rows, *({**row, "method": "balanced"} for row in rows if row["method"] == "nearest")]
    merged = command.compare_tiles(command.by_method(both, "layer"))
    assert merged.over_top_k["nearest or balanced", 8][0] == pytest.approx(0.02, abs=4e-3)
    assert math.isnan(command.compare({("top_k", 0): rows[:1]}).run_sd)
