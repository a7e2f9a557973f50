"""The names that PEFT gives to what it wraps, and those by which a config tells it what to adapt.

PEFT wraps a module once for every parameter of it that is adapted, the first one innermost, so
"experts.base_layer.lora_A" is the first of two and "experts.lora_A" the second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# target_modules that PEFT takes, in some families, for the experts and the router of checkpoints where they were layers
TAKEN_FOR_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
PREFIX = "base_model.model."
ROUTERS = {"gate", "router"}
KEY = re.compile(r"^(?P<module>.+?)\.(?P<depth>(?:base_layer\.)*)lora_(?P<side>[AB])(?:\.default)?\.weight$")
WRAPPER = re.compile(r"\.base_layer(?=\.|$)")  # what PEFT's wrappers call what is inside them


def without_base_layer(name: str) -> str:
    """Restore the name that a module or parameter had before PEFT wrapped anything."""
    return WRAPPER.sub("", name)


def is_in_router(name: str) -> bool:
    """Tell whether a module is a router, or in one: Gemma 4's router.proj, HunYuan's gate.wg."""
    return not ROUTERS.isdisjoint(name.split("."))


def is_target_parameter(name: str, config: dict) -> bool:
    """Tell whether target_parameters names the parameter `name`."""
    return any(f".{name}".endswith(f".{target}") for target in config.get("target_parameters") or ())


class Names:
    """Names of modules in a config: a regular expression of whole names, or a list of names and of endings."""

    def __init__(self, given: str | list[str] | None):
        self._pattern = given if isinstance(given, str) else None
        self._endings = set() if isinstance(given, str) else set(given or ())

    def __contains__(self, name: str) -> bool:
        if self._pattern is not None:
            return re.fullmatch(self._pattern, name) is not None
        words = name.split(".")
        return any(".".join(words[start:]) in self._endings for start in range(len(words)))


def endings(names: Iterable[str], everything: Iterable[str], lengths: tuple[int, ...]) -> list[str]:
    """Shorten `names` for PEFT's config: each to its shortest ending of one of these lengths, in words between dots,
    that no other name in `everything` has, or else not at all."""
    wanted, chosen = dict.fromkeys(names), dict[str, str]()
    others = [name for name in everything if name not in wanted]
    for length in reversed(lengths):
        taken = {_ending(name, length) for name in others}
        chosen |= {name: _ending(name, length) for name in wanted if _ending(name, length) not in taken}
    return list(dict.fromkeys(chosen.get(name, name) for name in wanted))


def _ending(name: str, length: int) -> str:
    return ".".join(name.split(".")[-length:])
