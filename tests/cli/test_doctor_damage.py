"""sonicmoe-hf doctor on damaged checkpoints: one line that names file, entry and value; no traceback, code or prompt."""

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from helpers.models import CONFIGS
from helpers.small_families import CHANGES, OMNI, small_config

from sonicmoe_hf.tools.cli.main import main

pytestmark = pytest.mark.pinned

DAMAGE = ("eight", -4, None, [1])
ONE_LAYER = {"num_hidden_layers": 1}  # with experts: building models is what takes the time here


def write(folder, entries):
    content = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    (folder / "config.json").write_bytes(content)
    return str(folder)


def entries_of(family):
    dense = {"first_k_dense_replace": 0} if family == "deepseek_v3" else {}
    return json.loads(CONFIGS[family](**ONE_LAYER, **dense).to_json_string(use_diff=False))


def refusal(capsys, folder, *options):
    """The one line that doctor prints, the same with and without --json."""
    assert main(["doctor", folder, *options]) == 2
    line = capsys.readouterr().err.removeprefix("sonicmoe-hf: ").rstrip("\n")
    assert main(["doctor", folder, *options, "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": line}
    assert "\n" not in line
    return line


@pytest.mark.parametrize("family", CONFIGS)
def test_any_entry_of_any_wrong_kind_gives_a_report_or_one_line(family, tmp_path, capsys):
    good, refused = entries_of(family), 0
    for key in good:
        for number, value in enumerate(DAMAGE):
            if (len(key) + number) % 2 and key not in ("hidden_size", "num_experts_per_tok", "hidden_act"):
                continue  # half of them: building a model takes a while
            write(tmp_path, {**good, key: value})
            code = main(["doctor", "--json", str(tmp_path)])
            facts = json.loads(capsys.readouterr().out)
            assert code in (0, 1, 2) and (code == 2) == ("error" in facts), (key, value)
            if code == 2:
                refused += 1
                assert "config.json" in facts["error"] and "\n" not in facts["error"]
    assert refused > 40


@pytest.mark.parametrize(
    ("family", "damage", "words"),
    [
        ("qwen3_moe", {"num_experts": "eight"}, "num_experts' expected int, got str (value: 'eight')"),
        ("qwen3_moe", {"num_experts_per_tok": 99}, "k not in range for dimension"),
        ("deepseek_v3", {"topk_group": 5}, "k not in range for dimension"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size' expected int, got NoneType"),
        ("olmoe", {"hidden_size": None}, "hidden_size' expected int, got NoneType"),
        ("qwen3_moe", {"hidden_act": "mesh"}, "KeyError: 'mesh'"),
        ("qwen3_moe", {"model_type": "no_such_type"}, "model_type is 'no_such_type', which Transformers"),
        ("qwen3_moe", {"model_type": ["qwen3_moe"]}, "model_type is ['qwen3_moe'], which Transformers"),
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
    [(b"null", "holds a NoneType"), (b"[]", "holds a list"), (b'"text"', "holds a str"), (b"", "cannot be read"),
     (b'{"model_type":', "cannot be read"), (b"\xff\x00\x80", "cannot be read"), (b"[" * 100_000, "cannot be read"),
     (b"{}", "model_type is None")],
)  # fmt: skip
def test_a_file_that_is_no_config_is_named(content, words, tmp_path, capsys):
    line = refusal(capsys, write(tmp_path, content))
    assert f"{tmp_path}/config.json" in line and words in line


def test_a_config_that_is_no_file_is_named(tmp_path, capsys):
    (tmp_path / "config.json").mkdir()
    assert f"{tmp_path}/config.json is not a file" in refusal(capsys, str(tmp_path))
    (tmp_path / "config.json").rmdir()
    os.mkfifo(tmp_path / "config.json")
    assert f"{tmp_path}/config.json is not a file" in refusal(capsys, str(tmp_path))
    assert f"{tmp_path}/config.json/deeper" in refusal(capsys, f"{tmp_path}/config.json/deeper")


@pytest.fixture
def with_code(tmp_path, monkeypatch):
    """Entries of config.json that name code beside it, which leaves a mark when it runs; asking anything is an error."""
    mark = tmp_path / "it ran"
    (tmp_path / "theirs.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Config: ...\nclass Model: ...\n")
    monkeypatch.setattr(builtins, "input", lambda prompt="": pytest.fail(f"it asked: {prompt}"))
    yield {"auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}}
    assert not mark.exists()


def test_code_of_a_checkpoint_is_never_run_nor_asked_about(tmp_path, capsys, with_code):
    assert main(["doctor", write(tmp_path, {**entries_of("qwen3_moe"), **with_code})]) == 0
    capsys.readouterr()
    line = refusal(capsys, write(tmp_path, {**entries_of("qwen3_moe"), **with_code, "model_type": "theirs"}))
    assert "model_type is 'theirs'" in line and "its code comes with the checkpoint (auto_map), and is not run" in line


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
