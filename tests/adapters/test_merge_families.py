"""merge of every family that is built small here: what PEFT's merge gives, in plain
Transformers, under the base's names."""

import pytest
import torch
from helpers.adapters import save_with_factors
from helpers.checkpoints import config_in, edit_tensors, rewrite, same_bits, tensors_in, to_fp8
from helpers.engine_adapters import edit_adapter_config
from helpers.marks import rest_pinned
from helpers.models import build, relative_error
from helpers.small_families import families_here, slow_beyond_kinds, small_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Concatenate, ConversionOps

from sonicmoe_hf import CheckpointError, convert_adapter, convert_checkpoint, lora_config, merge_adapter

TOLERANCE = 1e-5  # fp32: the products summed in another order, through two layers
IDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(3))
BESIDE = {  # what a model's class does not know: layers for multi-token prediction, indices, another vision tower
    "model.layers.99.mtp_block.weight": torch.randn(4, 4, generator=torch.Generator().manual_seed(4)).bfloat16(),
    "a_table_of_indices": torch.arange(7),
}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def load(folder, cls):
    model, info = cls.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    return model


def train_one_step(model):
    """Train a LoRA adapter for a step that makes B other than zero."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=IDS).logits.square().mean().backward()
    optimizer.step()
    return model.eval()


def adapt(model, folder):
    adapted = train_one_step(get_peft_model(model, lora_config(model, r=2, target_modules="all-linear")))
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


def saved(family, folder):
    """Save a small model in `folder`/base."""
    model = small_model(family)
    model.save_pretrained(folder / "base")
    return model


def adapt_and_merge(folder, cls, **options):
    """Write the adapter and the merged checkpoint, in `folder`, of the base there; return what PEFT merges."""
    by_peft = adapt(load(folder / "base", cls), folder / "adapter")
    merge_adapter(folder / "base", folder / "adapter", folder / "merged", **options)
    return by_peft


@pytest.mark.parametrize("family", slow_beyond_kinds(families_here()))
def test_it_is_what_peft_merges_and_other_tensors_keep_their_bytes(family, tmp_path):
    base, merged = tmp_path / "base", tmp_path / "merged"
    model = saved(family, tmp_path)
    edit_tensors(base, BESIDE)
    by_peft = adapt_and_merge(tmp_path, type(model))
    expected = logits(by_peft)
    assert relative_error(logits(load(merged, type(model))), expected) < TOLERANCE
    assert relative_error(logits(model), expected) > 0.1, "the adapter does something"
    by_peft.save_pretrained(tmp_path / "by peft")
    stored, found, whole = (tensors_in(folder) for folder in (base, merged, tmp_path / "by peft"))
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in stored.items()
    }
    changed = {name for name in stored if not same_bits({name: stored[name]}, {name: found[name]})}
    assert changed == {name for name in whole if name in stored and not torch.equal(stored[name], whole[name])}
    assert max(relative_error(found[name], whole[name]) for name in changed) < TOLERANCE
    assert config_in(merged) == config_in(base)


@pytest.mark.pinned
def test_files_that_lie_beside_the_weights_are_carried_over(tmp_path):
    model = saved("minimax_m2", tmp_path)
    beside = {"chat_template.jinja": "{{ messages }}", "modeling_custom.py": "raise SystemExit", "vocab.json": "{}"}
    for name, text in beside.items():
        (tmp_path / "base" / name).write_text(text)
    adapt_and_merge(tmp_path, type(model), max_shard_size="50KB")
    for name, text in {**beside, "generation_config.json": None}.items():
        merged, base = tmp_path / "merged" / name, tmp_path / "base" / name
        assert merged.read_text() == base.read_text() and (text is None or merged.read_text() == text)
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 1


def test_an_adapter_of_the_text_model_is_merged_into_the_whole_one(tmp_path):
    """Qwen3.5's config.json names Qwen3_5MoeForConditionalGeneration, and AutoModelForCausalLM builds another class."""
    whole = saved("qwen3_5_moe", tmp_path)
    text = adapt_and_merge(tmp_path, AutoModelForCausalLM)
    assert type(text) is not type(whole) and config_in(tmp_path / "base")["architectures"] == [type(whole).__name__]
    expected = logits(text)
    assert relative_error(logits(load(tmp_path / "merged", type(whole))), expected) < TOLERANCE
    assert relative_error(logits(whole), expected) > 0.1, "the adapter does something"


def test_experts_that_a_file_has_transposed_stay_transposed(tmp_path):
    """The first checkpoints of Qwen3-VL-MoE have them so; Transformers turns them where the shape asks for it."""
    model = saved("qwen3_vl_moe", tmp_path)
    stored = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in tensors_in(tmp_path / "base").items()
    }
    rewrite(tmp_path / "base", stored)
    expected = logits(adapt_and_merge(tmp_path, type(model)))
    assert {n: t.shape for n, t in tensors_in(tmp_path / "merged").items()} == {n: t.shape for n, t in stored.items()}
    assert relative_error(logits(load(tmp_path / "merged", type(model))), expected) < TOLERANCE


@pytest.mark.pinned
def test_whole_layers_that_the_files_hold_in_one_weight_with_others_are_merged(tmp_path):
    model = saved("unlimited_ocr", tmp_path)  # q, k and v of its vision tower are one weight
    config = LoraConfig(r=2, target_modules=["o_proj", "q_proj"], modules_to_save=["k_proj"])
    adapted = save_with_factors(get_peft_model(model, config), tmp_path / "adapter")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = load(tmp_path / "merged", type(model))
    assert relative_error(logits(merged), logits(adapted)) < TOLERANCE
    tower, expected = (
        merged.model.vision_tower.state_dict(),
        adapted.merge_and_unload().model.vision_tower.state_dict(),
    )
    assert all(relative_error(tower[name], expected[name]) < TOLERANCE for name in expected)


@pytest.mark.parametrize("layout", rest_pinned(["native", "as it is"]))
def test_a_tied_checkpoint_may_store_the_head_alone(layout, tmp_path):
    model = build("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    stored = tensors_in(tmp_path / "base")
    rewrite(tmp_path / "base", {name.replace("model.embed_tokens", "lm_head"): t for name, t in stored.items()})
    assert "lm_head.weight" in tensors_in(tmp_path / "base") and "lm_head.weight" not in stored
    base = tmp_path / "base"
    if layout == "native":
        convert_checkpoint(base, tmp_path / "native", layout)
        base = tmp_path / "native"
        assert relative_error(logits(AutoModelForCausalLM.from_pretrained(base)), logits(model)) < TOLERANCE
    adapted = AutoModelForCausalLM.from_pretrained(base)
    expected = logits(adapt(adapted, tmp_path / "adapter"))
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert relative_error(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected) < TOLERANCE
    assert set(tensors_in(tmp_path / "merged")) == set(tensors_in(base))


@pytest.mark.parametrize("family", rest_pinned(["minimax_m2", "qwen3_next", "glm4_moe", "qwen3_5_moe"]))
def test_an_fp8_base_stays_fp8_where_nothing_changed_it(family, tmp_path):
    """Blocks are 128 x 128, of which these matrices have a part of one; what was dense in the files stays so."""
    model = saved(family, tmp_path)
    in_float8, dense = to_fp8(tmp_path / "base")
    expected = adapt(load(tmp_path / "dense", type(model)), tmp_path / "adapter")
    done = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", quantize="keep", verify=True)
    expected.save_pretrained(tmp_path / "by peft")
    whole, merged = tensors_in(tmp_path / "by peft"), tensors_in(tmp_path / "merged")
    assert {n: (t.dtype, t.shape) for n, t in merged.items()} == {n: (t.dtype, t.shape) for n, t in in_float8.items()}
    for name, tensor in whole.items():
        scale = merged.get(f"{name}_scale_inv")
        values = merged[name] if scale is None else merged[name].float() * scale.reshape(())
        if torch.equal(tensor, dense[name]):
            assert same_bits({name: merged[name]}, {name: in_float8[name]})
        else:
            # E4M3's 3 bits of mantissa leave 0.026 to nearest, and dithered rounding has twice the variance
            assert relative_error(values, tensor) < (TOLERANCE if scale is None else 0.055)
    assert done.roundings and all(layer.survived > 0.9 for layer in done.roundings)
    assert config_in(tmp_path / "merged") == config_in(tmp_path / "base")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "bf16")
    assert "quantization_config" not in config_in(tmp_path / "bf16")
    for name, tensor in tensors_in(tmp_path / "bf16").items():
        assert relative_error(tensor, whole[name]) < 0.01, "rounded to bf16 before the product is added, and after"


def test_what_cannot_be_written_back_is_named_with_the_remedy(tmp_path, monkeypatch):
    model = saved("mixtral", tmp_path)
    adapt(load(tmp_path / "base", type(model)), tmp_path / "adapter")
    folders = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    for reverse in (ConversionOps.reverse_op.fget, lambda self: Chunk(self.dim - 1)):
        with monkeypatch.context() as patched:
            patched.setattr(Concatenate, "reverse_op", property(reverse))
            match = r"layers.0.mlp.experts.gate_up_proj cannot be written back .*unload"
            with pytest.raises(CheckpointError, match=match):
                merge_adapter(*folders)
    assert not (tmp_path / "merged").exists()


EXPERTS = "model.layers.1.block_sparse_moe.experts"


@pytest.mark.pinned
@pytest.mark.parametrize(
    "lost, match",
    [
        ([f"{EXPERTS}.3.w3.weight"], r"experts.3.w3.weight of model.layers.1.mlp.experts.gate_up_proj is missing"),
        ([f"{EXPERTS}.3.w{n}.weight" for n in (1, 2, 3)], "experts.3.w1.weight of .*gate_up_proj is missing"),
        ([f"{EXPERTS}.7.w2.weight"], "experts.7.w2.weight of .*down_proj is missing"),
        (["model.norm.weight"], "model.norm.weight is missing"),
    ],
    ids=["one matrix of an expert", "an expert", "the last expert's", "what no adapter changes"],
)
def test_a_base_that_lacks_weights_is_refused_by_their_names(lost, match, tmp_path):
    """The adapters of an expert that is missing would otherwise be added to the next ones."""
    model = saved("mixtral", tmp_path)
    adapt(load(tmp_path / "base", type(model)), tmp_path / "adapter")
    edit_tensors(tmp_path / "base", dict.fromkeys(lost))
    with pytest.raises(CheckpointError, match=match):
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.fixture
def nemotron(tmp_path):
    """Make (base, adapter) of experts without a gate."""
    adapt(saved("nemotron_h", tmp_path), tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


@pytest.mark.pinned
def test_factors_of_a_single_expert_change_it_alone(nemotron, tmp_path):
    base, adapter = nemotron
    before = tensors_in(base)
    weight = next(name for name in before if name.endswith(".experts.0.up_proj.weight"))
    size_out, size_in = before[weight].shape
    stem = f"base_model.model.{weight.replace('backbone.', 'model.')}".removesuffix(".weight")
    factors = {f"{stem}.lora_A.weight": torch.ones(2, size_in), f"{stem}.lora_B.weight": torch.ones(size_out, 2)}
    rewrite(adapter, factors)
    edit_adapter_config(adapter, target_modules=r".*\.experts\.0\.up_proj", target_parameters=None)
    merge_adapter(base, adapter, tmp_path / "merged")
    after = tensors_in(tmp_path / "merged")
    assert [name for name in before if not torch.equal(before[name], after[name])] == [weight]
    change = after[weight] - before[weight]
    assert relative_error(change, torch.full_like(change, 4.0)) < 1e-6, "lora_alpha / r B A, of which B A is r"


def test_a_family_without_a_native_layout_is_refused_by_all_that_write_one(nemotron, tmp_path):
    base, adapter = nemotron
    known = r"'nemotron_h'; qwen3_moe, .* have a native layout .* without --layout, and"
    for write, match in (
        (lambda to: convert_checkpoint(base, to, "native"), known),
        (lambda to: convert_adapter(adapter, to, "native", trained_on=base), known),
        (lambda to: merge_adapter(base, adapter, to, "native"), known),
    ):
        with pytest.raises(CheckpointError, match=match):
            write(tmp_path / "written")
        assert not (tmp_path / "written").exists()
