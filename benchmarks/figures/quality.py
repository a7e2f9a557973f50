"""What docs/token-rounding.md and docs/balance.md say of trained models."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures.documented import Cell, Sentence, Table
from benchmarks.figures.results import Figure, Results, computed, difference, mean
from benchmarks.quality.comparison import compare, compare_tiles

ROUNDING = "docs/token-rounding.md"
BALANCE = "docs/balance.md"
FILE = "token_rounding_quality"
PRESETS = {"gpu": {"preset": "gpu", "steps": 1300}, "cpu": {"preset": "cpu"}}  # of the table's runs


def declared(results: Results) -> Iterator[Table | Sentence]:
    """All tables and sentences of this file."""
    for part in (rounding, starved, balance):
        yield from part(results)


def by_method(rows: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """(method, tile) -> its rows."""
    found: dict[tuple[str, int], list[dict]] = {}
    for row in rows:
        found.setdefault((row["method"], int(row["tile"])), []).append(row)
    return found


def rounding(results: Results) -> Iterator[Table | Sentence]:
    """The cost of token rounding in loss."""
    tables = {name: by_method(results.rows(FILE, balancing="layer", **keys)) for name, keys in PRESETS.items()}
    rows_per_expert = {"gpu": 8192 * 4 // 64, "cpu": 2048 * 4 // 32}
    fits = {name: compare(table) for name, table in tables.items()}

    def of(name: str, column: str) -> Figure:
        return results.one(FILE, column, balancing="layer", **PRESETS[name])

    def top_k(name: str) -> Figure:
        return mean(results.all(FILE, "held_out_loss", balancing="layer", method="top_k", **PRESETS[name]))

    def sizes(name: str, experts: int) -> list[Figure]:
        return [
            of(name, "steps"),
            of(name, "tokens_per_step"),
            *(computed(n, "training.py") for n in (experts, 4)),
        ]

    def final_rate(name: str) -> Figure:
        share, peak = of(name, "final_rate"), of(name, "learning_rate")
        return Figure(share.value * peak.value, f"{share.source} * {peak.source}")

    yield Table(
        ROUNDING,
        "| | 26.8 M parameters, H200 | 3.7 M parameters, CPU |",
        [
            [
                "text",
                "[92 packages](../benchmarks/results/quality_corpus.csv) with permissive licences, 73.8 MB, less "
                "than one epoch",
                "Python 3.11's standard library, 29.5 MB",
            ],
            ["steps; tokens a step; experts; K", sizes("gpu", 64), sizes("cpu", 32)],
            ["peak learning rate; at the end", *((of(name, "learning_rate"), final_rate(name)) for name in PRESETS)],
            ["rows per expert, T·K/E", *(computed(rows, "T·K/E") for rows in rows_per_expert.values())],
            ["held-out loss of top-k, nats per token", *(top_k(name) for name in PRESETS)],
            [
                "standard deviation of a run; degrees of freedom",
                *(
                    (computed(fits[name].run_sd, f"a fit of {FILE}.csv"), computed(fits[name].freedom, "the fit"))
                    for name in PRESETS
                ),
            ],
        ],
    )
    over = {name: {**compare_tiles(tables[name]).over_top_k, **fits[name].over_top_k} for name in PRESETS}

    def cost(name: str, method: str, tiles: int) -> Cell:
        found = over[name].get((method, rows_per_expert[name] // tiles if tiles else 0))
        return [computed(value, f"a fit of {FILE}.csv, {method}") for value in found] if found else ""

    def seeds(method: str, tiles: int) -> str:
        names = method.split(" or ")
        found = [run for name in names for run in tables["gpu"].get((name, 512 // tiles if tiles else 0), [])]
        return f"{len({run['seed'] for run in found})}" if found else ""

    rows: list[list[Cell]] = []
    for label, method, tiles in (
        ("`nearest`", "nearest", 8),
        ("", "nearest", 4),
        ("", "nearest", 2),
        ("", "nearest", 1),
        ("`balanced`", "balanced", 8),
        ("", "balanced", 4),
        ("", "balanced", 2),
        ("", "balanced", 1),
        ("both together", "nearest or balanced", 4),
        ("", "nearest or balanced", 2),
        ("`down`", "down", 4),
        ("token drop, capacity factor 1.25", "token_drop", 0),
        ("expert choice", "expert_choice", 0),
    ):
        gpu, cpu = (cost(name, method, tiles) for name in PRESETS)
        rows.append([label, f"{tiles}" if tiles else "", gpu, seeds(method, tiles), cpu])
    yield Table(ROUNDING, "| method | rows per expert / M | 26.8 M, H200 | seeds | 3.7 M, CPU, three seeds |", rows)
    both = {name: compare_tiles(tables[name]).over_top_k for name in PRESETS}
    at_two = {name: both[name]["nearest or balanced", rows_per_expert[name] // 2] for name in PRESETS}
    yield Sentence(
        ROUNDING,
        "the roundings together are # and # standard errors from zero",
        [computed(value / error, f"a fit of {FILE}.csv") for value, error in at_two.values()],
    )
    at_four = both["gpu"]["nearest or balanced", 128]
    sd = computed(fits["gpu"].run_sd, f"a fit of {FILE}.csv")
    yield Sentence(BALANCE, "standard deviation is [# nats]", [sd])
    early, late = (computed(compare(tables["gpu"], f"train_loss_{share}").run_sd, "a fit") for share in (50, 100))
    yield Sentence(ROUNDING, "standard deviation is # nats there, and # at the end", (early, late))
    replicas = [
        results.all(FILE, "held_out_loss", steps=2400, learning_rate=rate, balancing="layer")
        for rate in (0.001, 0.003)
    ]
    apart = sorted(difference(*pair[::-1]) for pair in replicas)
    yield Sentence(ROUNDING, "one ended # nats apart, one #", apart)
    unbalanced = {"steps": 2400, "balancing": "none"}
    worse = difference(results.one(FILE, "held_out_loss", **unbalanced), mean(replicas[1]))
    yield Sentence(
        ROUNDING,
        "ended # nats worse than two with it, and # of its experts got no held-out token",
        (worse, results.one(FILE, "dead_share_held_out", **unbalanced)),
    )
    yield Sentence(
        ROUNDING,
        "**Two tiles per expert cost # nats per token, four about #.",
        [computed(value, f"a fit of {FILE}.csv") for value in (at_two["gpu"][0], at_four[0])],
    )


def starved(results: Results) -> Iterator[Table | Sentence]:
    """Experts without rows."""

    def dead(method: str, experts: int, **keys) -> Figure:
        found = results.all(FILE, "dead_share", method=method, balancing="layer", **keys)
        worst = max(found)
        return Figure(experts * worst.value, f"{experts} * {worst.source}")

    def single(method: str, tiles: str) -> Figure:
        return mean(
            results.all(
                FILE, "starved_share", method=method, tiles_per_expert=tiles, balancing="layer", **PRESETS["gpu"]
            )
        )

    none = results.one(FILE, "dead_share", balancing="none")
    top_k = mean(results.all(FILE, "starved_share", method="top_k", balancing="layer", **PRESETS["gpu"]))
    cpu = [dead(method, 128, preset="cpu", tiles_per_expert="4.0") for method in ("nearest", "balanced")]
    gpu = [dead(method, 256, **PRESETS["gpu"]) for method in ("nearest", "balanced", "top_k")]
    every = computed(128, "layers * experts"), computed(256, "layers * experts")
    yield Table(
        ROUNDING,
        "| model and steps counted | tiles per expert | balancing loss | without rows, `nearest` | `balanced` | top-k |",
        [
            [
                "3.7 M runs, last 20 of 300",
                "4",
                "of every layer, weight 0.01",
                (cpu[0], every[0]),
                cpu[1],
                dead("top_k", 128, preset="cpu"),
            ],
            [
                "26.8 M runs, last 20 of 1,300",
                "4 or 2",
                "of every layer, weight 0.01",
                (gpu[0], every[1]),
                gpu[1],
                gpu[2],
            ],
            [
                "the same, in a single step",
                "2",
                "the same",
                single("nearest", "2.0"),
                single("balanced", "2.0"),
                top_k,
            ],
            ["the same", "1", "the same", single("nearest", "1.0"), "", top_k],
            [
                "26.8 M, one run, last 20 of 2,400",
                "",
                "none",
                "",
                "",
                (Figure(256 * none.value, f"256 * {none.source}"), every[1]),
            ],
        ],
    )


def balance(results: Results) -> Iterator[Table | Sentence]:
    """Ways of balancing experts."""

    def of(column: str, case: tuple[str, str, float, str]) -> list[Figure]:
        keys = dict(zip(("router", "balancing", "rate", "routing"), case))
        return [results.one("load_balance", column, seed=seed, **keys) for seed in (0, 1)]

    def worst(figures: list[Figure]) -> Figure:
        return max(figures)

    rows: list[list[Cell]] = []
    for first, label, case in (
        ("softmax", "none", ("softmax", "none", 0.0, "top_k")),
        ("", "Transformers' loss, 0.001", ("softmax", "pooled", 0.001, "top_k")),
        ("", "Transformers' loss, 0.01", ("softmax", "pooled", 0.01, "top_k")),
        ("", "`per_layer_loss=0.01`", ("softmax", "layer", 0.01, "top_k")),
        ("", "`per_layer_loss=0.02`", ("softmax", "layer", 0.02, "top_k")),
        ("", "`per_layer_loss=0.05`", ("softmax", "layer", 0.05, "top_k")),
        ("", "`per_layer_loss=0.1`", ("softmax", "layer", 0.1, "top_k")),
        ("", "the same, with `nearest` at four tiles per expert", ("softmax", "layer", 0.1, "nearest")),
        ("sigmoid", "none", ("sigmoid", "none", 0.0, "top_k")),
        ("", "`bias_update=1e-3`", ("sigmoid", "bias", 0.001, "top_k")),
        ("", "`bias_update=5e-3`", ("sigmoid", "bias", 0.005, "top_k")),
        ("", "the same, linearly to zero", ("sigmoid", "bias_to_zero", 0.005, "top_k")),
    ):
        loss, plain = of("held_out_loss", case), of("held_out_loss", (case[0], "none", 0.0, "top_k"))
        over: Cell = [difference(*pair) for pair in zip(loss, plain)] if label != "none" else ""
        rows.append(
            [
                first,
                label,
                mean(loss),
                over,
                mean(of("load", case)),
                worst(of("load_worst", case)),
                mean(of("load_step", case)),
                mean(of("load_held_out", case)),
                mean(of("dead", case)),
            ]
        )
    yield Table(
        BALANCE,
        "| router | balancing | held-out loss | over none, seeds 0 and 1 | load, 20 steps | in the worst layer "
        "| of a step | held out | dead experts |",
        rows,
    )
