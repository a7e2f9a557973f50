"""The Hopper kernels on a Hopper GPU, by the bar of test_triton_gpu.py. Sizes are chosen so that these kernels run, not
the Triton kernels behind them: H and I multiples of 8 above 64. Every buffer starts out as NaN, tails included."""

import pytest
import torch
from kernel_helpers import check_nothing_synchronises, errors, same_bits
from kernel_products import Operands, products
from moe_problems import layer, routing_ids, run, upcast
from test_triton_gpu import CAP, _exact_fp32_reference, check, check_last_tokens, problem  # noqa: F401

from benchmarks.common.timing import record_graph
from sonicmoe_hf.kernels.hopper.config import TALL, WIDE, gemm_down_tiles, gemm_wgrad_tiles, is_short, row_bucket
from sonicmoe_hf.kernels.interface import Activation
from sonicmoe_hf.layer import backends
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.moe_experts import moe_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
ORDERS = ("concatenated", "interleaved")


def test_it_is_chosen_on_hopper():
    assert backends.choose(torch.device("cuda"), torch.bfloat16).name == "hopper"
    assert backends.choose(torch.device("cuda"), torch.float32).name == "triton"


@pytest.mark.parametrize("T", (3001, 5003))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", (False, True))
def test_sizes_and_layouts(hopper, T, layout, bias):
    check(*problem(T, empty=(0, 7), bias=bias), layout, backend="hopper")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_rows_of_deep_products(hopper, dtype, layout):
    """down, with bias, and up_backward_input take wide tiles."""
    H, I, E, K = 512, 1544, 8, 4
    tensors, dout, ids = problem(3001, H=H, I=I, E=E, K=K, empty=(0, 7), dtype=dtype, bias=True)
    assert all(gemm_down_tiles(H, depth)[row_bucket(3001 * K, E)] == WIDE for depth in (I, 2 * I))
    check(tensors, dout, ids, layout, backend="hopper")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_gradients_over_few_rows(hopper, dtype, layout):
    """Over about 256 rows they take other tiles than over more."""
    H, E, K = 576, 32, 4
    tensors, dout, ids = problem(1601, H=H, I=328, E=E, K=K, empty=(0, 7, 31), dtype=dtype)
    assert is_short(1601 * K, E) and len(set(gemm_wgrad_tiles(H))) == 2
    check(tensors, dout, ids, layout, backend="hopper")


@pytest.mark.parametrize("T, dtype", ((801, torch.bfloat16), (1101, torch.bfloat16), (1101, torch.float16)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_of_about_128_rows(hopper, T, dtype, layout):
    """down, with bias, and up_backward_input take an expert's last tile of up to 64 rows with the one before."""
    H, I, E, K = 576, 328, 32, 4
    tensors, dout, ids = problem(T, H=H, I=I, E=E, K=K, empty=(*range(7), 31), dtype=dtype, bias=True)
    assert gemm_down_tiles(H, I)[row_bucket(T * K, E)] == TALL
    rows = set(ids[0].flatten().bincount().tolist())
    assert rows & set(range(129, 193)) and rows & set(range(1, 129) if T == 801 else range(193, 257))
    check(tensors, dout, ids, layout, backend="hopper")


@pytest.mark.parametrize("K", (2, 4))
def test_many_short_products(hopper, K):
    """down and up_backward_input are scheduled statically, in many rounds; experts have about 320 or 640 rows,
    the last half a tile."""
    H, I, E = 520, 200, 192
    assert all(gemm_down_tiles(H, depth)[row_bucket(30720 * K, E)].static for depth in (I, 2 * I))
    check(*problem(30720, H=H, I=I, E=E, K=K, empty=(0, 7), bias=True), backend="hopper")


@pytest.mark.parametrize("T", (1, 63, 65, 190, 700))
@pytest.mark.parametrize("layout", ORDERS)
def test_few_rows(T, layout):
    """Up to 48 rows per expert, tiles have 64 rows, and up and down_backward run on Triton."""
    check(*problem(T, empty=(0, 7), bias=True), layout, backend="hopper")


def test_few_rows_of_skewed_experts():
    """Tiles of 64 rows, several of one expert."""
    tensors, dout, (expert, _) = problem(300, E=64, K=4)
    expert[:250, 0] = 3
    check(tensors, dout, (expert, None), backend="hopper")


def test_sizes_that_run_on_triton():
    check(*problem(3001, H=256, I=60, bias=True), "interleaved", backend="hopper")


@pytest.mark.parametrize(("H", "I"), [(264, 136), (72, 200), (512, 72), (2688, 1856)])
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_sizes_without_a_gate(hopper, dtype, H, I):
    check(*problem(5003, H=H, I=I, dtype=dtype, bias=True, activation="relu2"), activation="relu2", backend="hopper")


@pytest.mark.parametrize(("E", "K"), [(4, 1), (8, 8), (512, 10)])
def test_one_expert_all_experts_and_many_experts(hopper, E, K):
    check(*problem(11_000 if E == 512 else 1500, E=E, K=K), backend="hopper")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("H", "I"), [(264, 136), (72, 200), (512, 72), (1024, 768)])
@pytest.mark.parametrize("layout", ("concatenated", "transposed_interleaved"))
def test_sizes_that_no_tile_divides(hopper, dtype, H, I, layout):
    check(*problem(5003, H=H, I=I, dtype=dtype, bias=True), layout, "geglu", backend="hopper")


@pytest.mark.large
@pytest.mark.parametrize(("H", "I"), [(2048, 72), (128, 1024)])
def test_rows_beyond_two_to_the_31_elements(hopper, H, I):
    """The limit is that of gathered operands, which have a row a token."""
    check_last_tokens(H, I, "hopper")


@pytest.mark.large
@pytest.mark.parametrize("T", (16384, 65536))
def test_deepseek_v3_sizes(hopper, T):
    """Compared where it is cheap: some tokens, whose out, dx and dweight need no others, and the
    weights of two experts."""
    tensors, dout, (expert, _) = problem(T, H=7168, I=2048, E=256, K=8)
    found = run(tensors, dout, (expert, None), "concatenated", "swiglu", "hopper")
    sample = torch.arange(T - 4, T, device="cuda")
    weight = tensors["weight"].view(T, 8)
    named = expert[sample].unique()
    few = {"x": tensors["x"][sample], "weight": weight[sample].reshape(-1)}
    few |= {name: tensors[name][named] for name in ("gate_up", "down")}
    ids = torch.searchsorted(named, expert[sample]), None
    expected = run(upcast(few), dout[sample].float(), ids, "concatenated", "swiglu", "eager")
    of_sample = {
        "out": found["out"][sample],
        "dx": found["dx"][sample],
        "dweight": found["dweight"].view(T, 8)[sample].reshape(-1),
    }
    assert all(error < CAP for error in errors(of_sample, {name: expected[name] for name in of_sample}).values())
    for e in (0, 255):
        token, place = (expert == e).nonzero(as_tuple=True)
        alone = {"x": tensors["x"][token], "weight": weight[token, place]}
        alone |= {name: tensors[name][e : e + 1] for name in ("gate_up", "down")}
        ids = torch.zeros(len(token), 1, dtype=torch.long, device="cuda"), None
        expected = run(upcast(alone), dout[token].float(), ids, "concatenated", "swiglu", "eager")
        of_expert = {name: found[name][e : e + 1] for name in ("dgate_up", "ddown")}
        assert all(error < CAP for error in errors(of_expert, {name: expected[name] for name in of_expert}).values())


def test_one_expert_gets_everything(hopper):
    """More row tiles than pass over all columns together."""
    check(*problem(4000, E=16, K=1, empty=tuple(range(15))), backend="hopper")


def test_frozen_experts_and_frozen_router(hopper):
    tensors, dout, (expert, _) = problem(3000)
    expected = run(upcast(tensors), dout.float(), (expert, None), "concatenated", "swiglu", "eager")
    for trained in ("x", "gate_up", "down", "weight"):
        leaves = {name: t.detach().requires_grad_(name == trained) for name, t in tensors.items()}
        weights = leaves["weight"].view(expert.shape)
        out = moe_experts(leaves["x"], leaves["gate_up"], leaves["down"], (expert, weights), backend="hopper")
        (gradient,) = torch.autograd.grad(out, leaves[trained], dout)
        assert errors({"g": gradient}, {"g": expected[f"d{trained}"]})["g"] < CAP


@pytest.mark.parametrize("layout", ORDERS)
def test_many_reruns_give_the_same_bits(hopper, layout):
    tensors, dout, ids = problem(3001, bias=True)
    first = run(tensors, dout, ids, layout, "swiglu", "hopper")
    for _ in range(200):
        again = run(tensors, dout, ids, layout, "swiglu", "hopper")
        assert same_bits(first, again)


@pytest.mark.parametrize(("T", "E", "K"), [(30000, 16, 4), (5000, 16, 4), (130, 2, 1)])
def test_the_same_rows_serve_again(hopper, T, E, K):
    """A launch leaves the scheduler's counter at zero, for many more work tiles than blocks, for more and for fewer."""
    tensors, dout, (expert, token) = problem(T, E=E, K=K)
    t = Operands(**tensors, dout=dout, activation=Activation())
    rows = hopper.dispatch(expert, token, T, E, True)
    first = products(hopper, rows, t)
    for _ in range(3):
        assert rows.scheduler_state[0] == 0
        assert same_bits(products(hopper, rows, t), first)


def test_nothing_synchronises(hopper):
    tensors, dout, ids = problem(2000, bias=True)
    check_nothing_synchronises(lambda: run(tensors, dout, ids, "concatenated", "swiglu", "hopper", sentinels=False))


def test_a_cuda_graph_replayed_with_different_routing(hopper):
    tensors, dout, (expert, _) = problem(3000, bias=True)

    def step():
        return run(tensors, dout, (expert, None), "concatenated", "swiglu", "hopper", sentinels=False)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = step()
    torch.cuda.current_stream().wait_stream(stream)
    assert same_bits(beside, step()), "a side stream gives other bits"
    graph, results = record_graph(step)
    for seed in range(3):
        torch.manual_seed(seed)
        expert.copy_(routing_ids(3000, 16, 4, "top_k", "cuda", empty=(seed,))[0])
        graph.replay()
        replayed = {name: tensor.clone() for name, tensor in results.items()}
        assert same_bits(replayed, step())


def gpt_oss_problem(T=3000, H=256, I=192, E=8, K=2):
    """Make Transformers' experts in fp32 at realistic magnitudes (h of order one to ten, limits that bite), x and a
    routing."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E)
    experts = GptOssExperts(config).cuda().float()
    tensors, dout = layer(T, H, I, E, T * K, torch.float32, "cuda", bias=True)
    with torch.no_grad():
        experts.gate_up_proj.copy_(3 * tensors["gate_up"].transpose(1, 2))
        experts.down_proj.copy_(tensors["down"].transpose(1, 2))
        experts.gate_up_proj_bias.copy_(tensors["gate_up_bias"])
        experts.down_proj_bias.copy_(tensors["down_bias"])
    index, _ = routing_ids(T, E, K, "top_k", "cuda")
    return experts, tensors["x"], index, torch.rand(T, K, device="cuda"), dout


def out_and_gradients(experts, implementation, x, index, weights, dout):
    experts.config._experts_implementation = implementation
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    leaves = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    out = experts(x, index, weights)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **dict(zip(leaves, gradients))}


def test_gpt_oss_experts_equal_transformers_eager(hopper):
    """Compare with Transformers' own eager experts in fp32: ours are as close as those are in bf16. The tensors and
    weights rounded to bf16 cost most of it, and a slope that a rounding of h moves across a limit the rest."""
    experts, x, index, weights, dout = gpt_oss_problem()
    expected = out_and_gradients(experts, "eager", x, index, weights, dout)
    half = experts.bfloat16()
    rounded = x.bfloat16(), index, weights.bfloat16(), dout.bfloat16()
    eager = errors(out_and_gradients(half, "eager", *rounded), expected)
    found = errors(out_and_gradients(half, "sonicmoe_hf", *rounded), expected)
    assert {name: (error, eager[name]) for name, error in found.items() if error > 1.1 * eager[name]} == {}
    assert found["out"] < 1e-2
