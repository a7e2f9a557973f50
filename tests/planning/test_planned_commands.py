"""The commands that sonicmoe-hf plan prints: their examples take them as they stand, and they run."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from helpers.checkpoints import DECLARED_FP8, edit_config, make, to_nvfp4
from helpers.examples import EXAMPLES, TEXT, load
from helpers.models import CONFIGS
from helpers.terminal import make_configs
from test_plan import GPT_OSS, olmoe, sizes_of
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

import sonicmoe_hf
from sonicmoe_hf.layer.backends import BACKEND_VARIABLE
from sonicmoe_hf.tools.cli.main import main
from sonicmoe_hf.tools.demo import corpus
from sonicmoe_hf.tools.planning.choices import choose_shown
from sonicmoe_hf.tools.planning.sizes import sizes_of_checkpoint
from sonicmoe_hf.tools.planning.ways import ways_of, why_left_out
from sonicmoe_hf.tools.random_models import QWEN3_30B_A3B

pytestmark = pytest.mark.pinned


def parts_of(command):
    """Split a command into (the launcher's words, the example, its options)."""
    words = shlex.split(command)
    place = next(index for index, word in enumerate(words) if word.endswith(".py"))
    return words[:place], Path(words[place]), words[place + 1 :]


def test_every_command_is_one_that_its_launcher_and_its_example_take(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    pytest.importorskip("torchao")  # which one of the examples imports
    examples, accelerate = {}, launch_command_parser()
    quantized = DeepseekV3Config(quantization_config=DECLARED_FP8)
    for config in (Qwen3MoeConfig(**QWEN3_30B_A3B), GPT_OSS, quantized, CONFIGS["olmoe"]()):
        for gpus in (1, 8):
            for way in ways_of(sizes_of(config, "a folder/a model"), gpus=gpus, gpu_memory=80, tokens=16384):
                launcher, path, options = parts_of(way.command)
                assert (EXAMPLES.parent / path).is_file()
                if path.stem not in examples:
                    examples[path.stem] = load(path.stem)
                parsed = examples[path.stem].parse_arguments(options)
                assert parsed.batch_size * parsed.sequence_length == way.training.tokens
                assert parsed.model == "a folder/a model"
                if launcher[0] == "accelerate":
                    assert (EXAMPLES.parent / launcher[3]).is_file()
                    accelerate.parse_args([*launcher[2:], str(path)])
                for option in options:
                    assert not option.endswith(".json") or (EXAMPLES.parent / option).is_file()
    assert set(examples) == {"finetune", "qlora", "expert_parallel", "full_finetune_one_gpu"}


@pytest.mark.parametrize(
    ("family", "methods", "converts"),
    [
        ("qwen3_vl_moe", {"full", "lora", "qlora"}, False),  # AutoModelForCausalLM does not know it
        ("qwen3_moe", {"qlora"}, True),
        ("glm4_moe", {"qlora"}, True),
    ],
)
def test_the_planned_commands_load_their_checkpoint(family, methods, converts, tmp_path, monkeypatch):
    """Plain, or in NVFP4 that hf_quant_config.json alone declares, as in NVIDIA's exports."""
    pytest.importorskip("torchao")
    monkeypatch.syspath_prepend(EXAMPLES)
    folder, sizes = tmp_path / "tiny", {"hidden_size": 64, "moe_intermediate_size": 64}
    make(folder, family, **({} if "full" in methods else sizes))
    if "full" not in methods:
        to_nvfp4(folder)
        edit_config(folder, quantization_config=None)
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    corpus.train_tokenizer([TEXT], 300).save_pretrained(folder)
    sizes = sizes_of_checkpoint(str(folder))
    ways, _ = choose_shown(ways_of(sizes, gpus=1, gpu_memory=80, tokens=64))
    assert {way.training.method for way in ways} == methods
    loaders = {
        "finetune": lambda example, options: example.load_model([TEXT], options)[0],
        "full_finetune_one_gpu": lambda example, options: example.load(options, [TEXT])[0],
        "qlora": lambda example, options: example.load_packed(options.model, options),
    }
    for way in ways:
        _, path, options = parts_of(way.command)
        example = load(path.stem)
        assert sonicmoe_hf.is_patched(loaders[path.stem](example, example.parse_arguments(options))), way.command
    _, _, convert = (why_left_out(sizes) or "").partition("sonicmoe-hf ")
    assert bool(convert) is converts
    if converts:
        assert main(shlex.split(convert.replace("FOLDER", str(tmp_path / "bf16")))) == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_commands_of_a_small_model_run_on_one_machine(method, tmp_path, monkeypatch):
    """Each as it stands, but for the number of steps, and a smaller text."""
    pytest.importorskip("torchao")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv(BACKEND_VARIABLE, "eager")
    monkeypatch.setattr(corpus, "standard_library", lambda: ([TEXT * 20] * 20, []))
    tokenizer = corpus.train_tokenizer([TEXT], 300)
    config = olmoe(vocab_size=300)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    ways = ways_of(sizes_of_checkpoint("tiny"), gpus=1, gpu_memory=8, tokens=64, method=method)
    fitting, _ = choose_shown(ways)
    assert fitting
    for way in fitting:
        launcher, path, options = parts_of(way.command)
        assert launcher == ["python"]
        steps = ["--steps", "1", *(["--train-only"] if path.stem == "finetune" else [])]
        for name in ("finetune", "qlora"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        load(path.stem).main([*options, *steps])
        shutil.rmtree("outputs")  # no example overwrites what another merged


def test_of_ways_with_experts_in_host_memory_one_begins_with_that_which_copies_the_fewest(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("COLUMNS", raising=False)  # lines are whole where nothing says how wide they may be
    make_configs(tmp_path)
    assert main(["plan", str(tmp_path / "Qwen" / "Qwen3-30B-A3B"), "--gpu-memory", "24064MiB"]) == 0
    printed = capsys.readouterr().out
    assert "1 GPU of 23.5 GiB" in printed and "QLoRA FP8, r=8, 16 GiB of experts in host memory" in printed
    held = "beside weights in NF4, 1 GiB of them in host memory, from where each step copies them"
    assert f"begin with 1: adapters of all experts, {held}; other ways copy more." in printed
    rows = [line for line in printed.splitlines() if line.startswith((" 1 ", " 2 "))]
    assert "QLoRA NF4" in rows[0] and "QLoRA FP8" in rows[1], "what one begins with is first"
    assert "library without --dataset" in printed and "[all]" in printed
