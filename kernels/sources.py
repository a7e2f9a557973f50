"""Digests of sources, by which a cache on disk tells apart kernels that were compiled from different ones."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

# as text: to parse all these files takes a second. A docstring that looks like an import adds a file, which is harmless
RELATIVE_IMPORT = re.compile(r"^\s*from (\.+)([\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


def digest_sources(source: Path) -> bytes:
    """Digest a source of this package with all others that it imports, directly or not."""
    digest = hashlib.sha256()
    for path in sorted(_with_imports(source)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


def _with_imports(source: Path) -> set[Path]:
    sources: set[Path] = set()
    pending = [source]
    while pending:
        path = pending.pop()
        if path in sources or not path.is_file():
            continue
        sources.add(path)
        for dots, name, imported in RELATIVE_IMPORT.findall(path.read_text(encoding="utf-8")):
            module = path.parents[len(dots) - 1] / name.replace(".", "/")
            submodules = (module / f"{each}.py" for each in re.findall(r"\w+", imported))
            pending += [module.with_suffix(".py"), module / "__init__.py", *submodules]
    return sources
