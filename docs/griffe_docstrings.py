"""Docstrings as the reference reads them: with a blank line before each section."""

from __future__ import annotations

import re

import griffe

SECTION = re.compile(r"(?<!\n)\n([ ]*)(Args|Returns|Raises|Yields):\n")


class Docstrings(griffe.Extension):
    """Rewrites every docstring that the reference shows."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = SECTION.sub(r"\n\n\1\2:\n", obj.docstring.value)
