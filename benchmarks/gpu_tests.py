"""The log of the GPU tests, results/gpu_tests.txt, and the commits that no GPU has tested.

    python benchmarks/gpu_tests.py             # compares it with git's history; exits with 1 where it is out of date
    python benchmarks/gpu_tests.py --write     # brings it up to date

The log begins with the commit that was tested. Below stand the subjects of later commits that change kernels/. They are
told by their subjects, which a rebase keeps. A new log needs no such lines. Without git's history nothing is compared.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = "kernels/ has changed since, in commits that no GPU has tested:"
LISTED = re.compile(rf"{HEAD}\n(?:- .*\n)+\n")


def later_commits(root: Path, commit: str) -> list[str] | None:
    """List the subjects of the commits after `commit` that change kernels/, the oldest first; None where git cannot
    tell."""
    command = ["git", "log", "--no-merges", "--reverse", "--format=%s", f"{commit}..HEAD", "--", "kernels"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None


def with_commits(text: str, subjects: list[str]) -> str:
    """Put these subjects into the log in place of those that it lists, below its first paragraph."""
    head, _, rest = LISTED.sub("", text).partition("\n\n")
    if not subjects:
        return f"{head}\n\n{rest}"
    listed = "".join(f"- {subject}\n" for subject in subjects)
    return f"{head}\n\n{HEAD}\n{listed}\n{rest}"


def main(arguments: list[str] | None = None) -> None:
    """Compare, or write.

    Raises:
        SystemExit: the log is out of date, or does not begin with a commit.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="bring the log up to date")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository")
    options = parser.parse_args(arguments)
    path = options.root / "benchmarks" / "results" / "gpu_tests.txt"
    text = path.read_text(encoding="utf-8")
    tested = re.match(r"commit ([0-9a-f]{7,40})\b", text)
    if tested is None:
        raise SystemExit(f"{path} does not begin with the commit that was tested")
    subjects = later_commits(options.root, tested[1])
    if subjects is None:
        print(f"git does not know {tested[1]} here: nothing to compare {path.name} with", file=sys.stderr)
    elif (expected := with_commits(text, subjects)) != text:
        if not options.write:
            raise SystemExit(
                f"{path} does not list what came after {tested[1]}: python benchmarks/gpu_tests.py --write"
            )
        path.write_text(expected, encoding="utf-8")


if __name__ == "__main__":
    main()
