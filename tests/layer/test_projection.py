"""moe_experts with low-rank adapters: values and gradients, what is kept, computed and formed, and what is refused."""

import pytest
import torch
from helpers.marks import crossed, rest_pinned
from helpers.models import assert_all_close, relative_error
from helpers.one_layer import (
    OF_ONE_KIND,
    Watching,
    as_stored,
    expected,
    low_rank,
    output_and_gradients,
    problem,
    with_factors,
)
from helpers.one_layer import run_adapted as run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.layer import torch_op
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.moe_experts import Activation, LowRank, moe_experts
from sonicmoe_hf.layer.projection import side_by_side

FACTORS = ("gate_up_a", "gate_up_b", "down_a", "down_b")
T, H, I, E, K = 7, 6, 5, 4, 2


def merged(inputs, index, layout="concatenated", activation=None):
    """Compute the reference with W + scale * BA in the place of each weight."""
    whole = dict(inputs)
    for name in ("gate_up", "down"):
        adapter = low_rank(inputs, name)
        if adapter is not None:
            delta = adapter.scale * adapter.b @ adapter.a
            whole[name] = inputs[name] + (delta.transpose(1, 2) if LAYOUTS[layout][0] else delta)
    return expected(whole, index, layout=layout, activation=activation)


@pytest.mark.parametrize(
    "layout, name", [*((layout, "swiglu") for layout in LAYOUTS), *((layout, "relu2") for layout in OF_ONE_KIND)]
)
@pytest.mark.parametrize(
    "bias, save, ranks",
    rest_pinned(
        [
            (True, "input", (3, 2)),
            (False, "preactivation", (8, 9)),
            (True, "preactivation", (3, 0)),  # of one weight alone
            (True, "preactivation", (0, 2)),
            (True, "preactivation", (20, 3)),
        ],
        2,
    ),
)
def test_it_agrees_with_merged_weights_and_its_gradients_with_finite_differences(layout, name, bias, save, ranks):
    options = {"layout": layout, "activation": Activation(name)}
    inputs, index = problem(T, H, I, E, K, layout=layout, bias=bias, activation=options["activation"])
    inputs = with_factors(inputs, ranks)
    assert_all_close(
        output_and_gradients(run, inputs, index, save=save, **options),
        output_and_gradients(merged, inputs, index, **options),
        1e-12,
        "fp64, sums of a few dozen terms",
    )

    def by_position(*tensors):
        return run(dict(zip(inputs, tensors)), index, save=save, **options)

    assert torch.autograd.gradcheck(by_position, tuple(inputs.values()), fast_mode=True)


@pytest.mark.parametrize(
    "layout, ranks",
    crossed(["concatenated", "transposed_interleaved"], [(3, 2), (8, 16), (3, 0), (0, 2)], everywhere=1),
    ids=str,
)
def test_factors_as_peft_stores_them_give_what_their_views_do(layout, ranks):
    inputs, index = problem(T, H, I, E, K, layout=layout)
    inputs = with_factors(inputs, ranks)
    of_views, found = (
        output_and_gradients(run, inputs, index, layout=layout, low_rank=form) for form in (low_rank, as_stored)
    )
    assert_all_close(found, of_views, 0.0, "the same sums")
    compiled = torch.compile(
        lambda i: run(i, index, layout=layout, low_rank=as_stored), fullgraph=True, backend="aot_eager"
    )
    assert_all_close(output_and_gradients(compiled, inputs), of_views, 0.0, "the same functions")


def test_adapters_of_one_weight_add_up_each_with_its_own_scale():
    inputs, index = problem(T, H, I, E, K)
    one, other = with_factors(inputs, (3, 3)), with_factors(inputs, (2, 2), seed=1)
    scales = 0.5, 3.0

    def sum_of(weight):
        return [low_rank(adapter, weight, scale) for adapter, scale in zip((one, other), scales)]

    def together():
        return moe_experts(
            one["x"],
            one["gate_up"],
            one["down"],
            (index, one["weights"]),
            gate_up_bias=one["gate_up_bias"],
            down_bias=one["down_bias"],
            gate_up_adapter=sum_of("gate_up"),
            down_adapter=sum_of("down"),
        )

    def whole():
        weights = {name: one[name] + sum(a.scale * a.b @ a.a for a in sum_of(name)) for name in ("gate_up", "down")}
        return expected({**one, **weights}, index)

    wanted = {**one, **{f"other {name}": other[name] for name in FACTORS}}
    found, exact = (output_and_gradients(lambda _, f=f: f(), wanted) for f in (together, whole))
    assert_all_close(found, exact, 1e-12, "fp64, sums of a few dozen terms")


def test_adapters_of_one_weight_add_up_in_fp64_if_any_of_their_factors_is():
    def adapter(a_dtype, b_dtype):
        return LowRank(torch.randn(E, 2, H).to(a_dtype), torch.randn(E, I, 2).to(b_dtype), 0.5)

    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    for dtypes, wanted in (
        (((bf16, bf16), (bf16, fp64)), fp64),
        (((fp32, fp64), (fp32, fp32)), fp64),
        (((fp64, bf16), (bf16, bf16)), fp64),
        (((bf16, bf16), (bf16, bf16)), fp32),
        (((torch.float16, bf16), (bf16, fp32)), fp32),
    ):
        given = [adapter(*pair) for pair in dtypes]
        together = side_by_side(given, E)
        assert (together.a.dtype, together.b.dtype) == (wanted, wanted), dtypes
        exact = sum(one.scale * one.b.double() @ one.a.double() for one in given)
        rounding = 1e-6 if wanted is fp32 else 1e-15  # a few roundings of 2^-24, or of 2^-53
        assert relative_error(together.b.double() @ together.a.double(), exact) < rounding


@pytest.mark.parametrize("rank", [4, 8, 16])  # padded, and not; a copy is due all the same
def test_gradients_of_fp32_factors_are_fp32_sums_whatever_the_experts_dtype(rank):
    inputs, index = problem(65, 32, 24, E, K, dtype=torch.bfloat16)
    inputs = with_factors(inputs, (rank, rank), dtype=torch.float32)
    exact = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    exact = output_and_gradients(merged, exact, index)
    found = output_and_gradients(run, inputs, index)
    assert all(found[name].dtype == torch.float32 for name in FACTORS)
    errors = {name: relative_error(found[name], exact[name]) for name in FACTORS}
    assert max(errors.values()) < 1e-2, errors  # a handful of bf16 roundings of 2^-9 on the way
    with torch.autocast("cpu", torch.bfloat16):
        cast = {name: t.detach().float().requires_grad_() for name, t in inputs.items()}
        by_autocast = output_and_gradients(run, cast, index)
    assert all(torch.equal(by_autocast[name], found[name]) for name in FACTORS)


COMPUTED_BY = {  # what is asked for: the kernels' functions that are called for it
    ("x",): {"lora_b_backward", "up_backward_input"},
    ("gate_up_a",): {"lora_b_backward", "lora_a_gradient"},
    ("gate_up_b",): {"lora_b_backward"},
    ("down_a",): {"lora_b_backward", "lora_a_gradient"},
    ("down_b",): {"lora_b_backward"},
    ("weights",): {"lora_b_backward"},
    FACTORS: {"lora_b_backward", "lora_a_gradient"},
}


@pytest.mark.parametrize("wanted", COMPUTED_BY)
@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.parametrize("as_op", [False, True], ids=["plain", "op"])
def test_a_backward_computes_the_gradients_asked_for_and_no_others(monkeypatch, wanted, save, as_op):
    inputs, index = problem(T, H, I, E, K)
    inputs = with_factors(inputs)
    every = output_and_gradients(run, inputs, index, save=save)
    called = []
    for name in ("lora_b_backward", "lora_a_gradient", "up_backward_input", "gate_up_gradient", "down_gradient"):
        function = getattr(eager, name)
        monkeypatch.setattr(eager, name, lambda *a, _f=function, _n=name, **k: called.append(_n) or _f(*a, **k))
    with Watching() if as_op else torch.enable_grad():
        out = run(inputs, index, save=save)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad((out * direction).sum(), [inputs[name] for name in wanted])
    assert set(called) == COMPUTED_BY[wanted]
    assert_all_close(dict(zip(wanted, found)), {name: every[name] for name in wanted}, 1e-14, "the same sums")


@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_adapted_frozen_experts_keep_x_rows_of_the_rank_and_nothing_else_more(save):
    inputs, index = problem(T, H, I, E, K, bias=False)
    inputs = with_factors(inputs)
    for name in ("gate_up", "down"):
        inputs[name].requires_grad_(False)
    kept = {}
    for name, tensors in (("frozen", {n: t for n, t in inputs.items() if n not in FACTORS}), ("adapted", inputs)):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(tuple(t.shape)) or t, lambda t: t):
            run(tensors, index, save=save)
        kept[name] = sizes
    for size in kept["frozen"]:
        kept["adapted"].remove(size)
    factors = [(E, 3, H), (E, 2 * I, 3), (E, 2, I), (E, H, 2)]  # views, which take no memory
    x = [(T, H)] if save == "preactivation" else []
    assert sorted(kept["adapted"]) == sorted([*factors, *x, (T * K, 8), (T * K, 8)])


class LargestTensor(TorchDispatchMode):
    """The most elements of a tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["concatenated", "transposed_interleaved"])
def test_nothing_of_a_weights_size_is_formed(monkeypatch, layout, dtype, save):
    monkeypatch.setattr(torch_op, "traced", lambda *tensors: False)  # the mode is to look into the ops
    inputs, index = problem(4, 192, 160, 8, 2, layout=layout, dtype=dtype)
    inputs = with_factors(inputs, (2, 2), dtype=torch.float32)
    for name in ("gate_up", "down"):
        inputs[name].requires_grad_(False)
    wanted = [t for t in inputs.values() if t.requires_grad]
    with LargestTensor() as largest:
        out = run(inputs, index, layout=layout, save=save)
        torch.autograd.grad(out, wanted, torch.ones_like(out))
    factors, expert = 8 * 8 * (192 + 320 + 160 + 192), 320 * 192  # the four as the kernels take them, in one buffer
    assert 0 < largest.elements <= factors < expert < min(inputs["gate_up"].numel(), inputs["down"].numel())


def test_compiled_it_gives_the_same():
    torch._dynamo.reset()
    inputs, index = problem(16, 8, 6, E, K, dtype=torch.float32)
    inputs = with_factors(inputs, dtype=torch.float32)
    every = output_and_gradients(run, inputs, index)
    compiled = torch.compile(lambda i: run(i, index), fullgraph=True, backend="aot_eager")
    assert_all_close(output_and_gradients(compiled, inputs), every, 0.0, "the same functions on the same inputs")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"down_adapter": lambda a: a._replace(b=a.b[:, 1:])}, r"down_adapter has a \(4, 2, 5\) and b \(4, 5, 2\)"),
        ({"down_adapter": lambda a: a._replace(b=a.b[0])}, r"down_adapter has a \(4, 2, 5\) and b \(6, 2\)"),
        (
            {"down_adapter": lambda a: LowRank(a.a.reshape(8, 5)[:7], a.b.reshape(6, 8)[:, :7])},
            r"or \[r\*E, in\] and \[out, r\*E\], with E = 4, in = 5, out = 6",
        ),
        ({"gate_up_adapter": lambda a: a._replace(a=a.a[:3])}, r"\[E, out, r\], or .* with E = 4, in = 6, out = 10"),
        (
            {"down_adapter": lambda a: a._replace(a=a.a.to("meta"))},
            r"down_adapter.a is on meta but its weight is on cpu",
        ),
    ],
)
def test_what_does_not_fit_raises_value_error(change, words):
    inputs, index = problem(T, H, I, E, K, grad=False)
    inputs = with_factors(inputs)
    adapters = {f"{name}_adapter": low_rank(inputs, name) for name in ("gate_up", "down")}
    (name, function), *_ = change.items()
    adapters[name] = function(adapters[name])
    biases = {name: inputs[name] for name in ("gate_up_bias", "down_bias")}
    with pytest.raises(ValueError, match=words):
        moe_experts(inputs["x"], inputs["gate_up"], inputs["down"], (index, inputs["weights"]), **biases, **adapters)
