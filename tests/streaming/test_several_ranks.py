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


@pytest.mark.parametrize("by", ["tensor parallelism", "DeepSpeed's ZeRO-3"])
def test_loading_for_ranks_that_share_or_shard_experts_is_an_error(late_copies, monkeypatch, tmp_path, by):
    small().save_pretrained(tmp_path)
    config = {"distributed_config": DistributedConfig(tp_size=2)} if by == "tensor parallelism" else {}
    monkeypatch.setattr(loading, "is_deepspeed_zero3_enabled", lambda: not config)
    with pytest.raises(UnsupportedModelError, match="experts_memory takes experts that ranks neither share nor shard"):
        from_pretrained(tmp_path, experts_memory=0, **config)


@pytest.mark.parametrize(
    "mark, by",
    [(("_is_expert_parallel", True), "expert"), (("ds_id", 7), r"DeepSpeed's ZeRO-3")],  # ds_id: deepspeed.zero.Init's
)
def test_experts_that_ranks_share_or_shard_are_an_error(late_copies, mark, by):
    model = small()
    experts = model.model.layers[1].mlp.experts
    setattr(experts.down_proj if mark[0] == "ds_id" else experts, *mark)
    with pytest.raises(UnsupportedExpertsError, match=rf"layers\.1\.mlp\.experts is shared by ranks \(.*{by}"):
        patch_model(model, experts_memory=0)
    assert not host_weights(model)


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
