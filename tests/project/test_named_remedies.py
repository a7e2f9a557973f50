"""The register of remedies, remedies.txt: each message that names one is there, below the test that does what it says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.pinned
ROOT = Path(__file__).parents[2]
REGISTER = Path(__file__).with_name("remedies.txt")
NO_MESSAGES = ("tools/cli/commands.py", "tools/cli/example.py", "tools/demo/", "tools/planning/", "examples/")
NOT_CARRIED_OUT = "Not carried out: "
VERBS = (
    "add|adapt|attach|bring|build|call|cast|choose|compute|convert|copy|download|drop|give|group|hand|"
    "have|import|install|keep|launch|leave|let|load|log|make|merge|move|name|open|pack|pad|pass|pick|put|"
    "quantize|raise|record|remove|rename|replicate|resize|resume|return|run|save|say|see|serve|set|shard|"
    "show|split|start|take|train|try|unset|update|use|wait"
)
REMEDY = re.compile(rf"(?:^|[;:.,] |\bor |\band |\bthen )(?:{VERBS})\b", re.IGNORECASE)


def texts_of(tree: ast.Module) -> Iterator[str]:
    """Give the strings of a module that are no docstrings, with {} for what is formatted into them."""
    inner = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in ast.walk(node)}
    inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def messages() -> list[tuple[str, str]]:
    """List the module and the text of each message that names a remedy."""
    found, package = [], ROOT / "sonicmoe_hf"
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        if path.resolve().is_relative_to(package) and not module.startswith(NO_MESSAGES):
            texts = texts_of(ast.parse(path.read_text()))
            found += [(module, text) for text in texts if len(text.split()) > 2 and REMEDY.search(text)]
    return found


def register() -> list[tuple[str, str, str]]:
    """Read the heading, the module and the words of each row."""
    rows, heading = [], ""
    for line in REGISTER.read_text().splitlines():
        if line.startswith("    "):
            rows.append((heading, *line.strip().split(": ", 1)))
        elif line:
            heading = line
    return rows


def test_each_message_that_names_a_remedy_is_below_a_test_that_carries_it_out():
    rows, there = register(), messages()
    new = [m for m in there if not any(words in m[1] for _, _, words in rows)]
    assert not new, f"carry the remedy out in a test, and put the message below its name in {REGISTER}"
    gone = [row for row in rows if not any(row[2] in m[1] for m in there)]
    assert not gone, "no message has these words any longer"


def test_the_tests_of_the_register_are_there():
    for heading in {heading for heading, *_ in register() if not heading.startswith(NOT_CARRIED_OUT)}:
        path, name = heading.split("::")
        assert f"def {name}(" in (ROOT / path).read_text(), heading
