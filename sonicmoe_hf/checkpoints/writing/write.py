"""Write a checkpoint that a `Target` describes, file after file: the folder appears whole or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from ...formats.declared import MODELOPT_FILE
from ..reading.files import CONFIG_FILE, INDEX_FILE
from .atomic_folder import appearing_whole, copy_file, save_tensors, write_json
from .companions import companions
from .model_card import Origin, add_card
from .output import OutputTensors, shell
from .rounding_effects import LayerRounding
from .targets import Target

ALIGNED = 64  # bytes


class Conversion(NamedTuple):
    """A new checkpoint.

    path: the new checkpoint. family, source_layout, target_layout: names of NATIVE_FAMILIES and of `detect_layout`.
    tensors, nbytes, shards: what was written. notices: what else a user should know, in sentences. roundings: what
    rounding to the result's format did to a merged adapter's changes, layer by layer.
    """

    path: Path
    family: str
    source_layout: str
    target_layout: str
    tensors: int
    nbytes: int
    shards: int
    notices: list[str]
    roundings: list[LayerRounding]


def write_checkpoint(
    target: Target,
    dst: Path,
    origin: Origin,
    max_shard_size: int | str,
    verify: bool,
    on_progress: Callable[[int, int], None] | None,
) -> Conversion:
    """Write `target`, with the files that lie beside the weights it is made of, and its model card; see
    `convert_checkpoint`."""
    stored, output, notices = target.output.stored, target.output, target.notices
    tensors = output.tensors()
    own = {header.file for header in stored.tensors.values()} | {CONFIG_FILE, INDEX_FILE}
    if not output.keeps_format:
        own.add(MODELOPT_FILE)
    beside = companions(stored.folder, own, target.adapter)
    shards = _shards(tensors, max_shard_size)
    nbytes = sum(each.nbytes for each in tensors)
    progress = _Progress(nbytes * (1 + verify), on_progress)
    with appearing_whole(dst, nbytes, list(beside.sources), len(shards)) as folder:
        _write_shards(folder, shards, verify, progress)
        write_json(folder / CONFIG_FILE, target.config)
        for file, source in beside.sources.items():
            copy_file(source, folder / file)
        stored.close()
        notices = notices + beside.notices + output.roundings.notices()
        add_card(folder, dst.name, origin, _format_of(target), notices)
    return Conversion(
        dst,
        *target[:3],
        sum(len(each.shells) for each in tensors),
        nbytes,
        len(shards),
        notices,
        output.roundings.layers(),
    )


def _format_of(target: Target) -> str:
    """Describe a checkpoint that is written."""
    layout = "Transformers' and the engines'" if target.target_layout != "native" else "sonicmoe_hf's native"
    if target.output.keeps_format:  # which another file than config.json may declare
        format = target.output.stored.quantization
    else:
        declared = target.config.get("quantization_config") or {}
        format = declared.get("experts") or declared.get("quant_method")
    return f"{layout} layout, {'dense' if format is None else f'experts in {format}'}"


def _shards(tensors: list[OutputTensors], max_shard_size: int | str) -> dict[str, list[OutputTensors]]:
    """Choose files: their names and what they will hold. Tensors that are made together are in one file."""
    size = int(max_shard_size) if str(max_shard_size).isdigit() else max_shard_size
    by_name = {next(iter(each.shells)): each for each in tensors}
    whole = {name: shell((each.nbytes,), torch.uint8) for name, each in by_name.items()}
    files = split_torch_state_dict_into_shards(whole, max_shard_size=size).filename_to_tensors
    return {file: [by_name[name] for name in names] for file, names in files.items()}


class _Progress:
    def __init__(self, total: int, on_progress):
        self.total, self.done, self.on_progress = total, 0, on_progress

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


def _write_shards(folder: Path, shards: dict[str, list[OutputTensors]], verify: bool, progress: _Progress) -> None:
    shells = {file: {n: s for each in own for n, s in each.shells.items()} for file, own in shards.items()}
    starts = {file: _starts(list(own.values())) for file, own in shells.items()}
    memory = torch.empty(max(of_file[-1] for of_file in starts.values()), dtype=torch.uint8, device="cpu")
    for file, own in shards.items():
        tensors = {
            name: _place(like, memory[start:]) for (name, like), start in zip(shells[file].items(), starts[file])
        }
        for each in own:
            each.fill([tensors[name] for name in each.shells])
            progress.add(each.nbytes)
        save_tensors(folder / file, tensors, verify)
        progress.add(verify * sum(each.nbytes for each in own))
    if len(shards) > 1:
        weight_map = {name: file for file, own in shells.items() for name in own}
        total = sum(each.nbytes for own in shards.values() for each in own)
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _starts(shells: list[torch.Tensor]) -> list[int]:
    """Choose where in one block of memory tensors begin, and where the last one ends. Made one by one, they would stand
    between temporaries, and the holes that those leave take as much again."""
    return list(itertools.accumulate((-(-shell.nbytes // ALIGNED) * ALIGNED for shell in shells), initial=0))


def _place(like: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return memory[: like.nbytes].view(like.dtype).view(like.shape)
