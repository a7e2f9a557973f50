"""The commands of the examples that train as planned."""

from __future__ import annotations

import shlex

from .memory import GIB
from .step import Step
from .training import Training

QLORA_RANK = 8  # of LoRA in examples/qlora.py


def command_of(example: str, step: Step) -> str:
    """Write the command of an example that trains in such steps, under its launcher, with the options that it takes."""
    sizes, training = step
    model = [f"--model {shlex.quote(sizes.name)}"]
    if example == "qlora" and not sizes.is_packed:
        model.append(f"--experts-quantization {training.experts}")
    batch = f"--sequence-length {training.sequence} --batch-size {training.tokens // training.sequence}"
    options = _finetune_options(step) if example == "finetune" else _qlora_options(step) if example == "qlora" else []
    options += ["--activation-offloading"] * training.offloading
    return " ".join([_launcher(example, training), f"examples/{example}.py", *model, batch, *options])


def _launcher(example: str, training: Training) -> str:
    if example == "finetune" and training.parallel == "FSDP2":
        return f"accelerate launch --config_file examples/fsdp2.yaml --num_processes {training.gpus}"
    if training.parallel != "one GPU":
        return f"torchrun --nproc-per-node {training.gpus}"
    return "python" if training.gpus == 1 else "CUDA_VISIBLE_DEVICES=0 python"


def _qlora_options(step: Step) -> list[str]:
    """Choose the options of examples/qlora.py, which packs linear layers in NF4 unless told otherwise where it can."""
    sizes, training = step
    is_linear_nf4 = sizes.quantization is None and not training.splits_experts
    options: dict[str, bool] = {
        f"--experts-memory {(training.experts_memory or 0) // GIB}GiB": training.experts_memory is not None,
        "--replicate": training.parallel == "DDP",
        "--linear-nf4": training.linear == "nf4" and not is_linear_nf4,
        "--no-linear-nf4": training.linear == "bf16" and is_linear_nf4,
        "--optim adamw_8bit": training.optimizer == "adam8bit",
        f"--rank {training.r}": training.r != QLORA_RANK,
    }
    return [option for option, is_set in options.items() if is_set]


def _finetune_options(step: Step) -> list[str]:
    """Choose the options of examples/finetune.py. Full training checkpoints if told to, adapters' unless told not to."""
    sizes, training = step
    options: dict[str, bool] = {
        "--bf16": training.full and (training.weights == "fp32" or training.parallel == "ZeRO-3"),
        "--dtype bfloat16": training.full and training.weights == "bf16" and training.parallel != "ZeRO-3",
        "--gradient-checkpointing": training.full and training.checkpointing,
        "--lora": not training.full,
        f"--experts-quantization {training.experts}": training.method == "qlora",
        "--no-gradient-checkpointing": not training.full and not training.checkpointing,
        "--deepspeed examples/zero3.json": training.parallel == "ZeRO-3",
        "--liger": bool(training.liger),
        "--save input": training.save == "input",
        "--dequantize": sizes.can_dequantize and training.method != "qlora",
    }
    return [option for option, is_set in options.items() if is_set]
