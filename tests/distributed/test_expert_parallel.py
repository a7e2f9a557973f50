"""Our implementation of expert parallelism on gloo ranks: it computes what one rank with all the experts computes."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.adapters import fused, with_lora
from helpers.models import CONFIGS, assert_all_close, batch, build, loss_and_gradients
from helpers.ranks import WORLD, Ranks
from helpers.training import POLICY, TILE, Watch
from test_distributed import OWN_BATCH, gathered, gradients, mean_of_ranks
from transformers import AutoModelForCausalLM, TrainerState
from transformers.distributed import DistributedConfig

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback, LoadBalancing, TokenRounding
from sonicmoe_hf.expert_parallel.implementation import SonicMoEExpertParallelism
from sonicmoe_hf.patching.experts import expert_parallelism
from sonicmoe_hf.patching.support import find_layers
from sonicmoe_hf.routing import Routing

SHARED = {"tp_size": WORLD, "ep_size": WORLD}
APART = {"fsdp_size": WORLD, "ep_size": WORLD}
STOCHASTIC = TokenRounding(rounding="stochastic", tile=TILE)
PARTIAL_SUMS = "fp32: partial sums of the ranks are added in another order"
OTHER_LENGTHS = [{"rows": 4, "padding": True, "seed": 1}, {"rows": 2, "length": 17, "seed": 2}]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def load(folder, sizes, routing=None, implementation="sonicmoe_hf"):
    config = DistributedConfig(**sizes, ep_implementation=implementation)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).train()
    sonicmoe_hf.patch_model(model, routing)
    return model


@contextlib.contextmanager
def all_to_all():
    """Inside, two ranks exchange tokens as more do."""
    from sonicmoe_hf.expert_parallel import exchange, implementation

    with mock.patch.object(implementation, "by_gathering", exchange.by_all_to_all):
        yield


def step(model, inputs):
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


# ranks that share a batch


def shared_steps(rank, folder):
    model = load(folder, SHARED)
    assert all(layer.token_rounding for layer in sonicmoe_hf.supports(model))
    found = []
    for routing in (None, POLICY, STOCHASTIC):
        sonicmoe_hf.set_routing(model, routing)
        torch.manual_seed(rank)  # rank 0's draw is to count
        found.append({name: gathered(t) for name, t in loss_and_gradients(model, batch(padding=True)).items()})
    with torch.no_grad():
        found.append({"inference": model.eval()(**batch(padding=True)).logits})
    return found


@pytest.mark.parametrize("family", CONFIGS)
def test_ranks_that_share_a_batch_compute_what_one_rank_does(ranks, family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    sonicmoe_hf.patch_model(model)
    expected = []
    for routing in (None, POLICY, STOCHASTIC):
        sonicmoe_hf.set_routing(model, routing)
        torch.manual_seed(0)
        expected.append(loss_and_gradients(model, batch(padding=True)))
    with torch.no_grad():
        expected.append({"inference": model.eval()(**batch(padding=True)).logits})
    for found in ranks.run(shared_steps, str(tmp_path)):
        for actual, wanted in zip(found, expected, strict=True):
            assert_all_close(actual, wanted, 1e-5, PARTIAL_SUMS)


# ranks with batches of their own


def own_steps(rank, folder, batches, checkpointing=None):
    model = load(folder, APART)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    found = []
    for by in (contextlib.nullcontext, all_to_all):
        for routing in (None, POLICY):
            sonicmoe_hf.set_routing(model, routing)
            watch = Watch(model)
            with by():
                found.append(step(model, batch(**batches[rank])))
            # with other lengths the second rank has too few tokens, and lists top-k's pairs beside rounded ones
            assert set(watch.rounded()) == {routing is not None and (rank == 0 or batches == OWN_BATCH)}
    return found


def assert_mean_of_ranks(results, model, batches):
    sonicmoe_hf.patch_model(model)
    for number, routing in enumerate((None, POLICY, None, POLICY)):
        sonicmoe_hf.set_routing(model, routing)
        losses, expected = mean_of_ranks(model, batches)
        for own_loss, found in zip(losses, results, strict=True):
            assert_all_close(found[number], {"loss": own_loss, **expected}, 1e-5, PARTIAL_SUMS)


@pytest.mark.parametrize(
    ("family", "batches", "checkpointing"),
    [
        ("qwen3_moe", OWN_BATCH, None),
        ("gpt_oss", OWN_BATCH, False),
        ("deepseek_v3", OTHER_LENGTHS, True),
        ("olmoe", OTHER_LENGTHS, None),
    ],
)
def test_ranks_with_batches_of_their_own_get_the_mean_gradients(ranks, family, batches, checkpointing, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    assert_mean_of_ranks(ranks.run(own_steps, str(tmp_path), batches, checkpointing), model, batches)
