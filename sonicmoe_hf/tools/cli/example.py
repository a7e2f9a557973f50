"""`sonicmoe-hf example`: the files of examples/, which an installed package has too."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples"
SHARED = re.compile(r"^ *from (?:finetune|shared) import ", re.MULTILINE)
FIND_SHARED = "import os, sys, sonicmoe_hf; sys.path.append(os.path.join(sonicmoe_hf.__path__[0], 'examples'))"
OTHERS = {
    "context_parallel.yaml": "FSDP2 with context parallelism, a config for accelerate launch.",
    "fsdp2.yaml": "FSDP2, a config for accelerate launch.",
    "quickstart.ipynb": "A notebook: patch a model, train adapters on its experts, merge, check, generate.",
    "qwen3_30b_24gb.ipynb": "A notebook: Qwen3-30B-A3B on 24 GB, with experts in NF4.",
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


def _example_text(path: Path) -> str:
    """Make an example's text, with a line that finds what examples share before its first import of that."""
    return SHARED.sub(lambda match: f"{FIND_SHARED}\n{match[0]}", path.read_text(encoding="utf-8"), count=1)


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
    sys.stdout.write(_example_text(chosen))
    return 0
