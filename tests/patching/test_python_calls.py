"""Python calls in a step of a patched model: at small batches a GPU waits for them."""

import sys
from pathlib import Path

import pytest
import torch
from helpers.adapters import with_lora
from helpers.models import batch, build_patched

import sonicmoe_hf
from sonicmoe_hf.kernels import eager

PACKAGE = Path(sonicmoe_hf.__file__).parent
LIMIT = 122  # of two layers; with the hooks of routing's extras it is 144
FRAMES = 12  # three are torch's and Transformers'; adapters of both weights add one
COMPILED_LIMIT = 78  # with these hooks it is 96


class Calls:
    """Counts calls of the package's Python functions, but for those of the kernels: how many a backend has is its own."""

    def __init__(self):
        self.ours, self.count = {}, 0

    def __call__(self, frame, event, argument):
        if event != "call":
            return
        code = frame.f_code
        if code not in self.ours:
            path = Path(code.co_filename).resolve()
            self.ours[code] = PACKAGE in path.parents and (PACKAGE / "kernels").resolve() not in path.parents
        self.count += self.ours[code]


def calls_of_a_step(model, inputs):
    for _ in range(2):  # the first call checks the model
        model(**inputs).loss.backward()
    calls = Calls()
    sys.setprofile(calls)
    try:
        model(**inputs).loss.backward()
    finally:
        sys.setprofile(None)
    assert torch.is_grad_enabled() and calls.count > 30
    return calls.count


def compiled_layers(model):
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


def test_an_ordinary_step_of_two_layers_makes_few_python_calls():
    assert calls_of_a_step(build_patched("qwen3_moe", use_cache=False), batch()) <= LIMIT


@pytest.mark.parametrize("adapt", [lambda model: model, with_lora], ids=["plain", "with adapters"])
def test_few_frames_lie_between_the_block_and_the_kernels(adapt, monkeypatch):
    frames, up = [], eager.up

    def counted(*arguments, **options):
        frame, count = sys._getframe(1), 1
        while not frame.f_back.f_code.co_filename.endswith("modeling_qwen3_moe.py"):
            frame, count = frame.f_back, count + 1
        frames.append(count)
        return up(*arguments, **options)

    monkeypatch.setattr(eager, "up", counted)
    adapt(build_patched("qwen3_moe", use_cache=False))(**batch())
    assert len(frames) == 2 and max(frames) <= FRAMES + (adapt is with_lora)


def test_compiled_layers_make_fewer_and_call_no_op_of_ours_through_the_dispatcher():
    model, inputs = compiled_layers(build_patched("qwen3_moe", use_cache=False)), batch()
    assert calls_of_a_step(model, inputs) <= COMPILED_LIMIT
    with torch.autograd.profiler.profile() as profiled:
        model(**inputs).loss.backward()
    assert [event.name for event in profiled.function_events if event.name.startswith("sonicmoe_hf::")] == []
