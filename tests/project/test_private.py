"""Private parts of other packages: that they are where sonicmoe_hf looks for them, and that
helpers/private_names.py names all it uses."""

import ast
import importlib
import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest
from helpers.private_names import SINCE, USED

import sonicmoe_hf

PACKAGE = Path(sonicmoe_hf.__file__).parent
PRIVATE = re.compile(r"_[a-z][a-zA-Z_]*")
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if "kernels" not in path.relative_to(PACKAGE).parts]
OTHERS = {
    *("_asdict", "_fields", "_initializing", "_make", "_replace"),  # Python's named tuples and module specs
    *(
        "_blocks",
        "_codes",
        "_scale",
        "_scale_inv",
        "_scales",
        "_values",
    ),  # ends of tensors' names in quantized checkpoints
    *("_chunked_logps", "_full_logits_logps"),  # of TRL 1.14 alone, looked up before they are used
    *("_sync_weight", "_lora_sync"),  # of TRL's AsyncGRPOTrainer, which wants more packages; tests/rl looks them up
    *("_adapter", "_bias", "_format"),  # ends of names of what belongs to a projection
}


def look_up(name):
    """Look up the object with this dotted name; a class whose name ends in () is called."""
    path, _, attribute = name.partition(": ")
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part.removesuffix("()"))
            found = found() if part.endswith("()") else found
        break
    if attribute and attribute not in inspect.getsource(found):
        raise AttributeError(f"{path} sets no {attribute}")
    return found


@pytest.mark.parametrize("name", USED)
def test_private_part_is_there(name):
    package = name.partition(".")[0]
    installed, since = importlib.metadata.version(package), SINCE.get(name, "0.0")
    if [int(n) for n in installed.split(".")[:2]] < [int(n) for n in since.split(".")]:
        pytest.skip(f"{package} {installed} is older than {since}, which brought it")
    try:
        look_up(name)
    except (AttributeError, ModuleNotFoundError) as error:
        pytest.fail(f"{package} {installed} has no {name} ({error}), which {USED[name]} rests on")


def private_names(tree):
    """List (names of attributes, imports and strings that begin with an underscore, names that the code itself
    defines)."""
    seen, own = set(), set()
    ends = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in ends:  # of a name that is put together: f"{projection}_scale"
            continue
        if isinstance(node, ast.Attribute):
            (
                own
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
                else seen
            ).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            seen.update((node.module or "").split("."), (alias.name for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            seen.add(node.value)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    return {name for name in seen if PRIVATE.fullmatch(name)}, own


@pytest.mark.pinned
def test_every_private_name_in_our_code_is_in_a_table():
    known = OTHERS | {part for name in USED for part in re.findall(r"\w+", name)}
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    own = set().union(*(private_names(tree)[1] for tree in trees.values()))
    unknown = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in trees.items()
        for name in private_names(tree)[0] - own - known
        if path.name != "attributes.py"  # the names that are ours, on objects of others
    }
    assert not unknown, "a private part of another package that helpers/private_names.py does not name"
