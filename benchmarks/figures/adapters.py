"""What docs/lora.md, docs/packed-experts.md and README.md say of adapters and of packed experts."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures.documented import Cell, Sentence, Table
from benchmarks.figures.layers import ALL
from benchmarks.figures.results import Figure, Results, computed, difference, mean, ratio, span, times

DOCUMENT, PACKED = "docs/lora.md", "docs/packed-experts.md"
QWEN3 = "Qwen3-30B-A3B"
OURS, PEFT, UNSLOTH = "sonicmoe-hf", "PEFT over grouped_mm", "Unsloth"
FIXED_ORDER, ANY_ORDER = "7890a131dfe1", "d1b2c91de42f"  # runs of lora_layer.csv


def declared(results: Results) -> Iterator[Table | Sentence]:
    """All tables and sentences of this file."""
    for part in (memory, ranks, steps, layers, others, packed_steps, packed_layers, packed_quality):
        yield from part(results)


def memory(results: Results) -> Iterator[Table | Sentence]:
    """What follows from the sizes of Qwen3-30B-A3B."""
    layers, E, H, I, r = 48, 128, 2048, 768, 16
    adapters = layers * E * r * (H + 2 * I + I + H)
    yield Sentence(
        DOCUMENT, "has # million adapter parameters on its experts", [computed(adapters / 1e6, "the factors' sizes")]
    )
    yield Table(
        DOCUMENT,
        "| Qwen3-30B-A3B, r = 16 | GiB |",
        [
            ["weights in bf16", computed(2 * 30_532_122_624 / 2**30, "2 bytes a parameter")],
            ["adapters on experts: weights, gradients, Adam", computed(16 * adapters / 2**30, "16 bytes a parameter")],
        ],
    )


def ranks(results: Results) -> Iterator[Table | Sentence]:
    """The experts' own rank, on the demo's small model."""

    def loss(contender: str, step: int, **seed: int) -> Figure:
        return mean(results.all("lora_rank", "held_out_loss", contender=contender, step=step, **seed))

    def kept(**seed: int) -> Figure:
        """What r / K brings beside adapters on the attention alone, in percent of what r brings."""
        alone = loss("attention alone", 60, **seed)
        return times(100, ratio(*(difference(alone, loss(contender, 60, **seed)) for contender in ("r / K", "r"))))

    yield Table(
        DOCUMENT,
        "| r = 16, adapters on | parameters | held-out loss before | after 60 steps |",
        [
            [
                label,
                results.one("lora_rank", "adapter_parameters", contender=contender),
                loss(contender, 0),
                loss(contender, 60),
            ]
            for label, contender in (
                ("the attention alone", "attention alone"),
                ("the experts too, `experts_r` = r / K", "r / K"),
                ("the experts too, at r", "r"),
            )
        ],
    )
    yield Sentence(
        DOCUMENT,
        "r / K brings #% of what the experts' adapters bring at r (#% and #% in the two seeds)",
        [kept(), kept(seed=1), kept(seed=2)],
    )


def of_step(results: Results, shape: str, contender: str, metric: str, mode: str = "spread load") -> Figure:
    """A cell of lora_step.csv."""
    return results.one("lora_step", shape=shape, contender=contender, mode=mode, metric=metric)


def steps(results: Results) -> Iterator[Table | Sentence]:
    """Steps with LoRA."""
    frozen = "experts frozen, sonicmoe-hf"
    lora = "LoRA on experts, sonicmoe-hf"
    liger = "Liger, spread load"
    rows: list[list[Cell]] = []
    for label, shape, mode in (
        ("48, 4,096, no checkpointing", "48,4096,plain", "spread load"),
        ("48, 16,384, checkpointing", "48,16384,checkpointing", "spread load"),
        ("the same, Liger's kernels for the rest", "48,16384,checkpointing", liger),
        ("48, 4,096, no checkpointing, Liger's kernels", "48,4096,plain", liger),
        ("4, 16,384, no checkpointing", "4,16384,plain", "spread load"),
        ("4, 16,384, checkpointing", "4,16384,checkpointing", "spread load"),
    ):

        def both(contender: str, shape: str = shape, mode: str = mode) -> list[Figure]:
            return [of_step(results, shape, contender, metric, mode) for metric in ("ms", "peak_GiB")]

        out_of_memory = results.rows("lora_step", shape=shape, mode=mode, contender=PEFT, metric="out_of_memory")
        rows.append(
            [
                label,
                both(lora),
                both(frozen),
                of_step(results, shape, lora, "ratio_to_frozen", mode),
                "out of memory" if out_of_memory else both(PEFT),
            ]
        )
    yield Table(
        DOCUMENT,
        "| layers, tokens a step | LoRA on experts: ms, GiB | experts frozen: ms, GiB | ratio "
        "| PEFT over `grouped_mm`: ms, GiB |",
        rows,
    )
    full = [
        of_step(results, shape, "full, sonicmoe-hf", metric)
        for metric in ("ms", "peak_GiB")
        for shape in ("4,16384,plain", "4,16384,checkpointing")
    ]
    yield Sentence(DOCUMENT, "its gradients and Adam in bf16, takes # and # ms, # and # GiB", full)
    shape = "48,16384,checkpointing"
    peaks = [of_step(results, shape, lora, "peak_GiB", mode) for mode in (liger, "spread load")]
    yield Sentence("README.md", "it needs one GPU with # GiB, and without them # GiB", peaks)
    with_liger, without = (times(1e-3, of_step(results, shape, lora, "ms", mode)) for mode in (liger, "spread load"))
    yield Sentence("docs/recipes.md", "LoRA step of all 48 layers takes # s in place of #", (with_liger, without))


def of_layer(
    results: Results,
    config: str,
    mode: str,
    metric: str = "ms",
    contender: str = OURS,
    launch: str = "eager",
    run: str = "",
) -> Figure:
    """A cell of lora_layer.csv; of the run in any order where it has the config."""
    run = run or (FIXED_ORDER if config in ("OLMoE", "small") else ANY_ORDER)
    return results.one(
        "lora_layer", config=config, contender=contender, mode=mode, launch=launch, metric=metric, commit=run
    )


def layers(results: Results) -> Iterator[Table | Sentence]:
    """One layer with LoRA."""
    lora = "LoRA r=16"
    shapes = (
        ("24576, 1536, 256, 128, 8 (the paper's 7B)", "7B"),
        ("16384, 2048, 768, 128, 8 (Qwen3-30B-A3B)", QWEN3),
        ("16384, 2048, 1024, 64, 8 (OLMoE)", "OLMoE"),
        ("16384, 2880, 2880, 32, 4 (gpt-oss-20b)", "gpt-oss-20b"),
        ("2048, 2048, 768, 128, 8 (Qwen3, few tokens)", "small"),
    )
    yield Table(
        DOCUMENT,
        "| T, H, I, E, K | all weights | experts frozen | LoRA, r = 16 | PEFT over `grouped_mm` | LoRA / frozen, graph |",
        [
            [
                label,
                *(of_layer(results, config, mode) for mode in ("full", "frozen", lora)),
                of_layer(results, config, lora, contender=PEFT),
                of_layer(results, config, lora, "ratio_to_frozen", launch="graph"),
            ]
            for label, config in shapes
        ],
    )
    yield Table(
        DOCUMENT,
        "| | r = 8 | r = 64 |",
        [
            [
                label,
                *(
                    of_layer(results, config, f"LoRA r={rank}", "ratio_to_frozen", launch="graph", run=FIXED_ORDER)
                    for rank in (8, 64)
                ),
            ]
            for label, config in zip(("the paper's 7B", QWEN3, "OLMoE", "gpt-oss-20b", "Qwen3, few tokens"), ALL)
        ],
    )
    over_frozen = span(of_layer(results, config, lora, "ratio_to_frozen", launch="graph") for config in ALL)
    over_peft = span(
        ratio(of_layer(results, config, lora), of_layer(results, config, lora, contender=PEFT)) for config in ALL
    )
    yield Sentence(
        DOCUMENT,
        "takes # to # times the GPU time of frozen experts, and # to # times the time of PEFT over `grouped_mm`",
        (*over_frozen, *over_peft),
    )


def others(results: Results) -> Iterator[Table | Sentence]:
    """Others' LoRA on experts, at Qwen3's sizes."""
    sonic, axolotl = "PEFT over sonicmoe (Transformers)", "Axolotl ScatterMoE LoRA"
    files = {sonic: "lora_layer_sonicmoe", axolotl: "lora_layer_axolotl"}

    def of(contender: str, file: str, metric: str = "ms", **run) -> Figure:
        keys = {"config": QWEN3, "mode": "LoRA r=16", "launch": "eager", "metric": metric, **run}
        return results.one(file, contender=contender, **keys)

    unsloth_runs = [("lora_layer_sonicmoe", {}), ("lora_layer", {"commit": ANY_ORDER})]

    def csv(file: str) -> str:
        return f"[CSV](../benchmarks/results/{file}.csv)"

    yield Table(
        DOCUMENT,
        "| | theirs | error | ours | CSV |",
        [
            [
                "PEFT over `grouped_mm`",
                of(PEFT, "lora_layer", commit=ANY_ORDER),
                of(PEFT, "lora_layer", "error_out", commit=ANY_ORDER),
                of(OURS, "lora_layer", commit=ANY_ORDER),
                csv("lora_layer"),
            ],
            [
                "PEFT over Transformers' sonicmoe",
                (of(sonic, files[sonic]), of(sonic, files[sonic], "first_step_s")),
                of(sonic, files[sonic], "error_out"),
                of(OURS, files[sonic]),
                csv(files[sonic]),
            ],
            [
                "Axolotl's ScatterMoE LoRA",
                (of(axolotl, files[axolotl]), of(axolotl, files[axolotl], "first_step_s")),
                of(axolotl, files[axolotl], "error_out"),
                of(OURS, files[axolotl]),
                csv(files[axolotl]),
            ],
            [
                "Unsloth, two runs",
                [of(UNSLOTH, file, **run) for file, run in unsloth_runs],
                of(UNSLOTH, "lora_layer", "error_out", commit=ANY_ORDER),
                [of(OURS, file, **run) for file, run in unsloth_runs],
                f"{csv('lora_layer_sonicmoe')}, {csv('lora_layer')}",
            ],
        ],
    )
    yield Sentence(
        DOCUMENT,
        "The error is that of the output against fp32; ours is #",
        [of(OURS, "lora_layer", "error_out", commit=ANY_ORDER)],
    )


def packed_steps(results: Results) -> Iterator[Table | Sentence]:
    """Steps with packed experts."""

    def of(contender: str, metric: str) -> Figure:
        return results.one("qlora_step", contender=contender, metric=metric)

    rows: list[list[Cell]] = [
        [model, adapted, of(contender, "peak_GiB"), of(contender, "ms")]
        for model, adapted, contender in (
            (
                "Qwen3-30B-A3B, experts and attention in NF4",
                "experts and attention",
                "Qwen3-30B-A3B, experts and attention",
            ),
            ("Qwen3-30B-A3B, experts and attention in NF4", "attention", "Qwen3-30B-A3B, attention alone"),
            ("gpt-oss-20b, experts in MXFP4", "experts and attention", "gpt-oss-20b, experts and attention"),
        )
    ]
    yield Table(PACKED, "| model | adapters on | peak, GiB | step, ms |", rows)
    packed, plain = (f"{QWEN3}, 16384 tokens, {kind}" for kind in ("QLoRA", "bf16 LoRA"))
    yield Sentence(
        PACKED,
        "a step of 16,384 tokens takes # ms and # GiB. With experts and attention in bf16 it takes # ms and # GiB",
        (of(packed, "ms"), of(packed, "peak_GiB"), of(plain, "ms"), of(plain, "peak_GiB")),
    )


def packed_layers(results: Results) -> Iterator[Table | Sentence]:
    """A layer with packed experts, on few tokens."""

    def faster(tokens: int, kind: str) -> Figure:
        mode = f"forward, {tokens} tokens"
        return results.one("quantized_layer_fp8", contender=f"hopper {kind}", mode=mode, metric="speedup_over_bf16")

    four_bits = ("nf4", "mxfp4", "nvfp4")
    rows = [[f"{tokens}", *(faster(tokens, kind) for kind in (*four_bits, "fp8"))] for tokens in (1, 8, 64, 256)]
    yield Table(PACKED, "| tokens | NF4 | MXFP4 | NVFP4 | FP8 |", rows)
    slower = [Figure(1 / faster(512, kind).value, f"1 / {faster(512, kind).source}") for kind in four_bits]
    yield Sentence(
        PACKED,
        "With all experts at 32 rows (512 tokens) the formats of 4 bits take # to # times as long as bf16 weights",
        span(slower),
    )
    trained = [
        span(
            results.one("quantized_layer_fp8", contender=f"hopper {kind}", mode=mode, metric="ratio_to_bf16")
            for kind in (*four_bits, "fp8")
        )
        for mode in ("LoRA, 16384 tokens", "LoRA, 2048 tokens")
    ]
    yield Sentence(
        PACKED,
        "take # to # times as long as over bf16 weights at 16,384 tokens, and # to # times at 2,048",
        (*trained[0], *trained[1]),
    )
    rates = [
        times(1e-12, figure)
        for contender in ("dequantize nf4", "dequantize mxfp4")
        for figure in results.all("quantized_layer", contender=contender, metric="bytes_per_second")
    ]
    yield Sentence(PACKED, "On an H200 this runs at # to # TB/s, read and written", span(rates))


def packed_quality(results: Results) -> Iterator[Table | Sentence]:
    """Adapters beside packed experts."""
    yield Table(
        PACKED,
        "| held-out loss | bf16 experts | NF4 | MXFP4 |",
        [
            [
                label,
                *(
                    mean(results.all("qlora_curves", "held_out_loss", contender=contender, step=step))
                    for contender in ("bf16", "nf4", "mxfp4")
                ),
            ]
            for label, step in (("before", 0), ("after 192 steps", 192))
        ],
    )
