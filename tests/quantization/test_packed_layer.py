"""moe_experts over packed weights: what it computes from the dequantized ones, to the bit, and what it keeps."""

import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.marks import rest_slow
from torch import nn
from torch.utils.checkpoint import checkpoint

from sonicmoe_hf import PackedWeight, moe_experts
from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels.interface import PackedOperand
from sonicmoe_hf.kernels.packed import FORMATS, Quantized
from sonicmoe_hf.layer import kept, pieces
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.moe_experts import LowRank
from sonicmoe_hf.layer.packed_weight import as_parameter
from sonicmoe_hf.tools.comparing import relative_error

T, H, I, E, K, R = 7, 64, 64, 4, 2, 3
NAMES = ("x", "weights", "a1", "b1", "a2", "b2")


def packed_weights(name, layout, dtype=torch.float32):
    transposed = LAYOUTS[layout][0]
    gate_up, down = torch.randn(E, 2 * I, H, dtype=dtype) * H**-0.5, torch.randn(E, H, I, dtype=dtype) * I**-0.5
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    return PackedWeight.quantize(gate_up, name, transposed), PackedWeight.quantize(down, name, transposed)


def inputs(dtype=torch.float32):
    tensors = [torch.randn(T, H, dtype=dtype), torch.rand(T, K)]
    tensors += [torch.randn(E, R, H), torch.randn(E, 2 * I, R), torch.randn(E, R, I), torch.randn(E, H, R)]
    return [tensor.requires_grad_() for tensor in tensors], torch.randint(0, E - 1, (T, K))  # one expert has no rows


def experts(gate_up, down, leaves, index, **options):
    x, weights, a1, b1, a2, b2 = leaves
    biases = torch.linspace(-1, 1, E * 2 * I).view(E, 2 * I), torch.linspace(-1, 1, E * H).view(E, H)
    return moe_experts(
        x,
        gate_up,
        down,
        (index, weights),
        gate_up_bias=biases[0].to(gate_up.dtype),
        down_bias=biases[1].to(gate_up.dtype),
        gate_up_adapter=LowRank(a1, b1, 0.5),
        down_adapter=LowRank(a2, b2, 0.5),
        **options,
    )


def out_and_gradients(gate_up, down, leaves, index, **options):
    out = experts(gate_up, down, leaves, index, **options)
    return dict(zip(("out", *NAMES), (out, *torch.autograd.grad(out.float().square().sum(), leaves))))


def assert_same(actual, expected):
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.pinned
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_it_computes_what_dequantized_weights_give(name, layout, save):
    gate_up, down = packed_weights(name, layout)
    leaves, index = inputs()
    dense = [weight.dequantize() for weight in (gate_up, down)]
    if LAYOUTS[layout][0]:  # expanded weights are never stored transposed, and the order of sums depends on that
        dense = [weight.transpose(1, 2) for weight in dense]
    expected = out_and_gradients(*dense, leaves, index, save=save, layout=layout.removeprefix("transposed_"))
    assert_same(out_and_gradients(gate_up, down, leaves, index, save=save, layout=layout), expected)


@pytest.mark.pinned
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_backend_that_decodes_weights_gets_them_packed_in_every_product(monkeypatch, recomputed):
    """Also where backward computes the layer again, and would otherwise expand them once for all."""
    (gate_up, down), (leaves, index) = packed_weights("nf4", "concatenated"), inputs()
    call = partial(checkpoint, experts, use_reentrant=False) if recomputed else experts
    asked, taken = set(), []

    def out_and_gradients():
        out = call(gate_up, down, leaves, index)
        return dict(zip(("out", *NAMES), (out, *torch.autograd.grad(out.float().square().sum(), leaves))))

    def expanding(product, source, packed, *arguments, **options):
        assert isinstance(packed, PackedOperand)
        taken.append(product.__name__)
        dense = FORMATS["nf4"].dequantize(Quantized(*packed[:3]), torch.float32)
        return product(source, dense, *arguments, **options)

    def decodes(weight, dtype, rows, is_expanded=False):
        asked.add(is_expanded)
        return True

    expected = out_and_gradients()
    monkeypatch.setattr(eager, "decodes", decodes)
    products = "up", "down", "down_backward", "up_backward_input"
    for name in products:
        monkeypatch.setattr(eager, name, partial(expanding, getattr(eager, name)))
    monkeypatch.setattr(eager, "dequantize", None)
    assert_same(out_and_gradients(), expected)
    assert taken == [*products[:2] * (1 + recomputed), *products[2:]] and asked == {False, recomputed}


@pytest.mark.pinned
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", ["concatenated", "transposed_interleaved"])
@pytest.mark.parametrize("packed", ["gate_up", "down"])
def test_one_weight_may_be_packed_alone(name, layout, packed):
    weights, (leaves, index) = dict(zip(("gate_up", "down"), packed_weights(name, layout))), inputs()
    dense = {weight: tensor.dequantize().contiguous() for weight, tensor in weights.items()}
    found = out_and_gradients(*{**dense, packed: weights[packed]}.values(), leaves, index, layout=layout)
    expected = out_and_gradients(*dense.values(), leaves, index, layout=layout)
    assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-5, "fp32: another order of sums"
    dense_weight = torch.nn.Parameter(dense["down" if packed == "gate_up" else "gate_up"])
    trained = {**dense, packed: weights[packed], "down" if packed == "gate_up" else "gate_up": dense_weight}
    out = moe_experts(leaves[0], *trained.values(), (index, leaves[1]), layout=layout)
    (gradient,) = torch.autograd.grad(out.square().sum(), dense_weight)
    assert gradient.shape == dense_weight.shape and gradient.isfinite().all() and gradient.any()


def test_it_computes_in_the_dtype_of_down_where_that_alone_is_packed():
    """Down is in bf16, to which x and the dense gate_up are cast."""
    (gate_up, down), (leaves, index) = packed_weights("nf4", "concatenated", torch.bfloat16), inputs()
    dense = gate_up.dequantize().float()
    found = moe_experts(leaves[0].float(), dense, down, (index, leaves[1]))
    expected = moe_experts(leaves[0].bfloat16(), gate_up.dequantize(), down, (index, leaves[1]))
    assert found.dtype == torch.float32 and torch.equal(found, expected.float())


def test_it_computes_in_the_packed_weights_dtype_or_autocasts():
    gate_up, down = packed_weights("nf4", "concatenated", torch.bfloat16)
    leaves, index = inputs()
    dense = gate_up.dequantize(), down.dequantize()
    found = out_and_gradients(gate_up, down, leaves, index)
    assert found["out"].dtype == torch.float32
    narrow = [leaves[0].detach().bfloat16().requires_grad_(), *leaves[1:]]
    expected = out_and_gradients(*dense, narrow, index)
    assert_same({"out": found["out"]}, {"out": expected["out"].float()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = [PackedWeight(w.packed, w.format, torch.float32, w.is_transposed) for w in (gate_up, down)]
        autocast = out_and_gradients(*wide, leaves, index)
    assert_same(autocast, found)


@pytest.fixture
def expansions(monkeypatch):
    """Count the expanded weights that are alive: now, and (counts) as each was made."""
    alive, counts = [], []

    def counted(dequantize, *args):
        counts.append(sum(reference() is not None for reference in alive))
        weight = dequantize(*args)
        alive.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(eager, "dequantize", partial(counted, eager.dequantize))
    return SimpleNamespace(
        counts=counts, alive=lambda: sum(reference() is not None for reference in alive), clear=counts.clear
    )


@pytest.mark.parametrize("name", FORMATS)
def test_no_expanded_weight_outlives_its_product(name, expansions):
    gate_up, down = packed_weights(name, "concatenated")
    leaves, index = inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel() * t.itemsize) or t, lambda t: t):
        out_and_gradients(gate_up, down, leaves, index)
    assert expansions.counts == [0, 0, 0, 0]  # gate_up and down, forward and backward
    assert not expansions.alive()
    assert max(saved) <= gate_up.codes.nbytes


def taken_gradients(leaves):
    gradients = dict(zip(NAMES, [leaf.grad for leaf in leaves]))
    for leaf in leaves:
        leaf.grad = None
    return gradients


CHECKPOINTED = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
}


@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.parametrize("layout", ["concatenated", "transposed_interleaved"])
def test_a_step_expands_each_weight_twice_with_checkpointing_too(save, layout, expansions, monkeypatch):
    """Once in forward, once where backward computes the layer again: what is expanded there stays until its backward has
    used it, unless the card is too full."""
    (gate_up, down), (leaves, index) = packed_weights("nf4", layout), inputs()

    def gradients(run):
        expansions.clear()

        def layer(*leaves):
            return experts(gate_up, down, leaves, index, layout=layout, save=save).sin()

        run(layer, *leaves).sum().backward()
        return taken_gradients(leaves), len(expansions.counts)

    expected, times = gradients(lambda layer, *leaves: layer(*leaves))
    assert times == 4
    for run in CHECKPOINTED.values():
        found, times = gradients(run)
        assert_same(found, expected)
        assert times == 4 and not expansions.alive()
    monkeypatch.setattr(kept, "free_on_card", lambda device: 0)
    found, times = gradients(run)
    assert_same(found, expected)
    assert times == 6 + (save == "input")


@pytest.mark.parametrize("checkpointed", [None, *CHECKPOINTED])
def test_a_layer_in_pieces_expands_its_weights_once_for_all_of_them(checkpointed, expansions, monkeypatch):
    (gate_up, down), (leaves, _) = packed_weights("nf4", "concatenated"), inputs()
    leaves[:2] = torch.randn(300, H, requires_grad=True), torch.rand(300, K, requires_grad=True)
    index = (
        torch.tensor([[0, 1]]).repeat(300, 1).index_fill(0, torch.tensor([299]), 3)
    )  # an expert of the last piece alone

    def layer(*leaves):
        return experts(gate_up, down, leaves, index)

    def gradients():
        expansions.clear()
        out = CHECKPOINTED[checkpointed](layer, *leaves) if checkpointed else layer(*leaves)
        out.square().sum().backward()
        return taken_gradients(leaves)

    whole = gradients()
    monkeypatch.setattr(pieces, "MAX_ROWS", 256)
    found = gradients()
    assert max(relative_error(found[name], whole[name]) for name in NAMES) < 1e-6, "fp32, another order of sums"
    assert len(expansions.counts) == 4 and not expansions.alive()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.saved_tensors
        ctx.note()
        raise RuntimeError("between recomputation and backward")


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_kept_weights_go_with_what_was_saved_where_backward_fails_and_are_expanded_again_in_another(kind, expansions):
    (gate_up, down), (leaves, index) = packed_weights("nf4", "concatenated"), inputs()
    noted = []

    def layer(*leaves):
        return Fails.apply(experts(gate_up, down, leaves, index), lambda: noted.append(expansions.alive()))

    with pytest.raises(RuntimeError, match="between recomputation and backward"):
        CHECKPOINTED[kind](layer, *leaves).sum().backward()
    gc.collect()
    assert noted == [2] and not expansions.alive()
    expansions.clear()
    out = CHECKPOINTED[kind](lambda *leaves: experts(gate_up, down, leaves, index).sin(), *leaves).sum()
    first, second = (out.backward(retain_graph=True) or taken_gradients(leaves) for _ in range(2))
    assert_same(first, second)
    assert len(expansions.counts) == 6 and not expansions.alive()


class Layer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.gate_up, self.down = (as_parameter(weight) for weight in packed_weights(name, "concatenated"))

    def forward(self, x, index, weights):
        return moe_experts(self.linear(x), self.gate_up, self.down, (index, weights))


@pytest.mark.parametrize("name", rest_slow(FORMATS))
def test_compiled_and_checkpointed_it_stays_the_same(name, expansions):
    module, (leaves, index) = Layer(name), inputs()
    x, weights = leaves[:2]

    def run(function):
        out = function(x, index, weights)
        return dict(zip(("out", "x", "w"), (out, *torch.autograd.grad(out.square().sum(), (x, weights)))))

    def recomputed(*args):
        return checkpoint(module, *args, use_reentrant=False)

    expected, options = run(module), {"backend": "aot_eager", "fullgraph": True}
    for captured in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(module, **options)
        with torch._inductor.config.patch({"triton.cudagraphs": captured}):
            for function, times in (
                (compiled, 4),
                (torch.compile(recomputed, **options), 4),
                # a graph of forward does not own what backward would find
                (lambda *args: checkpoint(compiled, *args, use_reentrant=False), 6 if captured else 4),  # noqa: B023
            ):
                expansions.clear()
                assert_same(run(function), expected)
                assert len(expansions.counts) == times and not expansions.alive()


def test_a_layout_that_contradicts_the_packing_is_refused():
    gate_up, _ = packed_weights("nf4", "concatenated")
    leaves, index = inputs()
    square = PackedWeight.quantize(torch.randn(E, H, H), "nf4", is_transposed=True)
    with pytest.raises(ValueError, match="down is packed from a weight that is stored transposed"):
        moe_experts(leaves[0], gate_up, square, (index, leaves[1]))
