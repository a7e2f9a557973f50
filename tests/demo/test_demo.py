"""The demo end to end with few steps, and what it refuses."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from sonicmoe_hf.layer.backends import BACKEND_VARIABLE
from sonicmoe_hf.tools.cli.main import main as command
from sonicmoe_hf.tools.demo import corpus, run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small_corpus(monkeypatch):
    """Use a twelfth of the standard library, on the CPU."""
    texts, held_out = corpus.standard_library()
    few = (texts[::12], held_out[:4])
    monkeypatch.setattr(corpus, "standard_library", lambda: few)
    monkeypatch.setenv(BACKEND_VARIABLE, "eager")


@pytest.mark.slow
def test_the_demo_passes_its_own_checks_and_leaves_pictures_numbers_and_a_model(tmp_path, monkeypatch, small_corpus):
    monkeypatch.setattr(run, "BATCH_SIZE", 4)
    monkeypatch.setattr(run, "HELD_OUT_BLOCKS", 8)
    monkeypatch.setattr(run, "EVALUATIONS", 2)
    assert command(["demo", "--steps", "8", "--tile", "16", "--output", str(tmp_path)]) == 0
    for name in ("loss_curve.png", "expert_load.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert all(check["passed"] for check in metrics["checks"])
    assert any(check["name"] == "token rounding was at work" for check in metrics["checks"])
    assert {len(rows) for entry in metrics["expert_load"] for rows in entry["rows_per_expert"].values()} == {32}
    assert any("moe/rows_added" in entry for entry in metrics["log"])
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.pinned
def test_the_demo_with_top_k_fails_when_a_check_fails(tmp_path, monkeypatch, small_corpus):
    monkeypatch.setattr(run, "BATCH_SIZE", 2)
    monkeypatch.setattr(run, "HELD_OUT_BLOCKS", 2)
    monkeypatch.setattr(run, "EVALUATIONS", 1)
    monkeypatch.setattr(run, "relative_error", lambda ours, expected: 1.0)
    assert command(["demo", "--steps", "4", "--rounding", "top_k", "--output", str(tmp_path)]) == 1


@pytest.mark.pinned
@pytest.mark.parametrize(("dead", "passed"), [(0, True), (3, False)])
def test_the_demo_fails_when_experts_are_without_rows_at_the_end(dead, passed, tmp_path):
    demo = run.Demo(run.DemoSettings(output=tmp_path, rounding="top_k"), run.Console(quiet=True), None, [], [], None)
    demo.log = [{"loss": loss, "eval_loss": loss, "step": step} for step, loss in enumerate((3.0, 2.0, 1.0))]
    demo.load.history.append({"moe/dead_experts": dead})
    run._check_training(demo)
    assert {check["name"]: check["passed"] for check in demo.checks}["every expert has pairs at the end"] is passed


@pytest.mark.slow
@pytest.mark.pinned
def test_two_demos_with_one_seed_are_equal(tmp_path, monkeypatch, small_corpus):
    monkeypatch.setattr(run, "BATCH_SIZE", 2)
    monkeypatch.setattr(run, "HELD_OUT_BLOCKS", 2)
    losses = []
    for name in ("first", "second"):
        settings = run.DemoSettings(steps=4, tile=8, output=tmp_path / name, seed=3)
        demo = run.prepare(settings)
        run.train(demo)
        losses.append(demo.logged("loss"))
    assert losses[0] == losses[1]


def test_the_demo_refuses_a_tile_with_which_it_would_never_round(capsys):
    assert command(["demo", "--tile", "65"]) == 2
    assert "choose a tile of at most 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "threads"), [({}, 1), ({"OMP_WAIT_POLICY": "PASSIVE"}, 1), ({"OMP_NUM_THREADS": "2"}, 2)]
)
def test_the_demo_leaves_half_of_the_cores_to_others(monkeypatch, variables, threads):
    """Also where its threads wait without spinning, as the command has them."""
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run.limit_threads()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_make_demo_has_its_threads_sleep_while_they_wait():
    done = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True)
    assert "OMP_WAIT_POLICY=PASSIVE .venv/bin/python -m sonicmoe_hf demo" in done.stdout, done.stderr
