"""How a table or a sentence of the documents is declared, and which tables have no measured figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.figures.results import Figure

Cell = str | Figure | Sequence[Figure]


class Table(NamedTuple):
    """header: the line of the table's head. rows: its rows; a cell is its text, or the figures that it has, in order."""

    document: str
    header: str
    rows: list[list[Cell]]


class Sentence(NamedTuple):
    """text: words of a document, with # for each figure."""

    document: str
    text: str
    figures: Sequence[Figure]


# document, or (document, header) -> why its figures have no CSV
NOT_MEASURED: dict[str | tuple[str, str], str] = {
    ("docs/backends.md", "| | PyTorch | Triton | Transformers | PEFT |"): "versions",
    ("docs/attention.md", "| | CUDA | CPU |"): "what is supported",
    ("docs/backends.md", "| exit code | meaning |"): "numbers of the command line",
    ("docs/layout.md", "| entry | value |"): "a version's number",
    ("docs/layout.md", "| layout | experts on disk | families |"): "the names of formats",
    ("docs/layout.md", "| tensor | shape | |"): "sizes",
    ("docs/lora.md", "| fused | computed by PEFT, which materialises the merged weight at each call |"): "bits",
    ("docs/packed-experts.md", "| refused | take |"): "values of options",
    ("docs/lora.md", "| to adapt | say |"): "numbers of layers",
    ("docs/packed-experts.md", "| checkpoint | say |"): "sizes of blocks",
    ("docs/packed-experts.md", "| format | values | bits a weight | input features |"): "the formats' definitions",
    ("docs/plan.md", "| exit code | meaning |"): "numbers of the command line",
    (
        "docs/models.md",
        "| model | fast experts | [packed experts](packed-experts.md) | token rounding "
        "| [native checkpoints](layout.md) |",
    ): "names of models",
    ("docs/patching.md", "| argument | values | effect |"): "a threshold",
    ("docs/patching.md", "| where | what | for models without sonicmoe-hf's experts |"): "versions of other packages",
    ("docs/performance.md", "| step | idea | outcome |"): "quotes steps of dev/kernel-log",
    (
        "docs/recipes.md",
        "| model | card | host memory for all experts | tokens/s | peak GiB |",
    ): "computed from sizes; the rest is not run",
    ("docs/serving.md", "| engine | adapters on experts | merged checkpoints |"): "versions",
    (
        "docs/serving.md",
        "| GB | bf16 | `--quantize mxfp4` | `--quantize fp8` |",
    ): "computed from sizes, tests/planning/test_file_sizes.py",
    ("docs/serving.md", "| models | their form in vLLM |"): "names of models",
    ("docs/token-rounding.md", "| rows per expert and batch, T·K/E | use |"): "advice, declared as sentences",
    ("docs/token-rounding.md", "| option | default | meaning |"): "defaults",
    ("docs/token-rounding.md", "| rounding | n | max. rows of a layer |"): "formulas",
    ("docs/trainers.md", "| tool | versions | command | what was seen |"): "versions, and runs on a CPU",
}
WITHOUT_COMMIT = {"quality_corpus.csv"}  # a list of packages
