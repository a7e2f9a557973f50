"""Two gloo ranks: factors that they share are gathered and one of them writes, each keeps the experts of its own share, and
what is logged is of both."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers import vllm_stand_in
from helpers.checkpoints import tensors_in
from helpers.rl import GAP, logged, make
from helpers.rl_models import adapted
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from sonicmoe_hf.trl import GRPOTrainer
from sonicmoe_hf.trl.adapter_versions import AdapterVersions
from sonicmoe_hf.trl.generation import AdapterGeneration
from sonicmoe_hf.trl.rollouts import GeneratedSequences


def published(rank, base, folder):
    """Publish the adapter twice, with factors shared as DTensors: of experts by expert, of others by row."""
    model, mesh = adapted(base), init_device_mesh("cpu", (2,))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.requires_grad:
                shared = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                module._parameters[name] = torch.nn.Parameter(shared)
    versions = AdapterVersions(model, Accelerator(cpu=True), folder, torch.float32)
    return [versions.publish()[:3] for _ in range(2)], versions.rank


def test_shared_factors_are_gathered_and_written_once_with_one_number_on_all_ranks(base, ranks, tmp_path):
    first, second = ranks.run(published, base, tmp_path / "shared")
    assert first == second and first[1] == 8
    (_, number, folder), alone = (
        first[0][-1],
        AdapterVersions(adapted(base), Accelerator(cpu=True), tmp_path, torch.float32),
    )
    assert number == 2
    expected, found = tensors_in(alone.publish().folder), tensors_in(folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


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
        return [logged(trainer, f"serving/{name}") for name in names], measured, llm.loaded


@pytest.mark.slow
def test_two_ranks_train_with_an_engine_each_and_log_means_and_the_largest_gap_of_both(base, ranks, tmp_path):
    (found, measured, loaded), (_, _, also_loaded) = ranks.run(trained, base, tmp_path)
    assert loaded == also_loaded and len(loaded) == len(measured) == 2
    for step, values in enumerate(measured):
        assert values[0, 0] != values[1, 0], "the ranks sample other prompts"
        expected = [*values.mean(0)[:3].tolist(), values[:, 3].max().item()]
        assert [of_steps[step] for of_steps in found] == pytest.approx(expected, rel=1e-4)  # TRL rounds what it logs
        assert found[1][step] == 0.0 and 0 < found[3][step] < GAP
