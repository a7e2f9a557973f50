"""The digest of a source changes with all that it imports from this package."""

import ast
from pathlib import Path

import pytest

from sonicmoe_hf import kernels
from sonicmoe_hf.kernels.sources import _with_imports, digest_sources

pytestmark = pytest.mark.pinned

FILES = {
    "package/kernel.py": """
from .one import x
from . import (
    two,
    three as four,
)

def f():
    from ..below import y
""",
    "package/one.py": "import ast\nfrom other import nothing\nfrom ..folder import z\n",
    "package/two.py": "",
    "package/three.py": "",
    "package/nothing.py": "",
    "below.py": "from .package.kernel import f\n",
    "folder/__init__.py": "from .inner import z\n",
    "folder/inner.py": "",
}


def test_a_digest_is_of_a_source_and_of_what_it_imports(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    source = tmp_path / "package/kernel.py"
    before = digest_sources(source)
    changing = set()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text + "# changed\n")
        if digest_sources(source) != before:
            changing.add(name)
        (tmp_path / name).write_text(text)
    assert changing == set(FILES) - {"package/nothing.py"} and digest_sources(source) == before


def parsed_imports(path):
    """Yield the modules of this package that Python's parser says a source imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = path.parents[node.level - 1] / (node.module or "").replace(".", "/")
            yield from (module.with_suffix(".py"), *(module / f"{alias.name}.py" for alias in node.names))


@pytest.mark.parametrize("source", ["hopper/compiled.py", "triton/__init__.py"])
def test_the_imports_of_kernels_are_those_that_a_parser_finds(source):
    sources = _with_imports(Path(kernels.__path__[0]) / source)
    parsed = {module for path in sources for module in parsed_imports(path) if module.is_file()}
    assert parsed < sources and len(sources) > 25
