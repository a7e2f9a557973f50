"""Advice after ten steps under `attach`: how busy the GPU is, said once, and what helps."""

import logging
from types import SimpleNamespace

import pytest
import torch
from helpers.models import build_patched
from transformers import TrainerState

import sonicmoe_hf
from sonicmoe_hf.trainer import gpu_advice
from sonicmoe_hf.trainer.gpu_advice import GpuAdvice
from sonicmoe_hf.trainer.lengths import VaryingLengths
from sonicmoe_hf.trainer.packed_steps import PADDED_FIRST, PackedSteps


@pytest.mark.parametrize(
    ("busy", "is_said"),
    [(35, True), (90, False), (None, False)],
)
def test_the_tenth_step_says_how_busy_the_gpu_is_and_what_helps(busy, is_said, monkeypatch, caplog):

    def utilization(device):
        if busy is None:
            raise ModuleNotFoundError("pynvml")
        return busy

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("sonicmoe_hf"), "propagate", True)
    lengths = VaryingLengths()
    callback = GpuAdvice(lengths, PackedSteps())
    args = SimpleNamespace(device=torch.device("cuda", 0), gradient_accumulation_steps=1)
    caplog.clear()
    for each in (lengths, callback):
        each.on_train_begin(args, TrainerState(global_step=100), None, model=None)  # resumed
    for step in range(101, 113):
        callback.on_step_end(args, TrainerState(global_step=step), None, model=None)
        said = [record for record in caplog.records if not record.name.startswith("torch")]
        assert len(said) == int(is_said and step >= 110)
    if is_said:
        assert "busy 35% of the time" in caplog.text and "torch_compile=True" in caplog.text


@pytest.mark.pinned
@pytest.mark.parametrize(
    ("accumulated", "lengths", "settings", "packing", "switches"),
    [
        (1, [16], {}, {}, [gpu_advice.COMPILE]),
        (1, [16, 17], {}, {}, [gpu_advice.FEW_LENGTHS]),  # compiled layers gain nothing there
        (1, [16, 17], {"few_lengths": True}, {}, []),
        (1, [16], {"is_compiled": True}, {}, []),
        (4, [16, 17], {}, {}, [gpu_advice.PACK, gpu_advice.COMPILE]),
        (4, [16, 17], {}, {"has_rows": True}, [gpu_advice.COMPILE]),
        (4, [16, 17], {"is_compiled": True}, {"has_rows": True}, []),
        (4, [16, 17], {"is_compiled": True}, {"reason": "attention"}, [gpu_advice.FEW_LENGTHS]),
        (4, [16, 17], {"is_compiled": True}, {"reason_of_batches": PADDED_FIRST}, [gpu_advice.FEW_LENGTHS]),
        (4, [16, 17], {"is_compiled": True}, {"reason_of_batches": "they have position_ids too"}, []),
    ],
)
def test_the_advice_names_the_switch_for_the_runs_lengths(accumulated, lengths, settings, packing, switches):
    observed, args = VaryingLengths(), SimpleNamespace(gradient_accumulation_steps=accumulated, world_size=1)
    vars(observed).update(settings, shapes={(2, length) for length in lengths})
    packed_steps = PackedSteps()
    vars(packed_steps).update(packing)
    said = GpuAdvice(observed, packed_steps)._switches(args, build_patched("qwen3_moe"))
    assert said == "; ".join([*switches, gpu_advice.LARGER])


@pytest.mark.pinned
@pytest.mark.parametrize(
    ("shapes", "world_size", "mode", "is_advised"),
    [
        ({(2, 16)}, 1, None, True),
        ({(2, 16), (2, 17)}, 1, None, False),
        ({(2, 16)}, 2, None, False),
        ({(2, 16)}, 1, "reduce-overhead", False),
    ],
)
def test_compiled_layers_of_one_size_could_be_captured(shapes, world_size, mode, is_advised):
    observed, args = VaryingLengths(), SimpleNamespace(gradient_accumulation_steps=1, world_size=world_size)
    observed.is_compiled, observed.shapes = True, shapes
    model = build_patched("qwen3_moe")
    sonicmoe_hf.compile_layers(model, mode=mode, backend=lambda graph, inputs, **options: graph)
    assert (gpu_advice.CAPTURE in GpuAdvice(observed, PackedSteps())._switches(args, model)) == is_advised
