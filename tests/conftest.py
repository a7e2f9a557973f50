import gc
import logging
import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
torch.set_num_threads(1)


def pytest_collection_finish():
    """What the test modules imported stays: no later collection looks through it. The Trainer, for one, collects each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Messages(logging.Handler):
    """What sonicmoe_hf and the Trainer log."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def about(self, words):
        return [text for text in self.texts if words in text]


@pytest.fixture
def messages():
    handler = Messages()
    loggers = [logging.getLogger(name) for name in ("sonicmoe_hf", "transformers")]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)
