"""Markers on some of a test's parameters."""

import pytest


def rest_slow(cases, fast=1):
    """The parameters of a test, of which all but the first `fast` carry the marker `slow`: they show the same on more."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if index < fast else pytest.mark.slow) for index, case in enumerate(cases)]
