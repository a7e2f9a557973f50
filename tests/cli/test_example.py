"""`sonicmoe-hf example` prints the files of examples/, and lists them."""

import ast
import json
import os
import sys

import pytest
from helpers.examples import EXAMPLES

import sonicmoe_hf_command
from sonicmoe_hf.tools.cli.example import FIND_SHARED, examples
from sonicmoe_hf.tools.cli.main import main

pytestmark = pytest.mark.pinned


def test_every_file_of_the_examples_is_listed_with_what_it_does(capsys):
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"shared.py"}
    assert {path.name for path in examples().values()} == files
    assert main(["example"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == list(examples()) and all(summary.endswith(".") for _, summary in lines)


@pytest.mark.parametrize(
    ("name", "file"), [("finetune", "finetune.py"), ("qlora.py", "qlora.py"), ("fsdp2.yaml",) * 2]
)
def test_an_example_is_printed_as_it_is_but_for_the_line_that_finds_what_examples_share(name, file, capsys):
    assert main(["example", name]) == 0
    printed = capsys.readouterr().out
    assert printed.replace(f"{FIND_SHARED}\n", "") == (EXAMPLES / file).read_text(encoding="utf-8")
    assert printed.count(FIND_SHARED) == file.endswith(".py")
    assert file.endswith(".yaml") or ast.parse(printed)


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES.glob("*.py") if path.name != "shared.py"], ids=lambda p: p.stem
)
def test_threads_of_an_example_wait_without_spinning_as_is_set_before_torch_is_imported(path):
    body = ast.parse(path.read_text(encoding="utf-8")).body
    before = [ast.unparse(line) for line in body[1:4]]
    assert before[1:] == ["import os", "os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')"]


@pytest.mark.parametrize(
    ("given", "has_torch", "expected"), [(None, False, "PASSIVE"), ("ACTIVE", False, "ACTIVE"), (None, True, None)]
)
def test_threads_of_the_command_wait_without_spinning_unless_it_is_too_late(monkeypatch, given, has_torch, expected):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    if not has_torch:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.setattr(sys, "argv", ["sonicmoe-hf", "example"])
    assert sonicmoe_hf_command.main() == 0
    assert os.environ.get("OMP_WAIT_POLICY") == expected


def test_the_notebook_is_printed_as_a_notebook(capsys):
    assert main(["example", "quickstart.ipynb"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        (EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8")
    )


def test_an_example_that_is_not_there_is_an_error_that_lists_them(capsys):
    assert main(["example", "missing"]) == 2
    assert "there is no example 'missing'; there are accelerate_loop, " in capsys.readouterr().err
