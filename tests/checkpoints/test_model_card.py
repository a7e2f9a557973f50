"""README.md of what merge and convert write: a section and the hub's metadata, beside what a user wrote there."""

import pytest
import torch
from helpers.adapters import adapt
from helpers.checkpoints import make
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

import sonicmoe_hf
from sonicmoe_hf import convert_adapter, convert_checkpoint, merge_adapter
from sonicmoe_hf.checkpoints.writing.model_card import CARD, Origin, add_card


@pytest.fixture
def folders(tmp_path):
    make(tmp_path / "base", "qwen3_moe", dtype=torch.float32, hidden_size=128, moe_intermediate_size=128)
    adapt(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "lora", size=0.02)
    return tmp_path


def read(folder):
    return (folder / CARD).read_text(encoding="utf-8")


def test_a_merged_folder_says_what_it_was_made_of_and_how_to_check_it(folders):
    merge_adapter(folders / "base", folders / "lora", folders / "merged", quantize="fp8")
    text = read(folders / "merged")
    assert ModelCard(text).data.tags == ["sonicmoe_hf", "peft"] and "# merged\n" in text
    assert "- base: base\n- adapter: lora\n- format: Transformers' and the engines' layout, experts in fp8\n" in text
    assert "100% is left by rounding to fp8 in the median" in text
    assert (
        "    sonicmoe-hf check base lora merged\n" in text and f"sonicmoe_hf {sonicmoe_hf.__version__} (torch" in text
    )
    assert str(folders) not in text, "whose paths are nobody else's to know"
    merge_adapter(folders / "merged", folders / "lora", folders / "twice")
    text = read(folders / "twice")
    assert "# twice\n" in text and "# merged\n" not in text, "a title that is the source's name is not kept"


def test_the_command_that_checks_an_adapter_names_the_packing_that_its_base_is_not_stored_in(folders):
    command = "    sonicmoe-hf check {} qlora {}{}\n"
    model = sonicmoe_hf.from_pretrained(folders / "base", experts_quantization="nf4")
    model.save_pretrained(folders / "packed")
    adapt(model, folders / "qlora", task_type="CAUSAL_LM")
    for base, option in (("base", " --experts-quantization nf4"), ("packed", "")):
        merge_adapter(folders / base, folders / "qlora", folders / f"merged {base}")
        assert command.format(base, f"merged {base}", option) in read(folders / f"merged {base}")
    convert_adapter(folders / "qlora", folders / "vllm", "vllm", trained_on=folders / "base")
    assert command.format("base", "vllm", " --experts-quantization nf4") in read(folders / "vllm")


def test_converted_adapters_and_checkpoints_have_cards_and_keep_those_that_were_there(folders):
    (folders / "lora" / CARD).write_text("---\nlicense: mit\ntags: [mine]\n---\n# My adapter\n\nMy words.\n")
    (folders / "base" / CARD).write_bytes(b"---\nlicense: [not, closed\n---\nMy words, in Latin-1: \xff.\n")
    convert_adapter(folders / "lora", folders / "vllm", "vllm")
    card = ModelCard(read(folders / "vllm"))
    assert card.data.license == "mit" and card.data.tags == ["mine", "sonicmoe_hf", "peft"]
    assert card.text.startswith("# My adapter\n\nMy words.\n") and "- format: vllm layout" in card.text
    convert_checkpoint(folders / "base", folders / "native")
    card = (folders / "native" / CARD).read_bytes()
    assert card.startswith((folders / "base" / CARD).read_bytes().rstrip()), "a header that is no YAML stays as it is"
    assert b"native layout, dense" in card and b"sonicmoe-hf check" not in card


def test_the_base_on_the_hub_is_named_in_the_metadata_unless_the_user_did(tmp_path):
    for given, expected in (("", "org/base"), ("---\nbase_model: my/own\n---\n# Mine\n", "my/own")):
        (tmp_path / CARD).unlink(missing_ok=True)
        if given:
            (tmp_path / CARD).write_text(given)
        add_card(tmp_path, "name", Origin("merge", "org/base", "org/lora"), "dense", [])
        assert ModelCard(read(tmp_path)).data.base_model == expected
        assert "sonicmoe-hf check org/base org/lora name" in read(tmp_path)
