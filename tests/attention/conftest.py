import pytest
from helpers.flash_kernels import as_on_cuda


@pytest.fixture(params=["cpu", "cuda_path"])
def kernels(request, monkeypatch):
    """Both ways: a CPU's, and CUDA's with a stand-in for its kernels."""
    if request.param == "cpu":
        yield request.param
        return
    with as_on_cuda(monkeypatch):
        yield request.param
