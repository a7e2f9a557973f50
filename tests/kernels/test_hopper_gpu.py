"""The Hopper kernels on a Hopper GPU, by the bar of test_triton_gpu.py. Sizes are chosen so that these kernels run, not
the Triton kernels behind them: tiles of 128 rows, concatenated weights, H and I multiples of 8 above 64."""

from unittest import mock

import pytest
import torch
from moe_problems import errors, layer, routing_ids, run, upcast
from test_triton_gpu import CAP, _exact_fp32_reference, check, problem  # noqa: F401

from sonicmoe_hf import backends
from sonicmoe_hf.config import LAYOUTS
from sonicmoe_hf.functional import moe_experts
from sonicmoe_hf.kernels import triton as portable
from sonicmoe_hf.kernels.interface import ACTIVATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
GEMMS = ("up", "down", "down_backward", "input_rows", "gate_up_gradient", "down_gradient")
CONCATENATED = [layout for layout, (_, interleaved) in LAYOUTS.items() if not interleaved]


@pytest.fixture
def on_hopper_alone():
    """A GEMM that falls back to Triton fails the test."""

    def fell_back(*args, **kwargs):
        raise AssertionError("fell back to Triton")

    with mock.patch.multiple(portable, **dict.fromkeys(GEMMS, fell_back)):
        yield


def test_it_is_chosen_on_hopper():
    assert backends.choose(torch.device("cuda"), torch.bfloat16).name == "hopper"
    assert backends.choose(torch.device("cuda"), torch.float32).name == "triton"


@pytest.mark.parametrize("T", (3001, 5003))
@pytest.mark.parametrize("layout", CONCATENATED)
@pytest.mark.parametrize("bias", (False, True))
def test_sizes_and_layouts(on_hopper_alone, T, layout, bias):
    check(*problem(T, empty=(0, 7), bias=bias), layout, backend="hopper")


@pytest.mark.parametrize("T", (1, 63, 65, 700))
def test_few_rows_run_on_triton(T):
    check(*problem(T, empty=(0, 7), bias=True), backend="hopper")


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - set(CONCATENATED)))
def test_interleaved_weights_run_partly_on_triton(layout):
    check(*problem(3001, empty=(0, 7), bias=True), layout, backend="hopper")


def test_no_tokens():
    tensors, dout, ids = problem(0)
    assert all((t == 0).all() for t in run(tensors, dout, ids, "concatenated", "swiglu", "hopper").values())


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("layout", CONCATENATED)
def test_activations(on_hopper_alone, name, layout):
    tensors, dout, ids = problem(2000, bias=True)
    if name == "clamped_swiglu":  # see test_triton_gpu.py
        tensors["gate_up_bias"] += 30 * torch.randint_like(tensors["gate_up_bias"], -1, 2)
    check(tensors, dout, ids, layout, name, backend="hopper")


@pytest.mark.parametrize("kind", ("sentinels", "list"))
def test_dropped_pairs_and_general_lists(on_hopper_alone, kind):
    check(*problem(3000, kind=kind, empty=(15,)), save="input", backend="hopper")


@pytest.mark.parametrize(("E", "K"), [(4, 1), (8, 8), (512, 10)])
def test_one_expert_all_experts_and_many_experts(on_hopper_alone, E, K):
    check(*problem(11_000 if E == 512 else 1500, E=E, K=K), backend="hopper")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("H", "I"), [(264, 136), (72, 200), (512, 72), (1024, 768)])
def test_sizes_that_no_tile_divides(on_hopper_alone, dtype, H, I):
    check(*problem(5003, H=H, I=I, dtype=dtype, bias=True), "concatenated", "geglu", backend="hopper")


def test_one_expert_gets_everything(on_hopper_alone):
    check(*problem(4000, E=16, K=1, empty=tuple(range(15))), backend="hopper")


def test_frozen_experts_and_frozen_router(on_hopper_alone):
    tensors, dout, (expert, _) = problem(3000)
    expected = run(upcast(tensors), dout.float(), (expert, None), "concatenated", "swiglu", "eager")
    for trained in ("x", "gate_up", "down", "weight"):
        leaves = {name: t.detach().requires_grad_(name == trained) for name, t in tensors.items()}
        weights = leaves["weight"].view(expert.shape)
        out = moe_experts(leaves["x"], leaves["gate_up"], leaves["down"], (expert, weights), backend="hopper")
        (gradient,) = torch.autograd.grad(out, leaves[trained], dout)
        assert errors({"g": gradient}, {"g": expected[f"d{trained}"]})["g"] < CAP


def test_many_reruns_give_the_same_bits(on_hopper_alone):
    tensors, dout, ids = problem(3001, bias=True)
    first = run(tensors, dout, ids, "concatenated", "swiglu", "hopper")
    for _ in range(200):
        again = run(tensors, dout, ids, "concatenated", "swiglu", "hopper")
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_nothing_synchronises(on_hopper_alone):
    tensors, dout, ids = problem(2000, bias=True)
    run(tensors, dout, ids, "concatenated", "swiglu", "hopper", sentinels=False)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(tensors, dout, ids, "concatenated", "swiglu", "hopper", sentinels=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph_replayed_with_different_routing(on_hopper_alone):
    tensors, dout, (expert, _) = problem(3000, bias=True)

    def step():
        return run(tensors, dout, (expert, None), "concatenated", "swiglu", "hopper", sentinels=False)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = step()
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(beside[name], found) for name, found in step().items()), "a side stream gives other bits"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in range(3):
        torch.manual_seed(seed)
        expert.copy_(routing_ids(3000, 16, 4, "top_k", "cuda", empty=(seed,))[0])
        graph.replay()
        replayed = {name: tensor.clone() for name, tensor in results.items()}
        assert all(torch.equal(replayed[name], found) for name, found in step().items())


def test_gpt_oss_experts_equal_transformers_eager():
    """At realistic magnitudes (h of order one, limits that bite), against Transformers' own eager experts in fp32."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig(hidden_size=256, intermediate_size=192, num_local_experts=8)
    experts = GptOssExperts(config).cuda().float()
    tensors, _ = layer(3000, 256, 192, 8, 6000, torch.float32, "cuda", bias=True)
    with torch.no_grad():
        experts.gate_up_proj.copy_(3 * tensors["gate_up"].transpose(1, 2))
        experts.down_proj.copy_(tensors["down"].transpose(1, 2))
        experts.gate_up_proj_bias.copy_(tensors["gate_up_bias"])
        experts.down_proj_bias.copy_(tensors["down_bias"])
    index, _ = routing_ids(3000, 8, 2, "top_k", "cuda")
    weights = torch.rand(3000, 2, device="cuda")
    config._experts_implementation = "eager"
    experts.requires_grad_(False)
    expected = experts(tensors["x"], index, weights)
    config._experts_implementation = "sonicmoe_hf"
    half = experts.bfloat16()
    found = half(tensors["x"].bfloat16(), index, weights.bfloat16())
    # bf16 roundings of x, weights (2^-9 each, and three times larger h before the clamp), h, a, y and out
    assert errors({"out": found}, {"out": expected})["out"] < 1e-2
