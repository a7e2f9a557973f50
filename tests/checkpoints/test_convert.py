"""Conversion between the layouts: bit-exact both ways, from every kind of source, or an error that
names what does not fit."""

import json
import random

import pytest
import torch
from helpers.checkpoints import (
    FAMILIES,
    KINDS,
    assert_conversion_refused,
    config_in,
    edit_config,
    edit_tensors,
    fp8_by_transformers,
    make,
    rewrite,
    same_bits,
    tensors_in,
)
from helpers.models import ORDER_OF_SUMS, logits_of, relative_error
from helpers.trl_trainers import word_tokenizer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sonicmoe_hf import CheckpointError, convert_checkpoint
from sonicmoe_hf.checkpoints.reading import files
from sonicmoe_hf.formats.float_matrices import FP8Matrix
from sonicmoe_hf.tools.cli.main import main

EVERY_KIND = [(family, kind) for family in FAMILIES for kind in KINDS[family]]


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)


def assert_comes_back(folder, **options):
    """Convert folder/hub to the native layout, folder/native, and back: every bit of its tensors, and its config."""
    convert_checkpoint(folder / "hub", folder / "native", **options)
    convert_checkpoint(folder / "native", folder / "back", "hub", verify=True)
    assert same_bits(tensors_in(folder / "back"), tensors_in(folder / "hub"))
    assert config_in(folder / "back") == config_in(folder / "hub")


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_scattered_over_files_are_gathered(tmp_path, family):
    make(tmp_path / "hub", family)
    tensors = tensors_in(tmp_path / "hub")
    for path in (tmp_path / "hub").glob("*.safetensors"):
        path.unlink()
    files = [f"model-{i:05}-of-00003.safetensors" for i in range(1, 4)]
    places = {name: files[i * 7 % 3] for i, name in enumerate(random.Random(0).sample(sorted(tensors), len(tensors)))}
    for file in files:
        save_file({name: tensors[name] for name in tensors if places[name] == file}, tmp_path / "hub" / file)
    (tmp_path / "hub" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert_comes_back(tmp_path, max_shard_size="1KB", verify=True)
    assert len(list((tmp_path / "native").glob("*.safetensors"))) > 1


@pytest.mark.parametrize("family, kind", EVERY_KIND)
def test_every_kind_of_source_gives_the_same_native_checkpoint_as_its_hub_form(tmp_path, family, kind):
    """Quantized sources are first read by the formula; the others hold the hub's very bits."""
    make(tmp_path / "source", family, kind)
    convert_checkpoint(tmp_path / "source", tmp_path / "native")
    convert_checkpoint(tmp_path / "source", tmp_path / "hub", "hub")
    convert_checkpoint(tmp_path / "hub", tmp_path / "native again")
    assert same_bits(tensors_in(tmp_path / "native"), tensors_in(tmp_path / "native again"))
    if kind not in ("fp8", "mxfp4"):
        make(tmp_path / "plain", family)
        assert same_bits(tensors_in(tmp_path / "hub"), tensors_in(tmp_path / "plain"))


@pytest.mark.parametrize("family, tied", [*((family, False) for family in FAMILIES), ("qwen3_moe", True)])
def test_native_and_hub_forms_compute_the_same_logits(tmp_path, family, tied):
    make(tmp_path / "hub", family, tie_word_embeddings=tied)
    assert ("lm_head.weight" in tensors_in(tmp_path / "hub")) != tied
    convert_checkpoint(tmp_path / "hub", tmp_path / "native")
    hub = logits_of(load(tmp_path / "hub", experts_implementation="sonicmoe_hf"))
    native = load(tmp_path / "native")
    assert torch.equal(logits_of(native), hub)
    assert (native.lm_head.weight is native.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("family", FAMILIES)
def test_save_pretrained_and_from_pretrained_across_both_layouts_keep_logits(tmp_path, family):
    model = make(tmp_path / "hub", family, dtype=torch.float32)
    convert_checkpoint(tmp_path / "hub", tmp_path / "native")
    native = load(tmp_path / "native")
    assert relative_error(logits_of(native), logits_of(model)) < 1e-5, ORDER_OF_SUMS
    native.save_pretrained(tmp_path / "native saved")
    assert same_bits(tensors_in(tmp_path / "native"), tensors_in(tmp_path / "native saved"))
    convert_checkpoint(tmp_path / "native saved", tmp_path / "hub again", "hub")
    load(tmp_path / "hub again").save_pretrained(tmp_path / "hub saved")
    assert same_bits(tensors_in(tmp_path / "hub"), tensors_in(tmp_path / "hub saved"))
    assert torch.equal(logits_of(load(tmp_path / "hub saved", experts_implementation="eager")), logits_of(model))


def test_fp8_is_read_as_transformers_quantizes_it():
    weight = torch.randn(64, 48)
    quantized, scale_inv = fp8_by_transformers(weight, (16, 24))
    read = FP8Matrix((16, 24)).dense(quantized, scale_inv).to(torch.bfloat16)
    assert relative_error(read, weight) < 0.04, "three mantissa bits: at most 1/16 of a value is lost, 1/30 on average"
    exact = quantized.double() * scale_inv.double().repeat_interleave(16, 0).repeat_interleave(24, 1)
    assert torch.equal(read, exact.float().to(torch.bfloat16))


def test_fp8_blocks_cut_off_at_the_end_are_read(tmp_path):
    model = make(tmp_path / "source", "deepseek_v3", "fp8")
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors_in(tmp_path / "source").values())
    convert_checkpoint(tmp_path / "source", tmp_path / "hub", "hub")
    ours, theirs = tensors_in(tmp_path / "hub"), model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert relative_error(ours[name], theirs[name]) < 0.04
    assert not any(name.endswith("scale_inv") for name in ours)


def test_layers_for_multi_token_prediction_go_along_untouched(tmp_path):
    make(tmp_path / "hub", "deepseek_v3", num_nextn_predict_layers=1)
    extra = {
        "model.layers.2.mlp.experts.0.up_proj.weight": torch.randn(16, 32),
        "model.layers.2.eh_proj.weight": torch.ones(4),
    }
    edit_tensors(tmp_path / "hub", extra)
    assert_comes_back(tmp_path)
    assert extra.keys() <= tensors_in(tmp_path / "native").keys()


def test_a_dtype_is_cast_except_where_the_family_keeps_fp32(tmp_path):
    make(tmp_path / "hub", "deepseek_v3", dtype=torch.float32)
    convert_checkpoint(tmp_path / "hub", tmp_path / "native", dtype="bfloat16")
    dtypes = {name: tensor.dtype for name, tensor in tensors_in(tmp_path / "native").items()}
    assert dtypes["model.layers.1.mlp.experts.c_fc"] == torch.bfloat16
    assert dtypes["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32
    assert config_in(tmp_path / "native")["dtype"] == "bfloat16"


def test_values_beyond_float16_are_named_and_never_become_infinite(tmp_path):
    make(tmp_path / "hub", "qwen3_moe")
    tensors = tensors_in(tmp_path / "hub")
    for name in ("model.layers.0.mlp.experts.3.up_proj.weight", "model.norm.weight"):
        spoiled = {**tensors, name: tensors[name].clone()}
        spoiled[name].view(-1)[5] = 2.0**17
        rewrite(tmp_path / "hub", spoiled)
        for layout in ("native", "hub"):
            words = r"values up to 1.31e\+05, which are infinite in torch.float16"
            assert_conversion_refused(tmp_path / "hub", words, layout, dtype="float16")
    spoiled[name].view(-1)[5] = float("inf")
    rewrite(tmp_path / "hub", spoiled)
    convert_checkpoint(tmp_path / "hub", tmp_path / "half", dtype="float16")
    assert tensors_in(tmp_path / "half")[name][5] == float("inf"), "as it was stored: --verify is what refuses it"


def test_every_entry_that_names_a_dtype_is_rewritten(tmp_path):
    make(tmp_path / "hub", "qwen3_moe")
    for before in ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, {"dtype": None, "torch_dtype": "bfloat16"}):
        edit_config(tmp_path / "hub", **before)
        target = tmp_path / f"native {len(before)} {before['dtype']}"
        convert_checkpoint(tmp_path / "hub", target, dtype="float32")
        named = {key: value for key, value in config_in(target).items() if key in ("dtype", "torch_dtype")}
        assert set(named.values()) == {"float32"} and "torch_dtype" in named
        assert load(target).dtype == torch.float32


def test_tokenizer_and_other_files_go_along_and_optimiser_states_do_not(tmp_path):
    make(tmp_path / "hub", "qwen3_moe")
    word_tokenizer().save_pretrained(tmp_path / "hub")
    for name in ("optimizer.pt", "README.md", "chat_template.jinja", "pytorch_model.bin"):
        (tmp_path / "hub" / name).write_text(name)
    (tmp_path / "hub" / "additional_chat_templates").mkdir()
    (tmp_path / "hub" / "additional_chat_templates" / "tools.jinja").write_text("tools")
    done = convert_checkpoint(tmp_path / "hub", tmp_path / "native")
    names = {path.name for path in (tmp_path / "native").iterdir()}
    assert {"README.md", "chat_template.jinja", "generation_config.json", "tokenizer.json"} <= names
    assert (tmp_path / "native" / "additional_chat_templates" / "tools.jinja").read_text() == "tools"
    assert not {"optimizer.pt", "pytorch_model.bin"} & names
    assert "optimizer.pt" in done.notices[0]
    assert AutoTokenizer.from_pretrained(tmp_path / "native")("w3 w5")["input_ids"] == [3, 5]


def test_classes_on_the_hub_named_in_the_config_come_back(tmp_path):
    make(tmp_path / "hub", "deepseek_v3")
    edit_config(tmp_path / "hub", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    assert_comes_back(tmp_path)
    assert "auto_map" not in config_in(tmp_path / "native")


def test_the_command_converts_verifies_and_says_what_it_did(tmp_path, capsys):
    make(tmp_path / "hub", "deepseek_v3", "fp8")
    arguments = ["convert", str(tmp_path / "hub"), str(tmp_path / "native"), "--layout", "native"]
    assert main([*arguments, "--no-dequantize"]) == 2
    assert "can only dequantize" in capsys.readouterr().err
    assert main([*arguments, "--verify", "--max-shard-size", "20KB"]) == 0
    assert "bfloat16 now" in " ".join(capsys.readouterr().out.split())
    assert main(arguments) == 2
    assert "exists; remove it" in capsys.readouterr().err


def test_doctor_knows_native_checkpoints(tmp_path, capsys):
    make(tmp_path / "hub", "olmoe")
    convert_checkpoint(tmp_path / "hub", tmp_path / "native")
    capsys.readouterr()  # what libraries print when they are first imported
    assert main(["doctor", str(tmp_path / "native"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["model"]
    assert report["architecture"] == "SonicMoEOlmoeForCausalLM"
    assert report["layers"][0]["token_rounding"]


def test_a_hub_id_is_downloaded_or_named_in_the_error(tmp_path, monkeypatch):
    make(tmp_path / "hub", "qwen3_moe")
    asked = {}

    def snapshot_download(name, **options):
        asked.update(name=name, **options)
        return str(tmp_path / "hub")

    with pytest.raises(CheckpointError, match="the hub did not give it"):
        convert_checkpoint("nobody/nothing", tmp_path / "native")
    monkeypatch.setattr(files, "snapshot_download", snapshot_download)
    convert_checkpoint("Qwen/Qwen3-30B-A3B", tmp_path / "native", revision="main")
    assert (asked["name"], asked["revision"]) == ("Qwen/Qwen3-30B-A3B", "main")
    assert asked["ignore_patterns"] == ["*/*.safetensors"], "gpt-oss keeps another copy of its weights in original/"


def test_progress_reaches_the_end(tmp_path):
    make(tmp_path / "hub", "olmoe")
    seen = []
    done = convert_checkpoint(
        tmp_path / "hub", tmp_path / "native", verify=True, on_progress=lambda *now: seen.append(now)
    )
    assert seen[-1] == (2 * done.nbytes, 2 * done.nbytes)
    assert seen == sorted(seen)
