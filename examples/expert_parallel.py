"""A plain training loop under expert parallelism: each process holds a part of every layer's experts.

    torchrun --nproc-per-node 2 examples/expert_parallel.py                      # a small model, offline, on any machine
    torchrun --nproc-per-node 8 examples/expert_parallel.py --model Qwen/Qwen3-30B-A3B --batch-size 4 --output outputs/ep
    torchrun --nproc-per-node 2 examples/expert_parallel.py --model Qwen/Qwen3-30B-A3B --random --layers 8 --batch-size 4

Needs Transformers 5.23. FSDP2 shards everything else. Each process trains on batches of its own, and tokens travel to the
experts that they are routed to; token rounding is on.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: its threads wait without spinning

import argparse
import collections
import shutil
import tempfile

import torch
import torch.distributed as dist
from shared import (
    PER_LAYER_LOSS,
    VOCAB_SIZE,
    Throughput,
    add_model_options,
    add_training_options,
    blocks,
    forever,
    parsed,
    random_model,
    small_config,
    standard_library,
    train_tokenizer,
)
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.distributed import DistributedConfig

import sonicmoe_hf


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    add_training_options(parser, steps=50, batch_size=16, sequence_length=128, seed=0)
    parser.add_argument("--tile", type=int, help="rows; default: 64 for the small model, else the policy's own")
    parser.add_argument("--learning-rate", type=float, help="default: 3e-3 for the small model, else 1e-5")
    parser.add_argument("--output", help="where to save the model")
    return parsed(parser, arguments)


def save_random_model(tokenizer, arguments: argparse.Namespace) -> str:
    """Save a model with random weights, of which every process then reads its own part; returns the folder."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0:
        if arguments.random:
            model = random_model(arguments.model, arguments.layers, dtype=torch.bfloat16)
        else:
            model = AutoModelForCausalLM.from_config(small_config(tokenizer))
        model.save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    return folder[0]


def optimizer_of(model, learning_rate: float) -> torch.optim.Optimizer:
    """Make an optimizer with a group for each mesh: experts and the rest are on different ones, and torch updates
    lists of tensors of one mesh."""
    by_mesh = collections.defaultdict(list)
    for parameter in model.parameters():
        by_mesh[parameter.device_mesh].append(parameter)
    return torch.optim.AdamW([{"params": group} for group in by_mesh.values()], lr=learning_rate)


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the losses, each the mean over processes."""
    arguments = parse_arguments(argv)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    set_seed(arguments.seed)
    texts, _ = standard_library()
    is_small = arguments.model is None
    is_random = is_small or arguments.random
    tokenizer = train_tokenizer(texts, VOCAB_SIZE) if is_random else AutoTokenizer.from_pretrained(arguments.model)
    source = save_random_model(tokenizer, arguments) if is_random else arguments.model

    model = sonicmoe_hf.from_pretrained(
        source,
        dtype=torch.float32 if is_small else torch.bfloat16,
        routing=sonicmoe_hf.TokenRounding(tile=arguments.tile or (64 if is_small else None)),
        distributed_config=DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="sonicmoe_hf"),
    ).train()
    dist.barrier()
    if is_random and rank == 0:
        shutil.rmtree(source)
    balancing = sonicmoe_hf.LoadBalancing(per_layer_loss=PER_LAYER_LOSS)
    balancing.start(model)
    optimizer = optimizer_of(model, arguments.learning_rate or (3e-3 if is_small else 1e-5))

    own = blocks(texts, tokenizer, arguments.sequence_length)[rank::world]
    batches = DataLoader(own, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    losses: list[float] = []
    throughput = Throughput(arguments.batch_size * arguments.sequence_length)
    for step, batch in zip(range(arguments.steps), forever(batches)):
        loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
        balancing.step(model)
        optimizer.zero_grad()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / world)
        throughput.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:>4}  loss {losses[-1]:.3f}")
    if rank == 0 and throughput.timed_steps:
        print(throughput)
    if arguments.output is not None:
        model.save_pretrained(arguments.output)  # every process takes part
        tokenizer.save_pretrained(arguments.output)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
