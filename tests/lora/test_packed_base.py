"""An adapter remembers how the experts of its base were packed, and says where it meets others."""

import json
import shutil

import pytest
import torch
from helpers.adapters import adapt, lora
from helpers.checkpoints import make
from helpers.engine_adapters import adapter_config
from helpers.marks import rest_pinned, rest_slow
from huggingface_hub import constants
from peft import PeftModel

import sonicmoe_hf
from sonicmoe_hf import convert_adapter, convert_checkpoint, merge_adapter
from sonicmoe_hf.formats.declared import QUANT_METHOD
from sonicmoe_hf.lora import packed_base
from sonicmoe_hf.lora.packed_base import ENTRY

WHOLE_BLOCKS = {"hidden_size": 128, "moe_intermediate_size": 128}  # of FP8
MESSAGE = "the adapter was trained on experts in {}"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(packed_base, "_said", set())


def load(folder, format=None):
    return sonicmoe_hf.from_pretrained(folder, dtype="float32", experts_quantization=format)


def trained(tmp_path, format, **options):
    """Write a base, and an adapter beside its experts in this format; returns the packed base."""
    make(tmp_path / "base", "qwen3_moe", dtype=torch.float32, **WHOLE_BLOCKS)
    model = load(tmp_path / "base", format)
    adapt(model, tmp_path / "adapter", **options)
    return model


@pytest.mark.parametrize(("format", "task"), rest_pinned([("nf4", "CAUSAL_LM"), ("fp8", None), ("mxfp4", None)]))
def test_an_adapter_warns_on_another_packing_and_not_on_its_own(format, task, tmp_path, caplog):
    trained(tmp_path, format, task_type=task)
    assert adapter_config(tmp_path / "adapter")["auto_mapping"][ENTRY]["format"] == format
    PeftModel.from_pretrained(load(tmp_path / "base", format), tmp_path / "adapter").save_pretrained(
        tmp_path / "again"
    )
    assert not caplog.records and adapter_config(tmp_path / "again")["auto_mapping"][ENTRY]["format"] == format
    other = "mxfp4" if format == "nf4" else "nf4"
    for how, shown in ((None, "are not packed"), (other, f"are in {other} (checksums")):
        caplog.clear()
        PeftModel.from_pretrained(load(tmp_path / "base", how), tmp_path / "again")
        (record,) = caplog.records
        assert MESSAGE.format(format) in record.getMessage() and shown in record.getMessage()
        assert (how is None) == (f"--experts-quantization {format})" in record.getMessage())
    caplog.clear()
    packed_base._said.clear()
    expanded = load(tmp_path / "base")
    declare(tmp_path / "base", format)
    PeftModel.from_pretrained(expanded, tmp_path / "again")
    assert not caplog.records, "Transformers has expanded a checkpoint in that very format"


def declare(folder, format):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": QUANT_METHOD, "experts": format}}))


@pytest.mark.pinned
def test_a_hub_s_checkpoint_that_is_expanded_is_found_in_the_cache(tmp_path, caplog, monkeypatch):
    trained(tmp_path, "nf4")
    repository, commit = tmp_path / "hub" / "models--org--base", "0" * 40
    shutil.copytree(tmp_path / "base", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    expanded = load("org/base")
    declare(repository / "snapshots" / commit, "nf4")
    PeftModel.from_pretrained(expanded, tmp_path / "adapter")
    assert not caplog.records


@pytest.mark.pinned
def test_a_model_without_a_name_has_no_file_in_the_working_directory(tmp_path, caplog, monkeypatch):
    trained(tmp_path, "nf4")
    nameless = load(tmp_path / "base")
    nameless.name_or_path = ""  # as of a model that is built from a config
    declare(tmp_path / "base", "nf4")
    monkeypatch.chdir(tmp_path / "base")
    PeftModel.from_pretrained(nameless, tmp_path / "adapter")
    (record,) = caplog.records
    assert "are not packed" in record.getMessage()


@pytest.mark.pinned
@pytest.mark.parametrize("format", rest_slow(["fp8", "nf4", "mxfp4"]))
def test_merging_into_another_base_says_so(format, tmp_path):
    trained(tmp_path, format)
    convert_adapter(tmp_path / "adapter", tmp_path / "vllm", "vllm")
    make(tmp_path / "other", "qwen3_moe", dtype=torch.float32, seed=1, **WHOLE_BLOCKS)
    for name in ("base", "other"):
        convert_checkpoint(tmp_path / name, tmp_path / f"{name} native", "native", quantize=format)
    if format == "fp8":
        convert_checkpoint(tmp_path / "base", tmp_path / "base hub", "hub", quantize=format)
    expected = {"base": True, "base native": False, "other native": True, "base hub": False}
    for name, is_said in expected.items():
        if (tmp_path / name).exists():
            for adapter in ("adapter", "vllm"):
                notices = merge_adapter(tmp_path / name, tmp_path / adapter, tmp_path / f"{name} {adapter}").notices
                assert any(MESSAGE.format(format) in notice for notice in notices) == is_said, name


@pytest.mark.parametrize("task", rest_pinned(["CAUSAL_LM", None]))
def test_an_adapter_that_is_trained_on_belongs_to_the_base_below_it(task, tmp_path, caplog):
    trained(tmp_path, "mxfp4", task_type=task)
    for _ in range(2):
        model = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter", is_trainable=True)
    assert len(caplog.records) == 1, "once"
    model.save_pretrained(tmp_path / "again")
    assert ENTRY not in (adapter_config(tmp_path / "again")["auto_mapping"] or {})


@pytest.mark.pinned
def test_a_second_adapter_remembers_the_same_base(tmp_path):
    trained(tmp_path, "nf4")
    model = PeftModel.from_pretrained(load(tmp_path / "base", "nf4"), tmp_path / "adapter", is_trainable=True)
    model.add_adapter("second", lora(model))
    model.save_pretrained(tmp_path / "both")
    first, second = (adapter_config(tmp_path / "both" / name)["auto_mapping"][ENTRY] for name in ("", "second"))
    assert first == second and first["norms"]
