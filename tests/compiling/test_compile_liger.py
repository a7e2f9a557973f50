"""Liger's kernels and compiled layers together: what is traced has PyTorch's operations, the rest Liger's.

Liger's kernels need a GPU, so where they are called uncompiled stand-ins compute, and count.
"""

import importlib
import sys
from collections import Counter

import pytest
import torch
from helpers.adapters import with_lora
from helpers.marks import rest_slow
from helpers.models import ORDER_OF_SUMS, assert_all_close, batch, build_patched, loss_and_gradients, twin
from helpers.training import checkpoint_layers
from torch._dynamo.utils import counters

import sonicmoe_hf
from sonicmoe_hf.compiling.layers import why_in_python
from sonicmoe_hf.compiling.liger_tracing import FUNCTIONS
from sonicmoe_hf.private.replaced import put_back

liger = pytest.importorskip("liger_kernel.transformers")
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"]
WITHOUT_LOSS = {"fused_linear_cross_entropy": False}
LIGERS = {
    name: importlib.import_module(f"liger_kernel.transformers.{name}") for name in ("rms_norm", "rope", "swiglu")
}


def put_ligers_back():
    for name, function in FUNCTIONS:
        put_back(sys.modules.get(f"liger_kernel.transformers.{name}"), function)


@pytest.fixture(autouse=True)
def transformers_afterwards_as_before():
    modules = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in FAMILIES]
    before = [dict(vars(module)) for module in modules]
    put_ligers_back()  # what other tests of the process compiled had them replaced
    yield
    for module, names in zip(modules, before):
        vars(module).update(names)
    put_ligers_back()


@pytest.fixture
def uncompiled(monkeypatch):
    """Stand-ins for Liger's kernels, in PyTorch, that count their uncompiled calls, and break the graph as its own do."""
    calls = Counter()

    @torch.compiler.disable
    def stand_in(name, *args, **options):
        calls[name] += 1
        return next(own for (module, _), own in FUNCTIONS.items() if module == name)(*args, **options)

    for name, function in (("rms_norm", "LigerRMSNormFunction"), ("swiglu", "LigerSiLUMulFunction")):
        stand = type(function, (), {"apply": staticmethod(lambda *args, name=name: stand_in(name, *args))})
        monkeypatch.setattr(LIGERS[name], function, stand)
    monkeypatch.setattr(LIGERS["rope"], "dispatch", stand_in)
    return calls


@pytest.mark.parametrize("family", rest_slow(FAMILIES))
def test_compiled_layers_compute_as_transformers_and_the_rest_as_liger(family, uncompiled):
    torch._dynamo.reset()
    counters.clear()
    plain = with_lora(build_patched(family, use_cache=False))
    model = twin(plain)
    for each in (plain, model):
        each.enable_input_require_grads()
        checkpoint_layers(each, "non_reentrant")
    expected = loss_and_gradients(plain, batch(padding=True))
    liger._apply_liger_kernel_to_instance(model=model.base_model.model, **WITHOUT_LOSS)
    sonicmoe_hf.compile_layers(model, backend="aot_eager")
    found = loss_and_gradients(model, batch(padding=True))
    assert_all_close(found, expected, 1e-5, ORDER_OF_SUMS)
    assert not counters["graph_break"] and not why_in_python(model)
    assert uncompiled == {"rms_norm": 1}, "the last norm, which is in no layer"
    uncompiled.clear()
    with torch.no_grad():
        model.eval()(**batch())
    assert uncompiled["rms_norm"] > 1, "evaluation is not compiled"
