from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from helpers.flash_kernels import as_on_cuda
from helpers.sinks import needs_flash, tensors


@pytest.fixture(params=["cpu", "cuda_path"])
def kernels(request, monkeypatch):
    """Use both ways in turn: a CPU's, and CUDA's with a stand-in for its kernels."""
    with as_on_cuda(monkeypatch) if request.param == "cuda_path" else nullcontext():
        yield request.param


class Place(NamedTuple):
    """A place where attention is computed: both ways in fp64, for a few tokens; or a GPU in bf16, for several tiles of
    them."""

    kernels: str

    def either(self, few, many):
        return many if self.kernels == "cuda" else few

    @property
    def device(self):
        return self.either("cpu", "cuda")

    def tensors(self, batch, tokens):
        heads, dtype = self.either(((4, 2, 8, 8), torch.float64), ((8, 2, 64, 64), torch.bfloat16))
        return tensors(batch, tokens, tokens, *heads, dtype, self.device)


@pytest.fixture(params=["cpu", "cuda_path", pytest.param("cuda", marks=[pytest.mark.gpu, needs_flash])])
def place(request, monkeypatch):
    with as_on_cuda(monkeypatch) if request.param == "cuda_path" else nullcontext():
        yield Place(request.param)
