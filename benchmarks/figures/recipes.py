"""What README.md and docs/recipes.md say of the recipes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.figures.documented import Cell, Sentence, Table
from benchmarks.figures.results import Figure, Results, computed, difference, mean, total

DOCUMENT = "docs/recipes.md"
QWEN3_PARAMETERS = 30_532_122_624
GIB = 2.0**30
WISHES = (  # README.md's table: the wish, the command, the recipe that was measured, or what stands in its place
    ("LoRA on experts and attention", "`python examples/finetune.py --lora --liger`", "LoRA", ""),
    (
        "the same on a 24 GB card, with experts in 4 bits",
        "`python examples/qlora.py`",
        "QLoRA within 24 GiB, 2,048 tokens a step",
        "",
    ),
    (
        "all weights on one GPU",
        "`python examples/full_finetune_one_gpu.py`",
        "all weights of Qwen3-30B-A3B on one GPU",
        "",
    ),
    (
        "all weights on two GPUs",
        "`accelerate launch --config_file examples/fsdp2.yaml examples/finetune.py`",
        "FSDP2",
        "",
    ),
    (
        "reinforcement learning that replays its routing",
        "`python examples/grpo_replay.py`",
        "",
        "not measured",
    ),
    ("to know which ways of training fit your GPUs", "`sonicmoe-hf plan MODEL --gpus 8`", "", "no GPU"),
)


def declared(results: Results) -> Iterator[Table | Sentence]:
    """All tables and sentences of this file."""
    for part in (measured, one_gpu, optimizer_quality):
        yield from part(results)


def measured(results: Results) -> Iterator[Table | Sentence]:
    """What the recipes take, in docs/recipes.md and README.md."""
    qlora = {"contender": "Qwen3-30B-A3B, 16384 tokens, QLoRA"}
    of_qlora = (
        Figure(16384e3 / results.one("qlora_step", metric="ms", **qlora).value, "16384 tokens / qlora_step.csv"),
        results.one("qlora_step", metric="peak_GiB", **qlora),
    )
    rows: list[list[Cell]] = []
    for label, gpus, layers, recipe in (
        (
            "[all weights, one GPU](#all-weights-of-qwen3-30b-a3b-on-one-gpu)",
            1,
            48,
            "all weights of Qwen3-30B-A3B on one GPU",
        ),
        ("[LoRA](#lora), Liger", 1, 48, "LoRA"),
        ("[SFTTrainer with packing](#sfttrainer-with-packing), Liger", 1, 48, "SFTTrainer with packing, Liger"),
        ("[QLoRA](#qlora), Liger", 1, 48, ""),
        ("the same in 24 GiB, 2,048 tokens a step", 1, 48, "QLoRA within 24 GiB, 2,048 tokens a step"),
        ("[FSDP2](#fsdp2), Liger", 2, 48, "FSDP2"),
        ("[ZeRO-3](#zero-3), Liger", 2, 16, "ZeRO-3, 16 layers"),
        (
            "[expert parallelism](#expert-parallelism), token rounding `nearest`",
            2,
            8,
            "expert parallelism, 8 layers",
        ),
        (
            "[token rounding](#token-rounding-with-balanced-experts) `balanced`, Liger",
            1,
            4,
            "token rounding, balanced",
        ),
        ("the same with top-k", 1, 4, "top-k, Liger"),
        ("[torch.compile](#torchcompile), no Liger", 1, 4, "torch.compile"),
    ):
        figures = [
            results.one("recipes", "value", recipe=recipe, metric=metric) for metric in ("tokens_per_s", "peak_GiB")
        ]
        source = "the recipe" if recipe else "[qlora_step.py](../benchmarks/results/qlora_step.csv)"
        rows.append([label, f"{gpus} H200", f"{layers}", *(figures if recipe else of_qlora), source])
    yield Table(DOCUMENT, "| recipe | GPUs | layers | tokens/s a GPU | peak GiB a GPU | measured by |", rows)
    yield Table(
        "README.md",
        "| you want | command | GPU memory |",
        [
            [wish, command, results.one("recipes", "value", recipe=recipe, metric="peak_GiB") if recipe else memory]
            for wish, command, recipe, memory in WISHES
        ],
    )


def one_gpu(results: Results) -> Iterator[Table | Sentence]:
    """All weights of Qwen3-30B-A3B on one GPU."""
    whole = {"recipe": "all weights of Qwen3-30B-A3B on one GPU"}
    peak, first, speed = (
        results.one("recipes", "value", metric=metric, **whole)
        for metric in ("peak_GiB", "first_step_s", "tokens_per_s")
    )
    weights = computed(2 * QWEN3_PARAMETERS / GIB, "2 bytes a parameter")
    moments = computed(2 * (1 + 4 / 256) * QWEN3_PARAMETERS / GIB, "2 bytes a parameter, and 4 for 256 values of each")
    inputs = computed(48 * 16384 * 2048 * 2 / GIB, "48 layers, 16,384 tokens of 2,048 values in bf16")
    rest = difference(peak, total([weights, moments, inputs]))
    what = (
        "weights in bf16; no fp32 copy, because torchao's `AdamW8bit(bf16_stochastic_round=True)` rounds updates "
        "stochastically",
        "Adam's two moments in 8 bits, with one fp32 scale for 256 values",
        "inputs of 48 checkpointed layers, 16,384 tokens",
        "one layer's activations and gradients, and the optimiser's temporaries",
    )
    yield Table(
        DOCUMENT,
        "| what | GiB |",
        [[label, figure] for label, figure in zip(what, (weights, moments, inputs, [rest]))],
    )
    yield Sentence(
        DOCUMENT,
        "the first step took # s on the H200, and a step # s after it",
        (first, Figure(16384 / speed.value, f"16384 tokens / {speed.source}")),
    )
    adam = computed(16 * QWEN3_PARAMETERS / GIB, "16 bytes a parameter")
    yield Sentence(DOCUMENT, "takes 16 bytes a parameter, which is # GiB", [adam])


def optimizer_quality(results: Results) -> Iterator[Table | Sentence]:
    """The loss of that recipe's optimiser beside plain AdamW's."""
    losses = {
        (row["phase"], row["method"], row["seed"]): float(row["held_out_loss"])
        for row in results.rows("optimizer_quality")
    }

    def over_plain(phase: str, method: str) -> tuple[Figure, Figure]:
        own = [losses[phase, method, seed] - losses[phase, "plain", seed] for seed in "012"]
        average = mean(Figure(value, f"optimizer_quality.csv: {phase}, {method}, over plain") for value in own)
        spread = sum((value - average.value) ** 2 for value in own) / 2
        return average, Figure(math.sqrt(spread / 3), f"standard error of {average.source}")

    phases = ("from scratch", "trained further")
    yield Table(
        DOCUMENT,
        "| bf16 weights and | from scratch, learning rate 2e-3 | trained further, 1e-4 |",
        [
            [label, *(over_plain(phase, method) for phase in phases)]
            for label, method in (
                ("this example's optimiser", "one GPU"),
                ("torch's AdamW, which rounds updates to the nearest bf16", "nearest"),
            )
        ],
    )
