"""sonicmoe-hf on the command line: its help, and doctor in words and as JSON."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from helpers.models import CONFIGS, OTHERS, build
from helpers.small_families import small_config

import sonicmoe_hf
from sonicmoe_hf.adapters.engines import ENGINES
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.layer import backends
from sonicmoe_hf.private.versions import versions
from sonicmoe_hf.tools.cli import doctor
from sonicmoe_hf.tools.cli.commands import COMMANDS
from sonicmoe_hf.tools.cli.main import build_parser, main
from sonicmoe_hf.tools.planning.training import METHODS
from sonicmoe_hf.tools.planning.ways import SEQUENCE

ROOT = Path(__file__).parents[2]


def save_config(folder, **changes):
    """Make a checkpoint's folder without weights: doctor reads the config alone."""
    CONFIGS["qwen3_moe"](**{"num_hidden_layers": 4, **changes}).save_pretrained(folder)
    return str(folder)


def doctor_json(capsys, *arguments):
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_version_names_the_packages_that_matter(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert f"transformers {transformers.__version__}" in capsys.readouterr().out


def test_help_wrong_command_lines_and_examples_import_no_torch():
    """Importing torch takes seconds, as does Transformers."""
    lines = [
        "--help",
        "--version",
        *(f"{name} --help" for name in COMMANDS),
        "docter",
        "plan",
        "run",
        "example",
        "example x",
    ]
    code = f"""import contextlib, sys, sonicmoe_hf_command as command
for line in {lines}:
    sys.argv[1:] = line.split()
    with contextlib.suppress(SystemExit):
        command.main()
    assert not {{"torch", "transformers"}} & sys.modules.keys(), line"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(build_parser().format_help()) and "transformers" in done.stdout
    assert "there is no example 'x'" in done.stderr and "no program to run" in done.stderr


def test_the_choices_that_options_offer_are_those_of_the_library():
    """commands.py imports nothing that imports torch, so it writes some of them again."""
    options = {(name, *names): option for name, command in COMMANDS.items() for names, option in command.options}
    for command, name in (("convert", "--quantize"), ("run", "--experts-quantization")):
        assert set(options[command, name]["choices"]) == set(FORMATS)
    assert options["convert", "--layout"]["choices"] == ("native", "hub", *ENGINES)
    assert options["plan", "--method"]["choices"] == METHODS
    assert options["plan", "--sequence-length"]["default"] == SEQUENCE


def test_a_command_is_required_and_an_unknown_one_refused(capsys):
    for arguments in ([], ["docter"]):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2


@pytest.mark.parametrize(
    ("version", "says"), [("99.0.1", "is newer than 3.9, the newest"), ("3.5.1", "is older than 3.6, the oldest")]
)
def test_doctor_names_versions_outside_the_tested_range(version, says, capsys, monkeypatch, request):
    request.addfinalizer(versions.cache_clear)
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "triton" else installed(name))
    main(["doctor", "--json"])
    (sentence,) = json.loads(capsys.readouterr().out)["untested_versions"]
    assert sentence.startswith(f"triton {version} {says} that sonicmoe-hf")
    main(["doctor"])
    assert f"triton {version} {says}" in " ".join(capsys.readouterr().out.split())


def test_doctor_names_the_version_of_each_package_that_an_install_for_training_brings(capsys):
    extras = [requirement for requirement in importlib.metadata.requires("sonicmoe-hf") if "extra ==" in requirement]
    named = {
        re.split(r"[^\w-]", each)[0] for each in extras if re.search(r"""["'](trl|peft|train|hopper|all)["']""", each)
    }
    _, facts = doctor_json(capsys)
    of_charts = {"matplotlib", "nvidia-ml-py"}
    assert named - of_charts <= set(facts["versions"]), "what a report of a defect needs"
    assert {"bitsandbytes", "liger-kernel", "trl", "accelerate", "datasets"} <= named


def test_doctor_alone_prints_versions_devices_and_backends(capsys, monkeypatch):
    for name in ("SONICMOE_HF_BACKEND", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    reason = "plain PyTorch, correct but no faster than without sonicmoe-hf: the device is cpu"
    assert sum(reason in line for line in printed.splitlines()) == 1, "nothing wraps where no terminal ends"
    assert transformers.__version__ in printed
    assert "cpu" in printed and "eager" in printed
    assert "SONICMOE_HF_BACKEND is not set" in printed


def test_doctor_names_the_backend_override_and_a_wrong_one(capsys, monkeypatch):
    monkeypatch.setenv("SONICMOE_HF_BACKEND", "eager")
    assert doctor_json(capsys)[1]["backend_override"] == "eager"
    monkeypatch.setenv("SONICMOE_HF_BACKEND", "magic")
    _, facts = doctor_json(capsys)
    backend, reason = facts["devices"][-1]["backends"]["float32"]
    assert backend == "error"
    assert "'magic'" in reason and "'eager'" in reason


def test_doctor_collapses_equal_layers_and_exits_0_when_all_are_supported(capsys, tmp_path):
    code, facts = doctor_json(capsys, save_config(tmp_path))
    (layers,) = facts["model"]["layers"]
    assert code == 0
    assert facts["model"]["supported"]
    assert (layers["layers"], layers["count"]) == ("model.layers[0-3].mlp", 4)
    assert (layers["family"], layers["supported"], layers["token_rounding"]) == ("qwen3_moe", True, True)


def test_doctor_says_that_a_cpu_computes_in_plain_pytorch_and_accelerates_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("SONICMOE_HF_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "160")
    folder = save_config(tmp_path, dtype="bfloat16")
    code, facts = doctor_json(capsys, folder)
    model = facts["model"]
    assert code == 0 and model["supported"] and not model["accelerated"] and not model["layers"][0]["accelerated"]
    assert (model["here"]["device"], model["here"]["dtype"], model["here"]["backend"]) == ("cpu", "bfloat16", "eager")
    assert main(["doctor", folder]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "accelerated" not in printed
    assert "model.layers[0-3].mlp" in printed and "Qwen3MoeForCausalLM" in printed
    assert "backend here: eager (cpu, bfloat16): plain PyTorch, correct but no faster than without" in printed


def test_doctor_on_a_machine_with_kernels_says_that_they_accelerate(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.backends, "choose", lambda device, dtype: backends.Choice("triton", "of this test"))
    _, facts = doctor_json(capsys, save_config(tmp_path))
    assert facts["model"]["accelerated"] and facts["model"]["layers"][0]["accelerated"]
    assert facts["model"]["here"]["device"] == "cuda:0" and facts["model"]["here"]["backend"] == "triton"


@pytest.mark.parametrize(
    ("layers", "dense", "name"),
    [
        (4, [0], "[1-3]"),
        (4, [0, 1, 2], ".3"),
        (8, [0, 2, 4, 6], "[1, 3, ..., 7]"),
        (8, [0, 2, 3, 7], "[1, 4, 5, 6]"),
    ],
)
def test_layers_that_get_the_same_are_one_range(capsys, tmp_path, layers, dense, name):
    folder = save_config(tmp_path, num_hidden_layers=layers, mlp_only_layers=dense)
    (found,) = doctor_json(capsys, folder)[1]["model"]["layers"]
    assert (found["layers"], found["count"]) == (f"model.layers{name}.mlp", layers - len(dense))


def test_a_patch_report_reads_as_doctor_does():
    model = build("qwen3_moe", num_hidden_layers=4)
    assert str(sonicmoe_hf.patch_model(model)).splitlines() == [
        "4 mixture-of-experts layers patched; routing: top-k",
        "  model.layers[0-3].mlp (qwen3_moe): fully supported",
    ]
    rounding = str(sonicmoe_hf.patch_model(model, "token_rounding")).splitlines()[0]
    assert "TokenRounding(rounding='nearest', tile=128, min" in rounding and rounding.endswith(
        "in training, top-k in evaluation"
    )


def test_doctor_says_where_token_rounding_is_not_known(capsys, tmp_path):
    small_config(transformers.PhimoeConfig).save_pretrained(tmp_path)
    code, facts = doctor_json(capsys, str(tmp_path))
    (layers,) = facts["model"]["layers"]
    assert code == 0
    assert layers["supported"] and not layers["token_rounding"]
    assert "docs/models.md" in layers["reason"]


@pytest.mark.parametrize(
    ("method", "remedy", "file"),
    [
        ("mxfp4", "Mxfp4Config(dequantize=True)", {}),
        ("fp8", "FineGrainedFP8Config(dequantize=True)", {}),
        ("bitsandbytes", "a checkpoint that is not quantized", {}),
        ("modelopt", 'experts_quantization="nvfp4"', {"quant_algo": "NVFP4", "group_size": 16}),
        ("modelopt", "load the bf16 checkpoint", {"quant_algo": "FP8"}),
    ],
)
def test_doctor_never_passes_quantized_experts_as_supported(capsys, tmp_path, method, remedy, file):
    """Doctor finds them in config.json, or as in NVIDIA's exports in hf_quant_config.json alone."""
    folder = save_config(tmp_path, **({} if file else {"quantization_config": {"quant_method": method}}))
    if file:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": file}))
    code, facts = doctor_json(capsys, folder)
    (layers,) = facts["model"]["layers"]
    assert code == 1
    assert not facts["model"]["supported"] and not layers["supported"] and not layers["token_rounding"]
    assert method in layers["reason"] and remedy in layers["reason"]


def test_an_export_whose_kv_cache_alone_is_quantized_is_supported(capsys, tmp_path):
    quantization = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    code, facts = doctor_json(capsys, save_config(tmp_path))
    assert code == 0 and facts["model"]["quantization"] is None


def test_doctor_names_what_no_format_takes_of_an_fp8_checkpoint(capsys, tmp_path):
    declared = {"quant_method": "fp8", "weight_block_size": [64, 128]}
    code, facts = doctor_json(capsys, save_config(tmp_path, quantization_config=declared))
    (layers,) = facts["model"]["layers"]
    assert code == 1 and "weight_block_size [64, 128]" in layers["reason"] and "bf16" in layers["reason"]


@pytest.mark.parametrize("format", FORMATS)
def test_doctor_names_the_format_of_packed_experts(capsys, tmp_path, format):
    declared = {"quant_method": "sonicmoe_hf", "experts": format, "linear": None}
    code, facts = doctor_json(capsys, save_config(tmp_path, quantization_config=declared))
    (layers,) = facts["model"]["layers"]
    assert code == 0 and layers["supported"] and layers["token_rounding"]
    assert (
        facts["model"]["quantization"] == f"packed as {format}" and f"packed as {format}, frozen" in layers["reason"]
    )


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_doctor_finds_what_a_multimodal_config_declares_of_its_text_model(capsys, tmp_path, place):
    config = OTHERS["qwen3_vl_moe"]()
    (config.text_config if place == "inside" else config).quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    code, facts = doctor_json(capsys, str(tmp_path))
    assert code == 1 and facts["model"]["quantization"] == "fp8" and not facts["model"]["supported"]
    assert all("the checkpoint is quantized (fp8)" in layers["reason"] for layers in facts["model"]["layers"])


def test_doctor_says_that_a_dense_model_has_nothing_to_accelerate(capsys, tmp_path):
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path)]) == 1
    assert "nothing to accelerate" in " ".join(capsys.readouterr().out.split())


def test_doctor_forecasts_whether_token_rounding_applies(capsys, tmp_path):
    """8 experts, top-2, tiles of 128: four tiles per expert need 128 * 4 * 8 / 2 = 2048 tokens."""
    folder = save_config(tmp_path)
    for batch_size, applies in ((16, True), (15, False)):
        _, facts = doctor_json(capsys, folder, "--batch-size", str(batch_size), "--sequence-length", "128")
        (forecast,) = facts["model"]["token_rounding"]
        assert (forecast["tokens"], forecast["applies"], forecast["tokens_needed"]) == (
            128 * batch_size,
            applies,
            2048,
        )
    assert "needs 2048 tokens" in forecast["sentence"]
    _, facts = doctor_json(capsys, folder, "--batch-size", "15", "--sequence-length", "128", "--tile", "64")
    assert facts["model"]["token_rounding"][0]["applies"]


def test_doctor_rounds_the_tokens_that_token_rounding_needs_upwards(tmp_path):
    """Top-3 of 8 experts: 128 * 4 * 8 / 3 = 1365.3 tokens."""
    folder = save_config(tmp_path, num_experts_per_tok=3)
    for tokens, applies in ((1366, True), (1365, False)):
        (forecast,) = doctor.examine(folder, batch_size=1, sequence_length=tokens)["token_rounding"]
        assert (forecast["applies"], forecast["tokens_needed"]) == (applies, 1366)


def test_doctor_counts_the_parameters_of_adapters_on_the_experts(capsys, tmp_path):
    """4 layers of 8 experts, H = 32, I = 16, top-2: gate_up [32, 32] and down [32, 16]."""
    folder = save_config(tmp_path)
    adapters = doctor_json(capsys, folder)[1]["model"]["adapters"]
    each = 4 * 8 * (32 + 32 + 32 + 16)
    assert (adapters["r"], adapters["parameters"]) == (16, 16 * each)
    assert (adapters["experts_r"], adapters["parameters_at_experts_r"]) == (8, 8 * each)
    assert main(["doctor", folder]) == 0
    assert "lora_config(model, r=16, experts_r=8)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./no/such/folder"], "there is no folder ./no/such/folder"),
        (["no/such/folder"], "there is no folder no/such/folder"),
        (["{empty}"], "No such file or directory: '{empty}/config.json'"),
        (["--batch-size", "4", "model"], "belong together"),
        (["--batch-size", "4", "--sequence-length", "4"], "need a model"),
        (["--tile", "4", "model"], "--tile needs both"),
    ],
)
def test_doctor_explains_what_it_cannot_examine(capsys, tmp_path, arguments, words):
    assert main(["doctor", *(argument.format(empty=tmp_path) for argument in arguments)]) == 2
    assert words.format(empty=tmp_path) in capsys.readouterr().err
