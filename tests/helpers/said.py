"""Messages of a call: the error that it raises, warnings, logs and what it prints, in one text."""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging

KINDS = (ValueError, TypeError, RuntimeError, OSError, ImportError, MemoryError)


class _Log(logging.Handler):
    def __init__(self, into: list[str]):
        super().__init__()
        self.into = into

    def emit(self, record):
        self.into.append(record.getMessage())


@contextlib.contextmanager
def says(*words: str) -> Iterator[list[str]]:
    """Check that what is inside says each of these words, in an error or otherwise; gives what was said.

    Args:
        words: as they are written, whatever space is between them.
    Raises:
        AssertionError: it does not, or the error that came in its place.
    """
    said: list[str] = []
    handler, printed, failed = _Log(said), io.StringIO(), None
    loggers = [logging.getLogger(name) for name in ("sonicmoe_hf", "transformers")]
    transformers_logging.warning_once.cache_clear()
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            warnings.simplefilter("always")
            try:
                yield said
            except KINDS as raised:
                failed = raised
                said.append(str(raised))
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    said += [str(warning.message) for warning in caught] + [printed.getvalue()]
    text = re.sub(r"\s+", " ", " ".join(said))
    missing = [each for each in words if each not in text]
    if missing and failed is not None:
        raise failed
    assert not missing, f"not said: {missing}, but: {text}"


@contextlib.contextmanager
def silent(words: str) -> Iterator[None]:
    """Check that what is inside raises nothing and does not say these words."""
    with says() as said:
        yield
        said.append("it ended")
    assert "it ended" in said, said
    assert words not in " ".join(said)
