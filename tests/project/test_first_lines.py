"""The first line of a docstring says what the thing is or does, by a verb of its own or the thing's name."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.pinned
ROOT = Path(__file__).parents[2]
VAGUE = re.compile(r"(Returns?|Gives?|Whether|What|Where|How|Which|When|Why|It|They|This|These|Those|Its|Their)\b")
# "Make what takes the place of ...", "Read it": not of verbs that tell something, as "Say what to do"
NAMELESS = re.compile(r"(?!Check|Choose|Describe|Explain|Judge|Say|Tell)\w+ (what|it|them)\b")


def first_lines():
    """Yield the file and the first line of each docstring in the repository's Python files."""
    for name in subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split():
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield name, docstring.split("\n")[0]


def test_first_lines_begin_with_a_verb_that_names_its_object_or_with_the_thing():
    vague = {(name, line) for name, line in first_lines() if VAGUE.match(line) or NAMELESS.match(line)}
    assert not vague, "begin with a verb and what it is done to, or with the thing's name"


def test_a_vague_first_line_is_seen():
    for line in ("Return the sum.", "Whether it is on.", "Make what takes its place.", "Forget them.", "Its sum."):
        assert VAGUE.match(line) or NAMELESS.match(line), line
    for line in ("Say what to do.", "Tell whether it is on.", "Compute the sum.", "The sum of all."):
        assert not VAGUE.match(line) and not NAMELESS.match(line), line
