"""The Triton kernels, interpreted on a CPU (or run, where there is a GPU), against the eager backend, kernel by kernel,
and against the reference as a layer."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from helpers.marks import crossed, rest_pinned
from kernel_helpers import errors
from kernel_products import SHAPES, TOLERANCE, check_products
from moe_problems import by_reference, layer, poisoned, routing_ids, run, upcast

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import GATED, UNGATED, Activation
from sonicmoe_hf.kernels.triton.config import max_row_tiles, tile_rows
from sonicmoe_hf.layer import pieces
from sonicmoe_hf.layer.config import LAYOUTS

KINDS = ("top_k", "sentinels", "list")
DISPATCHED = {
    **{name: (T, E, K) for name, (T, _, _, E, K) in SHAPES.items()},
    "most of one launch": (128, 6, 4),
    "several launches": (171, 6, 3),
    "more experts than pairs": (3, 130, 2),
}


LAYERS = [  # backend, layout, activation, shape, routing, what is saved; of the eager backend with gates: tests/layer
    *(("triton", layout, "swiglu", "small", "sentinels", "input") for layout in LAYOUTS),
    *rest_pinned(
        [
            (backend, layout, *case)
            for layout in ("concatenated", "transposed_concatenated")
            for backend in ("eager", "triton")
            for case in (
                ("relu2", "odd", "list", "preactivation"),
                ("silu", "even", "sentinels", "input"),
                ("gelu_tanh", "one row", "top_k", "preactivation"),
            )
        ],
        6,
    ),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", rest_pinned(DISPATCHED, 2))
def test_dispatch_gives_the_rows_of_the_eager_backend(device, shape, kind):
    T, E, K = DISPATCHED[shape]
    expert, token = routing_ids(T, E, K, kind, device)
    with poisoned():
        found = kernels.dispatch(expert.int(), token, T, E, True)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == len(found)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in found)
    expected = eager.dispatch(expert, token, T, E, True)
    for name in expected._fields[:5]:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name

    tile, tiles = tile_rows(expert.numel(), E), []
    offsets = expected.offsets.tolist()
    for e, (start, end) in enumerate(pairwise(offsets)):
        tiles += [[e, row, min(row + tile, end)] for row in range(start, end, tile)]
    table = found.tiles[:-1]
    assert len(table) >= max_row_tiles(expert.numel(), E)
    assert table[: len(tiles)].tolist() == tiles
    assert (table[len(tiles) :, 0] == -1).all()
    assert found.scheduler_state[:2].tolist() == [0, len(tiles)]


def test_dispatch_of_no_pairs_has_no_rows(device):
    rows = kernels.dispatch(torch.empty(0, 2, dtype=torch.long, device=device), None, 0, 4, False)
    assert rows.offsets.tolist() == [0] * 5 and rows.token_offsets.tolist() == [0]
    assert len(rows.tiles) == kernels.tile_table_length(0, 4) and (rows.tiles == -1).all()


@pytest.fixture
def asserting(monkeypatch):
    """Let the interpreter check device-side assertions, as compiled kernels do that ask for it."""
    from triton.runtime.interpreter import interpreter_builder

    if torch.cuda.is_available():
        pytest.skip("a device-side assertion ends a process's use of the GPU: see test_triton_gpu.py")
    options = dataclasses.replace(interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter_builder, "options", options)


@pytest.mark.parametrize("num_tokens", [300, 90], ids=["several launches", "one launch"])
@pytest.mark.parametrize("expert", [-1, 3])
def test_dispatch_asserts_that_experts_are_there(asserting, num_tokens, expert):
    expert_TK = torch.arange(num_tokens * 2).view(-1, 2) % 3
    kernels.dispatch(expert_TK, None, num_tokens, 3, False)
    expert_TK[7] = expert
    with pytest.raises(Exception, match="the routing names an expert that does not exist"):
        kernels.dispatch(expert_TK, None, num_tokens, 3, False)
    assert kernels.dispatch(expert_TK, None, num_tokens, 3, True).offsets[-1] == num_tokens * 2 - 2


@pytest.mark.parametrize("token", [-1, 300])
def test_dispatch_asserts_that_tokens_of_pairs_with_an_expert_are_there(asserting, token):
    expert_P, token_P = torch.arange(300) % 3, torch.arange(300)
    token_P[7] = token
    with pytest.raises(Exception, match="the routing names a token that does not exist"):
        kernels.dispatch(expert_P, token_P, 300, 3, True)
    expert_P[7] = -1
    assert kernels.dispatch(expert_P, token_P, 300, 3, True).offsets[-1] == 299


def test_pairs_without_tokens_have_rows_of_no_token(device):
    """Dispatch pairs that a rank of expert parallelism may have: no tokens, and pairs that are all of other ranks."""
    expert_P, token_P = torch.tensor([-1, 5, 4], device=device), torch.zeros(3, dtype=torch.long, device=device)
    rows = kernels.dispatch(expert_P, token_P, 0, 4, True)
    assert rows.offsets.tolist() == [0] * 5 and rows.token_offsets.tolist() == [0]
    y = torch.randn(3, 16, device=device)
    for weight in (None, torch.rand(3, device=device)):
        assert kernels.combine(y, weight, rows, 0).shape == eager.combine(y, weight, rows, 0).shape == (0, 16)


@pytest.mark.parametrize(
    "layout, problem",
    crossed(
        LAYOUTS, [("odd", "list"), ("even", "list"), ("all experts", "top_k"), ("one row", "sentinels")], everywhere=2
    ),
    ids=str,
)
def test_every_kernel_agrees_with_the_eager_backend(device, layout, problem):
    check_products(device, layout, *problem)


@pytest.mark.parametrize(
    ("name", "interleaved"),
    [
        *((name, True) for name in GATED),
        *((name, False) for name in UNGATED),
        *rest_pinned(((name, False) for name in GATED), 0),
    ],
)
def test_activations_and_their_slopes_agree_with_the_eager_backend(device, name, interleaved):
    T, H, I, E, K = 20, 16, 40, 2, 2
    ids = routing_ids(T, E, K, "top_k", device)
    tensors, dout = layer(T, H, I, E, T * K, torch.float32, device, activation=name)
    rows, act = kernels.dispatch(*ids, T, E, False), Activation(name, 1.5, 0.8)
    h = torch.randn(T * K, act.width(I), device=device)
    h[:, ::3] = 0.0  # where relu has no slope
    found, expected = {}, {}
    for results, backend in ((expected, eager), (found, kernels)):
        results["h"], results["a"] = backend.up(
            tensors["x"], tensors["gate_up"], None, rows, act, interleaved, want_h=True, want_a=True
        )
        results["dh"], results["weighted_a"], results["dw"] = backend.down_backward(
            dout, tensors["down"], None, h, tensors["weight"], rows, act, interleaved, True, True, True
        )
    assert {n: e for n, e in errors(found, expected).items() if e > TOLERANCE} == {}


def test_what_is_not_wanted_is_none_and_changes_nothing_else(device):
    T, H, I, E, K = 20, 16, 24, 3, 2
    ids = routing_ids(T, E, K, "top_k", device)
    tensors, dout = layer(T, H, I, E, T * K, torch.float32, device)
    rows, act = kernels.dispatch(*ids, T, E, False), Activation()
    h, _ = kernels.up(tensors["x"], tensors["gate_up"], None, rows, act, False, True, True)
    only_h, no_a = kernels.up(tensors["x"], tensors["gate_up"], None, rows, act, False, True, False)
    assert no_a is None and torch.equal(only_h, h)
    arguments = dout, tensors["down"], None, h, tensors["weight"], rows, act, False
    everything = kernels.down_backward(*arguments, True, True, True)
    for wanted in ((True, False, False), (False, True, False), (False, False, True)):
        for result, whole, want in zip(kernels.down_backward(*arguments, *wanted), everything, wanted):
            assert torch.equal(result, whole) if want else result is None


@pytest.mark.parametrize("backend, layout, activation, shape, kind, save", LAYERS)
def test_the_layer_agrees_with_the_reference(device, backend, layout, activation, shape, kind, save):
    """1e-12: sums of a few hundred terms in fp64."""
    (T, H, I, E, K), dtype = SHAPES[shape], torch.float64 if backend == "eager" else torch.float32
    ids = routing_ids(T, E, K, kind, device, empty=(1,) if kind == "list" else ())
    tensors, dout = layer(T, H, I, E, ids[0].numel(), dtype, device, activation=activation)
    tensors = upcast(tensors, dtype)  # the routing weights too
    with poisoned():
        found = run(tensors, dout, ids, layout, activation, backend, save=save)
    expected = by_reference(tensors, dout, ids, layout, activation)
    found = {name: t.cpu().double() for name, t in found.items()}
    tolerance = 1e-12 if backend == "eager" else TOLERANCE
    assert {n: e for n, e in errors(found, expected).items() if e > tolerance} == {}


@pytest.mark.pinned
def test_pieces_of_a_layer_give_what_the_whole_does(device, monkeypatch):
    """Interpreted, tiles of other sizes sum up in another order; test_triton_gpu.py compares bits."""
    ids = routing_ids(200, 3, 2, "sentinels", device)
    tensors, dout = layer(200, 16, 24, 3, 400, torch.float32, device)
    whole = run(tensors, dout, ids, "concatenated", "swiglu", "triton")
    monkeypatch.setattr(pieces, "MAX_ROWS", 256)
    with poisoned():
        found = run(tensors, dout, ids, "concatenated", "swiglu", "triton")
    assert {n: e for n, e in errors(found, whole).items() if e > TOLERANCE} == {}


def test_a_layer_without_tokens_has_zero_gradients(device):
    ids = torch.empty(0, 2, dtype=torch.long, device=device), None
    tensors, dout = layer(0, 16, 16, 3, 0, torch.float32, device)
    found = run(tensors, dout, ids, "concatenated", "swiglu", "triton")
    assert found["out"].shape == (0, 16)
    assert all((gradient == 0).all() for gradient in found.values())
