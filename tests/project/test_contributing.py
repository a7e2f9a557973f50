"""CONTRIBUTING.md: its frames are those of a call, and each folder's order of reading has all of its files."""

import ast
import re
import traceback
from pathlib import Path

import pytest
import torch
from helpers.examples import TINY_SIZES
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import sonicmoe_hf
from sonicmoe_hf.kernels import eager
from sonicmoe_hf.layer.backends import BACKEND_VARIABLE

pytestmark = pytest.mark.pinned
ROOT = Path(__file__).parents[2]
HOOKS = [  # that have returned before the layer begins
    ("sonicmoe_hf/routing/hooks.py", "enter"),
    ("sonicmoe_hf/patching/guard.py", "__call__"),
]
KERNELS = [("kernels/eager.py", "up"), ("kernels/eager.py", "down")]


def frames_of_the_table():
    """List (file, function) of each row of "One call, frame by frame"."""
    _, section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("### One call, frame by frame\n")
    rows = re.findall(r"^\| `(\S+)`[^|]*\| ([^|]*) \|", section.partition("\n### ")[0], flags=re.MULTILINE)
    return [(file, function) for file, functions in rows for function in re.findall(r"`(\w+)`", functions)]


def test_the_frames_of_the_table_are_functions_of_their_files_and_those_of_a_call(monkeypatch):
    frames = frames_of_the_table()
    for file, function in frames:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (
            file,
            function,
        )

    monkeypatch.setenv(BACKEND_VARIABLE, "eager")
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**TINY_SIZES))
    sonicmoe_hf.patch_model(model)
    model = get_peft_model(model, sonicmoe_hf.lora_config(model, r=4))
    stacks, up = [], eager.up

    def kernel(*arguments, **options):
        stacks.append(traceback.extract_stack())
        return up(*arguments, **options)

    monkeypatch.setattr(eager, "up", kernel)
    model(torch.tensor([[1, 2, 3]]))
    package = ROOT / "sonicmoe_hf"
    called = [frame for frame in stacks[0] if Path(frame.filename).is_relative_to(package)]
    assert [(str(Path(frame.filename).relative_to(ROOT)), frame.name) for frame in called] == [
        frame for frame in frames if frame not in HOOKS + KERNELS
    ]


def test_an_order_of_reading_names_every_file_of_its_folder():
    orders = 0
    for init in (ROOT / "sonicmoe_hf").rglob("__init__.py"):
        order = (ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or "").partition("order of reading")[2]
        orders += bool(order)
        files = {path.stem for path in init.parent.glob("*.py")} - {"__init__"}
        assert not order or files <= set(re.findall(r"\w+", order)), init
    assert orders > 15
