"""Triton kernels run interpreted where there is no GPU; ../conftest.py imports them so."""

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()


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
