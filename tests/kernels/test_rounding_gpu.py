"""Token rounding on a GPU: the same set as the definition on the CPU, bit for bit, and what a
training step asks of it."""

from types import SimpleNamespace

import pytest
import torch
from kernel_helpers import check_nothing_synchronises, errors, num_launches, same_bits
from moe_problems import layer
from rounding_problems import KINDS, check_against_definition, matrix

from benchmarks.common.timing import record_graph
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.triton.config import max_row_tiles
from sonicmoe_hf.layer.config import ROUNDINGS, TokenRounding
from sonicmoe_hf.layer.moe_experts import moe_experts
from sonicmoe_hf.layer.routing import rounded_routing
from sonicmoe_hf.model_patches import FAMILIES

pytestmark = pytest.mark.gpu
FAMILY, ROUTER = FAMILIES["qwen3_moe"], SimpleNamespace(norm_topk_prob=True)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("num_experts, tile, count", [(1, 8, 30), (7, 4, 240), (100, 16, 120), (512, 128, 25)])
def test_it_rounds_by_the_definition(rounding, num_experts, tile, count):
    for trial in range(count):
        torch.manual_seed(trial)
        num_tokens = int(torch.randint(1, 900 if num_experts > 100 else 250, ()))
        top_k = int(torch.randint(1, min(num_experts, 12) + 1, ())) if trial % 5 else min(num_experts, 12)
        padding = trial % 2 == 0  # the two ways of a kernel, compiled for each
        valid = torch.rand(num_tokens) > 0.3 if padding else None
        least = int(torch.randint(0, num_tokens * top_k + 1, ())) if padding and trial % 4 == 0 else 0
        problem = matrix(KINDS[trial % len(KINDS)], num_tokens, num_experts, top_k)
        check_against_definition(kernels, "cuda", problem, rounding, tile, valid, least)


@pytest.mark.parametrize("rounding", ["nearest", "nearest_score"])
@pytest.mark.parametrize("kind", ["probabilities", "few levels"])
def test_many_tokens(kind, rounding):
    """Round as many tokens as registers hold, and more."""
    for num_tokens in (5003, 40000):
        check_against_definition(kernels, "cuda", matrix(kind, num_tokens, 7, 2), rounding, 128)


def decision(num_tokens, num_experts, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, device="cuda", generator=generator).bfloat16()
    return logits, logits.float().topk(4).indices


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_reruns_give_the_same_bits(rounding):
    logits, index = decision(16384, 128)

    def run():
        torch.manual_seed(7)
        leaf = logits.clone().requires_grad_()
        routing, _ = rounded_routing(FAMILY, ROUTER, leaf, index, TokenRounding(rounding=rounding))
        tiles = routing.rows.tiles[: max_row_tiles(routing.expert_index.numel(), 128)]
        slope = torch.linspace(-1, 1, routing.weights.numel(), device="cuda")
        (gradient,) = torch.autograd.grad((routing.weights * slope).sum(), leaf)
        return [*routing.rows[:5], tiles[tiles[:, 0] >= 0], routing.expert_index, routing.weights, gradient]

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(), first))
    tiles = first[5]
    assert ((tiles[:, 2] - tiles[:, 1]) == 128).all(), "no expert has a padded row"


def test_stochastic_rounding_draws_the_numbers_of_the_definition():
    logits, index = decision(4096, 16)
    policy = TokenRounding(rounding="stochastic", min_tiles_per_expert=0)
    torch.manual_seed(3)
    routing, _ = rounded_routing(FAMILY, ROUTER, logits, index, policy)
    torch.manual_seed(3)
    drawn = torch.rand(16, device="cuda")
    f_E = index.flatten().bincount(minlength=16)
    expected = f_E // 128 * 128 + 128 * (drawn * 128 < f_E % 128)
    assert torch.equal(routing.rows.offsets.diff(), expected.int())


def step(tensors, dout, logits, index, policy, valid, backend):
    """Compute out and gradients of a rounded layer, from the router's logits on."""
    leaves = {name: tensors[name].detach().requires_grad_() for name in ("x", "gate_up", "down")}
    leaves["logits"] = logits.detach().requires_grad_()
    routing, _ = rounded_routing(FAMILY, ROUTER, leaves["logits"], index, policy, valid)
    out = moe_experts(leaves["x"], leaves["gate_up"], leaves["down"], routing, backend=backend)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **{f"d{name}": gradient for name, gradient in zip(leaves, gradients)}}


@pytest.mark.parametrize("padding", [False, True])
def test_a_rounded_layer_is_as_exact_as_a_top_k_layer(padding):
    """Against fp32 by the plain backend; 5e-3 as for every kernel in bf16, and 2^-7 for gradients that end as bf16
    logits' after several roundings."""
    tensors, dout = layer(6000, 256, 128, 16, 0, torch.bfloat16, "cuda", bias=False)
    logits, index = decision(6000, 16)
    valid = torch.rand(6000, device="cuda") > 0.1 if padding else None
    policy = TokenRounding()
    upcast = {name: tensor.float() for name, tensor in tensors.items()}
    expected = step(upcast, dout.float(), logits, index, policy, valid, "eager")
    found = step(tensors, dout, logits, index, policy, valid, None)
    worst = errors(found, expected)
    assert worst.pop("dlogits") < 2**-7 and max(worst.values()) < 5e-3, worst


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nothing_synchronises(rounding):
    tensors, dout = layer(4096, 256, 128, 16, 0, torch.bfloat16, "cuda", bias=False)
    logits, index = decision(4096, 16)
    valid = torch.ones(4096, dtype=torch.bool, device="cuda")
    for padding in (None, valid):
        check_nothing_synchronises(
            lambda p=padding: step(tensors, dout, logits, index, TokenRounding(rounding=rounding), p, None)
        )


def test_a_cuda_graph_replays_with_other_scores():
    tensors, dout = layer(4096, 256, 128, 16, 0, torch.bfloat16, "cuda", bias=False)
    logits, index = decision(4096, 16)
    valid = torch.ones(4096, dtype=torch.bool, device="cuda")

    def run():
        return step(tensors, dout, logits, index, TokenRounding(), valid, None)

    graph, results = record_graph(run)
    for seed in (1, 2):
        other_logits, other_index = decision(4096, 16, seed)
        logits.copy_(other_logits)
        index.copy_(other_index)
        valid[: 1000 * seed] = False
        graph.replay()
        expected = run()
        assert same_bits(results, expected)


def test_a_compiled_step_computes_the_same():
    tensors, dout = layer(4096, 256, 128, 16, 0, torch.bfloat16, "cuda", bias=False)
    logits, index = decision(4096, 16)

    def forward(x, logits):
        routing, _ = rounded_routing(FAMILY, ROUTER, logits, index, TokenRounding())
        return moe_experts(x, tensors["gate_up"], tensors["down"], routing)

    found = []
    for function in (forward, torch.compile(forward, fullgraph=True, backend="aot_eager")):
        x, leaf = tensors["x"].detach().requires_grad_(), logits.detach().requires_grad_()
        out = function(x, leaf)
        found.append((out, *torch.autograd.grad(out, (x, leaf), dout)))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_it_takes_a_handful_of_launches():
    logits, index = decision(16384, 128)
    scores = logits.float().softmax(-1)
    options = "nearest", 128, 0, 16384 * 4 + 128 * 64, FAMILY.weighting(ROUTER), torch.bfloat16
    assert num_launches(lambda: kernels.round_rows(scores, scores, index, None, None, *options)) <= 3
