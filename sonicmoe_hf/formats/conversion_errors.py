"""Errors of conversions, kept while a model is loaded: Transformers' own, in whose place they come, names no weight."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from ..errors import CheckpointError

_errors: ContextVar[list[Exception] | None] = ContextVar("errors of conversions while a model is loaded", default=None)


def keeping_errors(convert: Callable) -> Callable:
    """Keep the ValueErrors of a conversion: Transformers prints them in a report and raises one that names nothing."""

    @functools.wraps(convert)
    def run(*args, **kwargs):
        try:
            return convert(*args, **kwargs)
        except ValueError as error:
            errors = _errors.get()
            if errors is not None:
                errors.append(error)
            raise

    return run


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Surround the loading of a model. Raises CheckpointError in the place of Transformers' error."""
    errors: list[Exception] = []
    token = _errors.set(errors)
    try:
        yield
    except RuntimeError as error:
        if not errors:
            raise
        more = f" (and {len(errors) - 1} more weights)" if len(errors) > 1 else ""
        raise CheckpointError(f"{errors[0]}{more}") from error
    finally:
        _errors.reset(token)
