"""Markers on some of a test's parameters."""

import itertools

import pytest

from sonicmoe_hf.formats.conversions import LOADS_MATRICES

loads_matrices = pytest.mark.skipif(
    not LOADS_MATRICES, reason="Transformers casts what FP8 checkpoints hold before 5.19"
)


def rest_slow(cases, fast=1):
    """List the parameters of a test, of which all but the first `fast` carry the marker `slow`: they
    show the same on more."""
    return _rest(cases, fast, pytest.mark.slow)


def rest_pinned(cases, everywhere=1):
    """List a test's parameters with the marker `pinned`: with other versions the first show what they all do."""
    return _rest(cases, everywhere, pytest.mark.pinned)


def crossed(*axes, everywhere=None):
    """List the combinations of values of the axes: first some in which each value comes once at least, then the others,
    which carry the marker `slow`: they show the same on more. everywhere: so many of the first lack the marker
    `pinned`."""
    axes = [list(axis) for axis in axes]
    diagonal = [tuple(axis[number % len(axis)] for axis in axes) for number in range(max(map(len, axes)))]
    others = [case for case in itertools.product(*axes) if case not in diagonal]
    return [
        *_rest(diagonal, len(diagonal) if everywhere is None else everywhere, pytest.mark.pinned),
        *rest_slow(others, 0),
    ]


def _rest(cases, first, mark):
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if index < first else mark) for index, case in enumerate(cases)]
