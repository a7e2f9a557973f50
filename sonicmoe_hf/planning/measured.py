"""Speeds that were measured, which `sonicmoe-hf plan` shows for the same sizes, tokens and way. It guesses no others."""

from __future__ import annotations

from typing import NamedTuple

from .sizes import ModelSizes
from .training import Training

OF_A_LAYER = (2048, 768, 128, 8, 151936)  # Qwen3-30B-A3B's
QWEN3_30B_A3B = (48, *OF_A_LAYER)


class Speed(NamedTuple):
    """tokens_per_second of one GPU; sizes: layers, H, I, E, K, V; csv, row: of benchmarks/results."""

    sizes: tuple[int, ...]
    training: Training
    tokens_per_second: int
    gpu: str
    csv: str
    row: str


SPEEDS = (
    Speed(
        QWEN3_30B_A3B,
        Training(method="full", tokens=16384, optimizer="adam8bit"),
        10461,
        "H200",
        "recipes.csv",
        "all weights of Qwen3-30B-A3B on one GPU",
    ),
    Speed(QWEN3_30B_A3B, Training(method="lora", tokens=16384), 14348, "H200", "recipes.csv", "LoRA"),
    Speed(
        QWEN3_30B_A3B,
        Training(method="full", tokens=16384, parallel="FSDP2", gpus=2),
        10987,
        "H200",
        "recipes.csv",
        "FSDP2",
    ),
    Speed(
        QWEN3_30B_A3B,
        Training(method="qlora", tokens=2048, sequence=2048, experts="nf4", linear="nf4", r=8, experts_r=8),
        2331,
        "H200, Triton kernels",
        "recipes.csv",
        "QLoRA within 24 GiB, 2,048 tokens a step",
    ),
    Speed(
        QWEN3_30B_A3B,
        Training(method="qlora", tokens=16384, experts="nf4", linear="nf4", r=8, experts_r=8),
        15315,
        "H200",
        "qlora_step.csv",
        "Qwen3-30B-A3B, 16384 tokens, QLoRA",
    ),
    Speed(
        (16, *OF_A_LAYER),
        Training(method="full", tokens=16384, parallel="ZeRO-3", gpus=2),
        20419,
        "H200",
        "recipes.csv",
        "ZeRO-3, 16 layers",
    ),
    Speed(
        (8, *OF_A_LAYER),
        Training(
            method="full",
            tokens=16384,
            parallel="expert parallelism",
            gpus=2,
            checkpointing=False,
            liger=False,
            extra_rows=64,
        ),
        47616,
        "H200",
        "recipes.csv",
        "expert parallelism, 8 layers",
    ),
    Speed(
        (4, *OF_A_LAYER),
        Training(method="full", tokens=16384, weights="fp32", checkpointing=False),
        64767,
        "H200",
        "recipes.csv",
        "top-k, Liger",
    ),
)


def speed_of(sizes: ModelSizes, training: Training) -> Speed | None:
    """What was measured of this model in this way, if anything."""
    own = (sizes.layers, sizes.hidden, sizes.inner, sizes.num_experts, sizes.top_k, sizes.vocabulary)
    return next((speed for speed in SPEEDS if speed.sizes == own and speed.training == training), None)
