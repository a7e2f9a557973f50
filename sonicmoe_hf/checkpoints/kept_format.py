"""What a checkpoint will hold that stays as the hub quantized it: tensors that nothing changes are copied bit for bit,
and of the others each is rounded to the same format again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from ..formats.hub_formats import HUB_FORMATS
from ..kernels.minifloat import has_e4m3_nan
from .dequantize import block_size
from .layouts import Named, assemble
from .packed import TRANSPOSED, part_views
from .plan import Planned, is_finite
from .requantize import Grid, dense, fp8_grid, mxfp4_grid, nvfp4_grid, requantize
from .roundings import Roundings
from .source import Source


class _Weight(NamedTuple):
    """A quantized weight: its name, the names of the tensors that stand for it, and of experts where it lies."""

    name: str
    stored: list[str]
    block: str | None = None
    named: Named | None = None


def plan_kept(source: Source, roundings: Roundings) -> list[Planned]:
    """The tensors of a checkpoint in the layout and the format of `source`, in the order of its files.

    Raises:
        CheckpointError: `source` is not quantized, or by this package, for training.
    """
    if source.quantization is None:
        raise CheckpointError(
            f"{source.folder} is not quantized, so there is no format to keep; leave quantize out, or give mxfp4 "
            "(gpt-oss) or fp8"
        )
    if source.packed_here:
        raise CheckpointError(
            f"{source.folder} was packed for training, in names that no engine reads; leave quantize out, and convert "
            "the result: sonicmoe-hf convert SRC DST --layout hub --quantize FORMAT"
        )
    weights = {weight.stored[0]: weight for weight in _quantized(source)}
    beside = {name for weight in weights.values() for name in weight.stored[1:]}
    unpacked = {
        n.name: (b, n) for b in source.expected.blocks for n in source.expert_tensors(b) if not _is_packed(source, n)
    }
    planned: list[Planned] = []
    for name in source.tensors:
        if name in weights and _is_changed(source, weights[name]):
            planned += _rounded(source, weights[name], roundings)
        elif name in weights:
            planned += [_copied(source, stored) for stored in weights[name].stored]
        elif name in unpacked and any(
            source.changes_part(unpacked[name][0], part) for part in unpacked[name][1].stored.parts
        ):
            planned.append(_dense_experts(source, *unpacked[name]))
        elif name not in beside:
            changed = source.changes(name)
            planned.append(_dense(source, name) if changed else _copied(source, name))
    return planned


def _is_packed(source: Source, named: Named) -> bool:
    return len(source.stored_names(named)) > 1


def _quantized(source: Source) -> Iterator[_Weight]:
    for block in source.expected.blocks:
        for named in source.expert_tensors(block):
            if _is_packed(source, named):
                yield _Weight(named.name, source.stored_names(named), block, named)
    ends = HUB_FORMATS[source.quantization].scales if source.quantization in HUB_FORMATS else ()
    for name in source.carried:
        stored = [name, *(name + end for end in ends if name + end in source.tensors)]
        if len(stored) > 1:
            yield _Weight(name, stored)


def _is_changed(source: Source, weight: _Weight) -> bool:
    if weight.named is None or weight.block is None:
        return source.changes(weight.name)
    return any(source.changes_part(weight.block, part) for part in weight.named.stored.parts)


def _copied(source: Source, name: str) -> Planned:
    header = source.tensors[name]
    return Planned(name, header.shape, header.dtype, lambda: source.stored(name), is_sound)


def is_sound(stored: torch.Tensor) -> bool:
    """Whether what is stored has no NaN or infinity; bytes show none."""
    if stored.dtype == torch.float8_e4m3fn:
        return not has_e4m3_nan(stored.view(torch.uint8))
    if stored.dtype == torch.float8_e8m0fnu:
        return not bool((stored.view(torch.uint8) == 255).any())
    return is_finite(stored) if stored.is_floating_point() else True


def _dense(source: Source, name: str) -> Planned:
    return Planned(name, source.shape_of(name), source.dtype_of(name), lambda: source.read(name))


def _dense_experts(source: Source, block: str, named: Named) -> Planned:
    dtype = source.dtype_of(named.name)
    return Planned(
        named.name,
        named.shape,
        dtype,
        lambda: assemble(named, dtype, lambda part, expert: source.part(block, part, expert)),
    )


def _rounded(source: Source, weight: _Weight, roundings: Roundings) -> Iterator[Planned]:
    """What stands for a changed weight; the tensors are asked for one after the other, and made together."""
    made: dict[str, torch.Tensor] = {}

    def make(name: str) -> torch.Tensor:
        if name not in made:
            made.update(_round(source, weight, roundings))
        return made.pop(name)

    for name in weight.stored:
        header = source.tensors[name]
        yield Planned(name, header.shape, header.dtype, partial(make, name), is_sound)


def _round(source: Source, weight: _Weight, roundings: Roundings) -> dict[str, torch.Tensor]:
    roundings.begin(weight.name)
    stored = {name: source.stored(name) for name in weight.stored}
    grid = _grid(source, weight, stored)
    codes, scales = (stored[name] for name in weight.stored[:2])
    if weight.named is None or weight.block is None:
        pairs: Iterable = [(Source.read(source, weight.name).float(), source.exact(weight.name), codes, scales)]
    elif weight.named.expert is None:
        pairs = (
            (
                *expert_matrices(source, weight.block, weight.named, expert, source.layout),
                codes[expert],
                scales[expert],
            )
            for expert in range(codes.shape[0])
        )
    else:
        pairs = [
            (*expert_matrices(source, weight.block, weight.named, weight.named.expert, source.layout), codes, scales)
        ]
    for before, exact, its_codes, its_scales in pairs:
        stands_for = dense(its_codes, its_scales, grid)  # `before` was rounded to bf16, the change was not
        exact = exact.sub_(before).add_(stands_for)
        rounded = requantize(exact, its_scales, grid)
        its_codes.copy_(rounded.codes)
        its_scales.copy_(rounded.scales)
        roundings.add(weight.name, stands_for, exact, rounded.values)
    return stored


def _grid(source: Source, weight: _Weight, stored: dict[str, torch.Tensor]) -> Grid:
    if source.quantization == "mxfp4":
        return mxfp4_grid()
    if source.quantization == "nvfp4":
        return nvfp4_grid(stored[weight.stored[2]].reshape(()))
    powers = source.hub_config["quantization_config"].get("scale_fmt") == "ue8m0"
    return fp8_grid(block_size(source.hub_config), stored[weight.stored[1]].dtype, powers)


def expert_matrices(
    source: Source, block: str, named: Named, expert: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert of the weight `named` of `layout`, [out, in] in fp32, as it is packed: without and with what `source`
    changes."""
    shape = named.shape if named.expert is not None else named.shape[1:]
    if named.expert is None and layout in TRANSPOSED:
        shape = shape[::-1]
    before, exact = torch.empty(shape), torch.empty(shape)
    for part, view in named.stored.parts.items():
        rows = view if named.expert is not None else part_views(layout, part, "mxfp4")[0]
        rows(before).copy_(Source.part(source, block, part, expert))
        rows(exact).copy_(source.part(block, part, expert))
    return before, exact
