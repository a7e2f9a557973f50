"""Our implementation of expert parallelism on gloo ranks: it computes what one rank with all the experts computes."""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers.adapters import forbid_merging, with_lora
from helpers.examples import load as load_example
from helpers.marks import rest_pinned
from helpers.models import assert_all_close, batch, build, loss_and_gradients
from helpers.native import in_native_names, save_both
from helpers.parallel import OWN_BATCH, PARTIAL_SUMS, gather, mean_of_ranks, whole_gradients
from helpers.ranks import WORLD
from helpers.training import POLICY, TILE, Watch, callback_in_first_step
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import sonicmoe_hf
from sonicmoe_hf import LoadBalancing, TokenRounding
from sonicmoe_hf.expert_parallel import collectives
from sonicmoe_hf.expert_parallel.exchange import EXCHANGES, use_exchange
from sonicmoe_hf.layer.holding import Holder, expert_parallelism, has_expert_parallelism, holding_of
from sonicmoe_hf.layer.routing import Routing
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.private import attributes
from sonicmoe_hf.routing import calls
from sonicmoe_hf.routing.hooks import hook_of
from sonicmoe_hf.tools.demo.corpus import standard_library

pytestmark = pytest.mark.skipif(
    not has_expert_parallelism(), reason="Transformers has EPImplementationInterface since 5.23"
)
SHARED = {"tp_size": WORLD, "ep_size": WORLD}
APART = {"fsdp_size": WORLD, "ep_size": WORLD}
STOCHASTIC = TokenRounding(rounding="stochastic", tile=TILE)
OTHER_LENGTHS = [{"rows": 4, "padding": True, "seed": 1}, {"rows": 2, "length": 17, "seed": 2}]


def load(folder, sizes, routing=None, implementation="sonicmoe_hf", **options):
    config = DistributedConfig(**sizes, ep_implementation=implementation)
    return sonicmoe_hf.from_pretrained(folder, routing=routing, distributed_config=config, **options).train()


def saved_and_patched(folder, family="qwen3_moe", routing=None):
    """Save a model, which the ranks load from the folder; return one rank's, patched."""
    model = build(family)
    model.save_pretrained(folder)
    sonicmoe_hf.patch_model(model, routing)
    return model


def step(model, inputs):
    """Compute the loss of one step, and the gradients of whole parameters."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **whole_gradients(model)}


# ranks that share a batch


def shared_steps(rank, folder):
    model = load(folder, SHARED)
    assert not sonicmoe_hf.routing.why_no_rounding(model)
    found = []
    for routing in (None, POLICY, STOCHASTIC):
        sonicmoe_hf.set_routing(model, routing)
        torch.manual_seed(rank)  # rank 0's draw is to count
        found.append({name: gather(t) for name, t in loss_and_gradients(model, batch(padding=True)).items()})
    with torch.no_grad():
        found.append({"inference": model.eval()(**batch(padding=True)).logits})
    return found


@pytest.mark.parametrize("family", rest_pinned(["qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3", "nemotron_h"], 2))
def test_ranks_that_share_a_batch_compute_what_one_rank_does(ranks, family, tmp_path):
    model = saved_and_patched(tmp_path, family)
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
    for kind in EXCHANGES:
        for routing in (None, POLICY):
            sonicmoe_hf.set_routing(model, routing)
            watch = Watch(model)
            with use_exchange(kind):
                found.append(step(model, batch(**batches[rank])))
            # with other lengths the second rank has too few tokens, and lists top-k's pairs beside rounded ones
            assert set(watch.rounded()) == {routing is not None and (rank == 0 or batches == OWN_BATCH)}
    return found


def assert_mean_of_ranks(results, model, batches, names=lambda gradients: gradients):
    for number, routing in enumerate((None, POLICY) * len(EXCHANGES)):
        sonicmoe_hf.set_routing(model, routing)
        losses, expected = mean_of_ranks(model, batches)
        for own_loss, found in zip(losses, results, strict=True):
            assert_all_close(found[number], {"loss": own_loss, **names(expected)}, 1e-5, PARTIAL_SUMS)


@pytest.mark.parametrize(
    ("family", "batches", "checkpointing"),
    rest_pinned(
        [
            ("gpt_oss", OWN_BATCH, False),
            ("deepseek_v3", OTHER_LENGTHS, True),
            ("qwen3_moe", OWN_BATCH, None),
            ("olmoe", OTHER_LENGTHS, None),
            ("nemotron_h", OWN_BATCH, True),
        ],
        2,
    ),
)
def test_ranks_with_batches_of_their_own_get_the_mean_gradients(ranks, family, batches, checkpointing, tmp_path):
    model = saved_and_patched(tmp_path, family)
    assert_mean_of_ranks(ranks.run(own_steps, str(tmp_path), batches, checkpointing), model, batches)


def test_native_experts_take_part(ranks, tmp_path):
    model = build("qwen3_moe")
    _, folder = save_both(model, tmp_path)
    sonicmoe_hf.patch_model(model)
    results = ranks.run(own_steps, str(folder), OWN_BATCH)
    assert_mean_of_ranks(results, model, OWN_BATCH, functools.partial(in_native_names, family="qwen3_moe"))


def routes():
    """Draw experts of both layers, for 96 tokens: near ties of scores, which bf16 sums order another way, play no
    part."""
    index = torch.randint(0, 8, (2, 96), generator=torch.Generator().manual_seed(0))
    return torch.stack((index, (index + 3) % 8), dim=2)


def autocast_steps(rank, folder, sizes):
    model = load(folder, sizes)
    watch = mock.patch.object(collectives, "_begin_gather", wraps=collectives._begin_gather)
    with torch.autocast("cpu", torch.bfloat16), watch as sent, sonicmoe_hf.replay_routing(model, routes()):
        loss = model(**batch(**OWN_BATCH[rank if sizes == APART else 0])).loss
    loss.backward()
    dtypes = {call.args[0].dtype for call in sent.call_args_list if call.args[0].shape[-1:] == (32,)}
    return {"loss": loss.detach(), **whole_gradients(model)}, dtypes


def test_under_autocast_tokens_travel_in_its_dtype(ranks, tmp_path):
    model = saved_and_patched(tmp_path)
    with torch.autocast("cpu", torch.bfloat16), sonicmoe_hf.replay_routing(model, [routes()] * WORLD):
        losses, expected = mean_of_ranks(model)
    for own_loss, (found, dtypes) in zip(losses, ranks.run(autocast_steps, str(tmp_path), APART)):
        assert dtypes == {torch.bfloat16}
        assert_all_close(found, {"loss": own_loss, **expected}, 2e-2, "bf16: partial sums of experts are rounded")


# adapters of the experts


def adapted_steps(rank, folder, sizes):
    model = with_lora(load(folder, sizes))
    found = []
    for routing in (None, POLICY):
        sonicmoe_hf.set_routing(model, routing)
        with forbid_merging():
            found.append(step(model, batch(**OWN_BATCH[rank if sizes == APART else 0])))
    return found


@pytest.mark.parametrize("sizes", [SHARED, APART], ids=["shared batch", "own batches"])
@pytest.mark.parametrize("family", rest_pinned(["qwen3_moe", "gpt_oss", "nemotron_h"]))
def test_adapted_experts_get_one_ranks_gradients(ranks, family, sizes, tmp_path):
    model = saved_and_patched(tmp_path, family)
    model = with_lora(model)
    results = ranks.run(adapted_steps, str(tmp_path), sizes)
    for number, routing in enumerate((None, POLICY)):
        sonicmoe_hf.set_routing(model, routing)
        losses, expected = mean_of_ranks(model, OWN_BATCH if sizes == APART else OWN_BATCH[:1] * WORLD)
        assert len(expected) == 2 * 4 and all(".experts." in name for name in expected)
        for own_loss, found in zip(losses, results):
            assert_all_close(found[number], {"loss": own_loss, **expected}, 1e-5, PARTIAL_SUMS)


# load and balance


def balanced_steps(rank, folder, sizes):
    model = load(folder, sizes, POLICY)
    callback = callback_in_first_step(model)
    LoadBalancing(0.5).start(model)
    found = step(model, batch(**OWN_BATCH[rank if sizes == APART else 0]))
    callback.collect(model, step=1)
    return found, callback.history


@pytest.mark.parametrize("sizes", [SHARED, APART], ids=["shared batch", "own batches"])
def test_load_is_counted_and_balanced_as_on_one_rank(ranks, sizes, tmp_path):
    model = saved_and_patched(tmp_path, routing=POLICY)
    callback = callback_in_first_step(model)
    LoadBalancing(0.5).start(model)
    losses, expected = mean_of_ranks(model, OWN_BATCH if sizes == APART else OWN_BATCH[:1])
    callback.collect(model, step=1)
    for rank, (actual, history) in enumerate(ranks.run(balanced_steps, str(tmp_path), sizes)):
        own_loss = losses[rank if sizes == APART else 0]
        assert_all_close(actual, {"loss": own_loss, **expected}, 1e-5, PARTIAL_SUMS)
        assert history == callback.history


# the example


def trained(rank, output):
    example = load_example("expert_parallel")
    texts = standard_library()[0][:4]
    example.standard_library = lambda: (texts, [])
    options = ["--batch-size", "4", "--tile", "16", "--output", output]
    losses = example.main(["--steps", "4", *options])
    config = AutoConfig.from_pretrained(output)
    example.main(["--steps", "3", *options, "--model", output, "--random", "--layers", "1"])
    return losses, config.num_hidden_layers


@pytest.mark.slow
def test_the_example_trains_and_saves_a_whole_model(ranks, tmp_path):
    (losses, layers), (same_losses, _) = ranks.run(trained, str(tmp_path))
    assert losses == same_losses and losses[-1] < losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16 and (layers, len(model.model.layers)) == (4, 1), (
        "the second: --random --layers 1"
    )
    assert model.model.layers[0].mlp.experts.down_proj.shape == (32, 128, 64)


# refusals


def pairs(num_tokens, is_list):
    """Draw tokens, and experts for them: two for each token, or any number; and weights."""
    generator = torch.Generator().manual_seed(num_tokens)
    mask_TE = torch.rand(num_tokens, 8, generator=generator) < 0.4
    token, expert = mask_TE.nonzero(as_tuple=True)
    if not is_list:
        token, expert = None, torch.rand(num_tokens, 8, generator=generator).topk(2).indices
    x, weights = (torch.randn(size, generator=generator) for size in ((num_tokens, 32), expert.shape))
    return x.requires_grad_(), expert, weights.requires_grad_(), token


def refusals(rank, folder):
    messages = []

    def note(ask, *arguments):
        try:
            ask(*arguments)
        except (ValueError, AttributeError, TypeError, RuntimeError) as error:
            messages.append(str(error))

    for sizes, implementation in ((APART, "all_to_all"), (SHARED, "all_to_all"), (SHARED, "all_reduce")):
        model = load(folder, sizes, implementation=implementation)
        note(sonicmoe_hf.set_routing, model, POLICY)
        note(LoadBalancing(0.1).start, model)
        experts = next(find_layers(model)).experts
        assert holding_of(experts).by is Holder.THEIR_EXPERT_PARALLEL
        x, expert, weights, token = pairs(8, is_list=True)
        note(experts, x, Routing(expert, weights, token), weights)
    config = DistributedConfig(**SHARED, ep_implementation="sonicmoe_hf")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    assert holding_of(next(find_layers(model)).experts).by is Holder.EXPERT_PARALLEL
    note(model, batch()["input_ids"])

    model = load(folder, APART)
    experts, hook = next(find_layers(model)).experts, hook_of(model)
    calls.begin(hook, None)
    for num_tokens in (8, 9):
        note(experts, *pairs(num_tokens, is_list=False)[:3])
    calls.end(hook)
    return messages


def test_what_does_not_work_raises_an_error_with_the_remedy(ranks, tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    for messages in ranks.run(refusals, str(tmp_path)):
        *messages, other_tokens = messages
        assert len(messages) == 10
        assert all('ep_implementation="sonicmoe_hf"' in message for message in messages), messages
        assert 'load the model with DistributedConfig(ep_implementation="sonicmoe_hf")' in messages[0]
        assert 'load the model with experts_implementation="sonicmoe_hf", or call' in messages[-1]
        assert "9 tokens and 18 pairs" in other_tokens and 'ep_implementation="all_to_all"' in other_tokens


def test_experts_that_one_rank_has_are_outside_fsdp2_unless_a_policy_or_a_list_comes_with_them(monkeypatch):
    from sonicmoe_hf.expert_parallel import implementation  # which older versions of Transformers do not have

    sharded, mesh = [], SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(implementation, "_FULLY_SHARD", lambda module, **options: sharded.append(module))
    experts = next(find_layers(build("qwen3_moe"))).experts
    vars(experts)[attributes.PARALLELISM] = SimpleNamespace(is_outside_fsdp=False)
    policy = MixedPrecisionPolicy()
    for module, options in ((experts, {"mp_policy": policy}), ([experts], {}), (experts, {})):
        implementation.fully_shard(module, mesh=mesh, reshard_after_forward=True, **options)
    assert sharded == [experts, [experts]] and expert_parallelism(experts).is_outside_fsdp
