"""Layers of DeepSeek-V3 and its kin, experts in host memory: steps of one GPU, or of several that share one copy by DDP.

    python -m benchmarks.step.deepseek --layers 5 11 --linear nf4 --optimizer adamw_8bit
    torchrun --nproc-per-node 4 -m benchmarks.step.deepseek --layers 8 [--losses 4]
    python -m benchmarks.step.deepseek --model Kimi-K2.5 --layers 4 [--resident]    # the latter: experts on the GPU
    python -m benchmarks.step.deepseek --model DeepSeek-V4-Flash --layers 30 --sequence 16384

Full widths, experts of random bytes in NF4, Kimi's in INT4 and DeepSeek-V4's in MXFP4, LoRA with r = 8 on experts and
attention in fp32, gradient checkpointing, bf16 autocast, Liger's kernels where they are installed, rows spread over
experts as in a balanced model. Each rank has tokens of its own. Before anything is timed, a tiny model's loss and
gradients over experts in host memory must equal to the bit those over experts on the GPU. Rows: seconds to build, GiB
of the host that building took, the losses of the first batches before training, steps. --device cpu --tiny --tokens 64
checks the script.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.command import Command
from benchmarks.common.table import Table
from benchmarks.common.timing import release, synchronize, waited_times
from benchmarks.step.models import MODELS
from benchmarks.step.run import Run, build_base, join_ranks, prepare
from benchmarks.step.training import GIB, SEQUENCE, WARMUP, check_learning, one_step, optimizer_of, sequences
from sonicmoe_hf.streaming.memory import free_on_host

MODELS_HERE, RANK = ("DeepSeek-V3", "Kimi-K2.5", "DeepSeek-V4-Flash", "GLM-5"), 8


def run_of(model: str, layers: int, linear: str | None) -> Run:
    run = Run(model, layers, 0, "QLoRA", experts=MODELS[model].packed, linear=linear, checkpointing=True)
    return run._replace(rank=RANK, targets=None)


def wrap_in_ddp(model, world: int):
    """Wrap the model in DDP where there are several ranks."""
    return model if world == 1 else DistributedDataParallel(model, gradient_as_bucket_view=True)


def loss_of(model, tokens):
    with torch.autocast(tokens.device.type, torch.bfloat16):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def check(options, rank: int, world: int) -> None:
    """Raise AssertionError unless experts in host memory give the loss and gradients of experts on the GPU."""
    tiny, results = argparse.Namespace(**{**vars(options), "tiny": True, "spread_load": False}), []
    for experts_memory in (None, 0):
        run = run_of(options.model, 3, None)
        model = prepare(build_base(run, tiny, experts_memory=experts_memory), run)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # which begins as zeros
                torch.nn.init.normal_(parameter, std=0.05)
        tokens = sequences(256, 64, options.device, seed=rank)
        loss = loss_of(wrap_in_ddp(model, world), tokens)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach(), **gradients})
    resident, host = results
    assert resident.keys() == host.keys() and len(resident) > 3 * 2 * 5  # factors of the attention, in three layers
    different = [name for name in resident if not torch.equal(resident[name], host[name])]
    assert not different, f"{len(different)} of {len(resident)} differ: {different[:3]}"
    print(f"checked: the loss and {len(resident) - 1} gradients of {world} ranks are equal to the bit", flush=True)


def make_optimizer(options, model) -> torch.optim.Optimizer:
    if options.optimizer == "adamw":
        return optimizer_of(model)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)


def batch_of(model, options, seed: int) -> torch.Tensor:
    """Draw the tokens of a step."""
    return sequences(options.tokens, model.config.vocab_size, options.device, seed=seed, length=options.sequence)


def first_losses(model, options, rank: int, world: int) -> dict[str, float]:
    """Compute losses before training: of one batch a rank, or of the first `--losses` batches where there is one rank."""
    seeds = range(options.losses) if world == 1 else [rank]
    with torch.no_grad():
        own = [loss_of(model, batch_of(model, options, seed)).item() for seed in seeds]
    losses: list = [None] * world
    dist.all_gather_object(losses, own)
    return {f"loss of batch {seed}": loss for seed, loss in enumerate(itertools.chain.from_iterable(losses))}


def measure(table: Table, layers: int, options, rank: int, world: int) -> None:
    """Build the model, and add its rows."""
    release()
    free, began = free_on_host() or 0, time.perf_counter()
    dist.barrier()
    run = run_of(options.model, layers, options.linear)
    base = build_base(run, options, experts_memory=None if options.resident else 0)
    synchronize()
    dist.barrier()
    seconds, taken = time.perf_counter() - began, free - (free_on_host() or 0)
    model = prepare(base, run)
    metrics = {"built_s": seconds, "host_GiB": taken / GIB, **first_losses(model, options, rank, world)}
    shape = f"{layers} layers, {options.tokens} tokens a GPU, {world} {'GPUs' if world > 1 else 'GPU'}"
    location = "on the GPU" if options.resident else "in host memory"
    format, linear = MODELS[options.model].packed.upper(), ", NF4 linear" if options.linear else ""
    contender = f"{format} experts {location}{linear}, {options.optimizer}"
    called, optimizer = wrap_in_ddp(model, world), make_optimizer(options, model)
    tokens = batch_of(model, options, rank)
    release()
    dist.barrier()
    ms, losses = waited_times(lambda: one_step(called, optimizer, tokens), options.steps, WARMUP)
    check_learning(losses)
    metrics |= {"ms": ms, "tokens_per_s": [1e3 * tokens.numel() / each for each in ms]}
    if tokens.is_cuda:
        metrics |= {
            "between_steps_GiB": torch.cuda.memory_allocated() / GIB,
            "peak_GiB": torch.cuda.max_memory_allocated() / GIB,
            "reserved_GiB": torch.cuda.max_memory_reserved() / GIB,
        }
    launch = "Liger" if options.liger else "eager"
    if options.sequence != SEQUENCE:
        launch += f", sequences of {options.sequence}"
    table.add(options.model, shape, contender, "QLoRA", launch, metrics)


def main() -> None:
    """Check, measure, and write the rows."""
    parser = Command(__doc__, "deepseek_host_memory.csv", "--device cpu --tiny --tokens 64")
    parser.add_argument("--model", choices=MODELS_HERE, default=MODELS_HERE[0])
    parser.add_argument("--resident", action="store_true", help="all experts on the GPU, to compare with")
    parser.add_argument("--layers", type=int, nargs="+", default=[8], help="the first are dense, but DeepSeek-V4's")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step and GPU")
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="tokens of one at most")
    parser.add_argument("--linear", choices=("nf4",), help="default: bf16; nf4: by bitsandbytes")
    parser.add_argument(
        "--optimizer", choices=("adamw", "adamw_8bit"), default="adamw", help="adamw_8bit: bitsandbytes'"
    )
    parser.add_argument("--losses", type=int, default=1, help="batches whose loss one GPU alone computes")
    parser.add_argument("--steps", type=int, default=3, help="timed, after the warm-up")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    options = parser.parse_args()
    options.spread_load = True
    options.liger = options.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    rank, world = join_ranks(options.device)
    check(options, rank, world)
    table = Table(options.csv)
    for layers in options.layers:
        measure(table, layers, options, rank, world)
        if rank == 0:
            table.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
