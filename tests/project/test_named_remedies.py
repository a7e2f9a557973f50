"""The register of remedies, remedies.txt: each message that names one is there, below the test that does what it says.

A row begins with + where the test gets the message first, and with = where another test of its file does.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.pinned
ROOT = Path(__file__).parents[2]
REGISTER = Path(__file__).with_name("remedies.txt")
NO_MESSAGES = ("tools/cli/commands.py", "tools/cli/example.py", "tools/demo/", "tools/planning/", "examples/")
OVERLAP = 16  # characters
NOT_CARRIED_OUT = "Not carried out: "
ROW = re.compile(r"    (?:(?P<mark>[+=]) )?(?P<module>[\w/]+\.py): (?P<words>.+)")
VERBS = (
    "activate|add|adapt|attach|bring|build|call|cast|check|checkpoint|choose|compute|convert|copy|download|drop|"
    "give|group|hand|have|import|install|keep|launch|leave|let|load|log|look|make|merge|move|name|open|pack|pad|"
    "pass|pick|put|quantize|raise|record|remove|rename|replay|replicate|resize|resume|return|round|run|save|say|"
    "see|serve|set|shard|show|split|start|switch|take|train|try|undo|unset|unshard|update|use|wait"
)
REMEDY = re.compile(rf"(?:^|[;:.,] |\bor |\band |\bthen )(?:{VERBS})\b", re.IGNORECASE)
WORD = re.compile(r"\b[a-z]{2,}\b")
FEW = 4  # words: a message with fewer of its own says what is formatted into it


def strings_of(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """List the strings of a module that are no docstrings, with {} for what is formatted into them."""
    inner = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in ast.walk(node)}
    inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node, "".join(str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node, node.value


def constants_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """List the names and the texts of a module's own strings."""
    strings = {id(node): text for node, text in strings_of(tree)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and id(node.value) in strings:
            yield node.targets[0].id, strings[id(node.value)]


def formats_a_remedy(node: ast.expr, remedies: set[str]) -> bool:
    """Tell whether a remedy is formatted into a string: one of these constants, a value with "remedy" in its name, or one
    that is written there."""
    values = [value.value for value in getattr(node, "values", []) if isinstance(value, ast.FormattedValue)]
    for value in values:
        named = {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}
        written = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
        if named & remedies or "remedy" in ast.unparse(value).lower() or any(map(names_a_remedy, written)):
            return True
    return False


def names_a_remedy(text: object) -> bool:
    """Tell whether a text is a sentence with the verb of a remedy."""
    return isinstance(text, str) and len(text.split()) > 2 and bool(REMEDY.search(text))


def remedies_by_module(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Map each module to the names that it has of constants with a remedy: its own, and those that it imports."""
    names = {
        module: {name for name, text in constants_of(tree) if names_a_remedy(text)} for module, tree in trees.items()
    }
    imports = [(module, node) for module, tree in trees.items() for node in ast.walk(tree) if is_relative(node)]
    for _ in range(2):  # a constant may be imported from a module that imports it
        for module, node in imports:
            folder = module.split("/")[: -node.level]
            path = "/".join([*folder, *(node.module.split(".") if node.module else ())])
            source = names.get(f"{path}.py", set()) | names.get(f"{path}/__init__.py", set())
            names[module] |= {alias.asname or alias.name for alias in node.names if alias.name in source}
    return names


def is_relative(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.level > 0


@functools.cache
def messages() -> list[tuple[str, str]]:
    """List the module and the text of each message that names a remedy."""
    trees, package = {}, ROOT / "sonicmoe_hf"
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        if path.resolve().is_relative_to(package) and not module.startswith(NO_MESSAGES):
            trees[module] = ast.parse(path.read_text())
    remedies = remedies_by_module(trees)
    return [
        (module, text)
        for module, tree in trees.items()
        for node, text in strings_of(tree)
        if names_a_remedy(text) or (len(WORD.findall(text)) >= FEW and formats_a_remedy(node, remedies[module]))
    ]


class Row(NamedTuple):
    heading: str  # a test, or why there is none
    module: str
    words: str  # of the message


def register() -> list[Row]:
    """Read the rows of the register."""
    rows, heading = [], ""
    for line in REGISTER.read_text().splitlines():
        if line.startswith("    "):
            row = ROW.fullmatch(line)
            assert row and bool(row["mark"]) != heading.startswith(NOT_CARRIED_OUT), line
            rows.append(Row(heading, row["module"], row["words"]))
        elif line and not line.startswith("#"):
            heading = line
    return rows


def asked_for(test: ast.Module) -> Iterator[str]:
    """List the pieces of a test module's strings, of which some are patterns."""
    for _, text in strings_of(test):
        yield from (re.sub(r"\\(.)", r"\1", piece) for piece in re.split(r"\.\*|\\S\+|\{\}|\|", text))


def overlap(asked: str, message: str) -> bool:
    """Tell whether a test asks for a part of a message: what is formatted into it may stand before or after."""
    starts = range(len(asked) - OVERLAP + 1)
    shorter = asked in message or message in asked
    return len(asked) > 10 and " " in asked and (shorter or any(asked[i : i + OVERLAP] in message for i in starts))


def test_each_message_that_names_a_remedy_is_below_a_test_that_carries_it_out():
    rows, there = register(), messages()
    new = [m for m in there if not any(row.module == m[0] and row.words in m[1] for row in rows)]
    assert not new, f"carry the remedy out in a test, and put the message below its name in {REGISTER}"
    gone = [row for row in rows if not any(row.module == module and row.words in text for module, text in there)]
    assert not gone, "no message of the module has these words any longer"


def test_the_tests_of_the_register_are_there_and_ask_for_the_messages_that_they_get():
    modules: dict[str, ast.Module] = {}
    pieces: dict[str, set[str]] = {}
    there = messages()
    for row in register():
        if row.heading.startswith(NOT_CARRIED_OUT):
            continue
        path, name = row.heading.split("::")
        if path not in modules:
            modules[path] = ast.parse((ROOT / path).read_text())
            pieces[path] = {piece.strip() for piece in asked_for(modules[path])}
        assert name in {node.name for node in modules[path].body if isinstance(node, ast.FunctionDef)}, row.heading
        texts = [text for module, text in there if module == row.module and row.words in text]
        asks = any(overlap(piece, text) for piece in pieces[path] for text in texts)
        assert asks, f"{path} does not ask for: {row.words}"


def test_a_constant_counts_where_it_is_imported_and_not_where_another_module_has_one_of_its_name():
    sources = {
        "a/one.py": 'TEXT = "load the model again"',
        "a/two.py": "from .one import TEXT as AGAIN",
        "b/three.py": "from ..a.two import AGAIN",
        "b/four.py": 'TEXT = "nothing helps"',
    }
    names = remedies_by_module({module: ast.parse(source) for module, source in sources.items()})
    assert names == {"a/one.py": {"TEXT"}, "a/two.py": {"AGAIN"}, "b/three.py": {"AGAIN"}, "b/four.py": set()}
