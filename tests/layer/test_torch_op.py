"""moe_experts as one op: what torch.compile, tracers, dispatch modes and torch's own checks see of it."""

import sys
from pathlib import Path

import pytest
import torch
from helpers.marks import rest_pinned, rest_slow
from helpers.models import assert_all_close
from helpers.one_layer import Watching, output_and_gradients, problem, run
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels.tape import leaves_of
from sonicmoe_hf.layer import moe_experts as functional
from sonicmoe_hf.layer.call import CALL, LayerCall, Options, Saved, SaveFlags
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.moe_experts import Activation, moe_experts
from sonicmoe_hf.layer.projection import Projection
from sonicmoe_hf.layer.torch_op import CODE_DIGEST, digest_code


@pytest.mark.parametrize("save", rest_pinned(["input", "preactivation"]))
def test_it_compiles_whole_and_gives_the_same_bits(save):
    inputs, index = problem(T=16, dtype=torch.float32)
    compiled = torch.compile(
        lambda x, gate_up, down, weights, b1, b2: moe_experts(
            x, gate_up, down, (index, weights), gate_up_bias=b1, down_bias=b2, save=save
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    actual = output_and_gradients(lambda i: compiled(*i.values()), inputs)
    assert_all_close(actual, output_and_gradients(run, inputs, index), 0.0, "the same kernels on the same inputs")


@pytest.mark.parametrize(
    "after", rest_pinned([torch.sin, torch.clone]), ids=["the output is needed", "nothing follows"]
)
def test_compiled_code_computes_the_second_product_again_only_for_what_follows_it(after, monkeypatch):
    inputs, index = problem(T=16, dtype=torch.float32)
    products = []
    for name in ("up", "down"):
        product = getattr(eager, name)
        monkeypatch.setattr(eager, name, lambda *args, f=product, n=name, **kw: products.append(n) or f(*args, **kw))

    def layer(*leaves):
        return after(run(dict(zip(inputs, leaves)), index))

    def recomputed(inputs):
        return checkpoint(layer, *inputs.values(), use_reentrant=False)

    wanted = output_and_gradients(lambda inputs: layer(*inputs.values()), inputs)
    torch._dynamo.reset()
    products.clear()
    actual = output_and_gradients(torch.compile(recomputed, backend="aot_eager", fullgraph=True), inputs)
    assert_all_close(actual, wanted, 0.0, "the same kernels on the same inputs")
    assert products == ["up", "down", "up", *["down"] * (after is torch.sin)]


@pytest.mark.slow
@pytest.mark.pinned
def test_torchs_cache_on_disk_gives_no_graph_of_another_version_of_the_op(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs, index = problem(T=16, dtype=torch.float32)

    def recomputed(inputs):
        return checkpoint(lambda *leaves: run(dict(zip(inputs, leaves)), index), *inputs.values(), use_reentrant=False)

    hits = []
    for digest in ("this", "this", "another"):
        monkeypatch.setattr(sys.modules[moe_experts.__module__], "CODE_DIGEST", digest)
        torch._dynamo.reset()
        counters.clear()
        torch.compile(recomputed, fullgraph=True)(inputs).sum().backward()
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0]


@pytest.mark.parametrize("name", ["layer/experts_op", "kernels/interface", "kernels/packed/format", "private/torch"])
def test_the_digest_is_of_all_sources_that_are_traced(name, monkeypatch):
    read = Path.read_bytes
    changed = f"/sonicmoe_hf/{name}.py"
    monkeypatch.setattr(Path, "read_bytes", lambda file: read(file) + b"#" * file.as_posix().endswith(changed))
    assert digest_code("layer", "kernels", "private") != CODE_DIGEST


@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_a_dispatch_mode_sees_the_ops_and_gets_the_same_bits(save):
    inputs, index = problem(dtype=torch.float32)
    plain = output_and_gradients(run, inputs, index, save=save)
    with Watching() as watching:
        seen = output_and_gradients(run, inputs, index, save=save)
    assert watching.seen == ["dispatch", "experts_forward", "experts_backward"]
    assert_all_close(seen, plain, 0.0, "the same functions on the same inputs")


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_tracers_and_tensor_subclasses_get_the_ops(pre_dispatch):
    inputs, index = problem(grad=False, dtype=torch.float32)
    graph = make_fx(lambda x: run({**inputs, "x": x}, index), pre_dispatch=pre_dispatch)(inputs["x"])
    assert "sonicmoe_hf.experts_forward" in graph.code and "sonicmoe_hf.dispatch" in graph.code
    assert torch.equal(graph(2 * inputs["x"]), run({**inputs, "x": 2 * inputs["x"]}, index))
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
        fake_index = mode.from_tensor(index)
    assert run(fakes, fake_index).shape == inputs["x"].shape


@pytest.mark.parametrize("layout", rest_slow(["concatenated", "transposed_interleaved"]))
def test_the_custom_ops_pass_torchs_own_checks(layout):
    inputs, index = problem(T=5, dtype=torch.float32, layout=layout)
    rows = functional.dispatch(index, 5, 4)
    weight = inputs["weights"].detach().reshape(-1).requires_grad_()
    plain = [Projection(inputs[name], bias=inputs[f"{name}_bias"]) for name in ("gate_up", "down")]
    factors = (
        (torch.randn(4, 3, 6), torch.randn(10, 3, 4).permute(2, 0, 1), 0.5),
        (
            torch.randn(4, 2, 5),
            torch.randn(6, 2, 4).permute(2, 0, 1),
            2.0,
        ),
    )
    adapted = [
        p._replace(a=a.requires_grad_(), b=b.requires_grad_(), scale=scale) for p, (a, b, scale) in zip(plain, factors)
    ]
    transposed, interleaved = LAYOUTS[layout]
    options = Options(
        activation=Activation(),
        transposed=transposed,
        interleaved=interleaved,
        backend="eager",
        saves=SaveFlags(h=True, u=True, v=True),
    )
    ops = torch.ops.sonicmoe_hf
    gate_up, down = adapted
    call = LayerCall(weight=weight, x=inputs["x"], gate_up=gate_up, down=down, rows=rows, options=options)
    torch.library.opcheck(ops.experts_forward.default, leaves_of(call))
    gate_up, down = plain
    saves_nothing = call._replace(gate_up=gate_up, down=down, options=options._replace(saves=SaveFlags()))
    torch.library.opcheck(ops.experts_forward.default, leaves_of(saves_nothing))
    torch.library.opcheck(ops.dispatch.default, (index, None, 5, 4, False, "eager"))
    (call,) = CALL.nest(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves_of(call))
    out, *kept = ops.experts_forward(*leaves_of(call))
    assert [tensor.shape[1] for tensor in kept] == [10, 8, 8], "ranks are padded to multiples of 8"
    saved = options.saves.restore(kept)
    needs = [name for name in CALL.leaves if name.split("_")[-1] in ("x", "weight", "bias", "a", "b")]
    backward = (torch.ones_like(out), *leaves_of(call._replace(saved=saved)), " ".join(needs))
    torch.library.opcheck(ops.experts_backward.default, backward)
    *same, a = ops.experts_first_half(*leaves_of(call))
    assert all(torch.equal(tensor, whole) for tensor, whole in zip(same, kept, strict=True))
    for v in (saved.v, None):
        given = call._replace(saved=Saved(v=v))
        assert torch.equal(ops.experts_second_half(*leaves_of(given), a)[0], out)
    without_u = call._replace(options=options._replace(saves=SaveFlags(h=True, v=True)))
    torch.library.opcheck(ops.experts_first_half.default, leaves_of(without_u))
    torch.library.opcheck(ops.experts_second_half.default, (*leaves_of(call._replace(saved=Saved(v=saved.v))), a))
