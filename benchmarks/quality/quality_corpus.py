"""The text of token_rounding_quality.py: Python sources of installed packages that may be redistributed, as token ids.

    python -m benchmarks.quality.quality_corpus    # writes benchmarks/.corpus/packages.npz and results/quality_corpus.csv

Packages are those installed beside the running Python whose licence, by their metadata, is permissive: MIT, BSD, Apache,
ISC, PSF and the like. A file is left out where most of its longer lines were already in files kept before: packages
bundle one another, and modelling code is copied. What remains is put in the order of a hash of package and path, so that
the same versions give the same text; its digest stands in every row of the results. quality_corpus.csv names the
packages with version, licence, files and bytes.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.metadata
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from benchmarks.common.command import RESULTS, ROOT
from sonicmoe_hf.tools.demo.corpus import train_tokenizer

VOCAB_SIZE = 2048
HELD_OUT_SHARE = 1 / 32
TRAIN_TOKENS, HELD_OUT_TOKENS = 26_000_000, 1_000_000  # at most
MAX_FILE_BYTES = 400_000  # longer ones are generated tables
MIN_LINE, MAX_SEEN_SHARE = 24, 0.5  # near duplicates: lines of so many characters, share of them seen before
FILE = ROOT / "benchmarks" / ".corpus" / "packages.npz"

# every word of a stated licence must be one of these
PERMISSIVE = {
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "0BSD",
    "Apache",
    "Apache-2.0",
    "BSL-1.0",
    "ISC",
    "ISCL",
    "PSF-2.0",
    "Python",
    "CNRI-Python",
    "Zlib",
    "CC0-1.0",
    "Unlicense",
}
NEUTRAL = {"AND", "OR", "WITH", "LLVM-exception", "License", "Software", "Foundation", "The", "2.0", "3-Clause"}


class Corpus(NamedTuple):
    """Token ids of the training and of the held-out files, and how many bytes the latter's text has."""

    train: torch.Tensor
    held_out: torch.Tensor
    held_out_bytes: int
    description: str


def permissive_licence(metadata) -> str | None:
    """Read a distribution's licence, if its metadata names permissive ones and no other; else None."""
    classifiers = [
        text.split("::")[-1].strip() for text in metadata.get_all("Classifier") or [] if "License ::" in text
    ]
    stated = metadata.get("License-Expression") or "; ".join(classifiers) or (metadata.get("License") or "").strip()
    stated = stated.split("\n")[0]
    words = set(re.findall(r"[^\s();]+", stated))
    return stated if words & PERMISSIVE and words <= PERMISSIVE | NEUTRAL else None


def package_files(distributions: Iterable[importlib.metadata.Distribution]):
    """Yield (package, version, licence, [(path, text)]) of the permissively licensed ones, by name; no file twice."""
    taken = set()
    for package in sorted(distributions, key=lambda each: each.metadata["Name"].lower()):
        if package.metadata["Name"] == "sonicmoe-hf":  # changes with every commit
            continue
        licence = permissive_licence(package.metadata)
        paths = sorted(str(path) for path in package.files or [] if path.suffix == ".py" and ".." not in path.parts)
        files = []
        for path in paths if licence else []:
            located = Path(package.locate_file(path))
            if path in taken or not located.is_file() or located.stat().st_size > MAX_FILE_BYTES:
                continue
            taken.add(path)
            files.append((path, located.read_text(encoding="utf-8", errors="replace")))
        if files:
            yield package.metadata["Name"], package.version, licence, files


def drop_near_duplicates(files: list[tuple]) -> list[tuple]:
    """List the files (their text is the last entry), in order, less those whose longer lines were mostly seen before."""
    seen: set[int] = set()
    kept = []
    for file in files:
        lines = {
            int.from_bytes(hashlib.blake2b(line.strip().encode(), digest_size=8).digest(), "big")
            for line in file[-1].splitlines()
            if len(line.strip()) >= MIN_LINE
        }
        if lines and len(lines & seen) <= MAX_SEEN_SHARE * len(lines):
            kept.append(file)
            seen |= lines
    return kept


class TokenStream(NamedTuple):
    """Sources as token ids, one after the other; the number of their bytes, and a digest of these."""

    ids: list[int]
    num_bytes: int
    digest: str


def build(packages: list[tuple], file: Path, table: Path) -> None:
    """Write the token ids of `package_files` to `file`, and what they were made of to `table`.

    Raises:
        RuntimeError: too few packages with sources are installed.
    """
    files = [
        (hashlib.sha256(f"{name} {path}".encode()).digest(), name, text)
        for name, _, _, texts in packages
        for path, text in texts
    ]
    files = drop_near_duplicates(sorted(files))
    held_out, train = (
        [entry for entry in files if (entry[0][-1] < 256 * HELD_OUT_SHARE) == held] for held in (True, False)
    )
    if not held_out or not train:
        raise RuntimeError(
            f"{len(files)} Python sources of permissively licensed packages are installed, too few to train on: install "
            "packages such as transformers, sympy, pandas, networkx"
        )
    tokenizer = train_tokenizer([text for *_, text in train[::8]], VOCAB_SIZE)
    used: dict[str, list[int]] = {}  # by package: files, and their bytes
    trained = _read_tokens(tokenizer, train, TRAIN_TOKENS, used)
    evaluated = _read_tokens(tokenizer, held_out, HELD_OUT_TOKENS, used)
    description = (
        f"{len(used)} packages: {trained.num_bytes / 1e6:.1f} MB ({trained.digest}), held out "
        f"{evaluated.num_bytes / 1e6:.2f} MB ({evaluated.digest}), {VOCAB_SIZE} tokens"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez_compressed(
        file,
        train=numpy.array(trained.ids, dtype=numpy.uint16),
        held_out=numpy.array(evaluated.ids, dtype=numpy.uint16),
        held_out_bytes=evaluated.num_bytes,
        description=description,
    )
    print(f"{file}: {description}; {len(trained.ids):,} and {len(evaluated.ids):,} tokens")
    with table.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(("package", "version", "licence", "files", "bytes"))
        writer.writerows(
            (name, version, licence, *used[name]) for name, version, licence, _ in packages if name in used
        )


def _read_tokens(tokenizer, files: list[tuple], max_tokens: int, used: dict[str, list[int]]) -> TokenStream:
    """Read files until they have so many tokens, and count them in `used`."""
    ids, num_bytes, digest = list[int](), 0, hashlib.sha256()
    for _, name, text in files:
        if len(ids) >= max_tokens:
            break
        ids += [*tokenizer.backend_tokenizer.encode(text).ids, tokenizer.eos_token_id]
        data = text.encode()
        num_bytes, counts = num_bytes + len(data), used.setdefault(name, [0, 0])
        counts[0], counts[1] = counts[0] + 1, counts[1] + len(data)
        digest.update(data)
    return TokenStream(ids, num_bytes, digest.hexdigest()[:12])


def load(file: Path = FILE) -> Corpus:
    """Read the corpus that `build` wrote, or build it from the packages installed here."""
    if not file.exists():
        build(installed_files(), file, file.with_suffix(".csv"))
    with numpy.load(file) as arrays:
        train, held_out = (torch.from_numpy(arrays[name].astype(numpy.int32)) for name in ("train", "held_out"))
        return Corpus(train, held_out, int(arrays["held_out_bytes"]), str(arrays["description"]))


def installed_files() -> list[tuple]:
    """List the `package_files` of all packages that are installed beside the running Python."""
    return list(package_files(importlib.metadata.distributions()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--table", type=Path, default=RESULTS / "quality_corpus.csv")
    options = parser.parse_args()
    build(installed_files(), options.out, options.table)
