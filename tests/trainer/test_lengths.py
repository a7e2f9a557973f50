"""Lengths that vary under `attach`: attention, and compiled layers that take any."""

from unittest import mock

import pytest
import torch
from helpers.models import build_patched
from helpers.training import arguments, trainer_for
from transformers import TrainerState

import sonicmoe_hf
from sonicmoe_hf.trainer import lengths as lengths_module
from sonicmoe_hf.trainer.lengths import OBSERVED, VaryingLengths
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
    callback, model = VaryingLengths(), build_patched("qwen3_moe")
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
    """The layers' routers read which tokens are no padding beside their arguments, so torch
    2.11 needs that marked too."""
    callback, model, mask = VaryingLengths(), build_patched("qwen3_moe"), torch.ones(1, 16)
    callback.on_train_begin(arguments(tmp_path, torch_compile=compiled), TrainerState(), None, model=model)
    with mock.patch.object(lengths_module, "mark_as_any_size") as mark:
        callback.expect(model, [], [mask])
    assert [(call.args[0] is mask, call.args[1]) for call in mark.mock_calls] == [(True, dim) for dim in marked]


def test_a_run_that_fails_puts_attention_back(tmp_path, monkeypatch):
    trainer = trainer_for(build_patched("qwen3_moe"), tmp_path, max_steps=OBSERVED + 1, count=64)
    sonicmoe_hf.attach(trainer)
    sonicmoe_hf.attach(trainer)
    callback = find_callback(trainer, VaryingLengths)
    assert sum(isinstance(each, VaryingLengths) for each in trainer.callback_handler.callbacks) == 1
    seen = []

    def note(inputs):
        seen.append(inputs["input_ids"].shape[1])
        VaryingLengths.note(callback, {"input_ids": inputs["input_ids"][:, : len(seen)]})
        if len(seen) > OBSERVED:
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            raise KeyboardInterrupt

    monkeypatch.setattr(callback, "note", note)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(seen) == OBSERVED + 1 and torch.backends.cuda.cudnn_sdp_enabled()
