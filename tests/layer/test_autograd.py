"""Gradients that a backward computes, when it is an op of torch's, and what cannot be differentiated."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.models import assert_all_close, batch, build
from helpers.one_layer import NAMES, Watching, output_and_gradients, problem, run
from helpers.training import POLICY
from torch.func import grad, jvp, vjp, vmap
from torch.utils import _python_dispatch

import sonicmoe_hf
from sonicmoe_hf.kernels import eager
from sonicmoe_hf.layer import torch_op
from sonicmoe_hf.patching.moe_layers import find_layers

COMPUTED_BY = {  # gradient: the kernels' functions that only it needs
    "x": {"up_backward_input"},
    "gate_up": {"gate_up_gradient"},
    "down": {"down_gradient"},
    "weights": set(),
    "gate_up_bias": {"gate_up_bias_gradient"},
    "down_bias": {"down_bias_gradient"},
}


@pytest.fixture
def called(monkeypatch):
    """Record the names of those functions, as they are called."""
    names = []
    for name in set().union(*COMPUTED_BY.values()):
        function = getattr(eager, name)
        monkeypatch.setattr(eager, name, lambda *a, _f=function, _n=name, **k: names.append(_n) or _f(*a, **k))
    return names


def by_grad(out, wanted):
    return torch.autograd.grad(out, wanted)


def by_backward(out, wanted):
    out.backward(inputs=wanted)
    return [tensor.grad for tensor in wanted]


@pytest.mark.parametrize(
    ("wanted", "biases"),
    [
        (("x",), "both"),
        (("x",), "none"),
        (("gate_up",), "none"),
        (("x", "down"), "both"),
        (("weights",), "none"),
        (("gate_up_bias",), "both"),
        (("down_bias",), "down_bias"),
        (("down",), "gate_up_bias"),
        (NAMES, "both"),
    ],
)
@pytest.mark.parametrize("ask", [by_grad, by_backward])
@pytest.mark.parametrize("leaves", [True, False], ids=["of leaves", "of results"])
@pytest.mark.parametrize("as_op", [False, True], ids=["plain", "op"])
def test_a_backward_computes_the_gradients_asked_for_and_no_others(called, wanted, biases, ask, leaves, as_op):
    inputs, index = problem(bias=True)
    inputs = {name: tensor for name, tensor in inputs.items() if "bias" not in name or biases in ("both", name)}
    every = output_and_gradients(run, inputs, index)
    called.clear()
    used = inputs if leaves else {name: tensor * 1 for name, tensor in inputs.items()}
    if as_op:
        with Watching() as watching:
            out = run(used, index)
        assert "experts_forward" in watching.seen
    else:
        out = run(used, index)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = ask((out * direction).sum(), [inputs[name] for name in wanted])
    assert sorted(called) == sorted(set().union(*(COMPUTED_BY[name] for name in wanted)))
    assert_all_close(dict(zip(wanted, found)), {name: every[name] for name in wanted}, 1e-14, "the same sums")
    assert all((tensor.grad is not None) == (ask is by_backward and name in wanted) for name, tensor in inputs.items())


def test_a_retained_graph_answers_each_question_by_itself(called):
    inputs, index = problem()
    out = run(inputs, index).sum()
    for name in ("x", "gate_up", "down"):
        called.clear()
        torch.autograd.grad(out, inputs[name], retain_graph=True)
        assert set(called) == COMPUTED_BY[name]
    called.clear()
    out.backward()
    assert set(called) == set().union(*COMPUTED_BY.values())


def test_a_compiled_call_gives_the_gradients_asked_for():
    torch._dynamo.reset()
    inputs, index = problem(dtype=torch.float32)
    every = output_and_gradients(run, inputs, index)
    compiled = torch.compile(lambda i: run(i, index), fullgraph=True, backend="aot_eager")
    direction = torch.randn(
        every["out"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).float()
    for name in ("x", "gate_up"):
        (found,) = torch.autograd.grad((compiled(inputs) * direction).sum(), inputs[name])
        assert_all_close({name: found}, {name: every[name]}, 0.0, "the same functions on the same inputs")


# what there is not


INPUTS, INDEX = problem(grad=False)


def _out(x):
    """Compute the function of one tensor."""
    return run({**INPUTS, "x": x}, INDEX)


def _dual(x):
    with torch.autograd.forward_ad.dual_level():
        _out(torch.autograd.forward_ad.make_dual(x, x))


def _in_a_batch(x):
    x = x.clone().requires_grad_()
    torch.autograd.grad(_out(x), x, torch.randn(2, *x.shape, dtype=x.dtype), is_grads_batched=True)


def _rounded(x):
    model = build("qwen3_moe")
    sonicmoe_hf.patch_model(model, POLICY)
    out, router = model(**batch(padding=True)).logits, next(find_layers(model)).router.weight
    torch.autograd.grad(out, router, torch.randn(2, *out.shape), is_grads_batched=True)


UNSUPPORTED = {
    "grad": lambda x: grad(lambda x: _out(x).sum())(x),
    "vjp": lambda x: vjp(_out, x),
    "vmap": lambda x: vmap(_out)(torch.stack([x, x])),
    "jvp": lambda x: jvp(_out, (x,), (x,)),
    "forward mode": _dual,
    "gradients in a batch": _in_a_batch,
    "of token rounding": _rounded,
    "jacobian": lambda x: torch.autograd.functional.jacobian(_out, x, vectorize=True),
    "torch.jit.trace": lambda x: torch.jit.trace(_out, (x,)),
    "compiled torch.func": lambda x: torch.compile(grad(lambda x: _out(x).sum()), backend="aot_eager")(x),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("attempt", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_transforms_of_functions_are_one_error_that_names_what_works(attempt):
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"works neither with torch.func .* use backward\(\) or torch.autograd.grad"):
        attempt(INPUTS["x"])


@pytest.mark.parametrize("needed", [("x",), ("x", "gate_up", "weights")])
def test_second_derivatives_are_refused_not_left_out(needed):
    inputs, index = problem(grad=False)
    wanted = [inputs[name].requires_grad_() for name in needed]
    gradients = torch.autograd.grad(run(inputs, index).sum(), wanted, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        (gradients[0].square().sum() + wanted[0].sum()).backward()


def test_modes_that_threads_leave_in_another_order_than_they_entered_them_are_over(monkeypatch):
    """torch's own answer stays yes then, and backward would be an op that keeps h to its end."""
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", False)  # set by what follows
    one, other = Watching(), Watching()
    with ThreadPoolExecutor(1) as thread:
        one.__enter__()
        thread.submit(other.__enter__).result()
        one.__exit__(None, None, None)
        thread.submit(other.__exit__, None, None, None).result()
    assert not torch_op.traced("moe_experts", torch.ones(1))
