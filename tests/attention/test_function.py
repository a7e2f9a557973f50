"""torch_sinks as a function of tensors, beside the definition; and both functions where Transformers is not installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.models import relative_error

import sonicmoe_hf

ROOT = Path(sonicmoe_hf.__file__).resolve().parents[1]
WITHOUT_TRANSFORMERS = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "peft", "accelerate", "huggingface_hub", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else find_spec(name, *rest)
source = open(sys.argv[1]).read().split("```python")[1].split("```")[0]
exec(source)
import sonicmoe_hf
assert sonicmoe_hf.TokenRounding(tile=8).tile == 8 and "transformers" not in sys.modules
try:
    sonicmoe_hf.patch_model
except ModuleNotFoundError as error:
    print(error)
"""


def by_definition(query, key, value, sinks, causal, window):
    groups = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(groups, 2) for x in (key, value))
    scores = torch.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
    queries = torch.arange(scores.shape[-1] - scores.shape[-2], scores.shape[-1])[:, None]
    distance = queries - torch.arange(scores.shape[-1])
    if causal:
        scores = scores.masked_fill((distance < 0) | (distance >= (window or 10**6)), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1)[..., : key.shape[1]], value)


@pytest.mark.parametrize(
    "causal, window, queries, has_sinks",
    [(True, None, 9, True), (True, 3, 9, True), (True, 4, 5, True), (False, None, 9, True), (True, None, 9, False)],
)
def test_it_is_attention_with_one_more_logit(causal, window, queries, has_sinks):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, queries, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (4,)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    inputs = (*tensors[:3], tensors[3] if has_sinks else None)
    found = sonicmoe_hf.torch_sinks(*inputs, causal=causal, window=window)
    expected = by_definition(*inputs, causal, window)
    assert relative_error(found, expected) < 1e-12, "fp64: another order of sums"
    needed = [each for each in inputs if each is not None]
    of_found, of_expected = (torch.autograd.grad(out.square().sum(), needed) for out in (found, expected))
    assert all(relative_error(one, other) < 1e-12 for one, other in zip(of_found, of_expected))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"query": torch.zeros(2, 9, 8)}, r"query, key and value are \[B, T, H, D\]"),
        ({"key": torch.zeros(2, 9, 3, 8)}, "do not fit query"),
        ({"key": torch.zeros(2, 9, 4, 4)}, "do not fit query"),
        ({"key": torch.zeros(2, 9, 4, 16)}, "do not fit query"),
        ({"sinks": torch.zeros(3)}, "one for each of the 4 heads"),
        ({"window": 0}, "window is 0"),
        ({"window": 2, "causal": False}, "window is 2; it counts keys of a causal query"),
        ({"query": torch.zeros(2, 9, 4, 8, device="meta")}, "query on meta"),
    ],
)
def test_what_does_not_fit_is_an_error(change, words):
    zeros = torch.zeros(2, 9, 4, 8)
    given = {"query": zeros, "key": zeros, "value": zeros, "sinks": torch.zeros(4), **change}
    with pytest.raises(ValueError, match=words):
        sonicmoe_hf.torch_sinks(**given)


@pytest.mark.slow
@pytest.mark.pinned
def test_the_document_on_kernels_runs_where_transformers_is_not_installed():
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(ROOT / "docs" / "kernels.md")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    gradients, error = done.stdout.splitlines()
    assert gradients == "torch.Size([8, 64, 64]) torch.Size([4])" and "No module named 'transformers'" in error
