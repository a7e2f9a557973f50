"""One model as a benchmark trains it: built, patched, with adapters, checked before it is timed, and on several ranks."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import sonicmoe_hf
from benchmarks.common.contenders import Unavailable
from benchmarks.step import checking, models
from benchmarks.step.models import CONTENDERS, MODELS, OURS
from benchmarks.step.training import ATTENTION, RANK, adapt
from sonicmoe_hf.tools.random_models import random_packed_model


class Run(NamedTuple):
    """A benchmark's training of one model, by one mode and contender.

    model, layers: one of MODELS, and how many of its layers. tokens: of a step and GPU. mode: the weights that are
    trained, as `adapt` takes it. contender: the one who computes the experts. attention: its implementation, None for
    the model's own. experts, linear: formats of packed experts and linear layers, None where they are in bf16 as all
    others. rank, targets: of adapters, None for the whole attention.
    """

    model: str
    layers: int
    tokens: int
    mode: str
    contender: str = OURS
    attention: str | None = None
    experts: str | None = None
    linear: str | None = None
    checkpointing: bool = False
    rank: int = RANK
    targets: tuple[str, ...] | None = ATTENTION

    @property
    def is_ours(self) -> bool:
        return CONTENDERS[self.contender].implementation == "ours"


def build_base(run: Run, options: argparse.Namespace, **packed):
    """Build the model of `run` with random weights, in training mode, before `prepare`.

    Args:
        options: the script's: device, tiny, and where it has them the settings of `models.add_settings`; sizes: in
            place of the model's; expert_parallel: whether the ranks share the experts.
        packed: further options of `random_packed_model`, which makes models of which some is packed.
    """
    is_shared = getattr(options, "expert_parallel", False)
    if run.experts is not None or run.linear is not None or is_shared:
        packed |= {"experts": run.experts, "linear": run.linear}
    if is_shared:
        world = torch.distributed.get_world_size()
        packed["distributed_config"] = DistributedConfig(
            fsdp_size=world, ep_size=world, ep_implementation="sonicmoe_hf"
        )
    config = models.config_of(run.model, run.layers, options.tiny, **getattr(options, "sizes", {}))
    chosen = {"dtype": torch.bfloat16, "attn_implementation": MODELS[run.model].attention}
    torch.manual_seed(0)
    if packed:
        model = random_packed_model(config, device=options.device, **packed, **chosen)
    else:
        implementation = "grouped_mm" if run.is_ours else CONTENDERS[run.contender].implementation
        with torch.device(options.device):
            model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation, **chosen)
    models.apply_settings(run.model, model, options, run.tokens)
    return model.train()


def prepare(model, run: Run):
    """Patch and adapt the model of `build_base` as `run` trains it."""
    contender = CONTENDERS[run.contender]
    if run.attention is not None:
        model.set_attn_implementation(run.attention)
    if run.is_ours:
        sonicmoe_hf.patch_model(model, contender.routing, experts_compute=contender.compute)
    model = adapt(model, run.mode, run.rank, run.targets)
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def build_prepared(run: Run, options: argparse.Namespace):
    """Build the model of `run`, and prepare it.

    Raises:
        Unavailable: the contender's package is not here, or it does not compute this model's experts.
    """
    models.check_available(run.contender)
    if run.experts is not None and not run.is_ours:
        raise Unavailable(f"{run.contender} has no packed experts")
    return prepare(build_base(run, options), run)


def compile_as(model, execution: str | None, **options):
    """Compile the model for an execution.

    Args:
        execution: None or "eager", for nothing; "layers", for each decoder layer by itself; or a mode of torch.compile,
            for the whole model.
        options: of torch.compile.
    Returns:
        what a step is to call.
    """
    if execution == "layers" and torch.distributed.is_initialized():  # ranks may share experts
        sonicmoe_hf.compile_layers(model, **options)
        return model
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None  # undoes Module.compile, for which torch has no function
        if execution == "layers":
            layer.compile(**options)
    return model if execution in (None, "eager", "layers") else torch.compile(model, mode=execution, **options)


def decoder_layers(model):
    return [module for module in model.modules() if "DecoderLayer" in type(module).__name__]


def check(runs: Sequence[Run], options: argparse.Namespace, autocast: bool) -> None:
    """Check gradients of runs of one model and mode (checking.py), with linear layers in bf16; none of peers' kernels,
    which tune for minutes at each new shape, nor of FP8 products and rounded routing.

    Raises:
        SystemExit: a gradient is wrong.
    """
    tiny, others = argparse.Namespace(device=options.device, tiny=True), {}
    for run in runs:
        if run.is_ours or (run.contender == "grouped_mm" and run.experts is None):
            name = f"{CONTENDERS[run.contender].implementation}, {run.attention or 'its own'} attention"
            others[name] = functools.partial(prepare, run=run._replace(contender=OURS) if run.is_ours else run)
    run = runs[0]._replace(layers=checking.LAYERS, contender=OURS, linear=None)
    checking.check(
        build_base(run, tiny), lambda model: adapt(model, run.mode, run.rank, run.targets), others, autocast
    )


def join_ranks(device: str) -> tuple[int, int]:
    """Read (this rank, how many there are), as torchrun says; one alone without it."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29571"}
    os.environ.update(alone | os.environ)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = torch.distributed.get_rank()
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - one rank speaks, until the end of the process
    return rank, torch.distributed.get_world_size()


def shard(model) -> None:
    """Shard by FSDP2 over all ranks, a unit a layer and one for the rest."""
    for layer in model.base_model.layers:
        fully_shard(layer)
    fully_shard(model)
