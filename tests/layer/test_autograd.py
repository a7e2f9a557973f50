"""Which gradients a backward computes, and torch.func's transforms."""

import pytest
import torch
from helpers.models import CONFIGS, ORDER_OF_SUMS, assert_all_close, batch, build, twin
from helpers.training import POLICY, Watch
from test_moe_experts import NAMES, Watching, output_and_gradients, problem, run
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import sonicmoe_hf
from sonicmoe_hf.kernels import eager
from sonicmoe_hf.patching.support import find_layers

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
    """The names of those functions, as they are called."""
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
        (("x",), "both"), (("x",), "none"), (("gate_up",), "none"), (("x", "down"), "both"), (("weights",), "none"),
        (("gate_up_bias",), "both"), (("down_bias",), "down_bias"), (("down",), "gate_up_bias"), (NAMES, "both"),
    ],
)  # fmt: skip
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


# torch.func


def experts_and_grouped_mm(family):
    """The same experts twice, with our implementation and with Transformers' grouped_mm; and what they take."""
    ours = next(find_layers(build(family, implementation="sonicmoe_hf"))).experts
    theirs = next(find_layers(build(family, implementation="grouped_mm"))).experts
    x, weights = torch.randn(12, 32), torch.rand(12, 2)
    index = torch.stack([torch.randperm(8)[:2] for _ in range(12)])
    return ours, theirs, (x, index, weights)


@pytest.mark.parametrize("family", CONFIGS)
def test_torch_func_differentiates_experts_as_grouped_mm(family):
    ours, theirs, (x, index, weights) = experts_and_grouped_mm(family)
    results = []
    for experts in (ours, theirs):

        def loss(parameters, x, weights, experts=experts):
            return functional_call(experts, parameters, (x, index, weights)).square().sum()

        parameters = dict(experts.named_parameters())
        found, dx, dweights = grad(loss, argnums=(0, 1, 2))(parameters, x, weights)
        out, pull = vjp(lambda x, experts=experts: experts(x, index, weights), x)
        results.append({**found, "x": dx, "weights": dweights, "out": out, "pulled": pull(torch.ones_like(out))[0]})
    assert_all_close(results[0], results[1], 1e-5, ORDER_OF_SUMS)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of grouped_mm, under vmap
def test_torch_func_maps_experts_over_a_batch_as_grouped_mm():
    ours, theirs, (x, index, weights) = experts_and_grouped_mm("qwen3_moe")
    x, index, weights = (torch.stack([tensor, tensor.flip(0)]) for tensor in (x, index, weights))
    results = []
    for experts in (ours, theirs):

        def loss(parameters, x, index, weights, experts=experts):
            return functional_call(experts, parameters, (x, index, weights)).square().sum()

        parameters = dict(experts.named_parameters())
        per_sample = vmap(grad(loss), in_dims=(None, 0, 0, 0))(parameters, x, index, weights)
        over_experts = vmap(loss, in_dims=(dict.fromkeys(parameters, 0), None, None, None))(
            {name: torch.stack([p, 2 * p, p]) for name, p in parameters.items()}, x[0], index[0], weights[0]
        )
        jacobian = jacrev(lambda x, experts=experts: experts(x, index[0], weights[0]).sum(0))(x[0])
        results.append({"out": vmap(experts)(x, index, weights), "over": over_experts, "jac": jacobian, **per_sample})
    assert_all_close(results[0], results[1], 1e-5, ORDER_OF_SUMS)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("routing", [None, POLICY], ids=["top_k", "token_rounding"])
def test_torch_func_differentiates_a_patched_model(family, routing):
    plain = build(family, implementation="grouped_mm")
    model = twin(plain)
    sonicmoe_hf.patch_model(model, routing)
    watch, inputs = Watch(model), batch(padding=True)
    found = grad(lambda p: functional_call(model, p, kwargs=inputs).loss)(dict(model.named_parameters()))
    assert set(watch.rounded()) == {routing is not None}
    if routing is None:
        expected = grad(lambda p: functional_call(plain, p, kwargs=inputs).loss)(dict(plain.named_parameters()))
    else:
        model(**inputs).loss.backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
    assert_all_close(found, expected, 1e-5, ORDER_OF_SUMS)


def test_torch_func_refuses_what_there_is_not():
    inputs, index = problem(grad=False)

    def out(x):
        return run({**inputs, "x": x}, index)

    with pytest.raises(RuntimeError, match="moe_experts has no second derivatives"):
        grad(lambda x: grad(lambda x: out(x).sum())(x).sum())(inputs["x"])
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivatives .* use reverse mode"):
        jvp(out, (inputs["x"],), (inputs["x"],))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs["x"], inputs["x"])
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            out(dual)
    x = inputs["x"].clone().requires_grad_()
    inner = grad(lambda x: out(x).sum())(x)  # of a tensor that autograd outside follows, too
    with pytest.raises(RuntimeError, match="moe_experts has no second derivatives"):
        inner.sum().backward()


# many gradients in one backward


def test_gradients_in_a_batch_are_those_of_grouped_mm():
    ours, theirs, (x, index, weights) = experts_and_grouped_mm("qwen3_moe")
    directions = torch.randn(3, *x.shape)
    results = []
    for experts in (ours, theirs):
        inputs = {"x": x.clone().requires_grad_(), **dict(experts.named_parameters())}
        found = torch.autograd.grad(
            experts(inputs["x"], index, weights), list(inputs.values()), directions, is_grads_batched=True
        )
        jacobian = torch.autograd.functional.jacobian(
            lambda x, experts=experts: experts(x, index, weights).sum(0), x, vectorize=True
        )
        results.append({**dict(zip(inputs, found)), "jacobian": jacobian})
    assert_all_close(results[0], results[1], 1e-5, ORDER_OF_SUMS)


def test_token_rounding_takes_gradients_in_a_batch():
    model = build("qwen3_moe")
    sonicmoe_hf.patch_model(model, POLICY)
    out, routers = model(**batch(padding=True)).logits, [layer.router.weight for layer in find_layers(model)]
    directions = torch.randn(2, *out.shape)
    found = torch.autograd.grad(out, routers, directions, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(out, routers, direction, retain_graph=True) for direction in directions]
    expected = [torch.stack(each) for each in zip(*one_by_one)]
    assert_all_close(dict(enumerate(found)), dict(enumerate(expected)), 1e-5, ORDER_OF_SUMS)


@pytest.mark.parametrize("leaves", [("x",), NAMES], ids=["frozen experts", "trained experts"])
def test_what_gradients_in_a_batch_cannot_do_is_an_error(leaves):
    inputs, index = problem(grad=False)
    inputs = {name: tensor.requires_grad_(name in leaves) for name, tensor in inputs.items()}
    directions = torch.randn(2, *inputs["x"].shape, dtype=torch.float64)

    def many():
        out = run(inputs, index)
        (found,) = torch.autograd.grad(out, inputs["x"], directions, is_grads_batched=True, create_graph=True)
        return found

    with pytest.raises(RuntimeError, match="moe_experts has no second derivatives"):
        many().sum().backward()
    outer = run(inputs, index)
    outer.register_hook(torch.enable_grad()(lambda gradient: many().sum(0)))
    with pytest.raises(RuntimeError, match="is_grads_batched=True inside itself is not supported"):
        torch.autograd.grad(outer, inputs["x"], directions, is_grads_batched=True)
