"""Small steps under `attach`: how busy the GPU is, said once, and attention for lengths that vary."""

import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers.marks import rest_pinned
from helpers.models import batch, patched
from helpers.training import arguments, trainer_for
from transformers import TrainerState

import sonicmoe_hf
from sonicmoe_hf.compiling import small_steps
from sonicmoe_hf.compiling.small_steps import LOGITS_BYTES, OBSERVED, SmallSteps
from sonicmoe_hf.trainer.methods import find_callback


@pytest.fixture(autouse=True)
def cudnn_is_on():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    ("lengths", "is_off", "compiled"),
    [
        (range(100, 100 + OBSERVED), True, None),
        ([128] * OBSERVED, False, None),  # one length
        ([64, 128] * (OBSERVED // 2), False, None),  # lengths that come again
        (range(20000, 20000 + OBSERVED), False, None),  # attention itself takes longer
        (range(100, 100 + OBSERVED // 2), False, None),  # not known yet
        ([64, 128], True, "layers"),  # the second is compiled for any length
        ([64, 128], True, "model"),
        ([128, 128], False, "layers"),
    ],
)
def test_cudnns_attention_is_off_until_the_end_where_short_lengths_vary(lengths, is_off, compiled, tmp_path):
    callback, model = SmallSteps(), patched("qwen3_moe")
    args = arguments(tmp_path, torch_compile=compiled == "model")
    if compiled == "layers":
        sonicmoe_hf.compile_layers(model)
    callback.on_train_begin(args, TrainerState(), None, model=model)
    for length in lengths:
        callback.note({"input_ids": torch.empty(1, length, dtype=torch.int64, device="meta")})
    assert torch.backends.cuda.cudnn_sdp_enabled() != is_off
    callback.on_train_begin(args, TrainerState(), None, model=model)  # again, with auto_find_batch_size
    assert torch.backends.cuda.cudnn_sdp_enabled()
    callback.end()
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.pinned
@pytest.mark.parametrize(("compiled", "marked"), [(True, [1]), (False, [])])
def test_compiled_layers_take_packed_rows_of_any_length(compiled, marked, tmp_path):
    """Their routers read which tokens are no padding beside their arguments, so torch 2.11 needs that marked too."""
    callback, model, mask = SmallSteps(), patched("qwen3_moe"), torch.ones(1, 16)
    callback.on_train_begin(arguments(tmp_path, torch_compile=compiled), TrainerState(), None, model=model)
    with mock.patch.object(small_steps, "mark_as_any_size") as mark:
        callback.expect(model, [], [mask])
    assert [(call.args[0] is mask, call.args[1]) for call in mark.mock_calls] == [(True, dim) for dim in marked]


def test_a_run_that_fails_puts_attention_back(tmp_path, monkeypatch):
    trainer = trainer_for(patched("qwen3_moe"), tmp_path, max_steps=OBSERVED + 1, count=64)
    sonicmoe_hf.attach(trainer)
    sonicmoe_hf.attach(trainer)
    callback = find_callback(trainer, SmallSteps)
    assert sum(isinstance(each, SmallSteps) for each in trainer.callback_handler.callbacks) == 1
    seen = []

    def note(inputs):
        seen.append(inputs["input_ids"].shape[1])
        SmallSteps.note(callback, {"input_ids": inputs["input_ids"][:, : len(seen)]})
        if len(seen) > OBSERVED:
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            raise KeyboardInterrupt

    monkeypatch.setattr(callback, "note", note)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(seen) == OBSERVED + 1 and torch.backends.cuda.cudnn_sdp_enabled()


def test_ligers_loss_has_larger_chunks_while_the_trainer_trains(tmp_path):
    """Through Liger's own forward of Qwen3-MoE, whose kernels need a GPU: its loss is replaced by one that notes."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe
    from liger_kernel.transformers.model import qwen3_moe as liger

    noted, got = [], []

    def loss(hidden_states, lm_head_weight, labels, **options):
        noted.append(options.get("chunk_mem_const"))
        return (hidden_states @ lm_head_weight.T).square().mean()

    model = patched("qwen3_moe")
    apply_liger_kernel_to_qwen3_moe(rope=False, rms_norm=False, swiglu=False, model=model)
    model.model.layers[0].register_forward_pre_hook(lambda _, args, options: got.extend(options), with_kwargs=True)
    trainer = trainer_for(model, tmp_path, max_steps=1)
    sonicmoe_hf.attach(trainer)
    with mock.patch.object(liger, "LigerForCausalLMLoss", loss):
        trainer.train()
        rows, columns = trainer.train_dataset[0]["input_ids"].shape[0], trainer.args.per_device_train_batch_size
        model.train()(**{name: column[None] for name, column in trainer.train_dataset[0].items()})
    assert noted == [LOGITS_BYTES // (2 * rows * columns * model.config.hidden_size), None]
    assert got and "chunk_mem_const" not in got  # compiled layers would be compiled again for each size


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
    callback, args = SmallSteps(), SimpleNamespace(device=torch.device("cuda", 0), gradient_accumulation_steps=1)
    model = None
    if hook is not None:
        torch._dynamo.reset()
        model = patched("qwen3_moe", num_hidden_layers=1, use_cache=False)
        model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: torch._dynamo.graph_break("of a test"))
        sonicmoe_hf.compile_layers(model, backend="eager")
        with pytest.warns(UserWarning, match="left a part of Qwen3MoeDecoderLayer to Python"):
            model(**batch())
    caplog.clear()
    callback.on_train_begin(args, TrainerState(global_step=100), None, model=model)  # resumed
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
        (1, [16], {}, [small_steps.COMPILE]),
        (1, [16, 17], {}, [small_steps.FEW_LENGTHS]),  # compiled layers gain nothing there
        (1, [16, 17], {"few_lengths": True}, []),
        (1, [16], {"is_compiled": True}, []),
        (4, [16, 17], {}, [small_steps.PACK, small_steps.COMPILE]),
        (4, [16, 17], {"is_packed": True}, [small_steps.COMPILE]),
        (4, [16, 17], {"is_packed": True, "is_compiled": True}, []),
    ],
)
def test_the_advice_names_the_switch_for_the_runs_lengths(accumulated, lengths, settings, switches):
    callback, args = SmallSteps(), SimpleNamespace(gradient_accumulation_steps=accumulated)
    vars(callback).update(settings, shapes={(2, length) for length in lengths})
    assert callback._switches(args, patched("qwen3_moe")) == "; ".join([*switches, small_steps.LARGER])
