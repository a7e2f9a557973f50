"""`sonicmoe-hf example`: the files of examples/, which an installed package has too."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples"
SHARED = re.compile(r'^(\s*"?)from (?:finetune|shared) import .*?(\\n",)?$', re.MULTILINE)  # also in a notebook
FIND_SHARED = "import os, sys, sonicmoe_hf; sys.path.append(os.path.join(sonicmoe_hf.__path__[0], 'examples'))"
OTHERS = {
    "context_parallel.yaml": "FSDP2 with context parallelism, a config for accelerate launch.",
    "fsdp2.yaml": "FSDP2, a config for accelerate launch.",
    "quickstart.ipynb": "A notebook: patch a model, train adapters on its experts, merge, generate.",
    "zero3.json": "ZeRO-3, a config for DeepSpeed.",
}


def examples() -> dict[str, Path]:
    """Find the examples by the names that the command takes: Python files without .py."""
    files = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path.stem != "shared"}
    return files | {name: FOLDER / name for name in OTHERS}


def _summary(name: str, path: Path) -> str:
    if name in OTHERS:
        return OTHERS[name]
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _printed(path: Path) -> str:
    """Return an example's text, with a line that finds what examples share before its first import of that."""

    def with_path(match: re.Match) -> str:
        return f"{match[1]}{FIND_SHARED}{match[2] or ''}\n{match[0]}"

    return SHARED.sub(with_path, path.read_text(encoding="utf-8"), count=1)


def example(name: str | None) -> int:
    """Run `sonicmoe-hf example`."""
    files = examples()
    if name is None:
        width = max(map(len, files))
        for each, path in files.items():
            print(f"{each:{width}}  {_summary(each, path)}")
        return 0
    chosen = files.get(name.removesuffix(".py"))
    if chosen is None:
        raise ValueError(f"there is no example {name!r}; there are {', '.join(files)}")
    sys.stdout.write(_printed(chosen))
    return 0
