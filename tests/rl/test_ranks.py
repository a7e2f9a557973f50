"""Two gloo ranks: factors that they share are gathered and one of them writes, and each keeps the experts of its own share."""

from types import SimpleNamespace

import torch
from accelerate import Accelerator
from helpers.checkpoints import tensors_in
from helpers.rl_models import adapted
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

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
