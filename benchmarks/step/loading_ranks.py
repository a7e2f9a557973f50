"""Host memory of ranks that share a model's packed experts, while each reads its part of a checkpoint.

    python -m benchmarks.step.loading_ranks [--folder /tmp/loading_ranks] [--layers 3] [--stored fp8 bf16]

Makes a checkpoint of DeepSeek-V3's architecture with random values in bf16 (4 GB by default), and from it one in which
experts are in FP8 (2 GB). Loads it on one and on two gloo ranks of this machine (expert parallelism, everything else
sharded by FSDP2), FP8 experts as they are and bf16 ones packed as NF4, and writes benchmarks/results/loading_ranks.csv. A
rank's peak is of its own pages, beyond those it had with all modules imported. Pages of mapped files, which the kernel
takes back at will, are told apart.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.distributed import DistributedConfig

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Rows
from benchmarks.step.checkpoints import PeakMemory, drop_from_page_cache, gigabytes, make

SHARD_SIZE = "500MB"
CONFIG = {
    "vocab_size": 16384, "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 768,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 512, "kv_lora_rank": 256,
}  # fmt: skip
HELD_AS = {"fp8": "fp8", "bf16": "nf4"}  # how a checkpoint stores experts: how ranks hold them


def load(rank: int, ranks: int, folder: Path, held_as: str) -> dict[str, float]:
    """Load on one rank: seconds, GB held, and the peaks of loading."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    store = folder / f"store-{ranks}"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(DeepseekV3Config(**CONFIG, num_hidden_layers=1))  # imports
    sharing = {"fsdp_size": ranks, "ep_size": ranks, "ep_implementation": "sonicmoe_hf"}
    options = {} if ranks == 1 else {"distributed_config": DistributedConfig(**sharing)}
    torch.distributed.barrier()
    with PeakMemory() as watched:
        start = time.perf_counter()
        model = sonicmoe_hf.from_pretrained(folder, dtype="bfloat16", experts_quantization=held_as, **options)
        seconds = time.perf_counter() - start
    held = sum(getattr(weight, "to_local", lambda w=weight: w)().nbytes for weight in model.parameters())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return {
        "seconds": seconds,
        "held_gb": held / 1e9,
        "peak_own_gb": watched.peak["RssAnon"],
        "peak_mapped_gb": watched.peak["RssFile"],
    }


def load_on_ranks(ranks: int, folder: Path, held_as: str) -> list[dict[str, float]]:
    """Load on all ranks together: the results of `load` on each."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(partial(load, ranks=ranks, folder=folder, held_as=held_as), range(ranks)))


def main() -> None:
    """Make, load, write the rows."""
    parser = Command(__doc__, "loading_ranks.csv", needs_gpu=False)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/loading_ranks"))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--stored", nargs="+", choices=tuple(HELD_AS), default=["fp8"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    machine, table = f"{platform.machine()}, {os.cpu_count()} cores", Rows(arguments.csv)
    shutil.rmtree(arguments.folder, ignore_errors=True)
    made = arguments.folder / "bf16"
    make(DeepseekV3Config(**CONFIG, num_hidden_layers=arguments.layers), made, SHARD_SIZE)
    if "fp8" in arguments.stored:
        packed = {"quantize": "fp8", "max_shard_size": SHARD_SIZE}
        sonicmoe_hf.convert_checkpoint(made, arguments.folder / "fp8", "hub", **packed)
    for stored in arguments.stored:
        held_as, folder = HELD_AS[stored], arguments.folder / stored
        for ranks in arguments.ranks:
            drop_from_page_cache(folder)
            for rank, loading in enumerate(load_on_ranks(ranks, folder, held_as)):
                names = {"stored": stored, "held_as": held_as, "ranks": ranks, "rank": rank}
                figures = {"checkpoint_gb": sum(gigabytes(folder)), "file_gb": max(gigabytes(folder)), **loading}
                table.add(**names, **{name: f"{value:.3f}" for name, value in figures.items()}, machine=machine)
    table.write()
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
