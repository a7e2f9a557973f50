"""Hopper kernels compiled ahead of their first use: which, by which process, and what is said meanwhile. Needs no GPU."""

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sonicmoe_hf.kernels.announce import LOCAL_RANKS, QUIET
from sonicmoe_hf.kernels.interface import Activation, Rows
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.tools.cli import warmup_kernels

pytest.importorskip("cutlass")
pytest.importorskip("triton")

from kernel_products import operands

from sonicmoe_hf.kernels import eager, hopper
from sonicmoe_hf.kernels.hopper import cache, compiled
from sonicmoe_hf.kernels.hopper.config import tile
from sonicmoe_hf.kernels.hopper.variants import variants

pytestmark = pytest.mark.pinned

PYTHON = sys.executable


def asked_for(monkeypatch, layout, activation, bias, dtype, H, I, rank=0):
    """List the kernels that the backend's functions ask for, on a CPU with nothing compiled nor launched."""
    found = []

    def note(name):
        return lambda *parameters: found.append((name, parameters))

    for name in ("gemm_up", "gemm_down", "gemm_down_backward", "gemm_wgrad"):
        monkeypatch.setattr(compiled, name, note(name))
    monkeypatch.setattr(cache, "compile_ahead", ahead := mock.Mock())
    monkeypatch.setattr(hopper, "_run_on_its_device", lambda *_: None)
    monkeypatch.setattr(hopper, "triton", SimpleNamespace(routing_gradient=lambda parts, *_: parts))
    T, E, K = 64, 2, 2  # not few rows per expert
    t = operands(T, H, I, E, T * K, layout, rank, dtype=dtype, bias=bias, activation=activation)
    h, a, lora_shrink = (torch.empty(T * K, width, dtype=dtype) for width in (activation.width(I), I, rank))
    lora = {}
    if rank:
        first, second = t.packed(eager)
        lora = {"up": first.term(lora_shrink), "down": second.term(lora_shrink)}
        lora |= {"up_backward_input": first.transposed_term(lora_shrink)}
        lora |= {"down_backward": second.transposed_term(lora_shrink)}
    index = torch.zeros(T * K, dtype=torch.int32)
    rows = Rows(index[: E + 1], index, index, index[: T + 1], index, torch.zeros(T * K, 3, dtype=torch.int32))
    gated = rows, activation, t.interleaved
    for want in ((True, True), (False, True), (True, False)):
        hopper.up(t.x, t.gate_up, t.gate_up_bias, *gated, *want, lora.get("up"))
    hopper.down(a, t.down, t.down_bias, rows, lora.get("down"))
    hopper.up_backward_input(h, t.gate_up, rows, lora.get("up_backward_input"))
    for want in ((True, True, True), (True, False, True), (True, True, False), (True, False, False)):
        hopper.down_backward(t.dout, t.down, t.down_bias, h, t.weight, *gated, *want, lora.get("down_backward"))
    hopper.gate_up_gradient(h, t.x, rows, t.gate_up)
    hopper.down_gradient(t.dout, a, rows, t.down)
    return found, [call.args[0] for call in ahead.call_args_list]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("bias", "I"), [(False, 192), (True, 192), (False, 768)]
)  # the last's up_backward_input is deep
@pytest.mark.parametrize("name", ["clamped_swiglu", "relu2"])
def test_warming_up_compiles_what_a_layer_asks_for_and_no_more(monkeypatch, layout, bias, I, name):
    """A layer asks for the tiles of any number of rows at once, so that another compiles nothing."""
    act, H = Activation(name), 256
    found, ahead = asked_for(monkeypatch, layout, act, bias, torch.bfloat16, H, I)
    expected = variants(H, I, torch.bfloat16, act, *LAYOUTS[layout], bias)
    assert {repr(kernel) for kernel in found} == {repr(kernel) for kernel in expected}  # the file is found by its repr
    of_training, of_inference, of_repeating = ahead
    assert of_inference == [] and of_training == of_repeating
    seldom = [kernel for kernel in found if kernel[0] == "gemm_up"]
    seldom += [kernel for kernel in found if kernel[0] == "gemm_down_backward" and not all(kernel[1][4:7])]
    assert {repr(kernel) for kernel in of_training} == {repr(kernel) for kernel in found if kernel not in seldom}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_with_adapters_asks_for_kernels_of_their_rank(monkeypatch, layout):
    """The layer compiles ahead what a step with frozen experts asks for, too."""
    act = Activation("swiglu")
    found, (of_training, of_inference, _) = asked_for(
        monkeypatch, layout, act, True, torch.bfloat16, 256, 192, rank=16
    )
    expected = variants(256, 192, torch.bfloat16, act, *LAYOUTS[layout], True, rank=16)
    assert {repr(kernel) for kernel in found} == {repr(kernel) for kernel in expected}
    assert all(parameters[-2] == 16 for name, parameters in found if name != "gemm_wgrad")
    assert of_inference == [] and {name for name, _ in of_training} == {"gemm_down", "gemm_down_backward"}
    assert {repr(kernel) for kernel in of_training} <= {repr(kernel) for kernel in found}


def small_gradients():
    return [("gemm_wgrad", (torch.bfloat16, 128, 128, across, tile("gemm_wgrad", 128))) for across in (False, True)]


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Make a process that no launcher started, with three CPUs and an empty cache."""
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))


@pytest.fixture
def begun(monkeypatch, alone):
    """Replace Popen by a mock that fails, so that no other process begins."""
    monkeypatch.setattr(subprocess, "Popen", begun := mock.Mock(side_effect=OSError))
    return begun


@pytest.mark.slow
@pytest.mark.parametrize("interpreter", (PYTHON, "/bin/false", "/nowhere", "hangs"))
def test_kernels_come_from_other_processes_or_are_compiled_here(tmp_path, monkeypatch, alone, interpreter):
    if interpreter == "hangs":
        (tmp_path / interpreter).write_text("#!/bin/sh\nexec sleep 600\n")
        (tmp_path / interpreter).chmod(0o755)
        monkeypatch.setattr(cache, "MAX_WAIT_SECONDS", 0.5)
        interpreter = str(tmp_path / interpreter)
    monkeypatch.setattr(sys, "executable", interpreter)
    monkeypatch.setattr(cache, "_save", save := mock.Mock(wraps=cache._save))
    cache.compile_ahead(small_gradients())
    for name, parameters in small_gradients():
        assert callable(getattr(compiled, name).__wrapped__(*parameters))  # past what this process has already
    assert save.call_count == (0 if interpreter == PYTHON else 2)
    assert len(list(tmp_path.glob("hopper/*.o"))) == 2
    assert all(process.poll() is not None for process in cache._pending.values() if interpreter != PYTHON)


@pytest.mark.parametrize(
    ("kernels", "fewest", "cpus", "variables", "times"),
    [
        (1, 2, 9, {}, 0),
        (1, 1, 9, {}, 1),
        (2, 2, 2, {}, 0),
        (2, 1, 2, {}, 1),
        (2, 1, 1, {}, 0),
        (0, 1, 9, {}, 0),
        (2, 2, 9, {"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 0),
        *((2, 1, 9, {name: "1"}, 0) for name in LOCAL_RANKS),
        (2, 2, 3, {}, 1),
        (2, 2, 3, {"LOCAL_RANK": "0", "SLURM_LOCALID": "5"}, 1),
        (2, 2, 3, {"SLURM_LOCALID": "0"}, 1),
    ],
)
def test_the_first_rank_begins_for_all_unless_there_is_little(
    monkeypatch, begun, kernels, fewest, cpus, variables, times
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cpus))
    cache.compile_ahead(small_gradients()[:kernels], fewest)
    assert begun.call_count == times


def test_what_is_compiled_is_said_once_and_not_where_bars_are_off(tmp_path, monkeypatch, begun, capsys):
    monkeypatch.delenv(QUIET, raising=False)
    cache.compile_ahead(small_gradients())
    said = capsys.readouterr().err
    name = small_gradients()[0][0]
    assert f"compiling 2 Hopper kernels ({name})" in said and cache.USUAL_TIME in said and str(tmp_path) in said
    monkeypatch.setenv(QUIET, "1")
    cache.compile_ahead(small_gradients())
    monkeypatch.delenv(QUIET)
    monkeypatch.setenv("LOCAL_RANK", "1")
    cache.compile_ahead(small_gradients())
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(cache, "is_intact", lambda path: True)
    cache.compile_ahead(small_gradients())
    assert not capsys.readouterr().err


def test_nothing_is_compiled_ahead_for_a_folder_that_others_can_write_to(tmp_path, monkeypatch, begun):
    (tmp_path / "mine" / "hopper").mkdir(parents=True)
    (tmp_path / "mine" / "hopper").chmod(0o777)
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "mine"))
    cache.compile_ahead(small_gradients())
    begun.assert_not_called()
    with pytest.raises(ValueError, match="others can write to it"):
        list(warmup_kernels.compile_kernels(small_gradients(), 1))
