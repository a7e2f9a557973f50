"""Whatever a command is given, it ends with a sentence and exit code 2, and with JSON where JSON is asked for."""

import json
import shutil

import pytest
import torch
from helpers.adapters import adapt
from helpers.checkpoints import edit_tensors, make
from transformers import AutoModelForCausalLM

import sonicmoe_hf
from sonicmoe_hf import CheckpointError, convert_adapter, convert_checkpoint
from sonicmoe_hf.checkpoints.reading import files
from sonicmoe_hf.lora.packed_base import ENTRY
from sonicmoe_hf.tools.cli.main import main

pytestmark = pytest.mark.pinned


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "hub"
    make(folder, "qwen3_moe", num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module")
def adapter(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    adapt(AutoModelForCausalLM.from_pretrained(hub), folder)
    return folder


def refusal(capsys, arguments):
    """Find the sentence that a command ends with."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    if "--json" in arguments:
        return json.loads(printed.out)["error"]
    (line,) = [line for line in printed.err.splitlines() if line.startswith("sonicmoe-hf: ")]
    return line.removeprefix("sonicmoe-hf: ")


@pytest.mark.parametrize(
    "command",
    ["doctor {} --json", "warmup {}", "convert {} new --layout native", "merge {} adapter new", "merge {hub} {} new"],
)
def test_a_name_that_cannot_be_is_answered_in_a_sentence(hub, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    for path, words in (
        ("x" * 300, "File name too long"),
        ("~nobody-of-this-name/x", "no folder ~nobody-of-this-name/x"),
    ):
        assert words in refusal(capsys, [word.format(path, hub=hub) for word in command.split()])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor", "--tile", "many", "model"], "is not a whole number"),
        (["merge"], "required: BASE"),
        (["doctor", "--colour"], "unrecognized arguments"),
        (["doctor", "one", "two"], "unrecognized arguments: two"),
    ],
)
def test_a_wrong_command_line_is_json_where_json_is_asked_for(arguments, words, capsys):
    assert words in refusal(capsys, [*arguments, "--json"])
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "unknown", "meant"),
    [
        ("run --experts-quantisation nf4 -- sft.py", "--experts-quantisation", "--experts-quantization"),
        ("merge base adapter new --quantise=fp8", "--quantise=fp8", "--quantize"),
        ("merge base adapter new --quantise fp8 --verfy", "--quantise fp8 --verfy", "--quantize, --verify"),
        ("doctor one two", "two", None),
    ],
)
def test_an_unknown_option_comes_with_its_commands_usage_and_the_option_that_was_meant(line, unknown, meant, capsys):
    with pytest.raises(SystemExit) as exit:
        main(line.split())
    said, command = capsys.readouterr().err, f"sonicmoe-hf {line.split()[0]}"
    hint = f"did you mean {meant}? " if meant else ""
    assert exit.value.code == 2 and said.startswith(f"usage: {command} ")
    assert said.endswith(f"error: unrecognized arguments: {unknown}; {hint}{command} --help lists the options\n")


def test_a_shard_size_is_bytes_or_text_with_a_unit(hub, tmp_path):
    for name, size, is_split in (("one", "1.5 GB", False), ("two", "9000", True), ("three", 9000, True)):
        convert_checkpoint(hub, tmp_path / name, max_shard_size=size)
        assert (tmp_path / name / files.INDEX_FILE).exists() == is_split


def test_an_adapter_in_pickles_is_named(hub, tmp_path):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(hub)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(CheckpointError, match=r"^there is no .*adapter_model.safetensors$"):
        convert_adapter(tmp_path, tmp_path / "new")
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(
        CheckpointError, match=r"there is no .*safetensors, and adapter_model.bin is not read: load it"
    ):
        convert_adapter(tmp_path, tmp_path / "new")


INDEX, MODELOPT, CONFIG, ADAPTER = (
    "model.safetensors.index.json",
    "hf_quant_config.json",
    "config.json",
    "adapter_config.json",
)
DAMAGES = [  # file, what stands in it, or entries that replace its own; what the sentence says
    (INDEX, "{}", "has no weight_map"),
    (INDEX, "[]", "holds no JSON object, but []"),
    (INDEX, '{"weight_map": ["model.safetensors"]}', "weight_map is ['model.safetensors'], where an object"),
    (INDEX, '{"weight_map": {"a": 1}}', "has no weight_map that names files"),
    (CONFIG, "[]", "holds no JSON object, but []"),
    (CONFIG, '"text"', "holds no JSON object, but 'text'"),
    (CONFIG, "{}", "model_type is None"),
    (CONFIG, {"model_type": None}, "model_type is None"),
    (CONFIG, {"model_type": ["qwen3_moe"]}, "model_type is ['qwen3_moe'], where a text"),
    (CONFIG, {"quantization_config": "fp8"}, "quantization_config is 'fp8', where an object"),
    (CONFIG, {"architectures": "Qwen3MoeForCausalLM"}, "architectures is 'Qwen3MoeForCausalLM', where a list"),
    (MODELOPT, "", "cannot be read"),
    (MODELOPT, "[]", "holds no JSON object"),
    (MODELOPT, "{}", "names no quant_algo"),
    (MODELOPT, '{"quantization": {}}', "names no quant_algo"),
    (MODELOPT, '{"quantization": "NVFP4"}', "quantization is 'NVFP4', where an object"),
    (MODELOPT, '{"quantization": {"quant_algo": 4}}', "quant_algo is 4, where a text"),
    (ADAPTER, "[]", "holds no JSON object"),
    (ADAPTER, {"auto_mapping": "text"}, "auto_mapping is 'text', where an object"),
    (ADAPTER, {"auto_mapping": {ENTRY: "nf4"}}, "sonicmoe_hf_base is 'nf4', where an object"),
    (ADAPTER, {"auto_mapping": {ENTRY: {"codes": [1]}}}, "without format"),
    (ADAPTER, {"rank_pattern": [4]}, "rank_pattern is [4], where an object"),
    (ADAPTER, {"target_modules": 3}, "target_modules is 3, where a text or a list"),
    (ADAPTER, {"r": "16"}, "r is '16', where a whole number"),
    (ADAPTER, {"modules_to_save": True}, "modules_to_save is True, where a list"),
    (ADAPTER, {"r": None}, "r is None, where a number above 0"),
    (ADAPTER, {"rank_pattern": {"o_proj": "x"}}, "rank_pattern['o_proj'] is 'x', where a whole number"),
    (ADAPTER, {"rank_pattern": {"o_proj": 0}}, "o_proj is 0, where a number above 0"),
    (
        ADAPTER,
        {"alpha_pattern": {"o_proj": None}},
        "alpha_pattern['o_proj'] is None, where a whole number or a number",
    ),
    (ADAPTER, {"target_modules": ["o_proj", 3]}, "target_modules[1] is 3, where a text"),
    (ADAPTER, {"layers_to_transform": "x"}, "layers_to_transform is 'x', where"),
    (ADAPTER, {"use_rslora": "yes"}, "use_rslora is 'yes', where true or false"),
]


@pytest.mark.parametrize(("file", "content", "words"), DAMAGES)
def test_what_is_damaged_is_named_with_its_file_by_every_command_that_reads_it(
    file, content, words, hub, adapter, tmp_path, capsys
):
    """Exit code 1 says that something is not supported or not applied."""
    base, tuned = (shutil.copytree(folder, tmp_path / folder.name) for folder in (hub, adapter))
    path = (tuned if file == ADAPTER else base) / file
    if isinstance(content, dict):
        content = json.dumps({**json.loads(path.read_text()), **content})
    path.write_text(content)
    if file == INDEX:
        (base / "model.safetensors").unlink(missing_ok=True)
    commands = {"merge": ["merge", str(base), str(tuned), str(tmp_path / "new")]}
    if file in (CONFIG, MODELOPT):
        commands |= {name: [name, str(base), "--json"] for name in ("doctor", "plan")}
    if file == ADAPTER and ENTRY not in words and "format" not in words:  # what merge alone reads
        commands["convert"] = ["convert", str(tuned), str(tmp_path / "new"), "--layout", "vllm"]
    for name, command in commands.items():
        said = refusal(capsys, command)
        assert file in said and words in said, name
    if file == MODELOPT or "quantization_config" in words:
        with pytest.raises(CheckpointError, match=file):
            sonicmoe_hf.from_pretrained(base)


GATE = "model.layers.0.mlp.experts.3.gate_proj.weight"
OF_BASE = [  # file, and what becomes of it, or of GATE; what the sentence says
    (None, lambda content: content[:-10], "is not a whole safetensors file"),
    (None, lambda content: content[:40], "is not a whole safetensors file"),
    (None, lambda content: b"", "is not a whole safetensors file"),
    (INDEX, lambda content: content[:60], "cannot be read"),
    (INDEX, lambda content: content.replace(b"-00001-of", b"-00009-of"), "which model.safetensors.index.json names"),
    (CONFIG, lambda content: content[:60], "cannot be read"),
    (CONFIG, lambda content: b"[" * 100_000, "cannot be read"),
    (CONFIG, lambda content: b"\xff\x00", "cannot be read"),
    (None, torch.ones(512, dtype=torch.bfloat16), "has shape (512,)"),
    (None, torch.ones(8, 64, dtype=torch.bfloat16), "has shape (8, 64)"),
    (None, torch.ones((), dtype=torch.bfloat16), "has shape ("),
    (None, torch.ones(16, 32, dtype=torch.int8), "has dtype torch.int8"),
    (None, torch.ones(16, 32, dtype=torch.complex64), "has dtype torch.complex64"),
    (None, torch.ones(16, 32).to(torch.float8_e5m2), "has dtype torch.float8_e5m2"),
]


@pytest.mark.parametrize(("file", "damage", "words"), OF_BASE)
def test_a_damaged_base_is_named_with_its_file_and_nothing_is_left_of_a_merge_or_a_conversion(
    file, damage, words, hub, adapter, tmp_path, capsys
):
    base = shutil.copytree(hub, tmp_path / "base")
    if callable(damage):
        path = base / (file or min(path.name for path in base.glob("*.safetensors")))
        path.write_bytes(damage(path.read_bytes()))
    else:
        edit_tensors(base, {GATE: damage})
        path = base / files.read_headers(base)[GATE].file
    named = path.name if "which" not in words else "-00009-of"
    new = str(tmp_path / "new")
    for command in (["merge", str(base), str(adapter), new], ["convert", str(base), new, "--layout", "native"]):
        said = refusal(capsys, command)
        assert named in said and words in said, command
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_defect_of_ours_is_no_exit_code_1(capsys, monkeypatch):
    def broken(**options):
        raise TypeError("unhashable type: 'list'")

    monkeypatch.setattr("sonicmoe_hf.tools.cli.doctor.doctor", broken)
    assert main(["doctor"]) == 2
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "sonicmoe-hf: a defect of sonicmoe-hf, please report it: TypeError" in printed
