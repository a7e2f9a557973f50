"""Lines on standard error that say why the first step takes long, from the first of a machine's ranks."""

from __future__ import annotations

import os
import sys

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


def is_first_rank() -> bool:
    """Whether this process is the first of a machine's ranks, or no rank at all."""
    return next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0") == "0"


def announce(message: str) -> None:
    """Print it, unless bars are switched off or another rank does."""
    if is_first_rank() and os.environ.get(QUIET, "").upper() not in ("1", "ON", "YES", "TRUE"):
        print(f"sonicmoe_hf: {message}", file=sys.stderr, flush=True)  # noqa: T201
