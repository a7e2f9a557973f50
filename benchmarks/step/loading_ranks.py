"""Host memory of ranks that share a model's packed experts, while each reads its part of a checkpoint.

    python -m benchmarks.step.loading_ranks [--folder /tmp/loading_ranks] [--layers 3] [--stored fp8 bf16]

Makes a checkpoint of DeepSeek-V3's architecture with random values, in FP8 (2 GB by default) or bf16 (4 GB). Loads it on
one and on two gloo ranks of this machine (expert parallelism, everything else sharded by FSDP2), FP8 experts as they are
and bf16 ones packed as NF4, and writes benchmarks/results/loading_ranks.csv. A rank's peak is of its own pages, beyond
those it had with all modules imported. Pages of mapped files, which the kernel takes back at will, are told apart.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common.command import Command
from benchmarks.common.table import Rows
from benchmarks.step.checkpoints import PeakMemory, forget

NUM_EXPERTS, BLOCK = 128, 128
CONFIG = {
    "vocab_size": 16384, "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 768,
    "n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 512, "kv_lora_rank": 256,
}  # fmt: skip
DECLARED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
HELD_AS = {"fp8": "fp8", "bf16": "nf4"}  # how a checkpoint stores experts: how ranks hold them


def config(layers: int):
    """Of the checkpoint's model."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**CONFIG, num_hidden_layers=layers)


def tensors_of(name: str, shape: torch.Size, stored: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight [N, K] with random values, as a checkpoint stores it."""
    if stored == "fp8" and len(shape) == 2 and "_proj" in name:
        codes = torch.randint(0, 120, shape, dtype=torch.uint8)  # no NaN, which is 127
        yield name, codes.view(torch.float8_e4m3fn)
        yield f"{name}_scale_inv", torch.full([-(-size // BLOCK) for size in shape], 1e-4)
    else:
        yield name, torch.randn(shape, dtype=torch.bfloat16) * 0.02


def names_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Size]]:
    """The names and shapes by which the hub stores a model, each expert's projections apart."""
    for name, weight in model.state_dict().items():
        layer, _, kind = name.rpartition(".experts.")
        if not layer:
            yield name, weight.shape
            continue
        projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        rows = weight.shape[1] // len(projections)
        for expert in range(len(weight)):
            for projection in projections:
                yield f"{layer}.experts.{expert}.{projection}.weight", torch.Size((rows, weight.shape[2]))


def make(folder: Path, layers: int, stored: str, file_bytes: float = 5e8) -> tuple[float, float]:
    """A checkpoint in files of about `file_bytes`; (its GB, the GB of its largest file)."""
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(layers))
    model.config.architectures = [type(model).__name__]
    declared = {"quantization_config": DECLARED} if stored == "fp8" else {}
    text = json.dumps({**model.config.to_dict(), "dtype": "bfloat16", **declared})
    (folder / "config.json").write_text(text, encoding="utf-8")
    files: list[dict[str, torch.Tensor]] = [{}]
    places, sizes = {}, []

    def write() -> None:
        path = folder / f"model-{len(files):05}.safetensors"
        save_file(files[-1], path, {"format": "pt"})
        places.update(dict.fromkeys(files[-1], path.name))
        sizes.append(path.stat().st_size / 1e9)
        files[-1].clear()

    for name, shape in names_of(model):
        files[-1].update(tensors_of(name, shape, stored))
        if sum(tensor.nbytes for tensor in files[-1].values()) >= file_bytes:
            write()
            files.append({})
    write()
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return sum(sizes), max(sizes)


def load(rank: int, ranks: int, folder: Path, held_as: str, pipe: Any) -> None:
    """One rank: seconds, GB held, and the peaks of loading."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import sonicmoe_hf

    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    store = folder / f"store-{ranks}"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config(1))  # imports
    sharing = {"fsdp_size": ranks, "ep_size": ranks, "ep_implementation": "sonicmoe_hf"}
    options = {} if ranks == 1 else {"distributed_config": DistributedConfig(**sharing)}
    torch.distributed.barrier()
    with PeakMemory() as watched:
        start = time.perf_counter()
        model = sonicmoe_hf.from_pretrained(folder, dtype="bfloat16", experts_quantization=held_as, **options)
        seconds = time.perf_counter() - start
    held = sum(getattr(weight, "to_local", lambda w=weight: w)().nbytes for weight in model.parameters())
    pipe.send(
        {
            "seconds": seconds,
            "held_gb": held / 1e9,
            "peak_own_gb": watched.peak["RssAnon"],
            "peak_mapped_gb": watched.peak["RssFile"],
        }
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def on_ranks(ranks: int, folder: Path, held_as: str) -> list[dict[str, float]]:
    """What `load` says on each rank."""
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=load, args=(rank, ranks, folder, held_as, pipe[1])) for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()  # a rank that fails ends our reading
    found = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join()
    return found


def main() -> None:
    """Make, load, write the rows."""
    parser = Command(__doc__, "loading_ranks.csv", needs_gpu=False)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/loading_ranks"))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--stored", nargs="+", choices=tuple(HELD_AS), default=["fp8"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    machine, table = f"{platform.machine()}, {os.cpu_count()} cores", Rows(arguments.csv)
    for stored in arguments.stored:
        held_as = HELD_AS[stored]
        shutil.rmtree(arguments.folder, ignore_errors=True)
        size, largest = make(arguments.folder, arguments.layers, stored)
        for ranks in arguments.ranks:
            forget(arguments.folder)
            for rank, found in enumerate(on_ranks(ranks, arguments.folder, held_as)):
                names = {"stored": stored, "held_as": held_as, "ranks": ranks, "rank": rank}
                figures = {"checkpoint_gb": size, "file_gb": largest, **found}
                table.add(**names, **{name: f"{value:.3f}" for name, value in figures.items()}, machine=machine)
    table.write()
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
