"""sonicmoe-hf doctor on damaged checkpoints: one line that names file, entry and value; no traceback, code or prompt."""

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from helpers.integers import DECLARED
from helpers.models import CONFIGS
from helpers.small_families import CHANGES, OMNI, small_config

from sonicmoe_hf.tools.cli.main import main

pytestmark = pytest.mark.pinned

ONE_LAYER = {"num_hidden_layers": 1}  # with experts: building models is what takes the time here


def write(folder, entries):
    content = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    (folder / "config.json").write_bytes(content)
    return str(folder)


def entries_of(family):
    dense = {"first_k_dense_replace": 0} if family == "deepseek_v3" else {}
    return json.loads(CONFIGS[family](**ONE_LAYER, **dense).to_json_string(use_diff=False))


def refusal(capsys, folder, *options):
    """Find the one line that doctor prints, the same with and without --json."""
    assert main(["doctor", folder, *options]) == 2
    line = capsys.readouterr().err.removeprefix("sonicmoe-hf: ").rstrip("\n")
    assert main(["doctor", folder, *options, "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": line}
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("family", "damage", "words"),
    [
        ("qwen3_moe", {"num_experts": "eight"}, "num_experts' expected int, got str (value: 'eight')"),
        ("olmoe", {"hidden_size": None}, "hidden_size' expected int, got NoneType"),
        ("qwen3_moe", {"hidden_act": "mesh"}, "KeyError: 'mesh'"),
        ("qwen3_moe", {"dtype": "int8"}, "dtype=torch.int8"),
    ],
)
def test_what_is_wrong_is_named_with_its_value(family, damage, words, tmp_path, capsys):
    line = refusal(
        capsys, write(tmp_path, {**entries_of(family), **damage}), "--batch-size", "8", "--sequence-length", "128"
    )
    assert line.startswith(f"{tmp_path}/config.json") and words in line


@pytest.mark.parametrize("declared", [{}, {"experts": "nf5"}, {"experts": ["nf4"]}])
def test_experts_packed_in_no_format_are_named(declared, tmp_path, capsys):
    config = {**entries_of("qwen3_moe"), "quantization_config": {"quant_method": "sonicmoe_hf", **declared}}
    words = f"the experts' format in quantization_config is {declared.get('experts')!r}, not nf4 or mxfp4"
    assert words in refusal(capsys, write(tmp_path, config))


IN_GROUPS_OF_ONE = {**CHANGES["deepseek_v2"], "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 2}


@pytest.mark.parametrize(
    ("cls", "changes"),
    [
        (transformers.DeepseekV2Config, CHANGES["deepseek_v2"]),
        (transformers.DeepseekV2Config, IN_GROUPS_OF_ONE),
        # a thinker and a talker, under a config that no Auto class of text has
        (transformers.Qwen3OmniMoeConfig, OMNI),
        (transformers.GraniteMoeHybridConfig, CHANGES["granitemoehybrid"]),  # which writes infinity as an object
    ],
    ids=["deepseek_v2", "groups of one", "omni", "infinity"],
)
def test_models_that_work_are_supported(cls, changes, tmp_path):
    small_config(cls, changes).save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"\xff\x00\x80", "cannot be read"),
        (b"{}", "model_type is None"),
    ],
)
def test_a_file_that_is_no_config_is_named(content, words, tmp_path, capsys):
    line = refusal(capsys, write(tmp_path, content))
    assert f"{tmp_path}/config.json" in line and words in line


def test_experts_in_integers_come_in_bf16_of_compressed_tensors_and_not_at_all_of_others(tmp_path, capsys):
    for kind, is_supported, words in (
        ("ct-32", True, "at every load Transformers makes its int4 experts bf16"),
        ("ct-8", True, "at every load Transformers makes its int8 experts bf16"),
        ("ct-asym", False, "its experts would never reach sonicmoe_hf"),
        ("gptq", False, "its experts would never reach sonicmoe_hf"),
    ):
        folder = write(tmp_path, {**entries_of("qwen3_moe"), "quantization_config": DECLARED[kind]})
        assert main(["doctor", folder, "--json"]) == (0 if is_supported else 1)
        (layer,) = json.loads(capsys.readouterr().out)["model"]["layers"]
        assert layer["supported"] is is_supported and words in layer["reason"]
        assert 'experts_quantization="int4"' in layer["reason"]


@pytest.fixture
def with_code(tmp_path, monkeypatch):
    """Write entries of config.json that name code beside it, which leaves a mark when it runs; asking anything is an
    error."""
    mark = tmp_path / "it ran"
    (tmp_path / "theirs.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Config: ...\nclass Model: ...\n")
    monkeypatch.setattr(builtins, "input", lambda prompt="": pytest.fail(f"it asked: {prompt}"))
    yield {"auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}}
    assert not mark.exists()


def test_code_of_a_checkpoint_is_never_run_nor_asked_about(tmp_path, capsys, with_code):
    assert main(["doctor", write(tmp_path, {**entries_of("qwen3_moe"), **with_code})]) == 0
    capsys.readouterr()
    theirs = {**entries_of("deepseek_v3"), **with_code, "model_type": "kimi_k2"}
    for architecture, remedy in (
        ("DeepseekV3ForCausalLM", "take auto_map out, and set model_type to 'deepseek_v3'"),  # as Kimi-K2 has it
        ("TheirModel", "its code (auto_map) is not run here: load it with trust_remote_code=True, and ask"),
    ):
        line = refusal(capsys, write(tmp_path, {**theirs, "architectures": [architecture]}))
        assert "model_type is 'kimi_k2', which Transformers" in line and remedy in line


@pytest.mark.parametrize("entry", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_code_of_the_hub_that_a_config_names_is_not_loaded(entry, tmp_path):
    """Transformers would load these from the hub while it builds the model; offline that is an error."""
    assert main(["doctor", write(tmp_path, {**entries_of("qwen3_moe"), entry: "someone/kernels"})]) == 0


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_asked_once(tmp_path):
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "sonicmoe_hf", "doctor", "some/model"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, **nowhere}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and "Retrying" not in done.stderr, done.stderr
    assert "there is no folder some/model, and the hub did not give it" in done.stderr.splitlines()[-1]


def test_offline_the_variable_that_forbids_asking_is_named(capsys):
    assert "unset HF_HUB_OFFLINE, or give a local folder" in refusal(capsys, "some/model")
