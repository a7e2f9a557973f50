"""moe_experts: the values, every gradient, what is saved, what is not computed, and what is refused."""

import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers.marks import rest_pinned
from helpers.models import assert_all_close, relative_error
from helpers.one_layer import NAMES, OF_ONE_KIND, expected, output_and_gradients, problem, run

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels.interface import GATED, UNGATED, Weighting
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.moe_experts import Activation, moe_experts
from sonicmoe_hf.layer.routing import TokenRounding, round_tokens, rounded_routing


@pytest.mark.parametrize(
    "layout, name",
    [
        *rest_pinned(itertools.product(LAYOUTS, GATED), len(GATED)),
        *rest_pinned(itertools.product(OF_ONE_KIND, UNGATED), len(UNGATED)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_it_agrees_with_the_reference_and_its_gradients_with_finite_differences(layout, name, bias, save):
    activation = Activation(name, alpha=1.702, limit=0.8)  # a limit that many pre-activations exceed
    inputs, index = problem(layout=layout, bias=bias, activation=activation)
    options = {"layout": layout, "activation": activation}
    assert_all_close(
        output_and_gradients(run, inputs, index, save=save, **options),
        output_and_gradients(expected, inputs, index, **options),
        1e-12,
        "fp64, sums of a few dozen terms",
    )

    def by_position(*tensors):
        return run(dict(zip(inputs, tensors)), index, save=save, **options)

    assert torch.autograd.gradcheck(by_position, tuple(inputs.values()), fast_mode=True)


@pytest.mark.parametrize("weighting", [Weighting(True, 1e-20, 2.5), Weighting(False)], ids=["normalised", "raw"])
@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_gradcheck_with_token_rounded_routing(save, weighting):
    T, E, K, tile = 13, 4, 2, 4
    inputs, _ = problem(T=T, E=E)
    scores = torch.rand(T, E, dtype=torch.float64)
    ranking, top_k = scores.float(), scores.topk(K).indices
    mask = round_tokens(scores, top_k, tile=tile)
    assert (mask.sum(1) == 0).any() or (mask.sum(1) > K).any(), "rounding changed nothing: not a test"
    family = SimpleNamespace(scores=lambda router, scores: (scores, ranking), weighting=lambda router: weighting)

    def by_position(x, gate_up, down, gate_up_bias, down_bias, scores):
        routing, _ = rounded_routing(family, None, scores, top_k, TokenRounding(tile=tile))
        return moe_experts(x, gate_up, down, routing, gate_up_bias=gate_up_bias, down_bias=down_bias, save=save)

    tensors = [inputs[n] for n in ("x", "gate_up", "down", "gate_up_bias", "down_bias")]
    assert torch.autograd.gradcheck(by_position, (*tensors, scores.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize(
    ("T", "K", "E", "idle"), [(0, 2, 4, 0), (1, 1, 1, 0), (1, 1, 4, 3), (5, 4, 4, 0), (63, 1, 8, 2), (65, 3, 5, 0)]
)
def test_odd_sizes_and_idle_experts(T, K, E, idle):
    inputs, index = problem(T=T, K=K, E=E, idle=idle)
    assert_all_close(
        output_and_gradients(run, inputs, index),
        output_and_gradients(expected, inputs, index),
        1e-12,
        "fp64, sums of a few hundred terms",
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lower_precision_stays_near_the_fp32_reference(dtype, tolerance, layout):
    """Tolerances: fp32 rounding of sums of 64 terms; bf16 (2^-9) and fp16 (2^-12) roundings of h, a, y and out."""
    inputs, index = problem(T=33, H=64, I=48, E=6, K=3, layout=layout, dtype=dtype)
    reference_inputs = {name: t.detach().float().requires_grad_() for name, t in inputs.items()}
    actual = output_and_gradients(run, inputs, index, layout=layout)
    wanted = output_and_gradients(expected, reference_inputs, index, layout=layout)
    assert actual["out"].dtype == dtype
    assert_all_close(actual, wanted, tolerance, "see the docstring")


def test_experts_without_rows_get_zero_gradients():
    inputs, index = problem(E=5, idle=2)
    gradients = output_and_gradients(run, inputs, index)
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        assert (gradients[name][3:] == 0).all() and (gradients[name][:3] != 0).any(), name


def test_ids_outside_the_experts_contribute_nothing_under_expert_parallelism():
    inputs, index = problem(T=9, E=4)
    index[0, 0], index[3] = 4, torch.tensor([7, -1])
    assert_all_close(
        output_and_gradients(run, inputs, index, sentinels=True),
        output_and_gradients(expected, inputs, index),
        1e-12,
        "fp64",
    )


def test_general_routing_lists_pairs_in_any_order():
    inputs, _ = problem(T=6, E=4)
    token = torch.tensor([5, 0, 0, 3, 3, 3, 5, 2])
    expert = torch.tensor([3, 1, 2, 0, 1, 3, 0, 3])
    inputs["weights"] = torch.rand(8, dtype=torch.float64).requires_grad_()
    assert_all_close(
        output_and_gradients(run, inputs, expert, token_index=token),
        output_and_gradients(expected, inputs, expert, token_index=token),
        1e-12,
        "fp64; tokens 1 and 4 have no expert",
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_keeps_the_weights_themselves_and_no_views_of_them(layout):
    """ZeRO-3 puts an empty tensor in a weight's place and gathers it again for backward; a view
    would keep the old one."""
    inputs, index = problem(layout=layout)
    _, saved = saved_tensors(lambda: run(inputs, index, layout=layout))
    for name in ("gate_up", "down"):
        held = [t for t in saved if t.data_ptr() == inputs[name].data_ptr()]
        assert len(held) == 1 and held[0] is inputs[name]


def saved_tensors(function):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = function()
    return out, saved


@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_backward_keeps_h_and_x_or_x_alone(save):
    T, H, I, E, K = 40, 32, 24, 8, 2
    inputs, index = problem(T=T, H=H, I=I, E=E, K=K, bias=False, dtype=torch.bfloat16)
    parameters = {inputs["gate_up"].data_ptr(), inputs["down"].data_ptr()}
    _, saved = saved_tensors(lambda: run(inputs, index, save=save))
    held = sum(t.nbytes for t in saved if t.data_ptr() not in parameters)
    rows, x = T * K, T * H * 2
    routing = 4 * (rows + E + 1 + rows + rows + T + 1 + rows)  # fp32 weights and the five int32 lists of Rows
    tiles = sum(t.nbytes for t in saved if t.dim() == 2 and t.shape[-1] == 3)  # the kernels' tile table
    assert held == x + routing + tiles + (4 * rows * I if save == "preactivation" else 0)


@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_backward_frees_what_it_has_used(monkeypatch, save):
    """h before dx's rows are made, those before the weights' gradients, dh before the last of these."""
    inputs, index = problem(T=40)
    out = run(inputs, index, save=save)
    alive, order = weakref.WeakValueDictionary(), []

    def spy(name, function):
        def called(*args, **options):
            order.append((name, set(alive)))
            if name == "down_backward":
                alive["h"] = args[3]
            found = function(*args, **options)
            if name == "down_backward":
                alive["dh"] = found[0]
            elif name == "up_backward_input":
                alive["dx_R"] = found
            return found

        return called

    for name in ("down_backward", "up_backward_input", "gate_up_gradient", "down_gradient"):
        monkeypatch.setattr(eager, name, spy(name, getattr(eager, name)))
    first = torch.autograd.grad(out.sum(), [*inputs.values()], retain_graph=True)
    kept = {"h"} if save == "preactivation" else set()  # by the graph
    assert order == [
        ("down_backward", set()),
        ("up_backward_input", kept | {"dh"}),
        ("gate_up_gradient", kept | {"dh"}),
        ("down_gradient", kept),
    ]
    order.clear()
    second = torch.autograd.grad(out.sum(), [*inputs.values()])
    assert [held - {"h"} if name == "down_backward" else held for name, held in order] == [
        set(),
        {"dh"},
        {"dh"},
        set(),
    ]
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def test_frozen_experts_keep_no_input_and_compute_no_weight_gradients(monkeypatch):
    inputs, index = problem()
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        inputs[name].requires_grad_(False)
    for name in ("gate_up_gradient", "down_gradient", "gate_up_bias_gradient", "down_bias_gradient"):
        monkeypatch.setattr(eager, name, lambda *a, **k: pytest.fail("computed for a frozen weight"))
    asked = []
    monkeypatch.setattr(eager, "down_backward", lambda *a, _f=eager.down_backward, **k: asked.append(k) or _f(*a, **k))
    out, saved = saved_tensors(lambda: run(inputs, index))
    assert not any(t.data_ptr() == inputs["x"].data_ptr() for t in saved)
    out.sum().backward()
    assert asked == [{"want_dh": True, "want_a": False, "want_dw": True, "lora": None}]
    assert inputs["x"].grad is not None and inputs["weights"].grad is not None and inputs["gate_up"].grad is None


@pytest.mark.parametrize("needed", NAMES)
@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_any_one_gradient_alone_is_right(needed, save):
    inputs, index = problem()
    every = output_and_gradients(run, inputs, index)
    for name, tensor in inputs.items():
        tensor.requires_grad_(name == needed)
    out = run(inputs, index, save=save)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * direction).sum().backward()
    assert relative_error(inputs[needed].grad, every[needed]) < 1e-14, "the same sums in the same order"
    assert all(t.grad is None for name, t in inputs.items() if name != needed)


def test_without_gradients_h_is_never_kept(monkeypatch):
    wants = []
    monkeypatch.setattr(eager, "up", lambda *a, _f=eager.up, **k: wants.append(k["want_h"]) or _f(*a, **k))
    inputs, index = problem()
    with torch.no_grad():
        run(inputs, index)
    run({name: t.detach() for name, t in inputs.items()}, index)
    assert wants == [False, False]


def test_unwritten_rows_are_never_read(monkeypatch):
    """Every buffer is poisoned with NaN first; dropped pairs leave rows that nobody writes."""

    def poisoned(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *args, **kw: poisoned(new_empty(self, *args, **kw)))
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **kw: poisoned(empty_like(tensor, **kw)))
    inputs, index = problem(T=9, E=4)
    index[2] = 9
    results = output_and_gradients(run, inputs, index, sentinels=True)
    assert all(t.isfinite().all() for t in results.values())


def test_autocast_computes_in_its_dtype_and_returns_to_the_inputs():
    inputs, index = problem(T=16, H=32, I=16, dtype=torch.float32)
    wanted = output_and_gradients(run, inputs, index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = output_and_gradients(run, inputs, index)
    assert actual["out"].dtype == torch.float32
    assert all(actual[name].dtype == torch.float32 for name in inputs)
    assert_all_close(actual, wanted, 2e-2, "bf16 roundings of inputs, weights, h, a, y and gradients")
    assert relative_error(actual["out"], wanted["out"]) > 1e-4, "computed in fp32: autocast was ignored"


@pytest.mark.parametrize("combination", itertools.product(("concatenated", "transposed_interleaved"), (False, True)))
def test_reruns_give_the_same_bits(combination):
    layout, bias = combination
    inputs, index = problem(T=65, dtype=torch.bfloat16, layout=layout, bias=bias)
    first = output_and_gradients(run, inputs, index, layout=layout)
    assert_all_close(output_and_gradients(run, inputs, index, layout=layout), first, 0.0, "deterministic")
