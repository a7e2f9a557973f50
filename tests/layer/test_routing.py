"""Token rounding's definition, as properties."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe_hf.expert_parallel.exchange import local_routing
from sonicmoe_hf.kernels import eager
from sonicmoe_hf.layer import backends
from sonicmoe_hf.layer.config import ROUNDINGS, TokenRounding, as_routing_policy
from sonicmoe_hf.layer.dispatch import dispatch
from sonicmoe_hf.layer.holding import Holder, Holding
from sonicmoe_hf.layer.routing import Routing, round_tokens, rounded_routing
from sonicmoe_hf.model_patches import FAMILIES


@st.composite
def problems(draw):
    """Draw scores with many ties (and forbidden experts), their top-k, a tile, and some padding."""
    T, E = draw(st.integers(0, 40)), draw(st.integers(1, 6))
    K, tile, levels = (
        draw(st.integers(1, E)),
        draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        draw(st.sampled_from([2, 5, 1000])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randint(0, levels, (T, E), generator=generator) / levels - draw(st.sampled_from([0.0, 0.5]))
    top_k = scores.topk(K, dim=1).indices
    if draw(st.booleans()) and T:
        forbidden = torch.rand(T, E, generator=generator) < 0.3
        scores = scores.masked_fill(forbidden.scatter(1, top_k, False), float("-inf"))
    valid = torch.rand(T, generator=generator) > 0.3 if draw(st.booleans()) else None
    return scores, top_k, tile, valid


def top_k_mask(scores, top_k, valid):
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, top_k, True)
    return mask if valid is None else mask & valid[:, None]


@pytest.mark.pinned
@pytest.mark.parametrize("rounding", ROUNDINGS)
@settings(max_examples=120, deadline=None)
@given(problem=problems())
def test_the_definition_of_token_rounding(rounding, problem):
    scores, top_k, tile, valid = problem
    before, after = (
        top_k_mask(scores, top_k, valid),
        round_tokens(scores, top_k, tile=tile, rounding=rounding, valid_T=valid),
    )
    f, n = before.sum(0).tolist(), after.sum(0).tolist()
    for e, (had, has) in enumerate(zip(f, n)):
        assert has % tile == 0 and abs(has - had) < tile

        def rank(t, e=e):
            return (-scores[t, e].item(), t)  # highest score first, then the lower index

        chosen = sorted(before[:, e].nonzero().flatten().tolist(), key=rank)
        others = [
            t
            for t in range(len(scores))
            if not before[t, e] and scores[t, e] > float("-inf") and (valid is None or valid[t])
        ]
        others.sort(key=rank)
        wanted = set(chosen[:has]) if has <= had else set(chosen) | set(others[: has - had])
        assert set(after[:, e].nonzero().flatten().tolist()) == wanted
        below, room = had // tile * tile, had // tile * tile + tile - had <= len(others)
        if rounding == "down" or not room:
            assert has == below
        elif rounding == "up":
            assert has == (had + tile - 1) // tile * tile
        elif rounding == "nearest":
            assert has == (below + tile if 2 * (had - below) > tile else below)
        elif rounding == "nearest_score" and had != below:
            gained = sum(scores[t, e].item() for t in others[: below + tile - had])
            lost = sum(scores[t, e].item() for t in chosen[below:])
            if abs(gained - lost) > 1e-6:
                assert has == (below + tile if gained < lost else below)


def routed_at_will(mask):
    """Draw random scores and indices that send token t to expert e where mask[t, e]; a spare column stands for
    "nowhere"."""
    T, E = mask.shape
    scores = torch.cat([torch.rand(T, E), torch.full((T, 1), float("-inf"))], dim=1)
    return scores, torch.where(mask, torch.arange(E), E)


@pytest.mark.pinned
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.sampled_from([1, 2, 3, 7, 8, 16]))
def test_balanced_is_the_greedy_choice_that_keeps_the_total(f, tile):
    T, E = 200, len(f)  # enough other tokens for any rounding
    scores, index = routed_at_will(torch.arange(T).unsqueeze(1) < torch.tensor(f))
    n = round_tokens(scores, index, tile=tile, rounding="balanced").sum(0)[:E].tolist()
    residual, greedy = 0, []
    for count in f:
        below = count // tile * tile
        up = below + tile if count > below else below
        pick = up if abs(residual + up - count) < abs(residual + below - count) else below
        residual += pick - count
        greedy.append(pick)
    assert n == greedy
    assert 2 * abs(sum(n) - sum(f)) <= tile


def test_stochastic_rounds_up_as_often_as_the_fraction_says_and_follows_the_seed():
    tile, f, experts = 8, 3, 400
    scores, index = routed_at_will((torch.arange(64) < f).unsqueeze(1).expand(64, experts))
    torch.manual_seed(3)
    first = round_tokens(scores, index, tile=tile, rounding="stochastic")
    torch.manual_seed(3)
    assert torch.equal(first, round_tokens(scores, index, tile=tile, rounding="stochastic"))
    assert not torch.equal(first, round_tokens(scores, index, tile=tile, rounding="stochastic"))
    share = (first.sum(0)[:experts] == tile).float().mean().item()
    assert abs(share - f / tile) < 4 * (f / tile * (1 - f / tile) / experts) ** 0.5, "four standard deviations"


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_fewer_tokens_than_a_tile_leave_nothing(rounding):
    scores = torch.rand(5, 3)
    assert not round_tokens(scores, scores.topk(2).indices, tile=8, rounding=rounding).any()


def test_bf16_scores_rank_in_fp32_and_negative_zero_ties_with_zero():
    scores = torch.tensor([[0.0], [-0.0], [0.0], [-1.0]])
    mask = round_tokens(scores, torch.zeros(4, 1, dtype=torch.long), tile=2, rounding="down")
    assert mask[:, 0].tolist() == [True] * 4
    mask = round_tokens(scores[:3], torch.zeros(3, 1, dtype=torch.long), tile=2, rounding="down")
    assert mask[:, 0].tolist() == [True, True, False], "ties: the lower token index stays"
    close = torch.tensor([[0.99609375], [1.0]], dtype=torch.bfloat16)  # 1 apart in the last bit
    assert round_tokens(close, torch.zeros(2, 1, dtype=torch.long), tile=1)[:, 0].all()


def fake_router(**facts):
    return type("Router", (), facts)()


ROUTERS = {
    "qwen3_moe": fake_router(norm_topk_prob=True),
    "olmoe": fake_router(norm_topk_prob=False),
    "gpt_oss": fake_router(),
    "deepseek_v3": fake_router(
        num_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        e_score_correction_bias=torch.zeros(8),
    ),
}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("family", ROUTERS)
def test_the_routing_lists_the_masks_pairs_with_the_familys_weights_and_their_gradients(family, padding):
    facts, router, policy = FAMILIES[family], ROUTERS[family], TokenRounding(tile=4, rounding="up")
    logits = torch.randn(90, 8, requires_grad=True)
    valid = torch.arange(90) < 80 if padding else None
    scores, ranking = facts.scores(router, logits)
    top_k = ranking.topk(2).indices
    mask = round_tokens(ranking, top_k, tile=4, rounding="up", valid_T=valid)
    routing, fell_back = rounded_routing(facts, router, logits, top_k, policy, valid)
    pairs = int(mask.sum())
    assert not fell_back and routing.sentinels and len(routing.expert_index) == policy.max_rows(90, 2, 8)
    expert, token = routing.expert_index[:pairs], routing.token_index[:pairs]
    assert torch.equal(torch.stack([token, expert], 1), mask.T.nonzero().flip(1)), "expert by expert, rising tokens"
    assert (routing.expert_index[pairs:] == 8).all() and (routing.weights[pairs:] == 0).all()
    assert torch.equal(routing.rows.offsets.diff(), mask.sum(0))
    dense = facts.weights(router, scores, mask)
    assert torch.equal(routing.weights[:pairs], dense[token, expert])
    slope = torch.randn_like(dense)
    (expected,) = torch.autograd.grad((dense * slope).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((routing.weights[:pairs] * slope[token, expert]).sum(), logits)
    assert (found - expected).norm() <= 1e-6 * expected.norm(), "fp32, another order of operations"


def test_the_ops_of_token_rounding_are_what_torch_expects_of_ops():
    scores, weighting = torch.rand(20, 4, requires_grad=True), (True, 1e-20, 2.5)
    ranking, top_k = scores.detach(), scores.topk(2).indices
    options = (None, *weighting, "nearest", 4, 32, 48, torch.float32, "eager", "source")
    for valid in (None, torch.arange(20) < 17):
        inputs = (scores, ranking, top_k, valid, *options)
        torch.library.opcheck(torch.ops.sonicmoe_hf.round_rows.default, inputs)
        _, expert, *rows = torch.ops.sonicmoe_hf.round_rows(*inputs)
        backward = (torch.rand(48), ranking, expert, *rows[:6], *weighting, "eager")
        torch.library.opcheck(torch.ops.sonicmoe_hf.round_rows_backward.default, backward)


def test_known_rows_of_other_sizes_are_refused():
    logits, policy = torch.randn(64, 4), TokenRounding(tile=4)
    routing, _ = rounded_routing(FAMILIES["olmoe"], ROUTERS["olmoe"], logits, logits.topk(2).indices, policy)
    assert routing.rows_for("eager", 64, 4) is routing.rows and routing.rows_for("triton", 64, 4) is None
    with pytest.raises(ValueError, match=r"the routing is of 64 tokens and 4 experts, but there are 60 tokens"):
        routing.rows_for("eager", 60, 4)


def test_sorting_and_rounding_have_no_dtype_that_a_backend_would_not_take(monkeypatch):
    """The eager functions stand for Hopper's, which runs on another device."""
    logits, policy = torch.randn(64, 4), TokenRounding(tile=4)
    top_k, weights = logits.topk(2).indices, torch.ones(64, 2)

    def sorted_rows():
        rounded, _ = rounded_routing(FAMILIES["olmoe"], ROUTERS["olmoe"], logits, top_k, policy)
        return (
            dispatch(top_k, 64, 4),
            local_routing(top_k, weights, None, 64, Holding(Holder.EXPERT_PARALLEL, 4)).rows,
            rounded.rows,
        )

    expected = sorted_rows()
    monkeypatch.setenv(backends.BACKEND_VARIABLE, "hopper")
    monkeypatch.setattr(backends, "_why_not_hopper", lambda device: None)
    monkeypatch.setattr(backends, "load", lambda name: eager)
    for rows, wanted in zip(sorted_rows(), expected):
        assert torch.equal(rows.token, wanted.token) and torch.equal(rows.offsets, wanted.offsets)


@pytest.mark.parametrize("family", ROUTERS)
def test_a_token_without_experts_gets_nothing_and_finite_gradients(family):
    facts, router = FAMILIES[family], ROUTERS[family]
    logits = torch.randn(6, 8, requires_grad=True)
    scores, _ = facts.scores(router, logits)
    mask = torch.zeros(6, 8, dtype=torch.bool)
    mask[0, 1] = mask[0, 4] = mask[2, 3] = True
    weights = facts.weights(router, scores, mask)
    assert (weights[~mask] == 0).all() and (weights[mask] > 0).all()
    (gradient,) = torch.autograd.grad((weights * torch.rand(6, 8)).sum(), logits)
    assert gradient.isfinite().all()
    extreme, _ = facts.scores(router, torch.full((6, 8), -200.0).index_fill(1, torch.tensor([0]), 200.0))
    assert facts.weights(router, extreme, mask).isfinite().all(), "scores that underflow to zero"


def test_deepseek_never_adds_a_token_from_outside_its_groups():
    router = ROUTERS["deepseek_v3"]
    logits = torch.randn(64, 8)
    scores, ranking = FAMILIES["deepseek_v3"].scores(router, logits)
    groups = scores.unflatten(-1, (4, 2)).sum(-1).topk(2).indices
    inside = torch.zeros(64, 4, dtype=torch.bool).scatter_(1, groups, True).repeat_interleave(2, dim=1)
    assert torch.equal(ranking > float("-inf"), inside)
    top_k = ranking.topk(2).indices
    mask = round_tokens(ranking, top_k, tile=16, rounding="up")
    assert not (mask & ~inside).any() and (mask.sum(0) > top_k_mask(scores, top_k, None).sum(0)).any()


def test_padding_that_leaves_too_few_tokens_falls_back_to_top_k():
    router, policy = ROUTERS["qwen3_moe"], TokenRounding(tile=4)
    logits = torch.randn(64, 4)
    top_k = logits.topk(1).indices
    few = torch.arange(64) < 20  # 5 rows per expert, under 4 tiles of 4
    routing, fell_back = rounded_routing(FAMILIES["qwen3_moe"], router, logits, top_k, policy, few)
    pairs = torch.stack([routing.token_index[:64], routing.expert_index[:64]], 1)
    assert fell_back and torch.equal(pairs, top_k_mask(logits, top_k, None).T.nonzero().flip(1))
    routing, fell_back = rounded_routing(FAMILIES["qwen3_moe"], router, logits, top_k, policy, torch.ones_like(few))
    assert not fell_back and (routing.rows.offsets.diff() % 4 == 0).all()


@pytest.mark.pinned
@settings(max_examples=100, deadline=None)
@given(problem=problems(), rounding=st.sampled_from(ROUNDINGS))
def test_the_policys_bound_holds_whatever_the_routing(problem, rounding):
    scores, top_k, tile, valid = problem
    policy = TokenRounding(rounding=rounding, tile=tile)
    rows = int(round_tokens(scores, top_k, tile=tile, rounding=rounding, valid_T=valid).sum())
    assert rows <= policy.max_rows(len(scores), top_k.shape[1], scores.shape[1])


def test_balanced_rounding_may_take_half_a_tile_more_than_top_k():
    """7 rows, of which 3 become 4 and 4 stay."""
    scores = torch.tensor([[0.9, 0.1]] * 3 + [[0.2, 0.8]] * 4)
    rows = round_tokens(scores, scores.topk(1).indices, tile=4, rounding="balanced").sum()
    assert rows == 8 and TokenRounding(rounding="balanced", tile=4).max_rows(7, 1, 2) == 9


def test_rounding_applies_from_the_mean_number_of_tiles_on():
    policy = TokenRounding(tile=8, min_tiles_per_expert=2.0)
    assert policy.applies(16, 4, 4) and not policy.applies(15, 4, 4), "64 pairs are two tiles of each expert"


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: TokenRounding(rounding="closest"), r"rounding is 'closest'; choose one of 'nearest', 'balanced'"),
        *((partial(TokenRounding, tile=tile), "tile is .*whole number") for tile in (0, -1, 2.5, True, "128")),
        (lambda: TokenRounding(min_tiles_per_expert=-1), "min_tiles_per_expert is -1"),
        (
            lambda: as_routing_policy("random"),
            "routing is 'random'; choose one of None, 'top_k', 'token_rounding', Token",
        ),
        (lambda: as_routing_policy("tokenrounding"), r"'tokenrounding' \(did you mean 'token_rounding'\?\); choose"),
        (lambda: as_routing_policy("balanced"), r"give TokenRounding\(rounding='balanced'\)"),
        (
            lambda: round_tokens(torch.rand(4, 3), torch.zeros(4, 1, dtype=torch.long), tile=2, rounding="sideways"),
            "rounding is 'sideways'",
        ),
        (
            lambda: round_tokens(torch.rand(4, 3), torch.zeros(3, 1, dtype=torch.long), tile=2),
            r"must be \[T, E\] and \[T, K\]",
        ),
        (lambda: Routing(torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 2)), "list the same pairs"),
    ],
)
def test_bad_policies_and_routings_raise_value_error_with_the_value(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_routing_says_what_went_wrong_where_it_does_not_belong():
    routing = Routing(torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))
    for misuse in (lambda: torch.nn.functional.one_hot(routing), lambda: routing.size(-1), lambda: routing // 2):
        with pytest.raises((TypeError, AttributeError), match=r'needs experts_implementation="sonicmoe_hf"'):
            misuse()


def test_a_routing_takes_the_weights_that_came_beside_it_unless_they_were_cast():
    routing = Routing(torch.zeros(4, dtype=torch.long), torch.rand(4), torch.arange(4), sentinels=True)
    beside = routing.weights * 1  # as after a hook of ZeRO-3 on the router
    taken = routing.with_weights(beside)
    assert taken.weights is beside and taken.token_index is routing.token_index and taken.sentinels
    for same in (None, routing.weights, routing.weights.bfloat16()):
        assert routing.with_weights(same) is routing
    local = Routing(routing.expert_index, routing.weights, sentinels=True, is_local=True)
    assert local.with_weights(beside).is_local and not taken.is_local
    with pytest.raises(ValueError, match=r"list the same pairs"):
        routing.with_weights(torch.rand(2, 2))
