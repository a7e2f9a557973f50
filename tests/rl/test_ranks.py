"""Two gloo ranks: factors that they share are gathered and one of them writes, each keeps the experts of its own share,
and what is logged is of both."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers import vllm_stand_in
from helpers.checkpoints import tensors_in
from helpers.rl import GAP, logged_values, make
from helpers.rl_models import adapted
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from sonicmoe_hf import CheckpointError, convert_adapter
from sonicmoe_hf.trl import GRPOTrainer
from sonicmoe_hf.trl.adapter_versions import AdapterVersions
from sonicmoe_hf.trl.generation import AdapterGeneration
from sonicmoe_hf.trl.rollouts import GeneratedSequences

with_deepspeed = pytest.mark.skipif(sys.platform != "linux", reason="the tests' requirements have it on Linux only")


def as_dtensors(model):
    """Share factors as expert parallelism does: of experts by expert, of others by row."""
    mesh = init_device_mesh("cpu", (2,))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.requires_grad:
                shared = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                module._parameters[name] = torch.nn.Parameter(shared)


def by_fsdp2(model):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_zero3(model):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # else it compiles an all-reduce over shared memory, in C++
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    model.config_of_zero3 = HfDeepSpeedConfig(config)  # as of a Trainer: models are partitioned as they are built
    optimizer = torch.optim.SGD(trained, lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def published(rank, share, base, folder):
    """Publish the adapter twice, between which ranks that can compute with shared weights do."""
    model = adapted(base)
    if share is by_fsdp2:
        first = FullyShardedDataParallel(adapted(base), use_orig_params=True, device_id=torch.device("cpu"))
        with pytest.raises(RuntimeError, match="use fsdp_version: 2 in accelerate's config"):
            AdapterVersions(first, Accelerator(cpu=True), folder, torch.float32).publish()
    wrapped = share(model)
    assert all(
        hasattr(each, "device_mesh") or each.numel() == 0 for each in model.parameters() if each.requires_grad
    ), "no rank has a whole factor"
    versions = AdapterVersions(model, Accelerator(cpu=True), folder, torch.float32)
    found = [versions.publish()[:3]]
    if wrapped is not None:
        wrapped(input_ids=torch.tensor([[5, 6, 7 + rank]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    found.append(versions.publish()[:3])
    if share is by_zero3:
        wrapped.destroy()
        unset_hf_deepspeed_config()
    return found, versions.rank


@pytest.mark.parametrize("share", [as_dtensors, by_fsdp2, pytest.param(by_zero3, marks=with_deepspeed)])
def test_shared_factors_are_gathered_and_written_once_with_one_number_on_all_ranks(share, base, ranks, tmp_path):
    first, second = ranks.run(published, share, base, tmp_path / "shared")
    assert first == second and first[1] == 8
    alone = AdapterVersions(adapted(base), Accelerator(cpu=True), tmp_path, torch.float32)
    expected = tensors_in(alone.publish().folder)
    for number, (_, found_number, folder) in enumerate(first[0], 1):
        found = tensors_in(folder)
        assert found_number == number and expected.keys() == found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def saved_under_zero3(rank, base, folder):
    """Save an adapter before ZeRO-3 takes its factors, under it, and inside DeepSpeed's context."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # as above
    model = adapted(base)
    if rank == 0:
        model.save_pretrained(folder / "whole")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.float32)
    if rank == 0:
        model.save_pretrained(folder / "empty")
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if rank == 0:
            model.save_pretrained(folder / "gathered")


@with_deepspeed
def test_factors_that_zero3_leaves_empty_are_saved_inside_deepspeeds_context(base, ranks, tmp_path):
    ranks.run(saved_under_zero3, base, tmp_path)
    with pytest.raises(CheckpointError, match=r"inside deepspeed.zero.GatheredParameters\(model.parameters\(\)\)"):
        convert_adapter(tmp_path / "empty", tmp_path / "converted", "vllm")
    whole, gathered = tensors_in(tmp_path / "whole"), tensors_in(tmp_path / "gathered")
    assert whole.keys() == gathered.keys() and all(torch.equal(gathered[name], whole[name]) for name in whole)
    convert_adapter(tmp_path / "gathered", tmp_path / "converted", "vllm")


def kept(rank):
    """Keep this rank's share of what a server answered to both."""
    answers = [torch.full((2, 1, 1), expert).numpy() for expert in range(4)]
    generation = SimpleNamespace(
        mode="server", accelerator=Accelerator(cpu=True), server=SimpleNamespace(routed_experts=answers),
        sequences=GeneratedSequences(),
    )  # fmt: skip
    prompts, completions = [[rank, 1], [rank, 2]], [[3], [4]]
    AdapterGeneration._keep(generation, prompts, completions)
    return [generation.sequences.experts_of([*prompt, *own])[0].item() for prompt, own in zip(prompts, completions)]


def test_each_rank_keeps_the_experts_of_its_own_share(ranks):
    assert ranks.run(kept) == [[0, 1], [2, 3]]


def trained(rank, base, folder):
    """Train with an engine on each rank; returns what was logged, what each rank measured, and what its engine loaded."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        vllm_stand_in.install(monkeypatch)
        trainer = make(GRPOTrainer, base, folder, {"per_device_train_batch_size": 2})
        gather, measured = trainer.accelerator.gather, []

        def watched(values):
            every = gather(values)
            if getattr(values, "dtype", None) == torch.float64 and values.numel() == 4:
                measured.append(every.view(-1, 4))
            return every

        monkeypatch.setattr(trainer.accelerator, "gather", watched)
        trainer.train()
        (llm,) = vllm_stand_in.StandInLLM.made
        names = ("kl", "divergence", "sync_seconds", "largest_gap")
        return [logged_values(trainer, f"serving/{name}") for name in names], measured, llm.loaded


@pytest.mark.slow
def test_two_ranks_train_with_an_engine_each_and_log_means_and_the_largest_gap_of_both(base, ranks, tmp_path):
    (found, measured, loaded), (_, _, also_loaded) = ranks.run(trained, base, tmp_path)
    assert loaded == also_loaded and len(loaded) == len(measured) == 2
    for step, values in enumerate(measured):
        assert values[0, 0] != values[1, 0], "the ranks sample other prompts"
        expected = [*values.mean(0)[:3].tolist(), values[:, 3].max().item()]
        assert [of_steps[step] for of_steps in found] == pytest.approx(expected, rel=1e-4)  # TRL rounds what it logs
        assert found[1][step] == 0.0 and 0 < found[3][step] < GAP
