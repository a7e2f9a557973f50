"""Lines on standard error that say why the first step takes long, and which rank of a job writes them."""

from __future__ import annotations

import os
import sys

import torch

QUIET = "HF_HUB_DISABLE_PROGRESS_BARS"  # which silences the hub's and Transformers' bars too
LOCAL_RANKS = (  # of torchrun and accelerate, Slurm, Open MPI, MVAPICH, Intel MPI, Hydra, PALS and Flux
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
)
RANKS = (  # of the same launchers, in all of a job's machines
    "RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
)


def _is_zero(names: tuple[str, ...]) -> bool:
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def is_first_of_machine() -> bool:
    """Tell whether this process is the first of its machine's ranks, or no rank at all."""
    return _is_zero(LOCAL_RANKS)


def is_first_rank() -> bool:
    """Tell whether this process is the first of all ranks of the job, on whichever machine, or no rank at all."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return is_first_of_machine() and _is_zero(RANKS)


def announce(message: str) -> None:
    """Print the message, unless progress bars are switched off or this is not the job's first rank."""
    if is_first_rank() and os.environ.get(QUIET, "").upper() not in ("1", "ON", "YES", "TRUE"):
        print(f"sonicmoe_hf: {message}", file=sys.stderr, flush=True)  # noqa: T201
