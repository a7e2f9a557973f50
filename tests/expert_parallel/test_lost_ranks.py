"""A rank that dies or stops in the middle of a step: the other ends with an error within the process group's timeout,
and the last checkpoint resumes."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.adapters import with_lora
from helpers.models import build
from helpers.ranks import WORLD, forkserver, join
from safetensors.torch import load_file
from test_expert_parallel import APART, load
from test_expert_parallel import pytestmark as pytestmark
from test_expert_parallel_adapters import SIZES, trainer_of

from sonicmoe_hf.patching.moe_layers import find_layers

TIMEOUT = 15  # seconds, of the process group
LOST_AT = 2  # steps that are done when the last rank is lost, in the forward of the second layer's experts


def train(rank, folder, run, lost_by):
    """Train one rank's four steps, with checkpoints every two. With `lost_by`, a signal, the last rank sends it to
    itself."""
    join(rank, WORLD, f"{folder}/store-{run}-{lost_by}", timeout=timedelta(seconds=TIMEOUT))
    model = with_lora(load(f"{folder}/base", APART, experts_quantization="nf4"), target_modules=["q_proj"])
    trainer = trainer_of(model, f"{folder}/{run}", 4, 2)

    def lose(experts, args):
        if trainer.state.global_step == LOST_AT:
            (folder / f"{run}-lost").touch()
            os.kill(os.getpid(), lost_by)

    if lost_by is not None and rank == WORLD - 1:
        *_, last = find_layers(model)
        last.experts.register_forward_pre_hook(lose)
    checkpoint = folder / run / f"checkpoint-{LOST_AT}"
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint.exists() else None)
    trainer.save_model(f"{folder}/{run}/adapter")
    dist.destroy_process_group()


def start(folder, run, lost_by=None):
    """Start the ranks' processes."""
    processes = [forkserver().Process(target=train, args=(rank, folder, run, lost_by)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    return processes


def finished(processes, seconds):
    """List the exit codes, None of those that have not ended in time."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Make a folder with the base model, and the adapter of a run in which no rank is lost."""
    folder = tmp_path_factory.mktemp("whole")
    build("qwen3_moe", **SIZES).save_pretrained(folder / "base")
    assert finished(start(folder, "whole"), 300) == [0] * WORLD
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("lost_by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_other_rank_ends_with_an_error_and_the_last_checkpoint_resumes(lost_by, whole, tmp_path):
    (tmp_path / "base").symlink_to(whole / "base")
    processes = start(tmp_path, "cut", lost_by)
    try:
        end = time.monotonic() + 300
        while not (tmp_path / "cut-lost").exists() and time.monotonic() < end:
            time.sleep(0.1)
        (code,) = finished(processes[:-1], TIMEOUT + 30)  # Python's own end takes a while
        assert code == 1, "an error"
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert finished(start(tmp_path, "cut"), 300) == [0] * WORLD
    expected, resumed = (
        load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole / "whole", tmp_path / "cut")
    )
    assert all(torch.equal(resumed[name], factor) for name, factor in expected.items())
