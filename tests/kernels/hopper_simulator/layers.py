"""Layers small enough for the simulator, and the Hopper backend's own functions on it."""

from __future__ import annotations

import itertools

import torch

from sonicmoe_hf.kernels import eager, hopper
from sonicmoe_hf.kernels.hopper.config import TILE_M

from . import launches, source


def use_simulator(monkeypatch, blocks=2):
    """Let the functions of kernels/hopper/__init__.py launch the simulated kernels, on a GPU of so many SMs."""
    monkeypatch.setattr(launches, "seeds", itertools.count())  # a test's schedules do not depend on other tests
    monkeypatch.setattr(hopper, "_compiled", lambda: source.module("compiled"))
    monkeypatch.setattr(hopper, "_compile_up", lambda compile_kernel, *parameters: compile_kernel(*parameters))
    monkeypatch.setattr(hopper, "_run_on_its_device", lambda kernel, *arguments: kernel(*arguments))
    monkeypatch.setattr(hopper, "num_sms", lambda device: blocks)


def pairs_of(counts, num_tokens, spare=3):
    """Draw (experts, tokens) of pairs: so many of each expert, whose tokens are random, and so many dropped ones."""
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    expert = torch.cat((expert, torch.full((spare,), len(counts))))[torch.randperm(sum(counts) + spare)]
    return expert, torch.randint(num_tokens, expert.shape)


def rows_of(counts, num_tokens, spare=3):
    """Make the rows of `pairs_of`, with the table of row tiles."""
    expert, token = pairs_of(counts, num_tokens, spare)
    rows = eager.dispatch(expert, token, num_tokens, len(counts), True)
    tiles = []
    for e, (first, end) in enumerate(zip(rows.offsets.tolist(), rows.offsets[1:].tolist())):
        tiles += [(e, row, min(row + TILE_M, end)) for row in range(first, end, TILE_M)]
    state = [(-1, 7, 7), (0, len(tiles), 0)]
    return rows._replace(tiles=torch.tensor(tiles + state, dtype=torch.int32))
