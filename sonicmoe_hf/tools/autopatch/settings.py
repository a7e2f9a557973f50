"""The settings of `sonicmoe-hf run`. Its process and the children of its program read it from one environment
variable."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ...layer.config import ROUNDINGS, TokenRounding

RUN_VARIABLE = "SONICMOE_HF_RUN"
ROUTINGS = ("top_k", "token_rounding", *ROUNDINGS)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings. routing, tile: of training, "token_rounding" being "nearest". save: what layers keep for backward.
    experts_quantization: how from_pretrained holds experts. adapt_experts: the rank of LoRA on experts that is added to
    the program's LoRA, or None. compile: whether Trainers compile each layer, as with their `torch_compile=True`."""

    routing: str = "top_k"
    tile: int | None = None
    save: str = "preactivation"
    experts_quantization: str | None = None
    adapt_experts: int | None = None
    compile: bool = False

    def __post_init__(self):
        if self.tile is not None and self.routing == "top_k":
            raise ValueError("--tile is of token rounding; add --routing, such as --routing nearest")

    def policy(self) -> TokenRounding | None:
        """Make the routing policy that models are patched with; None for top-k."""
        if self.routing == "top_k":
            return None
        rounding = "nearest" if self.routing == "token_rounding" else self.routing
        return TokenRounding(rounding=rounding, tile=self.tile)

    def as_variable(self) -> str:
        """Write the settings as RUN_VARIABLE's value, which counts for the Pythons of this environment alone."""
        return json.dumps({"prefix": sys.prefix, **asdict(self)})


def from_environment(environment: Mapping[str, str] = os.environ) -> RunSettings:
    """Read the settings that a `sonicmoe-hf run` left to this process."""
    entries = json.loads(environment[RUN_VARIABLE])
    del entries["prefix"]
    return RunSettings(**entries)
