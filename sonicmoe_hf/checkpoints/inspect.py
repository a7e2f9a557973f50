"""inspect_checkpoint: what a checkpoint is, and what conversion would make of it, from headers alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from .convert import Target, target_of
from .hub import local_folder
from .layouts import CHECKPOINT_LAYOUTS
from .plan import TARGETS
from .source import Source


class Inspection(NamedTuple):
    """What a checkpoint is.

    folder: where it is. family, layout: names of NATIVE_FAMILIES and CHECKPOINT_LAYOUTS; description: the layout in
    words.
    quantization: "nf4", "mxfp4", "nvfp4", "fp8" or None. dtypes: bytes per stored dtype. parameters, nbytes, files: in
    all. expert_parameters: how many of the parameters are experts' weights, biases left out; expert_nbytes: what stores
    them, scales included.
    layers, num_experts, hidden_size, intermediate_size: of the experts (the first layer's).
    conversions: for each target, what would be written.
    """

    folder: Path
    family: str
    layout: str
    description: str
    quantization: str | None
    dtypes: dict[str, int]
    parameters: int
    nbytes: int
    files: int
    layers: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    expert_parameters: int
    expert_nbytes: int
    conversions: dict[str, str]

    @property
    def bytes_per_expert_weight(self) -> float:
        """Stored for one weight of the experts, in the mean, scales included: 2 in bf16, 1.0002 in FP8."""
        return self.expert_nbytes / self.expert_parameters


def inspect_checkpoint(src: str | os.PathLike, revision: str | None = None) -> Inspection:
    """What the checkpoint in a folder or on the hub is, and what conversion would make of it; reads headers only.

    Raises:
        CheckpointError: as convert_checkpoint.
    """
    source = Source(local_folder(src, revision))
    dtypes: dict[str, int] = {}
    for header in source.tensors.values():
        name = str(header.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + header.nbytes
    conversions = {layout: target_of(source, layout) for layout in TARGETS}
    sizes = next(iter(source.blocks.values()))
    expert_parameters, expert_nbytes = _experts_weights(source)
    return Inspection(
        folder=source.folder,
        family=source.family.name,
        layout=source.layout,
        description=CHECKPOINT_LAYOUTS[source.layout],
        quantization=source.quantization,
        dtypes=dtypes,
        parameters=sum(tensor.like.numel() for tensor in conversions["native"].rewriting.plan()),
        nbytes=sum(dtypes.values()),
        files=len({header.file for header in source.tensors.values()}),
        layers=len(source.blocks),
        num_experts=sizes.num_experts,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        expert_parameters=expert_parameters,
        expert_nbytes=expert_nbytes,
        conversions={layout: _outlook(source, target) for layout, target in conversions.items()},
    )


def _experts_weights(source: Source) -> tuple[int, int]:
    """Of the experts' weights, biases left out: (how many values, the bytes that store them)."""
    stored = [name for name, target in source.targets.items() if source.is_experts(target)]
    values = sum(torch.Size(source.groups[source.targets[name]].shapes[name]).numel() for name in stored)
    return values, sum(source.tensors[part].nbytes for name in stored for part in source.weights[name].parts)


def _outlook(source: Source, target: Target) -> str:
    """What converting to this target would do, in words."""
    if target.target_layout == source.layout and source.quantization is None:
        return "already in this layout"
    planned = target.rewriting.plan()
    nbytes = sum(tensor.like.nbytes for tensor in planned)
    experts = [tensor for tensor in planned if ".experts." in tensor.name]
    words = (
        f"{len(source.tensors)} tensors become {len(planned)}, {len(experts)} of them experts', {nbytes / 1e9:.2f} GB"
    )
    dtype = str(source.dense_dtype).removeprefix("torch.")
    return words if source.quantization is None else f"{words}; {source.quantization} weights become {dtype}"
