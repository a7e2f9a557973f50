"""torch's cache on disk: the graphs of layers that were compiled before are taken from it."""

import pytest
import torch
from helpers.adapters import with_lora
from helpers.models import batch, loss_and_gradients, patched
from helpers.training import checkpointed
from torch._dynamo.utils import counters
from torch._inductor import config

import sonicmoe_hf


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "has_adapters", "kind"), [("nf4", True, "non_reentrant"), (None, False, None)]
)
def test_a_second_start_takes_compiled_layers_from_torchs_cache(
    quantization, has_adapters, kind, tmp_path, monkeypatch
):
    """Also in torch 2.11, whose cache passes by graphs with a function that it does not know."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        model = patched("qwen3_moe", use_cache=False, num_hidden_layers=1, hidden_size=64, moe_intermediate_size=64)
        if quantization is not None:
            sonicmoe_hf.quantize_experts(model, quantization)
        if has_adapters:
            model = with_lora(model)
            model.enable_input_require_grads()
        sonicmoe_hf.compile_layers(checkpointed(model, kind))
        with config.patch(fallback_by_default=True):  # torch's own kernels, so that no C++ compiler runs
            loss_and_gradients(model, batch())
        found.append([counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "saved", "bypass")])
    assert found == [[0, 1, 0], [1, 0, 0]]
