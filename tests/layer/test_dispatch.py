"""Dispatch: pairs to expert-sorted rows, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe_hf.layer.dispatch import dispatch


def assert_rows_describe(rows, expert_P, token_P, num_tokens, num_experts):
    """Compare with the definition, by loops: rows are the real pairs sorted by expert, stably; each token finds its
    rows again."""
    pairs = [p for e in range(num_experts) for p, expert in enumerate(expert_P) if expert == e]
    offsets, R, P = rows.offsets.tolist(), len(pairs), len(expert_P)
    assert offsets == [sum(0 <= expert_P[p] < e for p in pairs) for e in range(num_experts + 1)]
    assert rows.pair.tolist() == pairs + [P] * (P - R)
    assert rows.token.tolist() == [token_P[p] for p in pairs] + [num_tokens] * (P - R)
    starts = rows.token_offsets.tolist()
    assert starts[0] == 0 and len(starts) == num_tokens + 1
    for t in range(num_tokens):
        mine = [row for row in rows.token_rows[starts[t] : starts[t + 1]].tolist() if row < R]
        assert [pairs[row] for row in mine] == [
            p for p in range(P) if token_P[p] == t and 0 <= expert_P[p] < num_experts
        ]
    assert all(tensor.dtype == torch.int32 for tensor in (rows.offsets, rows.token, rows.pair, rows.token_rows))


@pytest.mark.pinned
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_top_k_indices_are_sorted_by_expert_and_come_back(data):
    T, E = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 6))
    K = data.draw(st.integers(1, E))
    low, high = (-1, E + 2) if data.draw(st.booleans()) else (0, E - 1)
    index = data.draw(st.lists(st.lists(st.integers(low, high), min_size=K, max_size=K), min_size=T, max_size=T))
    rows = dispatch(torch.tensor(index, dtype=torch.long).reshape(T, K), T, E, sentinels=low < 0)
    flat = [expert for row in index for expert in row]
    assert_rows_describe(rows, flat, [p // K for p in range(T * K)], T, E)


@pytest.mark.pinned
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_general_pairs_are_sorted_by_expert_and_come_back(data):
    T, E = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 6))
    pairs = data.draw(st.lists(st.tuples(st.integers(-1, E + 1), st.integers(0, T - 1)), max_size=20))
    expert_P, token_P = [e for e, _ in pairs], [t for _, t in pairs]
    rows = dispatch(
        torch.tensor(expert_P, dtype=torch.int32), T, E, torch.tensor(token_P, dtype=torch.int32), sentinels=True
    )
    assert_rows_describe(rows, expert_P, token_P, T, E)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
@pytest.mark.parametrize(("T", "K", "E"), [(0, 2, 4), (1, 1, 1), (7, 1, 4), (5, 4, 4)])
def test_edge_sizes(T, K, E, dtype):
    index = torch.stack([torch.randperm(E)[:K] for _ in range(T)]) if T else torch.zeros(0, K, dtype=torch.long)
    rows = dispatch(index.to(dtype), T, E)
    assert_rows_describe(rows, index.reshape(-1).tolist(), [p // K for p in range(T * K)], T, E)


@pytest.mark.parametrize("expert", [4, -1])
def test_an_expert_that_is_not_there_is_named(expert):
    with pytest.raises(ValueError, match=rf"names expert {expert}, but there are 4 experts.*expert parallelism"):
        dispatch(torch.tensor([[0, expert]]), 1, 4)


@pytest.mark.parametrize("token", [-1, 3])
@pytest.mark.parametrize("sentinels", [False, True])
def test_a_token_that_is_not_there_is_named(token, sentinels):
    expert_P, token_P = torch.tensor([0, 1]), torch.tensor([2, token])
    with pytest.raises(ValueError, match=rf"names token {token}, but there are 3 tokens \(0 to 2\)"):
        dispatch(expert_P, 3, 4, token_P, sentinels=sentinels)
    rows = dispatch(torch.tensor([0, -1]), 3, 4, token_P, sentinels=True)
    assert rows.token.tolist() == [2, 3], "a pair without an expert may name any"


def test_indices_that_are_no_indices_are_refused():
    index = torch.zeros(3, 2, dtype=torch.long)
    for arguments, words in (
        ((index.float(), 3, 4), "dtype torch.float32; expert ids are integers"),
        ((index, 5, 4), r"must be \[T, K\] with T = 5"),
        ((index[:, 0], 5, 4, torch.zeros(4, dtype=torch.long)), "list the same pairs"),
    ):
        with pytest.raises(ValueError, match=words):
            dispatch(*arguments)
