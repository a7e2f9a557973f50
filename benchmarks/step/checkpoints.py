"""Costs of conversion and gains of a native checkpoint: seconds, peak memory, load time, on random weights.

    python -m benchmarks.step.checkpoints [--folder /tmp/checkpoints] [--layers 5] [--shard-size 500MB]

Makes a Qwen3-MoE checkpoint in the hub layout (3 GB by default), converts it to the native layout and back in processes
of their own, loads both layouts, and writes benchmarks/results/checkpoints.csv. Peak memory is the process's, over what
importing the libraries takes; pages of mapped files count, they are reported on their own.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Rows

CONFIG = {
    "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}  # fmt: skip


def memory() -> dict[str, float]:
    """Measure this process's resident memory in GB: in all, its own pages, and pages of mapped files."""
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


def make(config, folder: Path, shard_size: str) -> None:
    """Make a random checkpoint in bf16 and the hub layout, through Transformers' own save_pretrained."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard_size)


def gigabytes(folder: Path) -> list[float]:
    """List the size of each of a checkpoint's files."""
    return [path.stat().st_size / 1e9 for path in folder.glob("*.safetensors")]


def convert(src: Path, dst: Path, layout: str, shard_size: str) -> dict:
    """Convert once; return seconds and peak memory in GB."""
    with PeakMemory() as watched:
        start = time.perf_counter()
        sonicmoe_hf.convert_checkpoint(src, dst, layout, max_shard_size=shard_size)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, **watched.peak}


def load(folder: Path) -> dict:
    """Load by from_pretrained on the CPU; return seconds and peak memory in GB."""
    with PeakMemory() as watched:
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        for parameter in model.parameters():  # files are mapped: this reads every page
            parameter.detach().view(-1)[::2048].float().sum()
        seconds = time.perf_counter() - start
    return {"seconds": seconds, **watched.peak}


def drop_from_page_cache(folder: Path) -> None:
    """Drop the folder's files from the page cache, so that the next reader goes to the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_process(step, *arguments) -> dict:
    """Run a step in a process of its own; returns what it returns."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(step, *arguments).result()


def main() -> None:
    """Make, convert both ways, load; write the rows."""
    parser = Command(__doc__, "checkpoints.csv", needs_gpu=False)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/checkpoints"))
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--shard-size", default="500MB")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    hub, native, back = (arguments.folder / name for name in ("hub", "native", "back"))
    make(Qwen3MoeConfig(num_hidden_layers=arguments.layers, **CONFIG), hub, arguments.shard_size)
    common = {"checkpoint_gb": f"{sum(gigabytes(hub)):.2f}", "shard_size": arguments.shard_size}
    table = Rows(arguments.csv, gpu=False)

    def add(what: str, figures: dict) -> None:
        columns = {"seconds": "seconds", "peak_gb": "VmRSS", "peak_own_gb": "RssAnon", "peak_mapped_gb": "RssFile"}
        values = {column: f"{figures[key]:.2f}" for column, key in columns.items()}
        table.add(**common, what=what, **values, machine=f"{platform.machine()}, {os.cpu_count()} cores")

    for layout, src, dst, kind in (("hub -> native", hub, native, "native"), ("native -> hub", native, back, "hub")):
        drop_from_page_cache(src)
        add(f"convert {layout}", in_process(convert, src, dst, kind, arguments.shard_size))
    for layout, folder in (("hub", hub), ("native", native)):
        for cache in ("cold", "warm", "warm"):
            if cache == "cold":
                drop_from_page_cache(folder)
            add(f"load {layout}, {cache} page cache", in_process(load, folder))
    table.write()
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
