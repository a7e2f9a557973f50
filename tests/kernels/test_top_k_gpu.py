"""A router's top-k on a GPU: the definition at real sizes, and what a training step asks of it."""

import pytest
import torch
from helpers.models import batch, build, loss_and_gradients, relative_error
from kernel_helpers import captured
from test_top_k import first_of_equals

import sonicmoe_hf
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.patching import fast_topk

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_experts, k", [(8, 2), (32, 4), (60, 4), (128, 8), (256, 8), (512, 10), (1024, 32)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_it_takes_the_highest(num_experts, k, dtype):
    torch.manual_seed(0)
    for num_tokens in (1, 4999, 16384):
        logits = torch.randn(num_tokens, num_experts, device="cuda")
        for scores in (logits.to(dtype), logits.softmax(-1).to(dtype), (2 * logits).round().to(dtype)):
            assert torch.equal(kernels.top_k(scores, k), first_of_equals(scores, k))


def test_it_is_used_and_captured_without_a_sync():
    scores = torch.randn(16384, 128, device="cuda").softmax(-1).requires_grad_()
    slope = torch.randn(16384, 8, device="cuda")

    def step():
        with fast_topk.FastTopK():
            values, index = torch.topk(scores, 8, dim=-1)
        # no graph stays alive: its leaf would belong to the stream it was made on, and be waited for in a capture
        return values.detach(), index, *torch.autograd.grad(values, scores, slope)

    values, index = torch.topk(scores, 8)
    expected = values.detach(), index, *torch.autograd.grad(values, scores, slope)
    del values
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, found, expected))
    graph, found = captured(step)
    graph.replay()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("family", ("qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"))
def test_a_patched_model_computes_the_same(family, monkeypatch):
    monkeypatch.setattr(fast_topk, "FEWEST_ROWS", 1)
    model = build(family).cuda()
    inputs = {name: tensor.cuda() for name, tensor in batch(16, 96).items()}
    sonicmoe_hf.patch_model(model)
    found = loss_and_gradients(model, inputs)
    sonicmoe_hf.unpatch_model(model)
    model.set_experts_implementation("sonicmoe_hf")
    expected = loss_and_gradients(model, inputs)
    for name in expected:
        assert relative_error(found[name], expected[name]) < 1e-5, name
