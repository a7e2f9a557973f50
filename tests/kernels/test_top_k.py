"""A router's top-k in Triton, interpreted on a CPU (or run, where there is a GPU), and routers that use it."""

import copy
import pickle

import pytest
import torch
from helpers.marks import rest_slow
from helpers.models import CONFIGS, batch, build, loss_and_gradients, relative_error

import sonicmoe_hf
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.layer import backends
from sonicmoe_hf.patching import fast_topk

SIZES = {"odd": (37, 5, 3), "all of them": (9, 3, 3), "one": (4, 1, 1), "many": (300, 128, 8), "most": (40, 300, 32)}


def first_of_equals(scores, k):
    """The definition: highest first, of equal ones the first."""
    return scores.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]


@pytest.mark.parametrize("size", rest_slow(SIZES, 4))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_it_takes_the_highest(device, size, dtype):
    num_tokens, num_experts, k = SIZES[size]
    torch.manual_seed(0)
    logits = torch.randn(num_tokens, num_experts, device=device)
    rounded = (4 * logits).round() / 4  # ties, zeros of both signs among them
    some = torch.where(torch.rand_like(logits) < 0.5, logits, float("-inf"))
    some[::3, 0], some[1::3, -1] = float("inf"), float("nan")
    for scores in (logits, logits.softmax(-1), rounded, some, torch.zeros_like(logits)):
        scores = scores.to(dtype)
        assert torch.equal(kernels.top_k(scores, k), first_of_equals(scores, k))
    transposed = logits.t().contiguous().t()
    assert torch.equal(kernels.top_k(transposed, k), first_of_equals(logits, k))


def test_no_tokens(device):
    assert kernels.top_k(torch.empty(0, 8, device=device), 2).shape == (0, 2)


@pytest.fixture
def for_any_size(monkeypatch):
    """As on a GPU, and for few tokens too; counts how often it is used."""
    used = []

    def top_k_of(scores, k):
        used.append(tuple(scores.shape))
        return kernels.top_k(scores, k)

    class Backends:
        choose = staticmethod(lambda device, dtype: backends.Choice("triton", ""))
        load = staticmethod(lambda name: type("Kernels", (), {"top_k": staticmethod(top_k_of)}))

    monkeypatch.setattr(fast_topk, "backends", Backends)
    monkeypatch.setattr(fast_topk, "FEWEST_ROWS", 1)
    return used


def test_values_and_gradients_are_those_of_torch(device, for_any_size):
    torch.manual_seed(0)
    scores = torch.randn(6, 4, 16, device=device).requires_grad_()
    slope = torch.randn(6, 4, 3, device=device)
    expected = scores.topk(3)
    with fast_topk.FastTopK():
        found = scores.topk(3, dim=-1)
        same = torch.topk(scores, k=3)[1]
    assert for_any_size == [(24, 16)] * 2
    assert torch.equal(found.values, expected.values) and torch.equal(found.indices, expected.indices)
    assert torch.equal(same, expected.indices)
    gradients = [torch.autograd.grad((t.values * slope).sum(), scores)[0] for t in (found, expected)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "arguments",
    [{"k": 3, "largest": False}, {"k": 2, "dim": 0}, {"k": 40}, {"k": 0}],
    ids=("lowest", "columns", "many", "none"),
)
def test_what_it_does_not_do_is_left_to_torch(device, for_any_size, arguments):
    scores = torch.randn(8, 50, device=device)
    expected = torch.topk(scores, **arguments)
    with fast_topk.FastTopK():
        found = torch.topk(scores, **arguments)
    assert not for_any_size
    assert all(map(torch.equal, found, expected))


def test_other_dtypes_and_few_rows_are_left_to_torch(device, monkeypatch):
    rows = fast_topk.FEWEST_ROWS
    monkeypatch.setattr(fast_topk, "backends", None)
    with fast_topk.FastTopK():
        torch.topk(torch.randn(rows, 8, device=device, dtype=torch.float64), 2)
        torch.topk(torch.randint(99, (rows, 8), device=device), 2)
        torch.topk(torch.randn(rows - 1, 8, device=device), 2)
        with pytest.raises(AttributeError, match="choose"):
            torch.topk(torch.randn(rows, 8, device=device), 2)


@pytest.mark.parametrize("family", CONFIGS)
def test_patched_routers_use_it_and_nothing_changes(family, for_any_size):
    model, inputs = build(family), batch()
    sonicmoe_hf.patch_model(model)
    routers = {
        id(m)
        for m in model.modules()
        if any(isinstance(h, fast_topk.FastTopKEntry) for h in m._forward_pre_hooks.values())
    }
    assert routers
    found = loss_and_gradients(model, inputs)
    assert len(for_any_size) >= len(routers)
    sonicmoe_hf.unpatch_model(model)
    for_any_size.clear()
    expected = loss_and_gradients(model, inputs)
    assert not for_any_size
    for name in expected:
        assert relative_error(found[name], expected[name]) < 1e-5, name


def test_copies_and_errors_leave_no_mode_on(for_any_size):
    model, inputs = build("qwen3_moe"), batch()
    sonicmoe_hf.patch_model(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        used = len(for_any_size)
        other(**inputs)
        assert len(for_any_size) > used
    first, second = (layer.mlp.gate for layer in model.model.layers)
    x = torch.randn(5, first.weight.shape[1])
    with pytest.raises(RuntimeError):
        first(x[:, 1:])
    second(x)  # a router by itself ends what an error in another one left
    assert torch.overrides._get_current_function_mode() is None
    first.hidden_dim += 1
    with pytest.raises(RuntimeError):
        model(**inputs)
    assert torch.overrides._get_current_function_mode() is None
