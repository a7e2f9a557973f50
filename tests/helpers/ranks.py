"""Gloo ranks on this machine that stay up and run functions: starting processes is what costs time."""

import gc
import io
import os
import sys
import time
import traceback
from multiprocessing import connection
from multiprocessing.forkserver import ensure_running
from unittest import mock

import torch
import torch.multiprocessing as multiprocessing
from accelerate.state import AcceleratorState

WORLD = 2  # unless a test asks for more
# by the process that ranks are forked from, one for all tests of a run: importing is what costs time
IMPORTED_ONCE = ["pytest", "accelerate", "peft", "torch.distributed.fsdp", "helpers.parallel", "helpers.training"]
IMPORTED_ONCE += ["helpers.adapters", "helpers.checkpoints", "sonicmoe_hf.trainer.attach"]
IMPORTED_ONCE += ["deepspeed"]  # accelerate does where it is installed
SECONDS = 120  # for one function; a rank that waits for a dead one would wait for ever
SECONDS_AFTER_FAILURE = 5


def forkserver():
    """Make the context that ranks' processes are of; the process that they are forked from finds what this one does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        ensure_running()
    return context


def join(rank, world, store, **options):
    """Make this process a rank of a gloo group that meets at a file: no port to be taken by somebody else meanwhile."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # needs no name of this host to be resolvable
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, **options)


def _serve(rank, world, folder, pipe):
    gc.freeze()  # what was imported once: the Trainer collects each time
    join(rank, world, f"{folder}/store")
    while (task := pipe.recv()) is not None:
        function, args, options = task
        try:
            torch.manual_seed(0)
            reply = (True, function(rank, *args, **options))
        except Exception:
            reply = (False, traceback.format_exc())
        AcceleratorState._reset_state(True)  # what accelerate found out once is another test's business
        buffer = io.BytesIO()
        torch.save(reply, buffer)
        pipe.send_bytes(buffer.getvalue())
    torch.distributed.destroy_process_group()


class Ranks:
    """`run(function, *args, **options)` calls the module-level `function(rank, ...)` on every rank: the results in their
    order."""

    def __init__(self, folder, world=WORLD, context=None):
        context = context or forkserver()
        ends = [context.Pipe() for _ in range(world)]
        self.pipes = [mine for mine, _ in ends]
        self.processes = [
            context.Process(target=_serve, args=(rank, world, str(folder), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()

    def run(self, function, *args, **options):
        for pipe in self.pipes:
            pipe.send((function, args, options))
        results, failure, deadline = {}, None, time.monotonic() + SECONDS
        while len(results) < len(self.pipes):
            waiting = [pipe for pipe in self.pipes if pipe not in results]
            ready = connection.wait(waiting, max(deadline - time.monotonic(), 0))
            if not ready:
                self.close()
                assert failure is None, failure
                raise TimeoutError(f"{len(waiting)} ranks did not finish {function.__name__} in {SECONDS} s")
            for pipe in ready:
                succeeded, results[pipe] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
                if not succeeded and failure is None:
                    failure = f"rank {self.pipes.index(pipe)}, {function.__name__}:\n{results[pipe]}"
                    deadline = min(deadline, time.monotonic() + SECONDS_AFTER_FAILURE)  # the others may wait for it
        assert failure is None, failure
        return [results[pipe] for pipe in self.pipes]

    def close(self):
        for pipe, process in zip(self.pipes, self.processes):
            if process.is_alive():
                pipe.send(None)
            process.join(5)
            process.kill()
