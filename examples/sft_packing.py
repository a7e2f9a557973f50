"""Supervised fine-tuning with TRL's SFTTrainer: LoRA on experts and attention, texts packed without padding.

    python examples/sft_packing.py                                                 # a small model, offline
    python examples/sft_packing.py --model Qwen/Qwen3-30B-A3B --dataset roneneldan/TinyStories --liger \
        --sequence-length 4096 --batch-size 4 --attn-implementation flash_attention_2

Flash attention keeps packed texts apart, and each text whole (TRL's "bfd"). Without it texts are joined into one stream
and cut at every --sequence-length tokens ("wrapped"): a token then sees the texts before its own in the row.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: its threads wait without spinning

import argparse

import torch
from datasets import Dataset, load_dataset
from shared import (
    ThroughputCallback,
    add_model_options,
    add_training_options,
    liger_kernels,
    load,
    parsed,
    standard_library,
)
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

import sonicmoe_hf


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add_model_options(parser)
    parser.add_argument("--attn-implementation", default="sdpa", help="flash_attention_2 keeps packed texts apart")
    parser.add_argument("--liger", action="store_true", help="Liger's RMSNorm, RoPE and fused linear cross entropy")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile of each layer; default: on GPUs, with sdpa",
    )
    parser.add_argument("--dataset", help="hub name, of a kind that SFTTrainer takes; default: the standard library")
    add_training_options(parser, steps=100, batch_size=4, sequence_length=512, rank=16, learning_rate=1e-4)
    add_training_options(parser, logging_steps=10, output="outputs/sft", seed=0)
    options = parsed(parser, arguments)
    if options.compile is None:
        options.compile = (
            torch.cuda.is_available() and options.model is not None and options.attn_implementation == "sdpa"
        )
    return options


def main(argv: list[str] | None = None) -> SFTTrainer:
    """Train, and save the adapter; returns the trainer."""
    arguments = parse_arguments(argv)
    set_seed(arguments.seed)
    texts, _ = standard_library()
    options = {"dtype": torch.bfloat16, "attn_implementation": arguments.attn_implementation}
    model, tokenizer = load(arguments, texts, **options)
    sonicmoe_hf.patch_model(model)
    if arguments.dataset is None:
        dataset = Dataset.from_dict({"text": texts})
    else:
        dataset = load_dataset(arguments.dataset, split="train")
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=arguments.output,
            packing=True,
            packing_strategy="bfd" if "flash" in arguments.attn_implementation else "wrapped",
            max_length=arguments.sequence_length,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.learning_rate,
            bf16=True,
            gradient_checkpointing=True,
            **(liger_kernels() if arguments.liger else {}),
            torch_compile=arguments.compile,  # after `attach` of each layer
            logging_steps=arguments.logging_steps,
            save_strategy="no",
            report_to="none",
            seed=arguments.seed,
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=sonicmoe_hf.lora_config(model, arguments.rank),
        callbacks=[ThroughputCallback(arguments.sequence_length)],
    )
    sonicmoe_hf.attach(trainer)
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
