"""Packed sequences: in every family each is computed as it is apart, or a patched model refuses them and says why."""

import pytest
import torch
from helpers.models import build, gradients_of, relative_error
from helpers.native import native_twin
from helpers.small_families import CHANGES, DEEPSEEK_V4, families_here, small_model

import sonicmoe_hf
from sonicmoe_hf.attention import boundaries, pieces
from sonicmoe_hf.attention.models import choose_attention

LENGTHS = (11, 14)
HEADS = 16  # of indexers: with two, many scores are 0, and which of equals is picked is by chance
OTHER = {
    "deepseek_v4": DEEPSEEK_V4,
    "dots3_note": {**CHANGES["dots3_note"], "layer_types": ["sliding_attention", "indexed_attention"]},
    "minimax_m3_vl": {
        "text_config": {
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "index_local_blocks": 1,
            "index_n_heads": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
        }
    },
    "qwen4_exp": {**CHANGES["qwen4_exp"], "indexer_n_heads": HEADS},
}
SINKS = [each for each in ("gpt_oss", "openai_privacy_filter") if each in families_here()]
APART = [each for each in ("deepseek_v4", "minimax_m3_vl") if each in families_here()]


@pytest.fixture(autouse=True)
def layers_of_every_kind(monkeypatch):
    for folder, changes in OTHER.items():
        monkeypatch.setitem(CHANGES, folder, changes)


def model_of(folder):
    model = small_model(folder, index_n_heads=HEADS)
    sonicmoe_hf.patch_model(model)
    return model


def packed_batch(rows=1):
    ids = torch.randint(3, 50, (rows, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": ids, "position_ids": positions, "use_cache": False}


def logits_apart(model, ids):
    return torch.cat([model(input_ids=each, use_cache=False).logits for each in ids.split(LENGTHS, 1)], 1)


def logits_of_padded(model, ids):
    first, second = ids.split(LENGTHS, 1)
    more = LENGTHS[1] - LENGTHS[0]
    padded = torch.cat([torch.nn.functional.pad(first, (0, more), value=3), second])
    mask = torch.ones_like(padded)
    mask[0, LENGTHS[0] :] = 0
    logits = model(input_ids=padded, attention_mask=mask, use_cache=False).logits
    return torch.cat([logits[:1, : LENGTHS[0]], logits[1:]], 1)


def check_each_is_as_apart(model):
    """fp32, other sums over masked keys: 1e-5."""
    packed = packed_batch()
    assert relative_error(model(**packed).logits, logits_apart(model, packed["input_ids"])) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("folder", families_here())
def test_each_sequence_is_computed_as_apart_or_packed_ones_are_refused(folder):
    model, packed = model_of(folder), packed_batch()
    choose_attention(model)
    lengths = {"cu_seq_lens_q": torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)}
    if model.config.get_text_config().model_type not in boundaries.LEAKING:
        check_each_is_as_apart(model)
        with pytest.raises(ValueError, match=r"does not read cu_seq_lens_q. Give it position_ids too"):
            model(input_ids=packed["input_ids"], use_cache=False, **lengths)
        return
    for more in ({}, lengths):
        with pytest.raises(
            ValueError,
            match=r"would mix the sequences of a row: .*\. Pad sequences \(TRL: packing=False.*"
            r"; with an attention_mask of ones a row is one sequence",
        ):
            model(**packed, **more)
    apart = logits_apart(model, packed["input_ids"])
    assert relative_error(logits_of_padded(model, packed["input_ids"]), apart) < 1e-5
    assert model(**packed, attention_mask=torch.ones_like(packed["input_ids"])).logits.isfinite().all()
    sonicmoe_hf.unpatch_model(model)
    error = relative_error(model(**packed).logits, apart)
    assert error > 1e-2, "this Transformers keeps them apart: take the family out of LEAKING"


@torch.no_grad()
@pytest.mark.parametrize("folder", SINKS)
def test_attention_with_sinks_keeps_them_apart(folder):
    model = model_of(folder)
    with pytest.raises(ValueError, match=r'or load it with flash attention \("torch_sinks"\)'):
        model(**packed_batch())
    model.set_attn_implementation("torch_sinks")
    check_each_is_as_apart(model)


@torch.no_grad()
def test_a_native_model_names_attention_with_sinks_too(tmp_path):
    model = native_twin(build("gpt_oss"), tmp_path)
    sonicmoe_hf.patch_model(model)
    with pytest.raises(ValueError, match=r'or load it with flash attention \("torch_sinks"\)'):
        model(**packed_batch())
    model.set_attn_implementation("torch_sinks")
    check_each_is_as_apart(model)


@torch.no_grad()
@pytest.mark.parametrize("folder", [each for each in ("ernie4_5_vl_moe", "glm4v_moe") if each in families_here()])
def test_the_tokens_own_positions_before_those_of_images_keep_them_apart(folder):
    model, packed = model_of(folder), packed_batch()
    positions = packed.pop("position_ids").expand(4, 1, -1)
    found = model(**packed, position_ids=positions).logits
    assert relative_error(found, logits_apart(model, packed["input_ids"])) < 1e-5


@pytest.mark.parametrize("folder", APART)
@pytest.mark.parametrize("implementation", ["eager", "torch_pieces"])
def test_attention_that_counts_keys_from_a_rows_start_trains_on_each_sequence_apart(
    folder, implementation, monkeypatch
):
    """Two rows, whose layers are checkpointed, in pieces of a few queries. fp32, sums in another order: 2e-5."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 * 4 * 20 * 5)
    model, packed = model_of(folder).train(), packed_batch(rows=2)
    if implementation == "torch_pieces":
        choose_attention(model)
    weights = torch.randn(2, sum(LENGTHS), 1, generator=torch.Generator().manual_seed(2))
    found, expected = [], []
    for results, logits in (
        (expected, lambda: logits_apart(model, packed["input_ids"])),
        (found, lambda: model(**packed).logits),
    ):
        model.zero_grad()
        of_all = logits()
        (of_all * weights).square().mean().backward()
        results.append({"logits": of_all.detach(), **gradients_of(model)})
        model.gradient_checkpointing_enable()
    largest = max(tensor.norm() for name, tensor in expected[0].items() if name != "logits")
    assert found[0].keys() == expected[0].keys()
    for name, tensor in found[0].items():
        error = (tensor - expected[0][name]).norm()
        assert error < 2e-5 * expected[0][name].norm() + 1e-7 * largest, name


@torch.no_grad()
@pytest.mark.parametrize("folder", APART)
@pytest.mark.parametrize("implementation", ["eager", "torch_pieces"])
@pytest.mark.parametrize("given", [False, True], ids=["", "position_ids"])
def test_a_row_that_is_padded_left_is_computed_as_it_is_apart(given, implementation, folder):
    """Trainers of reinforcement learning pad prompts so. Transformers compresses keys in blocks from the padding on."""
    model = model_of(folder)
    if implementation == "torch_pieces":
        choose_attention(model)
    ids = torch.randint(3, 50, (3, 25), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = mask[2, :11] = mask[1, 20:] = 0
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if given else {}
    found = model(input_ids=ids, attention_mask=mask, use_cache=False, **positions).logits
    for row, seen in enumerate(mask.bool()):
        apart = model(input_ids=ids[row, seen][None], use_cache=False).logits[0]
        assert relative_error(found[row, seen], apart) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("folder", APART)
def test_with_a_cache_packed_sequences_are_refused_and_padding_left_is_warned_of(folder, caplog, monkeypatch):
    monkeypatch.setattr(boundaries, "_warned", set())
    model, packed = model_of(folder), packed_batch()
    apart = model(**packed).logits
    del packed["use_cache"]
    with pytest.raises(ValueError, match=r"packed sequences would mix; call it with use_cache=False"):
        model(**packed)
    assert torch.equal(model(**packed, use_cache=False).logits, apart)
    mask = torch.ones_like(packed["input_ids"])
    model.generate(packed["input_ids"], attention_mask=mask, max_new_tokens=2)
    assert not caplog.records
    mask[0, :3] = 0
    for _ in range(2):
        model.generate(packed["input_ids"], attention_mask=mask, max_new_tokens=2)
    (record,) = caplog.records
    assert "a row that is padded left gets other logits than alone" in record.message


@pytest.mark.skipif("minimax_m3_vl" not in APART, reason="of Transformers 5.23")
def test_blocks_of_keys_in_a_model_that_is_not_patched_are_refused():
    model, packed = small_model("minimax_m3_vl"), packed_batch()
    choose_attention(model)
    with pytest.raises(ValueError, match=r"patch the model \(sonicmoe_hf\.patch_model\)"):
        model(**packed)
    sonicmoe_hf.patch_model(model)
    check_each_is_as_apart(model)
