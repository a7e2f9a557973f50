"""What README.md and docs/ say of whole training steps, expert parallelism and replayed routing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from benchmarks.figures import adapters, quality, recipes
from benchmarks.figures.documented import Cell, Sentence, Table
from benchmarks.figures.results import (
    Figure,
    Results,
    computed,
    difference,
    more_than_one,
    ratio,
    span,
    times,
    total,
)

QWEN3 = "Qwen3-30B-A3B"
LIGER, FSDP2, PLAIN, COMPILED = (
    "Liger, spread load",
    "Liger, spread load, FSDP2, 2 GPUs",
    "spread load",
    "spread load, compiled layers",
)
STEPS = {  # row of the table: config, shape, launch of train_step.csv
    "the paper's 7B, all 40, 24,576, one GPU": ("7B", "40,24576", LIGER),
    "the same, FSDP2 on two GPUs": ("7B", "40,24576", FSDP2),
    "Qwen3-30B-A3B, 16 of 48, 16,384, one GPU": (QWEN3, "16,16384", LIGER),
    "OLMoE-1B-7B, all 16, 16,384, one GPU": ("OLMoE-1B-7B", "16,16384", PLAIN),
    "gpt-oss-20b, 8 of 24, 8,192, eager attention, one GPU": ("gpt-oss-20b", "8,8192", LIGER),
    "Qwen3-30B-A3B, 4, 16,384, `torch.compile` of each layer, no Liger": (QWEN3, "4,16384", COMPILED),
}
OURS, NEAREST, SCATTER, GROUPED = "sonicmoe-hf", "sonicmoe-hf, nearest", "ScatterMoE", "grouped_mm"


def declared(results: Results) -> Iterator[Table | Sentence]:
    """All tables and sentences of this file, and of those on recipes, adapters and quality."""
    for part in (steps, attention_with_sinks, sharded, other_steps, step_parts, expert_parallel, replay):
        yield from part(results)
    yield from recipes.declared(results)
    yield from adapters.declared(results)
    yield from quality.declared(results)


def of_step(results: Results, row: str, contender: str, metric: str = "ms") -> Figure:
    """A cell of train_step.csv."""
    config, shape, launch = STEPS[row]
    return results.one(
        "train_step", config=config, shape=shape, launch=launch, contender=contender, mode="full", metric=metric
    )


def gain(results: Results, row: str, ours: str = OURS, other: str = GROUPED) -> Figure:
    """Times as fast."""
    return ratio(of_step(results, row, other), of_step(results, row, ours))


def steps(results: Results) -> Iterator[Table | Sentence]:
    """Whole training steps, in docs/performance.md and README.md."""
    yield Table(
        "docs/performance.md",
        "| model, layers, tokens a step and GPU | grouped_mm | ScatterMoE | sonicmoe-hf "
        "| sonicmoe-hf, nearest rounding |",
        [
            [
                row,
                *(
                    [of_step(results, row, contender, metric) for metric in ("tokens_per_s", "ms", "peak_GiB")]
                    for contender in (GROUPED, SCATTER, OURS, NEAREST)
                ),
            ]
            for row in STEPS
        ],
    )
    whole, sharded, qwen3, olmoe, gpt_oss, compiled = STEPS
    memory = {
        row: ratio(of_step(results, row, OURS, "peak_GiB"), of_step(results, row, GROUPED, "peak_GiB"))
        for row in STEPS
    }
    fast = (whole, sharded, qwen3, olmoe)
    yield Sentence(
        "README.md",
        "is # to # times as fast and needs # to # of the peak memory",
        (*span(gain(results, row) for row in fast), *span(memory[row] for row in fast)),
    )
    yield Sentence(
        "docs/performance.md",
        "Compiled layers of Qwen3 gain # times, with # of the memory",
        (gain(results, compiled), memory[compiled]),
    )
    yield Sentence("docs/performance.md", "**gpt-oss gains # times over `grouped_mm`**", [gain(results, gpt_oss)])
    yield Sentence(
        "docs/performance.md",
        "**Token rounding gains # at Qwen3's and OLMoE's sizes**",
        [more_than_one(gain(results, qwen3, NEAREST, OURS))],
    )
    first = span(of_step(results, row, OURS, "first_step_s") for row in STEPS)
    yield Sentence("docs/performance.md", "A first step of ours took # to # s", first)


def attention_with_sinks(results: Results) -> Iterator[Table | Sentence]:
    """Steps of gpt-oss by what computes its attention, in docs/attention.md and docs/performance.md."""

    def of(attention: str, contender: str, metric: str = "ms") -> Figure:
        launch = f"Liger, spread load, {attention} attention"
        return results.one("train_step_sinks", launch=launch, contender=contender, metric=metric)

    metrics = ("tokens_per_s", "ms", "peak_GiB")
    rows = [
        [label, *([of(attention, contender, metric) for metric in metrics] for contender in (GROUPED, OURS))]
        for label, attention in (("eager", "eager"), ("`torch_sinks`", "torch_sinks"))
    ]
    yield Table("docs/attention.md", "| attention | grouped_mm | sonicmoe-hf |", rows)
    fast, eager, others = of("torch_sinks", OURS), of("eager", OURS), of("eager", GROUPED)
    yield Sentence(
        "docs/attention.md",
        "A step is # times as fast as with eager attention, and # times as fast as Transformers trains it by itself",
        (ratio(eager, fast), ratio(others, fast)),
    )
    yield Sentence("docs/performance.md", "in a step that takes # ms instead of #", (fast, eager))
    yield Sentence("README.md", "with which a step is # times as fast as Transformers'", [ratio(others, fast)])


def sharded(results: Results) -> Iterator[Table | Sentence]:
    """What FSDP2 costs, and the 7B on 64 GPUs, in docs/performance.md."""
    document = "docs/performance.md"
    whole, on_two, *_ = STEPS
    yield Sentence(
        document,
        "**Under FSDP2 the 7B gains # times over `grouped_mm`**, and # on one GPU",
        (gain(results, on_two), gain(results, whole)),
    )
    costs = [
        difference(of_step(results, on_two, contender), of_step(results, whole, contender))
        for contender in (GROUPED, SCATTER, OURS)
    ]
    yield Sentence(document, "Gathering weights and summing gradients add # to # ms to a step", span(costs))
    speed = partial(of_step, results, metric="tokens_per_s")
    a_day = times(86400, speed(whole, OURS))
    yield Sentence(
        document,
        "One H200 trains it with # tokens a second, which is # billion a day; with ScatterMoE #",
        (speed(whole, OURS), times(1e-9, a_day), speed(whole, SCATTER)),
    )
    yield Sentence(
        document,
        "Two under FSDP2 train it with # each, # billion a day together; with ScatterMoE #",
        (speed(on_two, OURS), times(2 * 86400e-9, speed(on_two, OURS)), speed(on_two, SCATTER)),
    )
    upper = times(64 * 86400e-9, speed(on_two, OURS))
    seconds = of_step(results, on_two, OURS).value / 1e3 + 14.7 / 370 + 2.9 / 50  # nothing overlaps
    lower = computed(64 * 24576 / seconds * 86400e-9, "64 GPUs, 24,576 tokens in the step and all communication")
    yield Sentence(document, "64 H200s train it with # to # billion tokens a day", (lower, upper))


def other_steps(results: Results) -> Iterator[Table | Sentence]:
    """Transformers' sonicmoe, and lengths that vary, in docs/performance.md."""
    document = "docs/performance.md"
    sonic, ours = (
        results.one("train_step_sonicmoe", contender=contender, metric="tokens_per_s")
        for contender in ("sonicmoe (Transformers)", OURS)
    )
    yield Sentence(
        document,
        "Transformers' sonicmoe, in a run with ours alone: # tokens a second beside #",
        (sonic, ours),
    )
    yield Sentence("README.md", "than with those, # times for Qwen3", [ratio(ours, sonic)])
    tuning = results.one("train_step_sonicmoe", contender="sonicmoe (Transformers)", metric="first_step_s")
    yield Sentence(document, "It spends # s on tuning before its first step", [tuning])
    varying = "Liger, spread load, varying lengths"
    found = [
        results.one("train_step_varying", contender=contender, launch=launch, metric="ms")
        for contender, launch in ((OURS, varying), (GROUPED, varying), (OURS, f"{varying}, lengths seen before"))
    ]
    yield Sentence(document, "four layers of Qwen3 took # ms a step with ours and # with `grouped_mm`", found[:2])
    yield Sentence(document, "ours took # from its first step on", found[2:])


def step_parts(results: Results) -> Iterator[Table | Sentence]:
    """Where the time of a step is, in docs/performance.md."""
    document = "docs/performance.md"
    contenders = (OURS, NEAREST, GROUPED)
    parts = {
        "experts, the six products": "experts: products",
        "experts, combine": "experts: combine",
        "experts, all else": "experts: the rest",
        "router": "router",
        "attention and its projections": "attention",
        "norms": "norms",
        "output layer and loss": "loss",
        "optimiser": "optimiser",
        "all else": "the rest",
    }

    def of(part: str, contender: str) -> Figure:
        return results.one("step_parts", contender=contender, metric=f"{part}: GPU ms")

    rows: list[list[Cell]] = [
        [label, *(of(part, contender) if of(part, contender).value else "" for contender in contenders)]
        for label, part in parts.items()
    ]
    for row in rows:
        if row[0] == "experts, all else":
            row[2] = of("experts: the rest", NEAREST)
    sums = {contender: total(of(part, contender) for part in parts.values()) for contender in contenders}
    rows.append(["sum", *sums.values()])
    yield Table(document, "| part | sonicmoe-hf | sonicmoe-hf, nearest rounding | grouped_mm |", rows)

    def share(contender: str, suffix: str = "") -> Figure:
        return results.one("step_parts", contender=contender, metric=f"MoE block: share outside products{suffix}")

    yield Sentence(
        document, "takes # of the block at Qwen3's sizes and # tokens", (share(OURS), computed(16384, "the benchmark"))
    )
    yield Sentence(document, "and # without the combine", [share(OURS, " and combine")])
    yield Sentence(document, "With token rounding these are # and #", (share(NEAREST), share(NEAREST, " and combine")))
    loss = of("loss", OURS)
    layers = ("experts: products", "experts: combine", "experts: the rest", "router", "attention", "norms")
    parameters = {4: 3_109_000_000, 48: recipes.QWEN3_PARAMETERS}  # of the model with so many layers
    deep = total(
        [
            times(48 / 4, total(of(part, OURS) for part in layers)),
            times(parameters[48] / parameters[4], of("optimiser", OURS)),
            loss,
            of("the rest", OURS),
        ]
    )
    yield Sentence(document, "**The loss takes # of this step**", [ratio(loss, sums[OURS])])
    yield Sentence(document, "With all 48 it would be #", [ratio(loss, deep)])


def expert_parallel(results: Results) -> Iterator[Table | Sentence]:
    """docs/expert-parallelism.md."""
    document = "docs/expert-parallelism.md"
    E, K = 128, 8
    rows: list[list[Cell]] = []
    for ranks in (2, 4, 8):
        theirs = K * (ranks - 1) / ranks
        needed = 1 - math.comb(E - E // ranks, K) / math.comb(E, K)  # the chance that a rank has one of K of E experts
        ours = (ranks - 1) * needed
        cells = (computed(value, f"{ranks} ranks, {K} of {E} experts") for value in (theirs, ours, ours / theirs))
        rows.append([f"{ranks}", *cells])
    yield Table(document, "| ranks | Transformers' own | ours | ratio |", rows)
    common = "16384 tokens a rank, 2 ranks"
    shapes = (
        f"4 layers, vocabulary 151936, {common}, Liger, spread load",
        f"4 layers, vocabulary 151936, {common}, spread load",
        f"4 layers, vocabulary 4096, {common}, spread load",
        f"16 layers, vocabulary 151936, {common}, Liger, spread load",
    )
    cases = {
        "ours, top-k": "sonicmoe_hf, top-k",
        "ours, rounded to the nearest tile": "sonicmoe_hf, nearest",
        "Transformers' `all_to_all`, top-k": "all_to_all of Transformers, top-k",
        "FSDP2, top-k": "FSDP2, top-k",
    }

    def of(shape: str, case: str, metric: str = "tokens_per_second_per_gpu") -> Figure:
        return results.one("expert_parallel", shape=shape, case=case, metric=metric)

    def megabytes(shape: str, case: str) -> list[Cell]:
        return [times(1e-6, of(shape, case, metric)) for metric in ("exchange_bytes", "other_bytes")]

    yield Table(
        document,
        "| tokens/s a GPU | Liger, whole vocabulary | no Liger, whole vocabulary | no Liger, 4,096 words "
        "| MB for the experts | MB for FSDP2 |",
        [
            [label, *(of(shape, case) for shape in shapes[:3]), *megabytes(shapes[0], case)]
            for label, case in cases.items()
        ],
    )
    yield Table(
        document,
        "| 16 layers | tokens/s a GPU | GiB | MB for the experts | MB for FSDP2 |",
        [
            [label, of(shapes[3], case), of(shapes[3], case, "peak_GiB"), *megabytes(shapes[3], case)]
            for label, case in cases.items()
        ],
    )
    ours, _, theirs, fsdp = cases.values()
    faster = [ratio(of(shape, ours), of(shape, theirs)) for shape in shapes]
    yield Sentence(document, "Ours is #, # and # times as fast as Transformers'", faster[:3])
    yield Sentence("docs/recipes.md", "# to # times as fast as Transformers' own all-to-all", span(faster[:3]))
    yield Sentence(
        document,
        "That is # times Transformers' speed, and # times that of FSDP2",
        (faster[3], ratio(of(shapes[3], ours), of(shapes[3], fsdp))),
    )
    whole, small = shapes[1:3]
    losses = [difference(of(whole, case, "ms"), of(small, case, "ms")) for case in (ours, theirs, fsdp)]
    shares = [ratio(loss, of(whole, case, "ms")) for loss, case in zip(losses, (ours, theirs, fsdp))]
    yield Sentence(
        document,
        "the loss over 151,936 words: it takes # to # ms of each contender's step without Liger, # to # of the step",
        (*span(losses), *span(shares)),
    )


def replay(results: Results) -> Iterator[Table | Sentence]:
    """docs/replay.md."""
    runs = ("8", "6")  # by their number of rounds

    def over(case: str, clock: str, rounds: str) -> Figure:
        return more_than_one(results.one("replay_step", case=case, metric=f"{clock}, over plain", rounds=rounds))

    yield Table(
        "docs/replay.md",
        "| | GPU time, first run | second run | wall time, first run | second run |",
        [
            [label, *(over(case, clock, rounds) for clock in ("GPU", "wall") for rounds in runs)]
            for label, case in (
                ("recording", "recording"),
                ("replaying a record", "replaying"),
                ("replaying a tensor in the host's memory", "a host's tensor"),
            )
        ],
    )
