"""Kernels that are compiled ahead while a layer is traced: those that it then launches. Nothing is compiled or launched,
and the layer is on a CPU, which here counts as a GPU."""

import sys
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sonicmoe_hf.layer import ahead, backends
from sonicmoe_hf.layer.moe_experts import LowRank, moe_experts
from sonicmoe_hf.layer.packed_weight import PackedWeight

pytest.importorskip("cutlass")
pytest.importorskip("triton")

from sonicmoe_hf.kernels import hopper
from sonicmoe_hf.kernels.hopper import cache, compiled
from sonicmoe_hf.kernels.listing import TritonLaunch
from sonicmoe_hf.kernels.triton import ahead as triton_ahead
from sonicmoe_hf.kernels.triton import config, launch

pytestmark = pytest.mark.pinned

H, I, E, K, RANK = 256, 128, 2, 2, 8
GEMMS = ("gemm_up", "gemm_down", "gemm_down_backward", "gemm_wgrad")
GEMMS += ("gemm_fp8_up", "gemm_fp8_down", "gemm_fp8_down_backward")
LAYERS = [  # format, rank of the adapters, rows of each expert
    (None, 0, 200),
    (None, RANK, 200),
    *(("nf4", RANK, rows) for rows in (16, 130, 200, 400)),  # read, decoded, kept expanded, expanded
    ("fp8", RANK, 130),
    ("mxfp4", 0, 130),
]


class Noted:
    """The kernels that were asked for ahead, and those that launches asked for."""

    def __init__(self):
        self.ahead, self.launched = set(), set()

    def launch(self, kernel, grid, device, tensors, numbers, constants, options):
        self.launched.add(triton_ahead._key(TritonLaunch(kernel, tensors, numbers, constants, options)))

    def compiler(self, name):
        return lambda *parameters: self.launched.add((name, parameters))


@pytest.fixture
def noted(monkeypatch):
    """Let layers on a CPU choose the Hopper kernels, and note these and Triton's."""
    kernels = Noted()
    monkeypatch.setattr(backends, "_obstacle", lambda name, device, dtype: None)
    monkeypatch.setattr(config, "gpu_kind", lambda device: "hopper")
    monkeypatch.setattr(config, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(ahead, "is_gpu", lambda device: True)
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(cache, "compile_ahead", lambda found, fewest=2: kernels.ahead.update(found))
    monkeypatch.setattr(
        triton_ahead, "compile_ahead", lambda found: kernels.ahead.update(map(triton_ahead._key, found))
    )
    monkeypatch.setattr(launch, "_launch", kernels.launch)
    monkeypatch.setattr(hopper, "_run_on_its_device", lambda *_: None)
    monkeypatch.setattr(hopper, "training_step_kernels", lambda *_: [])
    for module in (config, hopper):
        monkeypatch.setattr(module, "num_sms", lambda device: 132)
    for name in GEMMS:
        monkeypatch.setattr(compiled, name, kernels.compiler(name))
    yield kernels
    forget()


def forget():
    """Forget the choices that this process has made for the kernels."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").startswith("sonicmoe_hf.kernels"):
            for kept in [*vars(module).values()]:
                getattr(kept, "cache_clear", lambda: None)()


def layer(quantize, rank):
    """Make the weights of a layer, packed or to be trained, with their adapters or without."""
    weights, adapters = [], []
    for size_out, size_in, order in ((2 * I, H, "concatenated"), (H, I, "whole")):
        weight = torch.zeros(E, size_out, size_in, dtype=torch.bfloat16)
        if quantize is None:
            weights.append(weight.requires_grad_(not rank))
        else:
            weights.append(PackedWeight.quantize(weight, quantize, order=order))
        a, b = torch.zeros(rank * E, size_in), torch.zeros(size_out, rank * E)
        adapters.append(LowRank(a.requires_grad_(), b.requires_grad_(), 2.0) if rank else None)
    return weights, adapters


CASES = [(*layer, True, False) for layer in LAYERS] + [("nf4", RANK, 130, True, True)]  # of any length
# an uncheckpointed backward decodes between 160 and 320 rows
CASES += [(*layer, False, False) for layer in LAYERS if layer != ("nf4", RANK, 200)]


@pytest.mark.parametrize(("quantize", "rank", "rows", "is_checkpointed", "is_dynamic"), CASES)
def test_a_layer_launches_the_kernels_that_were_compiled_ahead(
    noted, quantize, rank, rows, is_checkpointed, is_dynamic
):
    torch._dynamo.reset()
    (gate_up, down), (gate_up_adapter, down_adapter) = layer(quantize, rank)
    options = {"gate_up_adapter": gate_up_adapter, "down_adapter": down_adapter, "backend": "hopper"}
    options["compute"] = "fp8" if quantize == "fp8" else None

    def experts(*inputs):
        x, weights, index = inputs
        return moe_experts(x, gate_up, down, (index, weights), **options)

    def layer_of(*inputs):
        return checkpoint(experts, *inputs, use_reentrant=False) if is_checkpointed else experts(*inputs)

    x = torch.zeros(rows, H, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.zeros(rows, K, requires_grad=True)
    index = torch.zeros(rows, K, dtype=torch.int64)
    compiled_layer = torch.compile(layer_of, backend="aot_eager", fullgraph=True, dynamic=is_dynamic)
    compiled_layer(x, weights, index).sum().backward()
    for thread in threading.enumerate():
        if thread.name == ahead.THREAD:
            thread.join()
    assert noted.launched == noted.ahead
    names = {key[0] if len(key) == 2 else key[1] for key in noted.launched}
    assert "combine_kernel" in names and any(name.startswith("dispatch_") for name in names)
    assert rows == 16 or {f"gemm_{'fp8_' * (quantize == 'fp8')}{name}" for name in ("up", "down")} <= names
