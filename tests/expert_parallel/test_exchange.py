"""Every exchange of tokens between gloo ranks: ranks without tokens, pairs in lists, and what backward keeps."""

from unittest import mock

import pytest
import torch
from helpers.models import assert_all_close, batch
from helpers.parallel import OWN_BATCH, PARTIAL_SUMS, gather, mean_of_ranks
from helpers.ranks import WORLD, Ranks
from helpers.training import POLICY
from test_expert_parallel import APART, load, pairs, saved_and_patched, step
from test_expert_parallel import pytestmark as pytestmark

import sonicmoe_hf
from sonicmoe_hf.expert_parallel import collectives, exchange
from sonicmoe_hf.expert_parallel.exchange import EXCHANGES, choose_exchange, use_exchange
from sonicmoe_hf.layer import experts_op
from sonicmoe_hf.layer.routing import Routing
from sonicmoe_hf.patching.moe_layers import find_layers


def largest(rank):
    return collectives.max_over_ranks([rank, 3, 5 - rank], torch.distributed.group.WORLD)


def test_ranks_agree_on_the_maximum_of_each_number(ranks):
    assert ranks.run(largest) == [[1, 3, 5]] * WORLD


# ranks without tokens


def replayed_step(rank, folder):
    """Run a step in which both ranks' tokens all want the first rank's experts."""
    model = load(folder, APART)
    found = []
    for kind in EXCHANGES:
        with use_exchange(kind), sonicmoe_hf.replay_routing(model, torch.tensor([0, 2]).expand(2, 96, 2)):
            found.append(step(model, batch(**OWN_BATCH[rank])))
    return found


def test_a_rank_whose_experts_nobody_wants_takes_part(ranks, tmp_path):
    model = saved_and_patched(tmp_path)
    with sonicmoe_hf.replay_routing(model, [torch.tensor([0, 2]).expand(2, 96, 2)] * WORLD):
        losses, expected = mean_of_ranks(model)
    assert not expected["model.layers.0.mlp.experts.down_proj"][4:].any()
    for own_loss, found in zip(losses, ranks.run(replayed_step, str(tmp_path))):
        for actual in found:
            assert_all_close(actual, {"loss": own_loss, **expected}, 1e-5, PARTIAL_SUMS)


def experts_step(experts, num_tokens, is_list):
    x, expert, weights, token = pairs(num_tokens, is_list)
    out = experts(x, Routing(expert, weights, token) if is_list else expert, weights)
    out.square().sum().backward()
    own = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    experts_own = {name: gather(parameter.grad) for name, parameter in experts.named_parameters()}
    experts.zero_grad()
    return own, experts_own


NUM_TOKENS = [(13, 0), (0, 5), (7, 9), (0, 0)]  # of each rank


def experts_steps(rank, folder, num_tokens):
    world = len(num_tokens[0])
    experts = next(find_layers(load(folder, {"fsdp_size": world, "ep_size": world}))).experts
    found = []
    for kind in EXCHANGES:
        for is_list in (False, True):
            with use_exchange(kind):
                found += [experts_step(experts, sizes[rank], is_list) for sizes in num_tokens]
    return found


@pytest.mark.parametrize(
    "num_tokens", [NUM_TOKENS, [(13, 0, 5, 7, 9, 2, 1, 30)]], ids=lambda sizes: f"{len(sizes[0])} ranks"
)
def test_ranks_list_any_number_of_pairs_a_token_and_one_may_have_no_tokens(ranks, num_tokens, tmp_path):
    model = saved_and_patched(tmp_path, "gpt_oss")
    experts = next(find_layers(model)).experts
    world = len(num_tokens[0])
    if world != WORLD:
        ranks = Ranks(tmp_path, world)
    results = ranks.run(experts_steps, str(tmp_path), num_tokens)
    if world != WORLD:
        ranks.close()
    cases = [(is_list, sizes) for _ in EXCHANGES for is_list in (False, True) for sizes in num_tokens]
    for number, (is_list, sizes) in enumerate(cases):
        expected = [experts_step(experts, size, is_list) for size in sizes]
        total = {name: sum(one[name] for _, one in expected) / world for name in expected[0][1]}
        for rank in range(world):
            own, experts_own = results[rank][number]
            assert_all_close(own, expected[rank][0], 1e-5, PARTIAL_SUMS)
            assert_all_close(experts_own, total, 1e-5, PARTIAL_SUMS)


# the choice


WAIT = 15.4 / 8  # ms a layer that the GPU is idle in an all-to-all: (ms - busy_ms) / 8 of expert_parallel.csv
GB_PER_MS = 0.19  # of its links


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("num_tokens", [0, 64, 512, 16384])
def test_ranks_gather_where_it_was_measured_and_where_an_all_to_all_saves_less_than_its_wait(num_ranks, num_tokens):
    """Tokens of Qwen3-30B-A3B: 2,048 values in bf16, eight experts each."""
    others, gigabytes = num_ranks - 1, num_tokens * 4096 / 1e9
    sent = 1 - (1 - 1 / num_ranks) ** 8
    saved = (5 - 4 * sent) * others * gigabytes / GB_PER_MS
    kind = choose_exchange(num_ranks, num_ranks * num_tokens * 4096)
    assert kind == ("gathering" if num_ranks <= 4 or saved < WAIT else "all_to_all")


def long_steps(rank, folder):
    """Run steps as with many tokens, without checkpointing and with it, and (pairs there was room for, tokens saved) of
    each call of the experts' op."""
    model, calls, forward = load(folder, APART), [], experts_op._exchanged_forward

    def noted(call, exchange):
        calls.append((len(call.rows.token), len(call.x)))
        return forward(call, exchange)

    with mock.patch.object(exchange, "MANY_BYTES", 0), mock.patch.object(experts_op, "_exchanged_forward", noted):
        found = [step(model, batch(**OWN_BATCH[rank]))]
        sonicmoe_hf.set_routing(model, POLICY)
        found.append(step(model, batch(**OWN_BATCH[rank])))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        sonicmoe_hf.set_routing(model, None)
        return [*found, step(model, batch(**OWN_BATCH[rank]))], calls


def test_of_many_gathered_tokens_experts_have_room_for_a_ranks_own_pairs(ranks, tmp_path):
    model = saved_and_patched(tmp_path)
    results = ranks.run(long_steps, str(tmp_path))
    for number, routing in enumerate((None, POLICY, None)):
        sonicmoe_hf.set_routing(model, routing)
        losses, expected = mean_of_ranks(model)
        for loss, (steps, _) in zip(losses, results, strict=True):
            assert_all_close(steps[number], {"loss": loss, **expected}, 1e-5, PARTIAL_SUMS)
    (_, first), (_, second) = results
    num_pairs, step = 2 * WORLD * 96, 2 * WORLD * 96 // (exchange.LENGTHS * WORLD)
    assert len(first) == len(second) == 2 * 2 + 2 * 2  # checkpointing calls twice
    top_k = [*zip(first[:2], second[:2]), *zip(first[4:], second[4:])]
    for (room, tokens), (other_room, other_tokens) in top_k:
        assert tokens == other_tokens == 96 and num_pairs <= room + other_room < num_pairs + 2 * step
