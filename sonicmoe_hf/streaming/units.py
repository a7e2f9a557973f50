"""Numbers of bytes as people write them. Imports no torch: the command line reads them too."""

from __future__ import annotations

import re

IN_1000S = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = IN_1000S | {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(memory: str | int, wanted: str) -> int:
    """Read a number of bytes: 8589934592 of "8GiB", or of "8.6 GB" counted in thousands, or the number itself.

    wanted: the error's sentence, whose {} is what was given.
    Raises:
        ValueError: it is neither, or negative.
    """
    if isinstance(memory, int) and not isinstance(memory, bool) and memory >= 0:
        return memory
    given = memory if isinstance(memory, str) else ""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", given, re.IGNORECASE)
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(wanted.format(repr(memory)))
    return int(float(match[1]) * UNITS[match[2].upper()])
