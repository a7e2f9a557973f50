"""What conversion costs, and what a native checkpoint saves: seconds, peak memory, load time, on random weights.

    python -m benchmarks.step.checkpoints [--folder /tmp/checkpoints] [--layers 5] [--shard-size 500MB]

Makes a Qwen3-MoE checkpoint in the hub layout (3 GB by default), converts it to the native layout and back in processes
of their own, loads both layouts, and writes benchmarks/results/checkpoints.csv. Peak memory is the process's, over what
importing the libraries takes; pages of mapped files count, they are reported on their own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.common.command import Command
from benchmarks.common.table import Rows

CONFIG = {
    "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}  # fmt: skip


def memory() -> dict[str, float]:
    """This process's resident memory in GB: in all, its own pages, and pages of mapped files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(status[key].split()[0]) * 1024 / 1e9 for key in ("VmRSS", "RssAnon", "RssFile")}


class PeakMemory:
    """The highest memory() seen while the block ran, less what there was before it."""

    def __enter__(self):
        self.start, self.peak, self.over = memory(), {}, threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()
        return self

    def _watch(self):
        while not self.over.wait(0.005):
            for key, value in memory().items():
                self.peak[key] = max(self.peak.get(key, 0.0), value - self.start[key])

    def __exit__(self, *exception):
        self.over.set()
        self.watcher.join()


def make(folder: Path, layers: int, shard_size: str) -> None:
    """A random checkpoint in the hub layout, through Transformers' own save_pretrained."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(num_hidden_layers=layers, **CONFIG), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard_size)


def convert(src: str, dst: str, layout: str, shard_size: str) -> dict:
    """One conversion: seconds and peak memory in GB."""
    import sonicmoe_hf

    with PeakMemory() as watched:
        start = time.perf_counter()
        done = sonicmoe_hf.convert_checkpoint(src, dst, layout, max_shard_size=shard_size)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "gigabytes": done.nbytes / 1e9, **watched.peak}


def load(folder: str) -> dict:
    """from_pretrained on the CPU: seconds and peak memory in GB."""
    from transformers import AutoModelForCausalLM

    import sonicmoe_hf  # noqa: F401 - registers the native classes

    with PeakMemory() as watched:
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        total = sum(float(parameter.detach().view(-1)[::2048].float().sum()) for parameter in model.parameters())
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "checksum": total, **watched.peak}


def forget(folder: Path) -> None:
    """Drop the folder's files from the page cache, so that the next reader goes to the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_process(step: str, *arguments: str) -> dict:
    """Run a step of this script in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--step", step, *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    """Make, convert both ways, load; write the rows."""
    parser = Command(__doc__, "checkpoints.csv", needs_gpu=False)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/checkpoints"))
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--shard-size", default="500MB")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if arguments.step:
        step, *values = [*arguments.step, *rest]
        print(json.dumps({"convert": convert, "load": load}[step](*values)))
        return
    shutil.rmtree(arguments.folder, ignore_errors=True)
    hub, native, back = (arguments.folder / name for name in ("hub", "native", "back"))
    make(hub, arguments.layers, arguments.shard_size)
    size = sum(path.stat().st_size for path in hub.glob("*.safetensors")) / 1e9
    common = {"checkpoint_gb": f"{size:.2f}", "shard_size": arguments.shard_size}
    table = Rows(arguments.csv, gpu=False)

    def add(what: str, figures: dict) -> None:
        columns = {"seconds": "seconds", "peak_gb": "VmRSS", "peak_own_gb": "RssAnon", "peak_mapped_gb": "RssFile"}
        values = {column: f"{figures[key]:.2f}" for column, key in columns.items()}
        table.add(**common, what=what, **values, machine=f"{platform.machine()}, {os.cpu_count()} cores")

    for layout, src, dst, kind in (("hub -> native", hub, native, "native"), ("native -> hub", native, back, "hub")):
        forget(src)
        add(f"convert {layout}", in_process("convert", str(src), str(dst), kind, arguments.shard_size))
    for layout, folder in (("hub", hub), ("native", native)):
        for cache in ("cold", "warm", "warm"):
            if cache == "cold":
                forget(folder)
            add(f"load {layout}, {cache} page cache", in_process("load", str(folder)))
    table.write()
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
