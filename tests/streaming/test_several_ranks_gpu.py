"""Two processes on one GPU train from one copy of the experts in host memory, which both have pinned."""

import gc
import multiprocessing

import pytest
import torch
from helpers.adapters import with_lora
from helpers.models import batch, build, loss_and_gradients
from helpers.parallel import whole_gradients
from helpers.ranks import Ranks
from helpers.streamed import streamed_layers
from test_several_ranks import memory_of
from torch.nn.parallel import DistributedDataParallel

from sonicmoe_hf import patch_model, quantize_experts

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 3, "num_experts": 16}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Ranks that are no fork of a process that has used CUDA, which could not use it again."""
    started = Ranks(tmp_path_factory.mktemp("ranks"), context=multiprocessing.get_context("spawn"))
    yield started
    started.close()


def trained(rank, format):
    found = []
    for experts_memory in (None, 0):
        model = build("qwen3_moe", **SIZES).to("cuda", torch.bfloat16)
        if format is not None:
            quantize_experts(model, format, experts_memory=experts_memory)
        patch_model(model, experts_memory=None if format else experts_memory)
        model = with_lora(model, ["mlp.experts.down_proj"], target_modules=["q_proj"])
        inputs = {name: tensor.cuda() for name, tensor in batch(2, 32, seed=rank).items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_and_gradients(DistributedDataParallel(model), inputs)["loss"]
        found.append({"loss": loss.cpu(), **{name: each.cpu() for name, each in whole_gradients(model).items()}})
    hosts = [host for layer in streamed_layers(model) for host in layer._bytes.values()]
    pinned, memory = [host.is_pinned() for host in hosts], memory_of()
    del model
    gc.collect()
    return *found, pinned, memory, [host.is_pinned() for host in hosts]


@pytest.mark.parametrize("format", [None, "nf4"])
def test_two_processes_pin_and_read_one_copy(ranks, format):
    results = ranks.run(trained, format)
    for resident, host, pinned, memory, pinned_later in results:
        assert resident.keys() == host.keys() and all(torch.equal(resident[name], host[name]) for name in resident)
        assert all(pinned) and len(pinned) == len(memory) == 6 and not any(pinned_later)
    assert results[0][3] == results[1][3], "the same memory"
