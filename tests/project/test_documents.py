"""Documents whose commands and Python run as they are shown."""

import importlib.util
import os
import re
import shlex
from pathlib import Path

import datasets
import pytest
import torch
from helpers.examples import EXAMPLES, TEXT, TINY_SIZES, load
from helpers.terminal import assert_prints_what_is_shown, make_folders, sessions
from helpers.training import arguments
from helpers.vllm_engine import FAMILIES_SERVED
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer

import sonicmoe_hf
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.checkpoints.reading.source import Source
from sonicmoe_hf.layer.backends import BACKEND_VARIABLE
from sonicmoe_hf.routing.patched_model import routing_state
from sonicmoe_hf.tools.cli.main import build_parser
from sonicmoe_hf.tools.cli.main import main as run_command
from sonicmoe_hf.tools.cli.run import split_program
from sonicmoe_hf.tools.demo import corpus

pytestmark = pytest.mark.pinned


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "eager")


def texts_of_documents():
    """Yield README.md, docs/ and examples/, with each command in one line."""
    for path in (EXAMPLES.parent / "README.md", *(EXAMPLES.parent / "docs").glob("*.md"), *EXAMPLES.glob("*.py")):
        yield path.read_text(encoding="utf-8").replace("\\\n", " ")


def python_of(page):
    """List the Python blocks of a page of docs/."""
    text = (EXAMPLES.parent / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def tiny_model(**changes):
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**{**TINY_SIZES, **changes}))


def test_every_command_of_sonicmoe_hf_in_the_documents_is_one_that_it_takes():
    lines = [
        line
        for text in texts_of_documents()
        for line in re.findall(r"^    sonicmoe-hf ([^>\n]*)", text, flags=re.MULTILINE)
    ]
    commands = [shlex.split(line, comments=True) for line in lines if "[" not in line and "..." not in line]
    for words in commands:
        build_parser().parse_args(split_program(words)[0])
    assert len(commands) >= 20


def test_every_benchmark_in_the_documents_exists_and_has_its_options():
    sources = "".join(path.read_text(encoding="utf-8") for path in (EXAMPLES.parent / "benchmarks").rglob("*.py"))
    commands = [
        found for text in texts_of_documents() for found in re.findall(r"-m (benchmarks\.[\w.]+)([^`\n]*)", text)
    ]
    assert len(commands) >= 20
    for module, options in commands:
        assert importlib.util.find_spec(module) is not None, module
        assert [name for name in re.findall(r"--[a-z-]+", options) if f'"{name}"' not in sources] == [], module


def test_every_command_of_the_documents_is_one_that_its_example_takes(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # as `python examples/...` does: one imports another
    pytest.importorskip("torchao")  # which one of the examples imports
    count = 0
    for text in texts_of_documents():
        for name, options in re.findall(r"^    .*examples/(\w+)\.py(.*)", text, flags=re.MULTILINE):
            example = load(name)
            if "..." not in options and hasattr(example, "parse_arguments"):
                example.parse_arguments(shlex.split(options, comments=True))
                count += 1
    assert count >= 8


@pytest.fixture(scope="module")
def folder_of_sessions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sessions")
    make_folders(folder)
    return folder


@pytest.mark.parametrize(
    "session",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (each.command.split()[1] == "check"))
        for each in sessions()
        if each.command.split()[1] != "run"
    ],
    ids=lambda each: each.command[12:40],
)
def test_terminal_sessions_of_the_documents_are_what_the_commands_print(session, folder_of_sessions, monkeypatch):
    """`run`'s is tests/autopatch/test_run.py's."""
    monkeypatch.chdir(folder_of_sessions)
    before = dict(os.environ)
    assert_prints_what_is_shown(session)
    assert dict(os.environ) == before


def test_every_command_that_ends_in_a_moment_has_a_terminal_session():
    shown = {session.command.split()[1] for session in sessions()}
    (choices,) = [action.choices for action in build_parser()._subparsers._group_actions]
    assert set(choices) - shown == {"demo", "warmup", "example"}, "which train and compile for minutes, or list files"


def test_the_readme_is_short_and_opens_with_the_two_commands_that_try_it():
    lines = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert all(any(line.startswith(f"    make {target} ") for line in lines[:24]) for target in ("demo", "test"))


def test_the_python_of_the_document_on_token_rounding_runs():
    (python,) = python_of("token-rounding.md")
    model = tiny_model()
    exec(python, {"model": model})
    assert routing_state(model).policy.rounding == "nearest"


def test_the_python_of_the_document_on_patching_runs(capsys):
    (python,) = python_of("patching.md")
    model = tiny_model()
    exec(python, {"sonicmoe_hf": sonicmoe_hf, "model": model})
    assert "1 mixture-of-experts layer" in capsys.readouterr().out and not sonicmoe_hf.is_patched(model)


def test_the_python_of_the_document_on_balance_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a Trainer without arguments makes a folder
    callbacks, loop, plot = python_of("balance.md")
    model, ids = tiny_model(), torch.arange(64).view(2, 32)
    names = {"model": model, "Trainer": lambda *args, callbacks: callbacks}
    exec(callbacks.replace("...,", ""), names)
    sonicmoe_hf.patch_model(model)
    before = [weight.clone() for weight in model.parameters()]
    names |= {"batches": [{"input_ids": ids, "labels": ids}], "optimizer": torch.optim.SGD(model.parameters(), 1.0)}
    exec(loop, names)
    assert not all(map(torch.equal, before, model.parameters()))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    settings = arguments("outputs", max_steps=1)
    names["Trainer"] = lambda given: Trainer(model, settings, train_dataset=rows)
    exec(plot, names)
    assert Path("outputs/expert_load.png").read_bytes()


def test_the_python_of_the_document_on_replay_runs():
    recording, of_a_server = python_of("replay.md")
    model, ids = tiny_model(), torch.arange(64).view(2, 32)
    names = {"torch": torch, "model": model, "batch": {"input_ids": ids}}
    exec(recording, names)
    assert torch.equal(names["old"], names["new"])
    mask = torch.ones_like(ids)
    (served,) = names["routing"].tensors()
    rows = served.view(1, 2, 32, -1)[:, :, :-1].permute(1, 2, 0, 3).numpy()  # as vLLM has them, of each sequence

    class Completion:
        def __init__(self, routed_experts):
            self.outputs = [self]
            self.routed_experts = routed_experts

    class Engine:
        def generate(self, prompts, params):
            return [Completion(row) for row in rows]

    names |= {"llm": Engine(), "prompts": [], "sampling_params": None, "input_ids": ids, "attention_mask": mask}
    exec(of_a_server, names)
    assert set(names["shares"].values()) == {0.0} and torch.allclose(names["logits"], names["old"])


def test_the_commands_and_the_python_of_the_document_on_the_native_layout_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("Qwen/Qwen3-30B-A3B")
    text = (EXAMPLES.parent / "docs" / "layout.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    sonicmoe-hf (.*)", text, flags=re.MULTILINE)
    assert len(commands) == 3
    for words in (shlex.split(command, comments=True) for command in commands[:2]):
        assert run_command(words) == 0
    (python,) = python_of("layout.md")
    exec(python, names := {})
    assert Source(Path("qwen3-release")).layout == "per_expert" and routing_state(names["model"]) is not None


def test_the_python_of_the_documents_on_lora_and_packed_experts_runs(tmp_path, monkeypatch):
    config = Qwen3MoeConfig(**{**TINY_SIZES, "hidden_size": 64, "moe_intermediate_size": 64})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    blocks = [block for page in ("lora.md", "packed-experts.md", "host-memory.md") for block in python_of(page)]
    for name in ("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"):
        blocks = [block.replace(f'"{name}"', repr(str(tmp_path / "tiny"))) for block in blocks]
    in_bf16, in_4_bits, in_fp8, in_fp8_products, from_host = blocks
    exec(in_bf16, names := {})
    trained = [name for name, weight in names["model"].named_parameters() if weight.requires_grad]
    assert all("lora_" in name for name in trained)
    assert any(".experts." in name for name in trained) and any("self_attn" in name for name in trained)
    names["model"].save_pretrained("outputs/lora")
    for packed in (
        in_4_bits,
        *(f"import peft, sonicmoe_hf\n{block}" for block in (in_fp8, in_fp8_products, from_host)),
    ):
        exec(packed, names := {})
        assert sum(isinstance(weight, PackedWeight) for weight in names["model"].parameters()) == 2
    assert run_command(["merge", "tiny", "outputs/lora", "outputs/merged"]) == 0


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    """A tiny model and short rows stand in for the hub's, and two steps for a thousand."""
    folder = tmp_path / "tiny"
    corpus.train_tokenizer([TEXT], 300).save_pretrained(folder)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**TINY_SIZES)).save_pretrained(folder)
    texts = datasets.Dataset.from_dict({"text": [TEXT] * 20})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: texts)
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    for change in (
        ('"Qwen/Qwen3-30B-A3B", 4096', f"{str(folder)!r}, 16"),
        ("max_steps=1000", "max_steps=2"),
        ("use_liger_kernel=True", "use_cpu=True"),  # Liger's kernels need a GPU
        ("torch_compile=True", 'torch_compile_backend="aot_eager"'),  # Inductor would take a minute
    ):
        assert text.count(change[0]) == 1, change[0]
        text = text.replace(*change)
    [training] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(training, names := {})
    assert names["dataset"].num_rows > 0 and set(map(len, names["dataset"]["input_ids"])) == {16}
    assert run_command(["merge", "tiny", "outputs/lora", "outputs/merged"]) == 0
    assert run_command(["convert", "outputs/lora", "outputs/lora-vllm", "--layout", "vllm"]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert "`sonicmoe_hf.patch_model(model)`" in text
    sonicmoe_hf.patch_model(model)
    assert routing_state(model) is not None


def test_the_families_of_the_document_on_serving_are_those_that_tests_serve_and_all_others_that_vllm_takes():
    serving, models = (
        (EXAMPLES.parent / "docs" / page).read_text(encoding="utf-8") for page in ("serving.md", "models.md")
    )
    rows = [line for line in serving.splitlines() if re.search(r"\| `\w+`, `", line)]
    served, *others = (set(re.findall(r"`(\w+)`", row)) for row in rows)
    taken = re.findall(r"^\| (\w+), .* \| .*vLLM.* \|$", models, flags=re.MULTILINE)
    assert served == set(FAMILIES_SERVED) and set().union(served, *others) == set(taken)


def test_the_tests_that_the_evidence_names_exist():
    text = (EXAMPLES.parent / "docs" / "evidence.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/.]+)`", text))
    assert len(named) > 10 and [path for path in named if not (EXAMPLES.parent / path).exists()] == []


def test_the_reference_has_every_public_name():
    """A name by itself, or in one of the modules that are listed whole."""
    text = (EXAMPLES.parent / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: sonicmoe_hf\.(\w+)$", text, flags=re.MULTILINE))
    in_modules = {"moe_experts"} | {name for name in sonicmoe_hf.__all__ if name.endswith("Error")}
    assert {"functional", "errors"} <= listed
    assert listed - {"errors"} == set(sonicmoe_hf.__all__) - in_modules
