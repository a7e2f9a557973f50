"""A layer of very many rows, computed in pieces of its tokens: the whole's results, and what is held at once."""

import pytest
import torch
from helpers.models import assert_all_close, relative_error
from helpers.one_layer import (
    Watching,
    as_stored,
    expected,
    output_and_gradients,
    problem,
    run,
    run_adapted,
    with_factors,
)

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.layer import pieces

SIZES = {"T": 300, "K": 2}  # in pieces of 128, 128 and 44 tokens


@pytest.fixture
def in_pieces(monkeypatch):
    """Compute a layer in pieces of 256 rows at most."""

    def compute(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(pieces, "MAX_ROWS", 256)
            return output_and_gradients(*args, **options)

    return compute


@pytest.mark.parametrize("ranks", [(0, 0), (3, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("layout", ["concatenated", "transposed_interleaved"])
@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_pieces_give_the_whole_layers_results(in_pieces, layout, ranks, save):
    inputs, index = problem(**SIZES, layout=layout)
    inputs, options = with_factors(inputs, ranks), {"layout": layout, "save": save, "low_rank": as_stored}
    whole = output_and_gradients(run_adapted, inputs, index, **options)
    found = in_pieces(run_adapted, inputs, index, **options)
    assert_all_close(found, whole, 1e-14, "fp64, sums of a few hundred terms in another order")


def test_ids_of_no_expert_are_left_out_of_every_piece(in_pieces):
    inputs, index = problem(**SIZES)
    index[::3, 0], index[200:] = 7, -1
    found = in_pieces(run, inputs, index, sentinels=True)
    assert_all_close(found, output_and_gradients(expected, inputs, index), 1e-12, "fp64")


@pytest.mark.parametrize("frozen", [("gate_up", "down"), ("x",), ("x", "weights", "down")], ids=str)
def test_only_gradients_that_are_asked_for_come_of_pieces(in_pieces, frozen):
    inputs, index = problem(**SIZES, bias=False)
    every = output_and_gradients(run, inputs, index)
    trained = {name: tensor for name, tensor in inputs.items() if name not in frozen}
    held = {name: inputs[name].detach() for name in frozen}
    found = in_pieces(lambda given: run({**given, **held}, index), trained)
    assert_all_close(found, {name: every[name] for name in found}, 1e-14, "fp64, sums in another order")


def test_gradients_of_pieces_are_summed_in_fp32(in_pieces):
    """Sixteen pieces' sum errs by less than one rounding to bf16 (2^-9) more than the whole's does."""
    inputs, index = problem(T=2048, H=16, I=16, bias=False, dtype=torch.bfloat16)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    wanted = output_and_gradients(expected, exact, index)
    whole, found = output_and_gradients(run, inputs, index), in_pieces(run, inputs, index)
    for name in ("gate_up", "down"):
        assert found[name].dtype == torch.bfloat16
        assert relative_error(found[name], wanted[name]) < relative_error(whole[name], wanted[name]) + 2**-10, name


def test_what_a_layer_holds_at_once_is_that_of_a_piece(in_pieces, monkeypatch):
    """No kernel gives more rows than a piece has, in forward and backward; and none of them are kept."""
    inputs, index = problem(**SIZES, bias=False)
    rows, kept = set(), []

    def noting(function):
        def called(*args, **options):
            found = function(*args, **options)
            rows.update(len(t) for t in (found if isinstance(found, tuple) else (found,)) if t is not None)
            return found

        return called

    for name in ("up", "down", "down_backward", "up_backward_input"):
        monkeypatch.setattr(eager, name, noting(getattr(eager, name)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        in_pieces(run, inputs, index)
    assert rows == {256, 2 * SIZES["T"] - 2 * 256}
    assert not [t for t in kept if t.is_floating_point() and len(t) == index.numel()]


def test_compiled_it_gives_the_same(in_pieces):
    inputs, index = problem(**SIZES)
    inputs = with_factors(inputs)
    compiled = torch.compile(lambda i, index: run_adapted(i, index), fullgraph=True, backend="aot_eager")
    for num_tokens in (300, 290, 100):
        some = {n: t[:num_tokens] if n in ("x", "weights") else t for n, t in inputs.items()}
        some = {n: t.detach().requires_grad_() for n, t in some.items()}
        found, eagerly = (in_pieces(f, some, index[:num_tokens]) for f in (compiled, run_adapted))
        assert_all_close(found, eagerly, 0.0, "the same functions")


def test_a_layer_of_fewer_rows_and_one_of_listed_pairs_are_computed_whole(in_pieces):
    inputs, index = problem(T=128)
    token = torch.arange(128).repeat_interleave(2)
    listed = {**inputs, "weights": inputs["weights"].detach().reshape(-1).requires_grad_()}
    with Watching() as watching:
        in_pieces(run, inputs, index)
        in_pieces(run, {**listed, "x": listed["x"]}, index.reshape(-1), token_index=token)
    assert watching.seen == ["dispatch", "experts_forward", "experts_backward"] * 2
