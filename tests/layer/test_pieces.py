"""A layer of very many rows, computed in pieces of its tokens: the whole's results, and what is held at once."""

import weakref
from functools import partial

import pytest
import torch
from helpers.adapters import with_lora
from helpers.models import assert_all_close, batch, loss_and_gradients, relative_error
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
from helpers.streamed import build_streamed
from helpers.training import checkpoint_layers
from torch.utils._python_dispatch import TorchDispatchMode

import sonicmoe_hf
from sonicmoe_hf.layer import pieces
from sonicmoe_hf.layer.moe_experts import Activation

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


@pytest.mark.parametrize(("T", "K", "experts"), [(129, 1, None), (500, 1, [3]), (257, 3, [0, 1, 2]), (400, 2, [3, 0])])
def test_pieces_of_any_size_with_experts_of_all_tokens_and_of_none(in_pieces, T, K, experts):
    """gpt-oss's gate, clamped. The last case's first expert has rows in the last piece alone."""
    inputs, index = problem(T=T, K=K)
    inputs = with_factors(inputs)
    if experts is not None:
        index[:] = torch.tensor(experts)
        index[:384, 1:] = index[:384, 1:].clamp(min=1)
    gate = {"activation": Activation("swiglu", 1.7, 0.5)}
    whole = output_and_gradients(run_adapted, inputs, index, **gate)
    assert_all_close(in_pieces(run_adapted, inputs, index, **gate), whole, 1e-13, "fp64, sums in another order")


@pytest.mark.parametrize(
    ("family", "format", "memory", "compute", "kind", "autocast"),
    [
        ("qwen3_moe", "nf4", None, None, "reentrant", False),
        ("gpt_oss", "mxfp4", 0, None, "non_reentrant", True),
        ("qwen3_moe", None, "half", None, "none", False),
        ("qwen3_moe", "fp8", None, "fp8", "non_reentrant", False),
    ],
)
def test_models_with_layers_in_pieces_train_as_with_whole_ones(
    family, format, memory, compute, kind, autocast, monkeypatch
):
    """Frozen experts with adapters, packed, in host memory, multiplied in FP8, where a sum may round to another code."""
    model = build_streamed(memory, format, family, layers=2)
    if compute is not None:
        sonicmoe_hf.patch_model(model, experts_compute=compute)
    model = with_lora(model, target_modules=["q_proj"])
    model.enable_input_require_grads()
    checkpoint_layers(model, kind)

    def computed():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss_and_gradients(model, batch())

    whole = computed()
    for name, number in (("MAX_ROWS", 64), ("MULTIPLE", 16)):
        monkeypatch.setattr(pieces, name, number)
    assert pieces.tokens_of_piece(96, 192) == 32, "of batch(), in three pieces"
    tolerance = 1e-3 if compute == "fp8" else 1e-5
    assert_all_close(computed(), whole, tolerance, "fp32, and bf16 whose rounding hides the order of sums")


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


@pytest.mark.pinned
def test_gradients_of_pieces_are_summed_in_fp32(in_pieces):
    """Sixteen pieces' sum errs by less than one rounding to bf16 (2^-9) more than the whole's does."""
    inputs, index = problem(T=2048, H=16, I=16, bias=False, dtype=torch.bfloat16)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    wanted = output_and_gradients(expected, exact, index)
    whole, found = output_and_gradients(run, inputs, index), in_pieces(run, inputs, index)
    for name in ("gate_up", "down"):
        assert found[name].dtype == torch.bfloat16
        assert relative_error(found[name], wanted[name]) < relative_error(whole[name], wanted[name]) + 2**-10, name


class Live(TorchDispatchMode):
    """Counts the bytes that are allocated inside and live at once: now, and peak."""

    def __init__(self):
        super().__init__()
        self.storages, self.now, self.peak = weakref.WeakSet(), 0, 0

    def _free(self, nbytes):
        self.now -= nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage() for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage not in given | set(self.storages):
                self.storages.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result


@pytest.mark.parametrize("ranks", [(0, 0), (1, 1)], ids=str)
def test_what_a_layer_holds_at_once_does_not_grow_with_its_tokens(in_pieces, monkeypatch, ranks):
    """Only tensors of x's size grow, in forward and in backward, and what is kept: no h and no a."""
    H, I, K = 4, 256, 2
    peaks, kept = {"forward": [], "backward": []}, []

    def watched(name, run, *args):
        with Live() as live:
            results = run(*args)
        peaks[name].append(live.peak)
        return results

    for name in peaks:
        monkeypatch.setattr(pieces, name, partial(watched, name, getattr(pieces, name)))
    for num_pieces in (4, 8):
        inputs, index = problem(T=num_pieces * 128, H=H, I=I, K=K, bias=False)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            in_pieces(run_adapted, with_factors(inputs, ranks), index)
    a = 8 * K * I  # bytes a token
    for few, many in peaks.values():
        assert few > 128 * 2 * a, "a piece's h, at least"
        assert many - few < 512 * a / 2
    assert not [t for t in kept if t.is_floating_point() and t.numel() >= 512 * K * I]


@pytest.mark.slow
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
    inputs, index = problem(**SIZES)
    token = torch.arange(SIZES["T"]).repeat_interleave(SIZES["K"])
    listed = {**inputs, "weights": inputs["weights"].detach().reshape(-1).requires_grad_()}
    with Watching() as watching:
        in_pieces(run, listed, index.reshape(-1), token_index=token)
    assert watching.seen == ["dispatch", "experts_forward", "experts_backward"]
    assert [pieces.tokens_of_piece(tokens, 8 * tokens) for tokens in (32768, 32769, 131072)] == [0, 16512, 32768]
