"""Two gloo ranks on this machine that stay up and run functions."""

import io
import os
import sys
import traceback

import torch
import torch.multiprocessing as multiprocessing

WORLD = 2
# by the process that ranks are forked from, one for all tests of a run: importing is what costs time. Nothing of ours:
# this process does not have the tests' sys.path, which ranks get.
IMPORTED_ONCE = [
    "accelerate", "peft", "torch.distributed.fsdp", "transformers.trainer",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")),
]  # fmt: skip
SECONDS = 120  # for one function; a rank that waits for a dead one would wait for ever


def _serve(rank, folder, pipe):
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD,
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}  # fmt: skip
    os.environ.update({name: str(value) for name, value in environment.items()})
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # needs no name of this host to be resolvable
    torch.set_num_threads(1)
    # a file as the meeting point: no port to be taken by somebody else meanwhile
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            torch.manual_seed(0)
            reply = (True, function(rank, *args))
        except Exception:
            reply = (False, traceback.format_exc())
        buffer = io.BytesIO()
        torch.save(reply, buffer)
        pipe.send_bytes(buffer.getvalue())
    torch.distributed.destroy_process_group()


class Ranks:
    """`run(function, *args)` calls the module-level `function(rank, *args)` on every rank: the results in their order."""

    def __init__(self, folder):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        ends = [context.Pipe() for _ in range(WORLD)]
        self.pipes = [mine for mine, _ in ends]
        self.processes = [
            context.Process(target=_serve, args=(rank, str(folder), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()

    def run(self, function, *args):
        for pipe in self.pipes:
            pipe.send((function, args))
        replies = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} did not finish {function.__name__} in {SECONDS} s")
            replies.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False))
        for rank, (succeeded, result) in enumerate(replies):
            assert succeeded, f"rank {rank}, {function.__name__}:\n{result}"
        return [result for _, result in replies]

    def close(self):
        for pipe, process in zip(self.pipes, self.processes):
            if process.is_alive():
                pipe.send(None)
            process.join(5)
            process.kill()
