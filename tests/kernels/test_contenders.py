"""The benchmarks' contenders compute the layer that they are compared on: those that run on a
CPU, Liger's interpreted."""

import importlib
import sys

import pytest
import torch

from benchmarks.common.contenders import CONTENDERS
from benchmarks.common.measuring import relative_errors
from benchmarks.common.shapes import Shape, problem
from benchmarks.layer.moe_layer import step_of

pytestmark = pytest.mark.pinned


@pytest.fixture
def interpreted_liger(monkeypatch):
    """Import Liger's experts as the kernels' tests import ours; what other tests see of them stays as it was."""
    ops = pytest.importorskip("liger_kernel.ops")
    monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "0")
    for name in ("fused_moe_kernels", "fused_moe"):
        monkeypatch.setattr(ops, name, None, raising=False)
        monkeypatch.setitem(sys.modules, f"liger_kernel.ops.{name}", None)
        del sys.modules[f"liger_kernel.ops.{name}"]
        importlib.import_module(f"liger_kernel.ops.{name}")


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "Liger"])
def test_a_contender_computes_the_layer_and_its_gradients(name, request):
    if name == "Liger":
        request.getfixturevalue("interpreted_liger")
    shape = Shape(6, 32, 32, 3, 2)
    inputs = problem(shape, torch.float32, "cpu")
    layer = CONTENDERS[name](shape)
    errors = relative_errors(step_of(layer, inputs, "forward+backward"), inputs)
    assert len(errors) == 5 and max(errors.values()) < 1e-6  # sums in another order
