"""Bars of the long commands: on a terminal's standard error, nowhere else."""

import time

import pytest
from helpers.models import build

import sonicmoe_hf
from sonicmoe_hf.tools.checking.check import Check
from sonicmoe_hf.tools.checking.models import Loading
from sonicmoe_hf.tools.cli import check, warmup
from sonicmoe_hf.tools.cli import main as cli
from sonicmoe_hf.tools.cli.bar import progress
from sonicmoe_hf.tools.cli.warmup_kernels import Outcome

pytestmark = pytest.mark.pinned


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def is_terminal(request, monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if request.param:
        monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes any stream for a terminal
    return request.param


def test_a_bar_has_the_amounts_and_is_drawn_on_terminals_alone(is_terminal, capsys):
    with progress("packing") as move:
        move(2, 3)
    printed = capsys.readouterr()
    assert not printed.out
    assert ("packing" in printed.err and "2/3" in printed.err) if is_terminal else not printed.err


def test_convert_and_merge_draw_bytes(is_terminal, tmp_path, capsys):
    build("qwen3_moe").save_pretrained(tmp_path / "model")
    assert cli.main(["convert", str(tmp_path / "model"), str(tmp_path / "native"), "--layout", "native"]) == 0
    printed = capsys.readouterr()
    assert ("converting" in printed.err) is is_terminal
    assert "converting" not in printed.out and "tensors" in printed.out


def test_warmup_draws_kernels(is_terminal, monkeypatch, tmp_path, capsys):
    outcomes = [Outcome("up", 1.5), Outcome("down", None)]
    monkeypatch.setattr(warmup, "compile_for_layers", lambda kinds, processes: (2, iter(outcomes)))
    monkeypatch.setattr(warmup, "cache_folder", lambda: tmp_path)
    cli.main(["warmup", "--shape", "2048,768"])
    printed = capsys.readouterr()
    assert ("compiling" in printed.err and "2/2" in printed.err) if is_terminal else not printed.err
    assert "up compiled in 1.5 s" in printed.out and "down was there" in printed.out


def test_check_says_what_it_compares(is_terminal, monkeypatch, capsys):
    def compare(base, adapter, folders, loading, say, server):
        say("comparing [1] with the adapter, 3 of 7 readings")
        time.sleep(0.2)  # until the line is drawn again
        return Check(1.0, 40, [])

    monkeypatch.setattr(check, "check_adapter", compare)
    options = dict.fromkeys(Loading._fields)
    for as_json in (False, True):
        assert check.check("base", "adapter", [], as_json, **options) == 0
        printed = capsys.readouterr()
        assert ("[1] with the adapter, 3 of 7" in printed.err) is (is_terminal and not as_json)
        assert "comparing" not in printed.out


def test_packing_the_experts_of_a_model_draws_a_bar(capsys):
    sonicmoe_hf.quantize_experts(build("qwen3_moe", hidden_size=64, moe_intermediate_size=64), "mxfp4")
    assert "Packing experts in mxfp4: 100%" in capsys.readouterr().err
