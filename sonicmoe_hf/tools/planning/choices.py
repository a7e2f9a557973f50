"""The choice of the ways of training that are shown, their order, and the advice which to begin with."""

from __future__ import annotations

from .memory import GIB
from .sizes import ModelSizes
from .training import METHODS, RANK
from .ways import Way

NEAREST = ("bf16", "fp8", "nf4", "nvfp4", "int4", "uint4", "mxfp4")  # formats by the error of rounding to them
USUAL = ("fp8", "nf4")  # of those that plain experts can be packed in: the nearest, and the smallest


def choose_usual(sizes: ModelSizes, ways: list[Way]) -> list[Way]:
    """Leave out ways that pack experts in another format than the checkpoint's, or in one of plain experts beside USUAL;
    but not where those alone fit."""
    formats = {"bf16", *(USUAL if sizes.quantization is None else [sizes.quantization])}
    kept = [way for way in ways if way.training.experts in formats]
    packed = [way for way in ways if way.training.experts != "bf16"]
    return kept if any(way.fits for way in packed if way in kept) or not any(way.fits for way in packed) else ways


def choose_shown(ways: list[Way]) -> tuple[list[Way], list[Way]]:
    """Choose the ways to show: (of each kind the first way that fits; of kinds of which none fits, the smallest way). The
    way to begin with comes first, the others from all weights in fp32 to experts rounded the most."""
    ways = sorted(ways, key=_order)
    kinds: dict[str, list[Way]] = {}
    for way in ways:
        kinds.setdefault(way.kind, []).append(way)
    fitting = [fits[0] for kind in kinds.values() if (fits := [way for way in kind if way.fits])]
    too_large = [min(kind, key=lambda way: way.needed) for kind in kinds.values() if not any(w.fits for w in kind)]
    adapted = [way for way in fitting if not way.training.full]
    first = min(adapted or fitting, key=lambda way: way.memory.host, default=None)  # each step copies what is there
    return sorted(fitting, key=lambda way: way is not first), too_large


def _order(way: Way) -> tuple:
    """Order ways by what they train, and by how near to bf16 what they hold is."""
    training = way.training
    method, format = METHODS.index(training.method), NEAREST.index(training.experts)
    is_smaller = training.optimizer != "adam", training.linear != "bf16", training.r < RANK
    return method, format, training.weights != "fp32", is_smaller


def advise(fitting: list[Way]) -> str:
    """Say what the first of the ways that fit, as `choose_shown` orders them, trains, and what others do beside it."""
    training, host = fitting[0].training, fitting[0].memory.host
    trained = "all weights train"
    if not training.full:
        held = "in bf16, nothing rounded" if training.experts == "bf16" else f"in {training.experts.upper()}"
        trained = f"adapters of all experts, beside weights {held}"
    if host:
        trained += f", {host / GIB:.0f} GiB of them in host memory, from where each step copies them"
        trained += "; other ways copy more" * any(way.memory.host > host for way in fitting)
    rest = "; 2 trains all weights" if not training.full and any(way.training.full for way in fitting) else ""
    return f"To fine-tune, begin with 1: {trained}{rest}."
