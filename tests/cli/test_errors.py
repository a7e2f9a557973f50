"""Whatever a command is given, it ends with a sentence and exit code 2, and with JSON where JSON is asked for."""

import json

import pytest
import torch
from helpers.checkpoints import make

from sonicmoe_hf import CheckpointError, convert_adapter, convert_checkpoint
from sonicmoe_hf.checkpoints import files
from sonicmoe_hf.tools.cli.main import main

pytestmark = pytest.mark.pinned


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "hub"
    make(folder, "qwen3_moe", num_hidden_layers=1)
    return folder


def refusal(capsys, arguments):
    """Return the sentence that a command ends with."""
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
