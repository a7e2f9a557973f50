"""What README.md, docs/performance.md, backends.md, layout.md and token-rounding.md say of one layer and its kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.figures.documented import Sentence, Table
from benchmarks.figures.results import Figure, Results, computed, difference, mean, ratio, span, times, total

SHAPES = {  # name in the documents: config of the CSVs, shape
    "7B of the paper": ("7B", "24576, 1536, 256, 128, 8"),
    "Qwen3-30B-A3B": ("Qwen3-30B-A3B", "16384, 2048, 768, 128, 8"),
    "OLMoE": ("OLMoE", "16384, 2048, 1024, 64, 8"),
    "gpt-oss-20b": ("gpt-oss-20b", "16384, 2880, 2880, 32, 4"),
    "Qwen3, few tokens": ("small", "2048, 2048, 768, 128, 8"),
}
LARGE = ("7B", "Qwen3-30B-A3B", "OLMoE", "gpt-oss-20b")
ALL = (*LARGE, "small")
ALONE = ("7B", "Qwen3-30B-A3B", "OLMoE")  # the sizes whose kernels no run before them had compiled on that machine
OURS, TRITON, SONIC, SCATTER, GROUPED, BOUND = (
    "hopper",
    "triton",
    "sonicmoe (Transformers)",
    "ScatterMoE",
    "grouped_mm",
    "dense cuBLAS (bound)",
)
WHOLE, FROZEN = "forward+backward", "frozen"


def declared(results: Results) -> Iterator[Table | Sentence]:
    """All tables and sentences of this file."""
    for part in (readme, layer, kernels, limits, errors, starting, checkpoints, loading_ranks, token_rounding):
        yield from part(results)


def of_layer(
    results: Results, config: str, contender: str, metric: str = "ms", mode: str = WHOLE, launch: str = "eager"
):
    """A cell of moe_layer.csv."""
    return results.one("moe_layer", config=config, contender=contender, mode=mode, launch=launch, metric=metric)


def readme(results: Results) -> Iterator[Table | Sentence]:
    """The layer in README.md, and what docs/performance.md says of it beside the table."""
    speed = [ratio(of_layer(results, config, GROUPED), of_layer(results, config, OURS)) for config in LARGE]
    yield Sentence("README.md", "an MoE layer trains # to # times as fast as with `grouped_mm`", span(speed))
    first = {
        contender: span(of_layer(results, config, contender, "first_step_s") for config in configs)
        for contender, configs in ((OURS, ALONE), (SONIC, LARGE))
    }
    yield Sentence("README.md", "a first step without # to # seconds of tuning", first[SONIC])
    document = "docs/performance.md"
    graphs = [ratio(*(of_layer(results, config, other, launch="graph") for other in (SONIC, OURS))) for config in ALL]
    yield Sentence(document, "As a CUDA graph ours is # to # times as fast as Transformers' sonicmoe", span(graphs))
    yield Sentence(
        document,
        "its first step takes # to # s, most of it tuning, and ours takes # to # s",
        (*first[SONIC], *first[OURS]),
    )


def layer(results: Results) -> Iterator[Table | Sentence]:
    """One layer, in docs/performance.md."""
    contenders = (OURS, TRITON, SONIC, SCATTER, GROUPED, BOUND)
    second = {"7B": "(the paper's 7B)", "gpt-oss-20b": "(gpt-oss-20b, as SwiGLU)"}
    rows = []
    for name, (config, shape) in SHAPES.items():
        for first, label, settings in (
            (shape, "eager", {}),
            (second.get(config, f"({name})"), "graph", {"launch": "graph"}),
            ("", "experts frozen, eager", {"mode": FROZEN}),
        ):
            rows.append([first, label, *(of_layer(results, config, other, **settings) for other in contenders)])
    nemotron = "Nemotron-3-Nano-30B-A3B"
    for first, label, settings in (
        ("16384, 2688, 1856, 128, 6", "eager", {}),
        (f"({nemotron}, relu2)", "graph", {"launch": "graph"}),
        ("", "experts frozen, eager", {"mode": FROZEN}),
    ):
        rows.append([first, label, *(of_layer(results, nemotron, other, **settings) for other in contenders)])
    for config, shape in (
        ("DeepSeek-V3", "16384, 7168, 2048, 256, 8"),
        ("DeepSeek-V3, 65,536 tokens", "65536, 7168, 2048, 256, 8"),
    ):
        rows.append([shape, "eager", *(of_layer(results, config, other) for other in contenders)])
    yield Table(
        "docs/performance.md",
        "| T, H, I, E, K | | hopper | triton | Transformers' sonicmoe | ScatterMoE | grouped_mm | bound |",
        rows,
    )
    yield Table(
        "docs/performance.md",
        "| T, H, I, E, K | held for backward: ours | ScatterMoE | grouped_mm | peak: ours | Transformers' sonicmoe "
        "| grouped_mm |",
        [
            [
                shape,
                *(of_layer(results, config, other, "held_MB") for other in (OURS, SCATTER, GROUPED)),
                *(of_layer(results, config, other, "peak_MB") for other in (OURS, SONIC, GROUPED)),
            ]
            for config, shape in SHAPES.values()
        ],
    )
    nemotrons = ratio(*(of_layer(results, nemotron, other) for other in (GROUPED, OURS)))
    yield Sentence("docs/models.md", "a layer of Nemotron 3 Nano's sizes is [# times as fast]", [nemotrons])
    peaks = [times(1e-3, of_layer(results, config, SONIC, "first_peak_MB")) for config in ALL]
    yield Sentence("docs/performance.md", "Its first step peaks at # to # GB", span(peaks))


def of_kernel(results: Results, config: str, contender: str, names: str, mode: str = WHOLE) -> Figure:
    """The sum of what layer_kernels.csv has of a kernel; its metrics begin with a number."""
    found = results.rows("layer_kernels", config=config, contender=contender, mode=mode)
    metrics = [row["metric"] for row in found if re.fullmatch(rf"(\d+ )?({names})", row["metric"])]
    keys = {"config": config, "contender": contender, "mode": mode}
    return total(results.one("layer_kernels", metric=metric, **keys) for metric in metrics)


def sizes_of(name: str) -> tuple[int, ...]:
    """T, H, I, E, K."""
    return tuple(int(size) for size in SHAPES[name][1].split(","))


def floor_of(kernel: str, shape: tuple[int, ...]) -> Figure:
    """Microseconds at 790 TFLOP/s or 4.3 TB/s, whichever is more; each operand read or written once, in bf16."""
    T, H, I, E, K = shape
    rows = T * K
    product = 2 * rows * H * I
    flop, values = {
        "up": (2 * product, T * H + E * 2 * I * H + rows * 3 * I),  # reads x and W1, writes h and a
        "down": (product, rows * I + E * H * I + rows * H),
        "down_backward": (product, T * H + E * H * I + rows * 2 * I + rows * 3 * I),  # reads dout, W2, h; writes dh, a
        "up_backward_input": (2 * product, rows * 2 * I + E * 2 * I * H + rows * H),
        "dW1": (2 * product, T * H + rows * 2 * I + E * 2 * I * H),
        "dW2": (product, T * H + rows * I + E * H * I),
        "combine": (0, 2 * (rows * H + T * H)),
    }[kernel]
    return computed(1e6 * max(flop / 790e12, 2 * values / 4.3e12), f"the floor of {kernel}")


def kernels(results: Results) -> Iterator[Table | Sentence]:
    """Each kernel, in docs/performance.md."""
    combine = "combine_kernel|token_gather_sum_kernel"
    labels = {
        "up": "up: gather, GEMM, activation",
        "down": "down: GEMM",
        "down_backward": "down_backward: gather, GEMM, activation's gradient",
        "up_backward_input": "up_backward_input: GEMM for dx",
        "dW1": "dW1: gather, GEMM",
        "dW2": "dW2: gather, GEMM",
        "combine": "combine, forward and backward",
    }
    rows = []
    for name, label in labels.items():
        cells = []
        for config in ALL:
            ours, theirs = (
                of_kernel(results, config, other, combine if name == "combine" else name) for other in (OURS, SONIC)
            )
            cells.append((ours, ratio(theirs, ours)))
        share = ratio(floor_of(name, sizes_of("Qwen3-30B-A3B")), cells[1][0])
        rows.append([label, *cells, share])
    for label, mode in (("all", WHOLE), ("all, experts frozen", FROZEN)):
        sums = [[of_kernel(results, config, other, "sum", mode) for other in (OURS, SONIC)] for config in ALL]
        rows.append([label, *((ours, ratio(theirs, ours)) for ours, theirs in sums), ""])
    yield Table(
        "docs/performance.md",
        "| kernel | 7B | Qwen3 | OLMoE | gpt-oss | few tokens | share of the floor, Qwen3 |",
        rows,
    )


def limits(results: Results) -> Iterator[Table | Sentence]:
    """What limits each kernel: what a CSV has of it."""
    document = "docs/performance.md"
    watts, clocks = (results.all("power", column) for column in ("watts", "clock_MHz"))
    power = (
        *span(watts),
        results.one("power", "limit_watts"),
        *span(times(1e-3, clock) for clock in clocks),
        times(1e-3, results.one("power", "max_clock_MHz")),
    )
    bandwidths = [
        times(4.3, ratio(floor_of("combine", sizes_of(name)), of_kernel(results, config, OURS, "combine_kernel")))
        for name, (config, _) in SHAPES.items()
        if config in LARGE
    ]
    hosts = [
        figure
        for contender in (OURS, SONIC)
        for figure in span(of_layer(results, config, contender, "stacked_host_ms") for config in ALL)
    ]
    yield Table(  # what is text here, dev/kernel-log has
        document,
        "| kernel | limit | seen by |",
        [
            ["the six GEMMs", "the GPU's power cap", power],
            ["up, down, down_backward, up_backward_input", "L2, next", "8.8 to 9.4 TB/s leave L2 in each of them"],
            [
                "down_backward",
                "what its epilogue moves",
                "without its epilogue's reads and writes 1.59 ms instead of 1.74 at gpt-oss's sizes, as the clock rises",
            ],
            ["combine", "memory", (*span(bandwidths), computed(4.3, "the GPU's memory"))],
            ["few tokens", "reading the weights", "its floor is memory, in all six GEMMs"],
            ["one eager layer", "the host, in small layers", hosts],
        ],
    )


def errors(results: Results) -> Iterator[Table | Sentence]:
    """Accuracy, in docs/performance.md."""
    metrics = ("error_out", "error_dx", "error_dgate_up", "error_ddown", "error_dweight")
    rows: list[list] = [
        [label, *(of_layer(results, "Qwen3-30B-A3B", contender, metric) for metric in metrics)]
        for label, contender in (
            ("hopper, triton, Transformers' sonicmoe", OURS),
            ("ScatterMoE", SCATTER),
            ("grouped_mm", GROUPED),
        )
    ]
    yield Table("docs/performance.md", "| | out | dx | dW1 | dW2 | routing weights |", rows)


def starting(results: Results) -> Iterator[Table | Sentence]:
    """docs/backends.md."""
    run = {"column": "seconds", "commit": "4ff5593f9236"}
    yield Table(
        "docs/backends.md",
        "| first forward and backward of a process, H=2048, I=768, on 16 CPU cores | seconds |",
        [
            ["nothing cached", results.one("starting", **run, **{"full caches": "none"})],
            ["kernels cached", span(results.all("starting", **run, **{"full caches": "all"}))],
        ],
    )


def checkpoints(results: Results) -> Iterator[Table | Sentence]:
    """docs/layout.md."""
    rows: list[list] = []
    for label, what in (
        ("load hub, cold page cache", "load hub, cold page cache"),
        ("load hub, warm", "load hub, warm page cache"),
        ("load native, cold page cache", "load native, cold page cache"),
        ("load native, warm", "load native, warm page cache"),
        ("convert hub to native", "convert hub -> native"),
        ("convert native to hub", "convert native -> hub"),
    ):
        seconds, peaks = (results.all("checkpoints", column, what=what) for column in ("seconds", "peak_gb"))
        rows.append([label, mean(seconds), max(peaks)])
    yield Table("docs/layout.md", "| | seconds | peak memory, GB |", rows)


def loading_ranks(results: Results) -> Iterator[Table | Sentence]:
    """The host's memory in docs/expert-parallelism.md."""
    columns = ("held_gb", "peak_own_gb")
    rows: list[list] = [
        [str(ranks), *(max(results.all("loading_ranks", column, stored="fp8", ranks=ranks)) for column in columns)]
        for ranks in (1, 2)
    ]
    yield Table("docs/expert-parallelism.md", "| ranks | GB that a rank keeps | peak, GB |", rows)


def token_rounding(results: Results) -> Iterator[Table | Sentence]:
    """The speed of token rounding, in docs/token-rounding.md."""
    document = "docs/token-rounding.md"

    def faster(shape: str, rounding: str, launch: str) -> Figure:
        run = {"config": "routing included", "shape": shape.replace(" ", ""), "mode": WHOLE, "launch": launch}
        top_k, rounded = (
            results.one("token_rounding", contender=contender, metric="ms", **run) for contender in ("top_k", rounding)
        )
        return ratio(top_k, rounded)

    shapes = {}  # shape -> rows per expert
    for row in results.rows("token_rounding", contender="top_k", metric="rows"):
        T, H, I, E, K = (int(size) for size in row["shape"].split(","))
        shapes[f"{T}, {H}, {I}, {E}, {K}"] = T * K // E
    order = sorted(shapes, key=lambda shape: shapes[shape])
    columns = [(rounding, launch) for rounding in ("nearest", "balanced") for launch in ("graph", "eager")]
    rows: list[list] = [
        [shape, f"{shapes[shape]}", *(faster(shape, *column) for column in columns)] for shape in order
    ]
    yield Table(
        document,
        "| T, H, I, E, K | rows per expert | `nearest`: times as fast as top-k, CUDA graph | eager "
        "| `balanced`, CUDA graph | eager |",
        rows,
    )

    def all_at(*rows_per_expert: int) -> list[Figure]:
        chosen = [shape for shape in order if shapes[shape] in rows_per_expert]
        return [faster(shape, *column) for shape in chosen for column in columns]

    yield Sentence(document, "a layer is # to # times as fast, for about 0.01 nats", span(all_at(512)))
    yield Sentence(document, "At two tiles a layer is [# to # times]", span(all_at(256)))
    changes = [Figure(1 / figure.value - 1, f"less one, of 1 / {figure.source}") for figure in all_at(1024, 1536)]
    yield Sentence(document, "rounding changes a layer's time by # to #", span(changes))
    own_work = []
    for shape in shapes:
        routing = {"shape": shape.replace(" ", ""), "mode": "routing", "launch": "graph", "metric": "ms"}
        top_k = results.one("token_rounding", contender="top_k", **routing)
        for rounding in ("nearest", "balanced"):
            rounded = results.one("token_rounding", contender=rounding, **routing)
            own_work.append(times(1e3, difference(rounded, top_k)))
    yield Sentence(document, "Rounding's own work, # to # µs a layer", span(own_work))
