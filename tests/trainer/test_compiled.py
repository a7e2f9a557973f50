"""A Trainer's torch_compile after `attach`: the layers are compiled on their own, with Liger's kernels too."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from helpers.adapters import with_lora
from helpers.marks import rest_slow
from helpers.models import build_patched
from helpers.said import says, silent
from helpers.training import CHECKPOINTED_TRAINING, Examples, advise, arguments, trainer_for
from torch._dynamo.utils import counters
from transformers import Trainer, TrainerState

import sonicmoe_hf
from sonicmoe_hf.compiling import layers
from sonicmoe_hf.trainer import compiled
from sonicmoe_hf.trainer.compiled import CompiledLayers
from sonicmoe_hf.trainer.methods import find_callback
from sonicmoe_hf.trainer.packed_steps import PackedSteps

ONE_LAYER = {"num_hidden_layers": 1, "use_cache": False}
EAGER = {"torch_compile_backend": "aot_eager"}


def losses(model, folder, compile=None, **options):
    """Train with adapters under checkpointing: (the Trainer, the losses of two steps)."""
    torch._dynamo.reset()
    counters.clear()
    options = {"max_steps": 2, "logging_nan_inf_filter": False, **CHECKPOINTED_TRAINING["non_reentrant"], **options}
    trainer = trainer_for(model, folder, padding=True, **options)
    sonicmoe_hf.attach(trainer, compile=compile)
    trainer.train()
    return trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def lora_model():
    return with_lora(build_patched("qwen3_moe", **ONE_LAYER))


# of Liger what runs on a CPU because it is compiled: RoPE, in the layers alone
LIGER = {"use_liger_kernel": True}
LIGER |= {"liger_kernel_config": {"fused_linear_cross_entropy": False, "rms_norm": False}}


@pytest.mark.parametrize("liger", rest_slow([LIGER, {}]), ids=["Liger", "no Liger"])
def test_torch_compile_compiles_layers_and_no_whole_model(liger, tmp_path, monkeypatch):
    """The advice on a GPU that waits names it, and no longer where layers are compiled."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 35)
    advice = "attach(trainer, compile=True) or `sonicmoe-hf run --compile`, which compile each layer"
    before = dict(vars(modeling_qwen3_moe))
    try:
        trainer, expected = losses(lora_model(), tmp_path)
        assert not counters["stats"]
        with says(advice):
            advise(trainer)
        with says("attach(trainer, compile=False) leaves torch_compile to the Trainer"):
            trainer, found = losses(lora_model(), tmp_path, **EAGER, **liger)
        with says("What helps"), silent(advice):
            advise(trainer)
    finally:
        vars(modeling_qwen3_moe).update(before)
    assert found == pytest.approx(expected, rel=1e-5)  # fp32: another order of sums, after an update
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    assert trainer.model_wrapped is trainer.model, "not compiled as a whole"
    assert trainer.accelerator.state.dynamo_plugin.backend == "AOT_EAGER", "as it is for Trainers without attach"


@pytest.mark.parametrize(
    ("given", "compile", "expected"),
    [
        ({}, None, None),
        ({}, True, {}),
        ({"torch_compile": True}, None, {"backend": "inductor"}),
        ({"torch_compile_mode": "reduce-overhead"}, None, {"backend": "inductor", "mode": "reduce-overhead"}),
        ({"torch_compile": True}, False, None),
    ],
)
def test_what_is_compiled_follows_the_arguments_and_attach(given, compile, expected, tmp_path):
    model = build_patched("qwen3_moe")
    trainer = Trainer(model, arguments(tmp_path, **given), train_dataset=Examples(4))
    sonicmoe_hf.attach(trainer, compile=compile)
    sonicmoe_hf.attach(trainer)  # as `sonicmoe-hf run` does of a program that attaches by itself
    callback = trainer.callback_handler.callbacks[0]
    assert callback is find_callback(trainer, CompiledLayers), "before those that look whether anything is compiled"
    with mock.patch.object(compiled, "compile_layers", return_value=2) as compile_layers:
        callback.on_train_begin(trainer.args, TrainerState(), None, model=model)
    assert compile_layers.mock_calls == ([] if expected is None else [mock.call(model, **expected)])
    prepared = trainer.accelerator.prepare_model(model)
    assert hasattr(prepared, "_orig_mod") is (bool(given) and expected is None)


def test_a_trainer_that_compiles_layers_can_still_be_left_to_compile_the_whole_model(tmp_path):
    model = build_patched("qwen3_moe")
    trainer = Trainer(model, arguments(tmp_path, torch_compile=True), train_dataset=Examples(4))
    sonicmoe_hf.attach(trainer)
    sonicmoe_hf.attach(trainer, compile=False)
    assert hasattr(trainer.accelerator.prepare_model(model), "_orig_mod")


@pytest.mark.parametrize(
    ("given", "has_gpu", "times"),
    [
        ({}, True, 1),
        ({"torch_compile_backend": "aot_eager"}, True, 0),
        ({}, False, 0),
        ({"torch_compile": False}, True, 0),
    ],
)
def test_processes_that_compile_begin_before_training(given, has_gpu, times, tmp_path, monkeypatch):
    trainer = Trainer(
        build_patched("qwen3_moe"), arguments(tmp_path, **{"torch_compile": True, **given}), train_dataset=Examples(4)
    )
    monkeypatch.setattr(layers, "begin_compile_workers", begin := mock.Mock())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    sonicmoe_hf.attach(trainer)
    assert begin.call_count == times


@pytest.mark.slow
def test_inductors_processes_are_ready_without_a_graph():
    """Inductor compiles kernels one by one until its processes are ready, and begins them by
    itself at the first graph."""
    code = "from sonicmoe_hf.private.torch import begin_compile_workers; begin_compile_workers()\n"
    code += "from torch._inductor.async_compile import AsyncCompile; future = AsyncCompile._ready_future\n"
    code += "assert future.result(timeout=500) == 'ready' and AsyncCompile.use_process_pool()"
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.pinned
@pytest.mark.parametrize(
    ("packed_tokens", "lengths"),
    [(False, [20, 17, 19, 24]), (None, [20, 17, 19, 24, 8, 8, 4, 4])],
    ids=["micro-batches", "rows"],
)
def test_layers_of_a_run_with_lengths_are_compiled_once_for_all(packed_tokens, lengths, tmp_path):
    """torch by itself compiles for the first length, and again for any, as Transformers 5.17 has it do here too. The
    row of the last step has as many tokens as H."""
    torch._dynamo.reset()
    counters.clear()
    steps, lengths = len(lengths) // 2, iter(lengths)

    def collate(rows):
        length = next(lengths)
        return {name: torch.stack([row[name] for row in rows])[:, :length].contiguous() for name in rows[0]}

    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": steps, **EAGER}
    trainer = trainer_for(lora_model(), tmp_path, padding=True, **CHECKPOINTED_TRAINING["non_reentrant"], **options)
    trainer.data_collator = collate
    sonicmoe_hf.attach(trainer, packed_tokens=packed_tokens)
    trainer.train()
    assert find_callback(trainer, PackedSteps).has_rows is (packed_tokens is None)
    assert next(lengths, None) is None and counters["stats"]["unique_graphs"] == 1
