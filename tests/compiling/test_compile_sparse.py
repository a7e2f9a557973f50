"""compile_layers of models whose attention runs partly in Python: what is beside it is compiled, checkpointed too."""

import warnings

import pytest
import torch
from helpers.marks import rest_slow
from helpers.models import ORDER_OF_SUMS, assert_all_close, gradients_of
from helpers.small_families import CHANGES, DEEPSEEK_V4, KINDS, families_here, small_model
from helpers.training import checkpoint_layers
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import sonicmoe_hf
from sonicmoe_hf.attention import pieces
from sonicmoe_hf.attention.models import choose_attention
from sonicmoe_hf.compiling.layers import expect_lengths, why_in_python

LENGTH, PIECE = 37, 11
BLOCKS = {"index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1, "index_n_heads": 2}
ONE_OF_EACH = {
    "deepseek_v4": {**DEEPSEEK_V4, "num_hidden_layers": 1, "layer_types": KINDS[2:], "mlp_layer_types": ["moe"]},
    "minimax_m3_vl": {"text_config": {**BLOCKS, "layer_types": ["full_attention", "minimax_m3_sparse"]}},
}
HERE = [family for family in ("deepseek_v4", "minimax_m3_vl", "hy_v4", "deepseek_v32") if family in families_here()]
pytestmark = pytest.mark.skipif(not HERE, reason="of Transformers 5.23")


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    for family, changes in ONE_OF_EACH.items():
        monkeypatch.setitem(CHANGES, family, changes)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 * 4 * 20 * PIECE)


def model_of(family, implementation):
    model = small_model(family).train()
    sonicmoe_hf.patch_model(model)
    if implementation == "torch_pieces":
        choose_attention(model)
    return model


def batch_of(kind):
    ids = torch.randint(3, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if kind != "packed":
        return {"input_ids": ids, "labels": ids, "use_cache": False}
    positions = torch.cat([torch.arange(15), torch.arange(LENGTH - 15)]).expand(2, -1)
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}


def step(model, batch):
    batch = {name: each.to(model.device) if isinstance(each, torch.Tensor) else each for name, each in batch.items()}
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


CASES = [
    (family, implementation, kind)
    for kind in ("non_reentrant", "reentrant", None)
    for family, implementation in (
        ("deepseek_v4", "torch_pieces"),
        ("minimax_m3_vl", "torch_pieces"),
        ("deepseek_v4", "eager"),
        ("minimax_m3_vl", "eager"),
        ("hy_v4", "torch_pieces"),
        ("deepseek_v32", "eager"),
    )
    if family in HERE
]


@pytest.mark.parametrize("family, implementation, kind", rest_slow(CASES))
def test_checkpointed_layers_of_sparse_attention_are_compiled_beside_it(family, implementation, kind):
    """Packed sequences are computed apart as without compiling, and nothing is compiled for them beside any size."""
    model = checkpoint_layers(model_of(family, implementation), kind)
    model.enable_input_require_grads()
    batches = [batch_of("full"), batch_of("packed")]
    expected = [step(model, batch) for batch in batches]
    compiled = CompileCounterWithBackend("eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch.compile left")
        sonicmoe_hf.compile_layers(model, backend=compiled)
        found = [step(model, batch) for batch in batches]
    assert compiled.frame_count >= 3 and compiled.op_count > 50, "norms, the block of experts, and what else there is"
    assert not why_in_python(model)
    for ours, theirs in zip(found, expected):
        assert_all_close(ours, theirs, 1e-5, ORDER_OF_SUMS)


@pytest.mark.pinned
@pytest.mark.skipif("deepseek_v4" not in HERE, reason="of Transformers 5.23")
def test_what_mixes_streams_of_states_is_compiled_once_for_all_lengths():
    """The states of DeepSeek-V4's layers are [B, L, streams, H]."""
    model = checkpoint_layers(model_of("deepseek_v4", "torch_pieces"), "non_reentrant")
    model.enable_input_require_grads()
    streams = []

    def backend(graph, inputs):
        streams.extend(each for each in inputs if isinstance(each, torch.Tensor) and each.dim() == 4)
        return graph

    sonicmoe_hf.compile_layers(model, backend=backend)
    expect_lengths(model)
    for length in (LENGTH, LENGTH - 8):
        ids = batch_of("full")["input_ids"][:, :length]
        step(model, {"input_ids": ids, "labels": ids, "use_cache": False})
    assert len(streams) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("family", HERE)
def test_kernels_that_inductor_makes_of_such_layers_compute_the_same_on_a_gpu(family):
    model = checkpoint_layers(model_of(family, "torch_pieces").to("cuda"), "non_reentrant")
    model.enable_input_require_grads()
    batches = [batch_of("full"), batch_of("packed")]
    expected = [step(model, batch) for batch in batches]
    sonicmoe_hf.compile_layers(model)
    found = [step(model, batch) for batch in batches]
    assert counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"] > 0
    for ours, theirs in zip(found, expected):
        assert_all_close(ours, theirs, 1e-3, "fp32: fused sums in another order")


@pytest.mark.pinned
def test_no_graphs_are_captured_of_layers_whose_attention_runs_partly_in_python(caplog):
    model, captures = model_of(HERE[0], "torch_pieces"), []

    def backend(graph, inputs, options):
        captures.append(options["triton.cudagraphs"])
        return graph

    sonicmoe_hf.compile_layers(model, mode="reduce-overhead", backend=backend)
    assert any("'reduce-overhead' captures no CUDA graphs of" in record.message for record in caplog.records)
    assert model(**batch_of("full")).loss.isfinite() and captures and not any(captures)
