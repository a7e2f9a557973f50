"""Reports of ExpertLoadCallback beside numbers: a picture, and histograms in TensorBoard and W&B."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest
from helpers.models import build
from helpers.training import run_trainer
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.integrations import WandbCallback

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback
from sonicmoe_hf.trainer import load_reports
from sonicmoe_hf.trainer.load_reports import draw_experts, labels_of

pytestmark = pytest.mark.pinned
PNG = b"\x89PNG"
STEPS, ROWS = 3, 96 * 2  # of each layer in a step: tokens times top-k


def train_with(callback, folder, **options):
    return run_trainer(build("qwen3_moe"), folder, [callback], max_steps=STEPS, **options)


def test_the_picture_is_there_at_the_end_of_training(tmp_path):
    picture = tmp_path / "new" / "load.png"
    callback = ExpertLoadCallback(plot=picture)
    with pytest.raises(ValueError, match="nothing was counted"):
        callback.draw(tmp_path / "early.png")
    train_with(callback, tmp_path)
    callback.draw(tmp_path / "again.png")
    assert picture.read_bytes().startswith(PNG) and (tmp_path / "again.png").read_bytes().startswith(PNG)


def test_the_picture_is_of_this_training_alone_and_by_the_first_rank(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(sonicmoe_hf.trainer.load_callback, "draw_history", lambda path, history: drawn.append(history))
    callback, model = ExpertLoadCallback(plot=tmp_path / "load.svg"), build("qwen3_moe")
    for steps in (3, 2):
        trainer = run_trainer(model, tmp_path, [callback], attach=False, max_steps=steps)
    assert [[entry["step"] for entry in history] for history in drawn] == [[1, 2, 3], [1, 2]]
    monkeypatch.setenv("RANK", "1")
    callback.on_train_end(trainer.args, trainer.state, trainer.control, model=model)
    assert len(drawn) == 2


def test_the_colours_are_rows_over_the_layers_mean_with_the_busiest_on_top():
    rows = {"a.0": np.array([[1, 3], [0, 4]]), "a.1": np.array([[5, 5, 5], [0, 0, 0]])}
    figure = Figure()
    draw_experts(figure, figure.subplots(), rows, [10, 20])
    axes = figure.axes[0]
    (mesh,) = axes.collections
    expected = [[1.5, 2.0], [0.5, 0.0], *[[1.0, 0.0]] * 3]
    np.testing.assert_allclose(mesh.get_array().reshape(5, 2), expected)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 0", "layer 1"]
    assert axes.get_xlim() == (0, 20)


def test_layers_are_named_in_full_where_their_numbers_do_not_tell_them_apart():
    assert labels_of(["model.layers.3.mlp", "model.layers.4.mlp"]) == ["layer 3", "layer 4"]
    assert labels_of(["vision.0.mlp.1"]) == ["vision.0.mlp.1"]
    assert labels_of(["text.layers.0.a", "text.layers.0.b"]) == ["text.layers.0.a", "text.layers.0.b"]


def test_what_cannot_be_drawn_is_refused_before_training():
    with pytest.raises(ValueError, match=r"load\.mp3.*png"):
        ExpertLoadCallback(plot="load.mp3")


def test_a_picture_that_cannot_be_written_ends_no_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    warnings = []
    monkeypatch.setattr(sonicmoe_hf.trainer.load_callback.logger, "warning", warnings.append)
    train_with(ExpertLoadCallback(plot=tmp_path / "file" / "load.png"), tmp_path)
    train_with(ExpertLoadCallback(plot=tmp_path / "load.png"), tmp_path, logging_steps=10, logging_strategy="no")
    assert [warning.partition(": ")[2].startswith("no picture in") for warning in warnings] == [True, True]


def histograms_of(folder):
    events = EventAccumulator(str(next(Path(folder).rglob("events*")).parent), {"histograms": 0}).Reload()  # 0: all
    return {name: events.Histograms(name) for name in events.Tags()["histograms"]}


def test_tensorboard_has_a_histogram_of_every_layers_rows_at_every_log(tmp_path):
    callback = ExpertLoadCallback()
    train_with(callback, tmp_path / "on", report_to=["tensorboard"])
    found = histograms_of(tmp_path / "on")
    assert set(found) == {f"{load_reports.HISTOGRAMS}/{name}" for name in callback.history[0]["rows_per_expert"]}
    for name, events in found.items():
        assert [event.step for event in events] == [1, 2, 3]
        for event, entry in zip(events, callback.history):
            rows = entry["rows_per_expert"][name.removeprefix(f"{load_reports.HISTOGRAMS}/")]
            value = event.histogram_value
            assert (value.num, value.sum) == (len(rows), ROWS) and (value.min, value.max) == (min(rows), max(rows))
    train_with(ExpertLoadCallback(histograms=False), tmp_path / "off", report_to=["tensorboard"])
    assert not histograms_of(tmp_path / "off")


@pytest.mark.parametrize("is_running", [True, False])
def test_wandb_gets_the_histograms_at_the_trainers_step(is_running, tmp_path, monkeypatch):
    logged = []  # what WandbCallback has of the package; it is not installed with the tests
    parts = {"Histogram": lambda rows: ("histogram", list(rows)), "log": logged.append}
    wandb = types.SimpleNamespace(run="a run" if is_running else None, **parts)
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    class Reporter(WandbCallback):
        def __init__(self):
            """Do nothing, as without the package."""

        def __getattribute__(self, name):
            if name.startswith("on_"):
                return lambda *args, **kwargs: None
            return super().__getattribute__(name)

    callback = ExpertLoadCallback()
    run_trainer(build("qwen3_moe"), tmp_path, [Reporter(), callback], max_steps=STEPS)
    expected = [
        {
            "train/global_step": entry["step"],
            **{
                f"{load_reports.HISTOGRAMS}/{name}": ("histogram", rows)
                for name, rows in entry["rows_per_expert"].items()
            },
        }
        for entry in callback.history
    ]
    assert logged == (expected if is_running else [])
