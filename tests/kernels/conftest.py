"""Triton kernels run interpreted where there is no GPU. Triton looks at the variable when it and the kernels are imported,
so both are imported here with it set; it is not left set for other tests."""

import os

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()

if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    import sonicmoe_hf.kernels.triton  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device():
    return torch.device("cpu" if INTERPRETED else "cuda")


def pytest_collection_modifyitems(items):
    for item in items:
        if INTERPRETED and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
