"""Experts in host memory on several ranks: DDP replicates them, and what would share or shard them is an error."""

import pytest
import torch
from helpers.adapters import with_lora
from helpers.models import batch, loss_and_gradients
from helpers.parallel import gradients
from helpers.streamed import host_weights, small, streamed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from sonicmoe_hf import UnsupportedExpertsError, UnsupportedModelError, from_pretrained, patch_model
from sonicmoe_hf.patching import loading
from sonicmoe_hf.streaming.placement import expert_layers


def test_ranks_that_share_or_shard_experts_are_an_error(late_copies, tmp_path):
    small().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="experts_memory takes experts that ranks neither share nor shard"):
        from_pretrained(tmp_path, experts_memory=0, distributed_config=DistributedConfig(tp_size=2))
    model = small()
    for _, experts in expert_layers(model):
        experts._is_expert_parallel = True
    with pytest.raises(UnsupportedExpertsError, match="shared by ranks"):
        patch_model(model, experts_memory=0)


def test_zero_3_is_an_error(late_copies, monkeypatch, tmp_path):
    model = small()
    model.model.layers[1].mlp.experts.down_proj.ds_id = 7  # as deepspeed.zero.Init leaves it
    with pytest.raises(
        UnsupportedExpertsError, match=r"layers\.1\.mlp\.experts is shared by ranks \(DeepSpeed's ZeRO-3\)"
    ):
        patch_model(model, experts_memory=0)
    assert not host_weights(model)
    small().save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(UnsupportedModelError, match="DeepSpeed's ZeRO-3"):
        from_pretrained(tmp_path, experts_memory=0)


def with_adapters(experts_memory):
    return with_lora(streamed(experts_memory), ["mlp.experts.down_proj"], target_modules=["q_proj"])


def under_ddp(rank):
    found = []
    for experts_memory in (None, 0):
        model = with_adapters(experts_memory)
        loss_and_gradients(DistributedDataParallel(model), batch(seed=rank))
        found.append(gradients(model))
    return found


def test_ddp_replicates_experts_in_host_memory(ranks):
    for resident, host in ranks.run(under_ddp):
        assert resident.keys() == host.keys() and all(torch.equal(resident[name], host[name]) for name in resident)


def under_fsdp2(rank):
    model = with_adapters(0)
    try:
        fully_shard(model.get_base_model().model.layers[0])
    except RuntimeError as error:
        return str(error)


def test_fsdp2_of_experts_in_host_memory_is_an_error(ranks):
    assert all("FSDP" in error and "replicate them by DDP" in error for error in ranks.run(under_fsdp2))
