"""`check` says "applied" of no adapter that a merge has damaged: the cases that it once believed, and
defects drawn at random."""

import random
import shutil

import pytest
import torch
from helpers.adapters import adapt
from helpers.checkpoints import make, rewrite, tensors_in
from transformers import AutoModelForCausalLM

from benchmarks.quality import check_defects
from benchmarks.quality.check_defects import KINDS, NONE, SIZES, Defect, draw, measure, word_tokenizer, write_text
from sonicmoe_hf.tools.checking.check import check_adapter
from sonicmoe_hf.tools.checking.texts import LENGTH

pytestmark = pytest.mark.pinned


def of_layer(number, experts_alone=False):
    return lambda layer: 0.0 if layer.decoder_layer == number and (layer.experts or not experts_alone) else None


CASES = [  # and the words of the reason in fp32
    (Defect("the last layer", 1, of_layer("3")), "without layer 3"),
    (Defect("layer 2's experts", 1, of_layer("2", experts_alone=True)), "without layer 2's experts"),
    (Defect("half of down", 1, lambda layer: 0.5 if layer.target == "down_proj" else None), "down_proj scaled by 0.5"),
    (
        Defect("a target", 1, lambda layer: 0.0 if (layer.target, layer.decoder_layer) == ("o_proj", "3") else None),
        "without layer 3's o_proj",
    ),
    (Defect("1.2", 1, lambda layer: 1.2), "the adapter scaled by 1.2"),
    (Defect("0.8", 1, lambda layer: 0.8), "the adapter scaled by 0.8"),
    (Defect("0.5", 1, lambda layer: 0.5), "the adapter scaled by 0.5"),
]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_what_is_missing_is_told_and_named(dtype, tmp_path):
    text = write_text(tmp_path / "text", 1100, random.Random(0))
    cases = [(NONE, ""), *CASES]
    verdicts = measure(tmp_path, word_tokenizer(), text, dtype, [defect for defect, _ in cases])
    assert verdicts[0][0] == "applied"
    for (defect, words), (kind, reason) in zip(cases[1:], verdicts[1:]):
        assert kind not in ("applied", "cannot tell"), defect.kind
        assert dtype == "bfloat16" or words in reason, reason


def test_what_is_trained_whole_and_missing_is_named(tmp_path):
    text = write_text(tmp_path / "text", 1100, random.Random(0))
    without = {
        "lm_head": Defect("lm_head", 1, lambda layer: None, "lm_head"),
        "norm": Defect("norm", 1, lambda layer: None, "norm"),
        "its LoRA": Defect("LoRA", 1, lambda layer: 0.0),
    }
    applied, *verdicts = measure(tmp_path, word_tokenizer(), text, "float32", [NONE, *without.values()])
    assert applied[0] == "applied"
    assert verdicts == [("applied in part", f"without {name}") for name in without]


def test_no_defect_drawn_at_random_is_applied_in_fp32(tmp_path):
    draws = random.Random(4)
    text = write_text(tmp_path / "text", 500, draws)
    defects = [draw(kind, draws.choice(SIZES), draws) for kind in draws.sample(KINDS, 4)]
    assert all(kind != "applied" for kind, _ in measure(tmp_path, word_tokenizer(), text, "float32", defects))


@pytest.mark.slow
def test_what_rounding_hides_in_bf16_is_told_in_float32(tmp_path, monkeypatch):
    monkeypatch.setattr(check_defects, "NUM_LAYERS", 1)
    text = write_text(tmp_path / "text", 1100, random.Random(0))
    verdicts = {
        loaded: measure(tmp_path, word_tokenizer(), text, "bfloat16", [NONE], 0.015, loaded)[0]
        for loaded in ("auto", "float32")
    }
    assert verdicts["auto"][0] == "cannot tell" and "add --dtype float32" in verdicts["auto"][1]
    assert verdicts["float32"] == ("applied", "")


def test_an_adapter_that_changes_the_weights_much_is_applied_in_bf16_where_they_are_rounded_much(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(check_defects, "NUM_LAYERS", 1)
    text = write_text(tmp_path / "text", 1100, random.Random(0))
    assert measure(tmp_path, word_tokenizer(), text, "bfloat16", [NONE], 4.0) == [("applied", "")]


WHOLE = {  # what an adapter may train whole: PEFT's options, the tensors, and their name
    "biases": ({"bias": "lora_only"}, ".bias", "its biases"),
    "tokens": ({"trainable_token_indices": list(range(4, 20))}, "embed_tokens.weight", "embed_tokens"),
    "norms": ({"modules_to_save": ["input_layernorm"]}, "input_layernorm.weight", "input_layernorm"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_biases_tokens_and_norms_that_are_missing_are_named(kind, tmp_path):
    options, ending, name = WHOLE[kind]
    make(tmp_path / "base", "qwen3_moe", dtype=torch.float32, num_hidden_layers=1, attention_bias=True)
    word_tokenizer().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = adapt(model, tmp_path / "adapter", size=0.1, target_modules=["q_proj", "o_proj"], **options)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    base, merged = tensors_in(tmp_path / "base"), tensors_in(tmp_path / "merged")
    whole = {each: tensor for each, tensor in base.items() if each.endswith(ending)}
    for place, lacking in (("without what is whole", whole), ("without LoRA", base.keys() - whole.keys())):
        shutil.copytree(tmp_path / "merged", tmp_path / place)
        rewrite(tmp_path / place, merged | {each: base[each] for each in lacking})
    text = write_text(tmp_path / "text", 3 * LENGTH, random.Random(0), last=63)
    places = [str(tmp_path / place) for place in ("merged", "without what is whole", "without LoRA")]
    result = check_adapter(str(tmp_path / "base"), str(tmp_path / "adapter"), places, text=text)
    assert [(each.verdict.kind, each.verdict.reason) for each in result.places] == [
        ("applied", ""),
        ("applied in part", f"without {name}"),
        ("applied in part", "without its LoRA"),
    ]
