"""Four gloo ranks: expert parallelism of ours, and shards of packed experts."""

import itertools

import pytest
import torch
from helpers.adapters import forbid_merging, with_lora
from helpers.checkpoints import same_bits
from helpers.models import assert_all_close, build
from helpers.parallel import OWN_BATCH, PARTIAL_SUMS, mean_of_ranks
from helpers.ranks import Ranks
from helpers.training import POLICY
from test_expert_parallel import batch, load, step
from test_expert_parallel import pytestmark as pytestmark
from torch.distributed.fsdp import fully_shard

import sonicmoe_hf
from sonicmoe_hf.expert_parallel.exchange import EXCHANGES, use_exchange
from sonicmoe_hf.expert_parallel.gradients import by_mesh, clip_grad_norm_
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.patching.moe_layers import find_layers

APART = {"fsdp_size": 4, "ep_size": 4}
BATCHES = [*OWN_BATCH, {"rows": 2, "length": 17, "seed": 3}, {"rows": 4, "length": 30, "seed": 4}]
TWICE = {"fsdp_size": 4, "ep_size": 2}  # each expert on two ranks
IN_PAIRS = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}  # two ranks share each of two batches
# odd numbers of tokens; no near ties of scores, which tensor parallelism's other sums would order the other way
BATCHES_OF_PAIRS = [{"rows": 3, "length": 25, "seed": 3}, OWN_BATCH[0]]
ROUTINGS = (None, POLICY)


def steps(rank, folder):
    found = []
    for sizes, own in ((APART, BATCHES[rank]), (IN_PAIRS, BATCHES_OF_PAIRS[rank // 2])):
        model = load(folder, sizes)
        for kind, routing in itertools.product(EXCHANGES, ROUTINGS):
            sonicmoe_hf.set_routing(model, routing)
            with use_exchange(kind):
                found.append(step(model, batch(**own)))
    with forbid_merging():
        found.append(step(with_lora(load(folder, IN_PAIRS, POLICY)), batch(**BATCHES_OF_PAIRS[rank // 2])))
    return found


def assert_mean(results, number, model, batches):
    losses, expected = mean_of_ranks(model, batches)
    for rank, found in enumerate(results):
        own_loss = losses[rank * len(batches) // len(results)]
        assert_all_close(found[number], {"loss": own_loss, **expected}, 1e-5, PARTIAL_SUMS)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), world=4)
    yield ranks
    ranks.close()


@pytest.mark.slow
def test_four_ranks_get_the_mean_gradients(ranks, tmp_path):
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    results = ranks.run(steps, str(tmp_path))
    sonicmoe_hf.patch_model(model)
    cases = list(itertools.product((BATCHES, BATCHES_OF_PAIRS), EXCHANGES, ROUTINGS))
    for number, (batches, _, routing) in enumerate(cases):
        sonicmoe_hf.set_routing(model, routing)
        assert_mean(results, number, model, batches)
    assert_mean(results, len(cases), with_lora(model), BATCHES_OF_PAIRS)


def packed_logits(rank, folder, format):
    """Compute logits of a model whose experts four ranks pack, and of what they saved of it."""
    model = load(f"{folder}/hub", APART, experts_quantization=format)
    model.save_pretrained(f"{folder}/{format}")
    torch.distributed.barrier()
    found = []
    for one, routing in itertools.product((model, load(f"{folder}/{format}", APART)), ROUTINGS):
        sonicmoe_hf.set_routing(one, routing)
        found.append(one(**batch(**BATCHES[rank])).logits.detach())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_four_ranks_pack_save_and_reload_every_format(ranks, format, tmp_path):
    build("qwen3_moe", hidden_size=64, moe_intermediate_size=128).save_pretrained(tmp_path / "hub")
    results = ranks.run(packed_logits, str(tmp_path), format)
    model = sonicmoe_hf.from_pretrained(tmp_path / "hub", experts_quantization=format).train()
    for number, routing in enumerate((*ROUTINGS, *ROUTINGS)):
        sonicmoe_hf.set_routing(model, routing)
        for rank, found in enumerate(results):
            expected = model(**batch(**BATCHES[rank])).logits.detach()
            assert_all_close({"logits": found[number]}, {"logits": expected}, 1e-5, PARTIAL_SUMS)
    saved = sonicmoe_hf.from_pretrained(tmp_path / format)
    assert same_bits(saved.state_dict(), model.state_dict())


def packed_steps(rank, folder):
    """Run steps of packed experts, which four ranks share or two ranks twice, with adapters on them and on attention."""
    found = []
    for sizes in (APART, TWICE):
        model = with_lora(load(folder, sizes, POLICY, experts_quantization="nf4"), target_modules=["q_proj", "v_proj"])
        result = {name: one.clone() for name, one in step(model, batch(**BATCHES[rank])).items()}
        norm = clip_grad_norm_(model.parameters(), 0.1)
        clipped = clip_grad_norm_(model.parameters(), torch.inf)
        optimizer = torch.optim.AdamW(by_mesh(model.parameters()), foreach=True)
        optimizer.step()
        found.append({**result, "norm": norm, "clipped": clipped})
    return found


def test_four_ranks_train_adapters_beside_packed_experts(ranks, tmp_path):
    build("qwen3_moe", hidden_size=64, moe_intermediate_size=128).save_pretrained(tmp_path)
    results = ranks.run(packed_steps, str(tmp_path))
    model = sonicmoe_hf.from_pretrained(tmp_path, experts_quantization="nf4", routing=POLICY).train()
    losses, expected = mean_of_ranks(with_lora(model, target_modules=["q_proj", "v_proj"]), BATCHES)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for loss, found in zip(losses, results, strict=True):
        for one in found:
            wanted = {"loss": loss, **expected, "norm": norm, "clipped": torch.tensor(0.1)}
            assert_all_close(one, wanted, 1e-5, PARTIAL_SUMS)


def resharded(rank):
    model = sonicmoe_hf.quantize_experts(build("qwen3_moe", hidden_size=64, moe_intermediate_size=64), "nf4")
    first, second = (layer.experts for layer in find_layers(model))
    fully_shard(first, reshard_after_forward=True)
    with pytest.raises(RuntimeError, match="give fully_shard reshard_after_forward=True or False, not a number"):
        fully_shard(second, reshard_after_forward=2)


def test_packed_experts_are_not_sharded_again_over_fewer_ranks(ranks):
    ranks.run(resharded)
