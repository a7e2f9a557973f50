"""The facts of a release in the repository: the version of sonicmoe_hf/__init__.py and the notes of CHANGELOG.md.

python .ci/release.py version                   # prints it
python .ci/release.py check refs/tags/v0.1.0    # exits with 1 where the tag, or the CHANGELOG's entry, is another's
python .ci/release.py notes                     # prints the version's entry
python .ci/release.py nightly [YYYYMMDD]        # writes X.Y.Z.devYYYYMMDD into the checkout
"""

from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
TAG = "refs/tags/v"


def version(root: Path) -> str:
    """Read the version, which stands in sonicmoe_hf/__init__.py alone."""
    found = VERSION.search((root / "sonicmoe_hf" / "__init__.py").read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit("sonicmoe_hf/__init__.py has no __version__")
    return found[1]


def entry(root: Path) -> tuple[str, str]:
    """Read the CHANGELOG's entry of the version: what its heading says of the date, and its text."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(
        rf"^## \[{re.escape(version(root))}\] - ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise SystemExit(f"CHANGELOG.md has no entry `## [{version(root)}] - DATE`")
    return found[1], found[2].strip() + "\n"


def check(root: Path, ref: str) -> None:
    """Compare a git ref with the version and the CHANGELOG; a ref that is no tag of a version is a rehearsal.

    Raises:
        SystemExit: the tag names another version, or the version's entry has no date.
    """
    date, _ = entry(root)
    if not ref.startswith(TAG):
        return
    if ref != TAG + version(root):
        raise SystemExit(f"the tag is {ref.removeprefix(TAG)}, and sonicmoe_hf/__init__.py has {version(root)}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise SystemExit(f"CHANGELOG.md dates {version(root)} {date!r}: write YYYY-MM-DD")


def nightly(root: Path, day: str) -> None:
    """Write the version of a day's build into the checkout."""
    path = root / "sonicmoe_hf" / "__init__.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(VERSION.sub(f'__version__ = "{version(root)}.dev{day}"', text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("version", "check", "notes", "nightly"))
    parser.add_argument("value", nargs="?", help="of check: a git ref; of nightly: a day")
    options = parser.parse_args()
    if options.verb == "version":
        print(version(ROOT))
    elif options.verb == "notes":
        print(entry(ROOT)[1], end="")
    elif options.verb == "check":
        check(ROOT, options.value or "")
    else:
        nightly(ROOT, options.value or datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d"))


if __name__ == "__main__":
    main()
