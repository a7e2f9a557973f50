"""What a step of a patched model costs in Python: at small batches a GPU waits for it."""

import sys
from pathlib import Path

import torch
from helpers.models import batch, patched

import sonicmoe_hf

PACKAGE = Path(sonicmoe_hf.__file__).parent
LIMIT = 150  # of two layers; before calls and experts were made lighter it was 238


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


def test_an_ordinary_step_of_two_layers_makes_few_python_calls():
    model, inputs = patched("qwen3_moe", use_cache=False), batch()
    for _ in range(2):  # the first call checks the model
        model(**inputs).loss.backward()
    calls = Calls()
    sys.setprofile(calls)
    try:
        model(**inputs).loss.backward()
    finally:
        sys.setprofile(None)
    assert torch.is_grad_enabled() and 30 < calls.count <= LIMIT, calls.count
