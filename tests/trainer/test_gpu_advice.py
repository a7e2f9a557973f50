"""Advice after ten steps under `attach`: how busy the GPU is, said once, and what helps."""

import logging
from types import SimpleNamespace

import pytest
import torch
from helpers.marks import rest_pinned
from helpers.models import batch, patched
from transformers import TrainerState

import sonicmoe_hf
from sonicmoe_hf.trainer import gpu_advice
from sonicmoe_hf.trainer.gpu_advice import GpuAdvice
from sonicmoe_hf.trainer.lengths import VaryingLengths


@pytest.mark.parametrize(
    ("busy", "is_said", "hook"),
    rest_pinned([(35, True, None), (90, False, None), (None, False, None), (35, True, "compiled")], 3),
)
def test_the_tenth_step_says_how_busy_the_gpu_is_and_what_helps(busy, is_said, hook, monkeypatch, caplog):
    """The message names the layers that torch left to Python, why, and what to do."""

    def utilization(device):
        if busy is None:
            raise ModuleNotFoundError("pynvml")
        return busy

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("sonicmoe_hf"), "propagate", True)
    lengths = VaryingLengths()
    callback, args = GpuAdvice(lengths), SimpleNamespace(device=torch.device("cuda", 0), gradient_accumulation_steps=1)
    model = None
    if hook is not None:
        torch._dynamo.reset()
        model = patched("qwen3_moe", num_hidden_layers=1, use_cache=False)
        model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: torch._dynamo.graph_break("of a test"))
        sonicmoe_hf.compile_layers(model, backend="eager")
        with pytest.warns(UserWarning, match="left a part of Qwen3MoeDecoderLayer to Python"):
            model(**batch())
    caplog.clear()
    for each in (lengths, callback):
        each.on_train_begin(args, TrainerState(global_step=100), None, model=model)  # resumed
    for step in range(101, 113):
        callback.on_step_end(args, TrainerState(global_step=step), None, model=model)
        said = [record for record in caplog.records if not record.name.startswith("torch")]
        assert len(said) == int(is_said and step >= 110)
    if is_said:
        assert "busy 35% of the time" in caplog.text
        remedies = ["torch_compile=True", "take that out of the layer"]
        assert [remedy in caplog.text for remedy in remedies] == [hook is None, hook is not None]


@pytest.mark.pinned
@pytest.mark.parametrize(
    ("accumulated", "lengths", "settings", "switches"),
    [
        (1, [16], {}, [gpu_advice.COMPILE]),
        (1, [16, 17], {}, [gpu_advice.FEW_LENGTHS]),  # compiled layers gain nothing there
        (1, [16, 17], {"few_lengths": True}, []),
        (1, [16], {"is_compiled": True}, []),
        (4, [16, 17], {}, [gpu_advice.PACK, gpu_advice.COMPILE]),
        (4, [16, 17], {"is_packed": True}, [gpu_advice.COMPILE]),
        (4, [16, 17], {"is_packed": True, "is_compiled": True}, []),
    ],
)
def test_the_advice_names_the_switch_for_the_runs_lengths(accumulated, lengths, settings, switches):
    observed, args = VaryingLengths(), SimpleNamespace(gradient_accumulation_steps=accumulated)
    vars(observed).update(settings, shapes={(2, length) for length in lengths})
    assert GpuAdvice(observed)._switches(args, patched("qwen3_moe")) == "; ".join([*switches, gpu_advice.LARGER])
