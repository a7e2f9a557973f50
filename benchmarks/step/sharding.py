"""A model over the ranks of torchrun."""

from __future__ import annotations

import os
import sys

import torch


def join_ranks(device: str) -> tuple[int, int]:
    """(this rank, how many there are), as torchrun says; one alone without it."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29571"}
    os.environ.update(alone | os.environ)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = torch.distributed.get_rank()
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - one rank speaks, until the end of the process
    return rank, torch.distributed.get_world_size()


def shard(model) -> None:
    """FSDP2 over all ranks, a unit a layer and one for the rest."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.base_model.layers:
        fully_shard(layer)
    fully_shard(model)
