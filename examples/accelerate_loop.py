"""A plain training loop with Accelerate: no Trainer, no callbacks. Runs offline on a small model.

    python examples/accelerate_loop.py
    accelerate launch --num_processes 2 examples/accelerate_loop.py --steps 50

Token rounding acts only in training forwards: under `model.eval()` or `torch.no_grad()` the model routes by top-k.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: its threads wait without spinning

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from shared import (
    PER_LAYER_LOSS,
    VOCAB_SIZE,
    add_training_options,
    blocks,
    forever,
    small_config,
    standard_library,
    train_tokenizer,
)
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import sonicmoe_hf


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_options(parser, steps=100, batch_size=16, learning_rate=3e-3, seed=0)
    parser.add_argument("--top-k-steps", type=int, default=10, help="the last steps, with plain top-k (default 10)")
    parser.add_argument("--tile", type=int, default=64, help="of token rounding, in rows (default %(default)s)")
    return parser.parse_args(arguments)


@torch.no_grad()
def evaluate(model, batches, accelerator: Accelerator) -> float:
    """Compute the mean loss over the held-out batches, by top-k."""
    model.eval()
    losses = [accelerator.gather(model(**batch).loss.detach().reshape(1)) for batch in batches]
    model.train()
    return torch.cat(losses).mean().item()


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Train; returns the held-out loss before and after."""
    arguments = parse_arguments(argv)
    accelerator = Accelerator()
    set_seed(arguments.seed)
    train_texts, held_out_texts = standard_library()
    tokenizer = train_tokenizer(train_texts, VOCAB_SIZE)
    train_batches = DataLoader(
        blocks(train_texts, tokenizer, 128), batch_size=arguments.batch_size, shuffle=True, drop_last=True
    )
    held_out_batches = DataLoader(blocks(held_out_texts, tokenizer, 128)[:64], batch_size=arguments.batch_size)

    model = AutoModelForCausalLM.from_config(small_config(tokenizer))
    token_rounding = sonicmoe_hf.routing.TokenRounding(rounding="nearest", tile=arguments.tile)
    report = sonicmoe_hf.patch_model(model, routing=token_rounding)
    accelerator.print(f"{len(report.layers)} layers patched, training with {report.routing}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    model, optimizer, train_batches, held_out_batches = accelerator.prepare(
        model, optimizer, train_batches, held_out_batches
    )

    balancing = sonicmoe_hf.LoadBalancing(per_layer_loss=PER_LAYER_LOSS)
    balancing.start(model)
    before = evaluate(model, held_out_batches, accelerator)
    accelerator.print(f"held-out loss {before:.3f} before training")
    model.train()
    for step, batch in zip(range(arguments.steps), forever(train_batches)):
        if step == arguments.steps - arguments.top_k_steps:
            sonicmoe_hf.set_routing(model, "top_k")
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        balancing.step(model)  # updates the routers' biases, where LoadBalancing(bias_update=...) asks for it
        optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.print(f"step {step:>4}  loss {loss.item():.3f}")
    after = evaluate(model, held_out_batches, accelerator)
    accelerator.print(f"held-out loss {after:.3f} after training")
    accelerator.end_training()
    return before, after


if __name__ == "__main__":
    main()
