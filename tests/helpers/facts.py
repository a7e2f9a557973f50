"""Facts about other packages that stand in our source as tables, each with the version that it was read in.

    PYTHONPATH=.:tests python -m helpers.facts      # `make facts`: those read in older versions than the newest we know

Reading one again: look the source of that version through, change the table, and enter version and day here.
"""

import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
# packages that no environment of ours installs, or not their newest: the newest on the day
ELSEWHERE = {
    "vllm": ("0.33.0", "2026-11-28"),
    "sglang": ("0.5.23", "2026-11-26"),
    "unsloth_zoo": ("2026.9.6", "2026-11-26"),
}


class Fact(NamedTuple):
    """A table: the module and its names, and the package's version and the day that it was read."""

    module: str
    names: tuple[str, ...]
    package: str
    version: str
    day: str


ENGINES, CONFIG = "sonicmoe_hf.adapters.engines", "sonicmoe_hf.lora.config"
FACTS = [
    Fact(
        ENGINES,
        ("VLLM_RANKS", "VLLM_PER_EXPERT", "VLLM_FUSED", "VLLM_MIXED", "VLLM_ABSORBED"),
        "vllm",
        "0.33.0",
        "2026-11-26",
    ),
    Fact(ENGINES, ("NOT_IN_SGLANG", "SGLANG_FUSED"), "sglang", "0.5.23", "2026-11-26"),
    Fact(
        "sonicmoe_hf.adapters.rules",
        ("UNSLOTH_FAMILIES", "UNSLOTH_PARAMETERS"),
        "unsloth_zoo",
        "2026.9.6",
        "2026-11-26",
    ),
    Fact("sonicmoe_hf.adapters.rules", ("PLAIN", "BASE_CHANGED"), "peft", "0.21.2", "2026-11-26"),
    Fact("sonicmoe_hf.lora.names", ("TAKEN_FOR_EXPERTS",), "peft", "0.21.2", "2026-11-26"),
    Fact(CONFIG, ("MODULES_ALONE", "INITS_OF_MODULES"), "peft", "0.21.2", "2026-11-28"),
    Fact(CONFIG, ("READ_PAST",), "transformers", "5.24.0", "2026-11-28"),
    Fact("sonicmoe_hf.attention.models", ("SUPPORTED", "PIECES_WITH_SINKS"), "transformers", "5.24.0", "2026-11-28"),
    Fact("sonicmoe_hf.tools.planning.attention_sizes", ("MIXERS",), "transformers", "5.24.0", "2026-11-28"),
    Fact("sonicmoe_hf.tools.planning.sizes", ("TOP_K",), "transformers", "5.24.0", "2026-11-28"),
    Fact("sonicmoe_hf.tools.planning.ways", ("LIGER",), "liger_kernel", "0.8.5", "2026-11-28"),
    Fact("sonicmoe_hf.compiling.liger_tracing", ("FUNCTIONS",), "liger_kernel", "0.8.5", "2026-11-28"),
    Fact("sonicmoe_hf.trl.functions", ("REPLAY", "ASYNC"), "trl", "1.16.0", "2026-11-28"),
]


def newest() -> dict[str, str]:
    """Read the newest version that we know of each package: that of `make test-newest`, or that of ELSEWHERE."""
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", (REPOSITORY / ".ci" / "newest.txt").read_text(), re.MULTILINE)
    return dict(pins) | {package: version for package, (version, _) in ELSEWHERE.items()}


def number(version: str) -> list[int]:
    """Split a version into its numbers."""
    return [int(part) for part in re.findall(r"\d+", version)]


def outdated() -> list[str]:
    """Write a sentence for each fact that was read in an older version than the newest."""
    known = newest()
    return [
        f"{fact.module}: {', '.join(fact.names)} read in {fact.package} {fact.version} on {fact.day}; the newest is "
        f"{known[fact.package]}"
        for fact in FACTS
        if number(fact.version) < number(known[fact.package])
    ]


if __name__ == "__main__":
    print("\n".join(outdated()) or f"all {len(FACTS)} tables were read in the newest version that we know")
