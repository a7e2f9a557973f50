"""The parts that the examples share: the small model and the text that they train without arguments, models with random
weights of any sizes (--random), and tokens per second with the peak memory."""

from __future__ import annotations

import argparse
import time

import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import sonicmoe_hf
from sonicmoe_hf.tools.demo.corpus import blocks, standard_library, train_tokenizer
from sonicmoe_hf.tools.demo.model import PER_LAYER_LOSS, VOCAB_SIZE, small_config
from sonicmoe_hf.tools.random_models import config_of, pack_linear_layers, random_model, random_packed_model

__all__ = [
    "PER_LAYER_LOSS",
    "READERS",
    "VOCAB_SIZE",
    "Throughput",
    "ThroughputCallback",
    "add_activation_offloading",
    "add_data_options",
    "add_model_options",
    "add_training_options",
    "blocks",
    "checkpointing",
    "compiles_by_default",
    "config_of",
    "forever",
    "keep_gradients_once",
    "liger_kernels",
    "load",
    "pack_linear_layers",
    "parsed",
    "random_model",
    "random_packed_model",
    "small_config",
    "standard_library",
    "train_tokenizer",
]

READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text", ".parquet": "parquet"}
WARM_UP_STEPS = 2
TRAINING = {  # options of training that examples share
    "steps": "optimiser steps",
    "batch_size": "sequences of a batch on each device",
    "gradient_accumulation_steps": "batches of a step",
    "sequence_length": "tokens of a sequence",
    "rank": "of the adapters",
    "learning_rate": "at its highest",
    "logging_steps": "steps between two lines of the log",
    "output": "folder to write",
    "seed": "of random weights and of the order of texts",
}


def add_model_options(parser) -> None:
    """Add the options that choose the model."""
    parser.add_argument("--model", help="hub id or local folder; default: a small model with random weights")
    parser.add_argument("--random", action="store_true", help="random weights at the sizes of --model")
    parser.add_argument("--layers", type=int, help="with --random: in place of the config's own number")


def add_data_options(parser) -> None:
    """Add the options that choose the texts, as `finetune.load_texts` reads them."""
    parser.add_argument("--dataset", help=f"hub name, or a file ({', '.join(READERS)}); default: the standard library")
    parser.add_argument("--dataset-config", help="the hub dataset's configuration")
    parser.add_argument("--split", default="train", help="of the hub's dataset (default %(default)s)")
    parser.add_argument("--text-column", default="text", help="(default %(default)s)")


def add_training_options(parser, **defaults) -> None:
    """Add options of TRAINING, with these defaults."""
    for name, default in defaults.items():
        text = f"{TRAINING[name]} (default %(default)s)"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=text)


def add_activation_offloading(parser) -> None:
    """Add the option of `checkpointing`."""
    text = "gradient checkpointing whose hidden states between layers wait in pinned host memory: for long sequences"
    parser.add_argument("--activation-offloading", action="store_true", help=text)


def checkpointing(offloads: bool) -> dict:
    """Make the Trainer's arguments for gradient checkpointing; on a CPU there is nothing to offload."""
    offload = {"offload": True} if offloads and torch.accelerator.is_available() else {}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False, **offload}}


def keep_gradients_once(trainer) -> None:
    """Have the buckets in which DDP sends gradients be these gradients, which are there twice otherwise."""
    if trainer.accelerator.ddp_handler is not None:
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True


def parsed(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line of a parser with `add_model_options`."""
    options = parser.parse_args(arguments)
    if options.random and options.model is None:
        parser.error("--random takes the sizes of --model")
    return options


def liger_kernels() -> dict:
    """Make the Trainer's arguments for Liger's kernels, which a CPU has none of. The experts are ours."""
    if not torch.accelerator.is_available():
        print("--liger is left out: Liger's kernels need a GPU", flush=True)
        return {}
    return {"use_liger_kernel": True, "liger_kernel_config": {"swiglu": False}}


def compiles_by_default(arguments: argparse.Namespace) -> bool:
    """Tell whether layers with adapters and gradient checkpointing are compiled where --compile does not say: on a GPU,
    except the small model's, which would compile for longer than it trains, and where offloading would undo it."""
    return torch.cuda.is_available() and arguments.model is not None and not arguments.activation_offloading


def load(arguments: argparse.Namespace, texts: list[str], device_map: str | None = None, **options):
    """Load (the model of `add_model_options`, its tokenizer, which is made of the texts where the weights are random).

    device_map: where a checkpoint is loaded. options: of Transformers, such as dtype."""
    if arguments.model is not None and not arguments.random:
        model = sonicmoe_hf.from_pretrained(arguments.model, device_map=device_map, **options)
        return model, AutoTokenizer.from_pretrained(arguments.model)
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    if arguments.random:
        return random_model(arguments.model, arguments.layers, **options), tokenizer
    config = small_config(tokenizer)
    config.max_position_embeddings = max(config.max_position_embeddings, arguments.sequence_length)
    return AutoModelForCausalLM.from_config(config, **options), tokenizer


def forever(batches):
    """Yield the batches, epoch after epoch."""
    while True:
        yield from batches


class Throughput:
    """The time and memory that a training run takes. Make it before the first step, and call `step` after each.

    Args:
        tokens: of a step, on this device. Padding would count, too.
    """

    def __init__(self, tokens: int):
        self.tokens, self.steps = tokens, 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.began = _seconds()

    def step(self) -> None:
        """Count a step that has ended."""
        self.steps += 1
        if self.steps == 1:
            self.until_first_step = _seconds() - self.began
        if self.steps == WARM_UP_STEPS:
            self.warm = _seconds()

    @property
    def timed_steps(self) -> int:
        """The steps after the warm-up, which compiles kernels and allocates the optimiser's state."""
        return max(0, self.steps - WARM_UP_STEPS)

    def tokens_per_second(self) -> float:
        """Compute the tokens per second of the timed steps until now; there must be one."""
        return self.timed_steps * self.tokens / (_seconds() - self.warm)

    def __str__(self) -> str:
        line = f"{self.tokens_per_second():,.0f} tokens/s a device over {self.timed_steps} steps"
        line += f" of {self.tokens:,} tokens; first step after {self.until_first_step:.1f} s"
        if torch.cuda.is_available():
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            line += f"; peak {allocated / 2**30:.1f} GiB allocated, {reserved / 2**30:.1f} reserved"
        return line


class ThroughputCallback(TrainerCallback):
    """Prints a Trainer's `throughput` at the end of training, on the first rank.

    Args:
        sequence_length: tokens of each sequence of a batch.
    """

    def __init__(self, sequence_length: int):
        self.sequence_length = sequence_length

    def on_train_begin(self, args, state, control, **kwargs):
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
        parallelism = AcceleratorState().parallelism_config
        parts = 1 if parallelism is None else parallelism.cp_size * parallelism.sp_size  # of a sequence
        self.throughput = Throughput(sequences * self.sequence_length // parts)

    def on_step_end(self, args, state, control, **kwargs):
        self.throughput.step()

    def on_train_end(self, args, state, control, **kwargs):
        if self.throughput.timed_steps and state.is_world_process_zero:
            print(self.throughput, flush=True)


def _seconds() -> float:
    """Read the clock, once the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
