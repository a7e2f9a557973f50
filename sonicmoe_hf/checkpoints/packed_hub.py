"""What a checkpoint will hold whose experts are packed in the hub's own layout, as engines and Transformers read it:
MXFP4 for gpt-oss, FP8 for families that have one tensor for each expert and projection. The rest stays dense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..errors import CheckpointError
from ..formats import HUB, PACKED
from ..kernels.quantized import FP8_BLOCK, Quantized, dequantize, quantize
from .kept_format import expert_matrices, is_sound
from .layouts import Named, assemble, holder, layer_tensors
from .packed import part_views, parts_of
from .plan import Planned, dense_tensor
from .roundings import Roundings
from .source import Source

FORMATS_OF = {"gpt_oss": "mxfp4", "per_expert": "fp8"}  # by the hub's layout
MXFP4_DENSE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def check_hub_format(source: Source, format: str) -> None:
    """Raise CheckpointError where the hub has no layout for this family's experts in the format, or `source` is quantized
    otherwise."""
    layout = source.family.hub_layout
    if format != FORMATS_OF.get(layout):
        raise CheckpointError(
            f"the hub has no layout for the experts of {source.family.name} in {format}, only for "
            f"{FORMATS_OF.get(layout, 'none')}; for training, --layout native packs in every format"
        )
    if source.quantization not in (None, format):
        raise CheckpointError(
            f"the experts would be packed as {format}, but are {source.quantization} already, and rounding twice loses "
            "more: keep that format, or convert the bf16 checkpoint"
        )
    for block, sizes in source.expected.blocks.items():
        if format == "fp8" and (sizes.hidden % FP8_BLOCK or sizes.intermediate % FP8_BLOCK):
            raise CheckpointError(
                f"the experts of {block} have sizes {sizes.hidden} and {sizes.intermediate}, of which not both are "
                f"multiples of {FP8_BLOCK}: Transformers takes other blocks where they are cut off; serve bf16"
            )


def quantization_config(source: Source, format: str) -> dict:
    """config.json's entry for such a checkpoint."""
    if format == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": MXFP4_DENSE}
    dense = {
        source.model_name(name).removesuffix(".weight")
        for name in source.carried  # layers for multi-token prediction are among them, with experts of their own
        if name.endswith(".weight") and len(source.shape_of(name)) == 2
    }
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted(dense | {"lm_head"}),
    }


def plan_packed_hub(source: Source, format: str, roundings: Roundings) -> list[Planned]:
    """The tensors, in the order of the source's files; weights that are packed in the format already keep their blocks
    where nothing changes them."""
    check_hub_format(source, format)
    block_of = {
        name: block
        for block in source.expected.blocks
        for named in source.expert_tensors(block)
        for name in (named.name, *source.weights[named.name])
    }
    carried, done = set(source.carried), set()
    planned: list[Planned] = []
    for name in source.tensors:
        if name in carried:
            planned.append(dense_tensor(source, name))
        elif name in block_of and block_of[name] not in done:
            done.add(block_of[name])
            planned += _experts(source, block_of[name], format, roundings)
    return planned


def _experts(source: Source, block: str, format: str, roundings: Roundings) -> Iterator[Planned]:
    layout = source.family.hub_layout
    for named in layer_tensors(layout, block, source.expected.blocks[block]):
        if named.stored.is_bias:
            stored = holder(source.layout, next(iter(named.stored.parts)))
            dtype = source.dtype_of(f"{block}.{stored.name}")
            yield Planned(named.name, named.shape, dtype, _bias(source, block, named, dtype))
        else:
            yield from _packed(source, block, named, format, roundings)


def _bias(source: Source, block: str, named: Named, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: assemble(named, dtype, lambda part, expert: source.part(block, part, expert))


def _packed(source: Source, block: str, named: Named, format: str, roundings: Roundings) -> Iterator[Planned]:
    """What stands for one weight; the tensors are asked for one after the other, and made together."""
    made: dict[str, torch.Tensor] = {}
    shells = _shells(source, block, named, format)

    def make(name: str) -> torch.Tensor:
        if name not in made:
            made.update(zip(shells, _pack(source, block, named, format, roundings, list(shells.values()))))
        return made.pop(name)

    for name, shell in shells.items():
        yield Planned(name, tuple(shell.shape), shell.dtype, partial(make, name), is_sound)


def _shells(source: Source, block: str, named: Named, format: str) -> dict[str, torch.Tensor]:
    """By name, tensors on the meta device like those that will stand for the weight."""
    if format == "mxfp4":
        parts = parts_of(named.name, named.shape, PACKED[format], source.family.hub_layout)
        return {part.name: torch.empty(part.shape, dtype=part.dtypes[0], device="meta") for part in parts}
    rows, columns = named.shape
    kept = _is_kept(source, block, named, format) and source.stored_dtype(block, named, 1) == torch.uint8
    scales = torch.empty(
        rows // FP8_BLOCK,
        columns // FP8_BLOCK,
        dtype=torch.float8_e8m0fnu if kept else torch.float32,
        device="meta",
    )
    weight = torch.empty(named.shape, dtype=torch.float8_e4m3fn, device="meta")
    return {named.name: weight, named.name + HUB["fp8"].scales[0]: scales}


def _is_kept(source: Source, block: str, named: Named, format: str) -> bool:
    """Whether all that the weight holds is packed in this format, and not changed."""
    experts = range(source.expected.blocks[block].num_experts) if named.expert is None else [named.expert]
    needed = {
        f"{block}.{holder(source.layout, part).name.format(expert=expert)}"
        for part in named.stored.parts
        for expert in experts
    }
    changed = any(source.changes_part(block, part) for part in named.stored.parts)
    return not changed and all(source.is_kept(name, format) for name in needed)


def _pack(
    source: Source, block: str, named: Named, format: str, roundings: Roundings, shells: list[torch.Tensor]
) -> list[torch.Tensor]:
    made = [torch.empty(shell.shape, dtype=shell.dtype) for shell in shells]
    changed = any(source.changes_part(block, part) for part in named.stored.parts)
    kept = _is_kept(source, block, named, format)
    if changed:
        roundings.begin(named.name)
    experts = range(made[0].shape[0]) if named.expert is None else [named.expert]
    for place, expert in enumerate(experts):
        own = [tensor[place] if named.expert is None else tensor for tensor in made]
        if kept:
            _move(source, block, named, format, expert, own)
            continue
        before, exact = expert_matrices(source, block, named, expert, source.family.hub_layout)
        packed = _quantized(exact, format, named.name)
        for tensor, stored in zip(own, packed):
            if stored is not None:
                tensor.copy_(stored[0].view(tensor.dtype).view(tensor.shape))
        if changed:
            rounded = dequantize(packed, format, torch.float32)[0]
            roundings.add(named.name, before, exact, rounded)
    return made


def _quantized(matrix: torch.Tensor, format: str, name: str) -> Quantized:
    try:
        return quantize(matrix[None], format, "whole")
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}; nothing is written") from error


def _move(source: Source, block: str, named: Named, format: str, expert: int, own: list[torch.Tensor]) -> None:
    """One expert's codes and scales as they are."""
    for part in named.stored.parts:
        stored = source.packed_parts_of(block, part, expert)
        layout = source.family.hub_layout
        views = part_views(layout, part, format) if named.expert is None else (_same, _same, _same)
        for view, tensor, values in zip(views, own, stored):
            view(tensor).copy_(values.view(tensor.dtype))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
