import functools
import gc
import importlib.util
import logging
import os
import sys

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
HAS_WORKERS = any(word == "-n" and count != "0" for word, count in zip(sys.argv, sys.argv[1:]))

# xdist's own process runs no test, and starts its workers the sooner without what they import
if "PYTEST_XDIST_WORKER" in os.environ or not HAS_WORKERS:
    gc.disable()  # it would look through what is imported, a fifth of the time of collecting the tests
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # torch's own formats the whole stack, 1 ms, for each kind of device that may come
        torch.manual_seed = torch.default_generator.manual_seed
    # Triton decides when it and the kernels are imported whether kernels run interpreted. Whatever else imports it comes
    # later.
    if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
        os.environ["TRITON_INTERPRET"] = "1"
        import sonicmoe_hf.kernels.triton
        import sonicmoe_hf.kernels.triton.scale_rows  # noqa: F401

        del os.environ["TRITON_INTERPRET"]

    import jinja2

    # once for all model cards that PEFT writes of a template, which takes a third of saving a small adapter
    jinja2.Environment.compile = functools.lru_cache(jinja2.Environment.compile)

    from helpers import tapes


def pytest_addoption(parser):
    parser.addoption(
        "--versions", choices=["oldest", "newest"], help="run the part of the cases that helpers.stacks says"
    )


@pytest.hookimpl(trylast=True)  # of the tests that the markers leave
def pytest_collection_modifyitems(config, items):
    from helpers.stacks import runs_with

    if (versions := config.getoption("--versions")) is not None:
        kept = runs_with(versions, items)
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


def pytest_collection_finish():
    """Keep the test modules' imports out of later collections. The Trainer, for one, collects each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _earlier_modules_frozen():
    """Freeze the objects that earlier modules of tests left in caches, for collections too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _afresh():
    """Start with the same random numbers, no tape of what another test made of the kernels, and nothing of accelerate's
    in this process: after a Trainer that was interrupted, or accumulates gradients, its optimizers may skip steps."""
    torch.manual_seed(0)
    tapes.forget()
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Start two gloo ranks, whose process groups pile up while they live."""
    from helpers.ranks import Ranks

    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


class Messages(logging.Handler):
    """Messages that sonicmoe_hf and the Trainer log."""

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
