"""Train all weights of a model on one GPU in 6 bytes a parameter: Qwen3-30B-A3B fits on one H200.

    python examples/full_finetune_one_gpu.py                                      # a small model, offline, on any machine
    python examples/full_finetune_one_gpu.py --model Qwen/Qwen3-30B-A3B --text my_texts/*.txt --output outputs/full
    python examples/full_finetune_one_gpu.py --model Qwen/Qwen3-30B-A3B --random --steps 7 --no-save  # speed, memory

Needs torchao; on a GPU, Liger too. What makes it fit:
- Weights are bf16 alone. torchao's AdamW rounds their updates stochastically, so that updates below bf16's resolution
  are not lost; its two moments take 8 bits each.
- The optimiser steps one weight at a time, in backward, as soon as that weight's gradient is complete, and the gradient
  is freed at once. So there is no gradient accumulation, no clipping by the norm of all gradients, and one GPU.
- Gradient checkpointing, and Liger's RMSNorm, RoPE and fused linear cross entropy.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: its threads wait without spinning

import argparse
from pathlib import Path

import torch
from shared import ThroughputCallback, add_model_options, add_training_options, blocks, load, parsed, standard_library
from torchao.optim import AdamW8bit
from transformers import Trainer, TrainingArguments, set_seed

import sonicmoe_hf


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add_model_options(parser)
    parser.add_argument("--text", type=Path, nargs="+", help="files of plain text; default: the standard library's")
    add_training_options(parser, steps=100, batch_size=4, sequence_length=512, logging_steps=1)
    add_training_options(parser, output="outputs/full", seed=0)
    parser.add_argument("--learning-rate", type=float, help="default: 3e-3 for the small model, else 1e-5")
    parser.add_argument("--no-save", dest="save", action="store_false", help="do not write the model at the end")
    return parsed(parser, arguments)


def step_in_backward(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make backward update every weight as soon as its gradient is complete, and free the gradient."""

    def step(weight):
        optimizer.step()  # updates this weight alone: no other has a gradient now
        weight.grad = None

    for weight in model.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(step)


def main(argv: list[str] | None = None) -> Trainer:
    """Train, and save the model; returns the Trainer."""
    arguments = parse_arguments(argv)
    set_seed(arguments.seed)
    on_gpu = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate or (3e-3 if arguments.model is None else 1e-5),
        lr_scheduler_type="cosine",
        warmup_steps=max(1, arguments.steps // 20),
        max_grad_norm=0.0,  # gradients are gone before there is a norm of all
        gradient_checkpointing=True,
        use_liger_kernel=on_gpu,
        liger_kernel_config={"swiglu": False},  # the experts are ours
        logging_steps=arguments.logging_steps,
        save_strategy="no",
        report_to="none",
        seed=arguments.seed,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
    )
    if (processes := args.world_size * max(1, args.n_gpu)) > 1:
        raise SystemExit(
            f"gradients of {processes} GPUs would not be averaged before the step: start one process with "
            "CUDA_VISIBLE_DEVICES=0, or see FSDP2 in docs/recipes.md"
        )
    if arguments.text:
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in arguments.text]
    else:
        texts, _ = standard_library()
    device = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    model, tokenizer = load(arguments, texts, device_map=device, dtype=torch.bfloat16)
    sonicmoe_hf.patch_model(model)
    optimizer = AdamW8bit(model.parameters(), args.learning_rate, bf16_stochastic_round=True)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=blocks(texts, tokenizer, arguments.sequence_length),
        processing_class=tokenizer,
        optimizers=(optimizer, None),
        callbacks=[ThroughputCallback(arguments.sequence_length)],
    )
    step_in_backward(model, optimizer)
    if on_gpu:
        print(
            "torchao compiles its optimiser in the first step, once for each shape of weight: usually about a minute"
        )
    # torchao compiles its step, which takes a CPU longer than it saves
    with torch.compiler.set_stance("default" if on_gpu else "force_eager"):
        trainer.train()
    if arguments.save:
        trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
