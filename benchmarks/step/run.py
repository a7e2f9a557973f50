"""One model as a benchmark trains it: built, patched, with adapters, and checked before it is timed."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

import sonicmoe_hf
from benchmarks.common.contenders import Unavailable
from benchmarks.step import checking, models
from benchmarks.step.models import CONTENDERS, OURS
from benchmarks.step.training import ATTENTION, RANK, adapted


class Run(NamedTuple):
    """model, layers: one of MODELS, and how many of its layers. tokens: a step and GPU. mode: what is trained, as
    `adapted` takes it. contender: who computes the experts. attention: its implementation, None for the model's own.
    experts, linear: formats of packed experts and linear layers, None where they are in `weights`, the dtype of all
    others. rank, targets: of adapters."""

    model: str
    layers: int
    tokens: int
    mode: str
    contender: str = OURS
    attention: str | None = None
    experts: str | None = None
    linear: str | None = None
    weights: torch.dtype = torch.bfloat16
    checkpointing: bool = False
    rank: int = RANK
    targets: tuple[str, ...] = ATTENTION

    @property
    def is_ours(self) -> bool:
        return CONTENDERS[self.contender].implementation == "ours"


def bare(run: Run, options: argparse.Namespace, **packed):
    """The model of `run` before it is patched and adapted. options: as `models.build` takes them; packed: further ones of
    `random_packed_model`."""
    if run.experts is not None or run.linear is not None:
        packed |= {"experts": run.experts, "linear": run.linear}
    return models.build(
        run.model,
        run.layers,
        options,
        dtype=run.weights,
        implementation="grouped_mm" if run.is_ours else CONTENDERS[run.contender].implementation,
        packed=packed or None,
    )


def trained(model, run: Run):
    """A bare model as `run` trains it."""
    contender = CONTENDERS[run.contender]
    if run.attention is not None:
        model.set_attn_implementation(run.attention)
    if run.is_ours:
        sonicmoe_hf.patch_model(model, contender.routing, experts_compute=contender.compute)
    model = adapted(model, run.mode, run.rank, run.targets)
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def built(run: Run, options: argparse.Namespace):
    """The model as `run` trains it.

    Raises:
        Unavailable: the contender's package is not here, or it does not compute this model's experts.
    """
    models.check_available(run.contender)
    if run.experts is not None and not run.is_ours:
        raise Unavailable(f"{run.contender} has no packed experts")
    return trained(bare(run, options), run)


def check(runs: Sequence[Run], options: argparse.Namespace, autocast: bool) -> None:
    """Gradients of runs of one model and mode (checking.py), with linear layers in bf16; none of peers' kernels, which
    tune for minutes at each new shape, nor of FP8 products and rounded routing.

    Raises:
        SystemExit: a gradient is wrong.
    """
    tiny, others = argparse.Namespace(device=options.device, tiny=True), {}
    for run in runs:
        if run.is_ours or (run.contender == "grouped_mm" and run.experts is None):
            name = f"{CONTENDERS[run.contender].implementation}, {run.attention or 'its own'} attention"
            others[name] = functools.partial(trained, run=run._replace(contender=OURS) if run.is_ours else run)
    run = runs[0]._replace(layers=checking.LAYERS, contender=OURS, linear=None)
    checking.check(bare(run, tiny), lambda model: adapted(model, run.mode, run.rank, run.targets), others, autocast)
