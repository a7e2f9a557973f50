"""Experts in host memory are read by a GPU over the bus for few tokens: the resident model's bits."""

import gc
from unittest import mock

import pytest
import torch
from helpers.models import build

from sonicmoe_hf import patch_model, quantize_experts
from sonicmoe_hf.layer import fetching
from sonicmoe_hf.streaming.weight import HostWeight

pytestmark = pytest.mark.gpu


def made(format, experts_memory):
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 3, "num_experts": 16}
    model = build("qwen3_moe", **sizes).to("cuda", torch.bfloat16).eval()
    quantize_experts(model, format, experts_memory=experts_memory)
    patch_model(model)
    return model


@pytest.mark.parametrize("format", ["nf4", "mxfp4", "fp8", "nvfp4", "int4", "uint4"])
def test_few_tokens_are_computed_without_a_copy(format):
    model, resident = made(format, 0), made(format, None)
    tokens = torch.arange(20, device="cuda")[None]
    with torch.no_grad(), mock.patch.object(fetching, "_with_weights", wraps=fetching._with_weights) as copied:
        for count, copies in ((1, 0), (6, 0), (7, 3), (20, 3), (1, 0)):
            copied.reset_mock()
            given, expected = (each(input_ids=tokens[:, :count]).logits for each in (model, resident))
            assert torch.equal(given, expected) and copied.call_count == copies
        options = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(model.generate(tokens, **options), resident.generate(tokens, **options))


def test_backward_of_few_tokens_reads_over_the_bus():
    gradients = []
    for experts_memory in (None, 0):
        model = made("nf4", experts_memory)
        x = model.get_input_embeddings()(torch.arange(4, device="cuda")[None]).detach().requires_grad_()
        model(inputs_embeds=x).logits.float().square().mean().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_memory_is_unpinned_after_the_kernels_that_read_it():
    model = made("nf4", 0)
    layer = next(weight for weight in model.parameters() if isinstance(weight, HostWeight)).layer
    hosts = list(layer._bytes.values())
    with torch.no_grad():
        model(input_ids=torch.arange(4, device="cuda")[None])
    del model, layer
    gc.collect()
    torch.cuda.synchronize()
    for host in hosts:
        assert not host.is_pinned()
