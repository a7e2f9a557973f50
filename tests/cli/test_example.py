"""`sonicmoe-hf example` prints the files of examples/, and lists them."""

import ast
import json

import pytest
from helpers.examples import EXAMPLES

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


def test_the_notebook_is_printed_as_a_notebook(capsys):
    assert main(["example", "quickstart.ipynb"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        (EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8")
    )


def test_an_example_that_is_not_there_is_an_error_that_lists_them(capsys):
    assert main(["example", "missing"]) == 2
    assert "there is no example 'missing'; there are accelerate_loop, " in capsys.readouterr().err
