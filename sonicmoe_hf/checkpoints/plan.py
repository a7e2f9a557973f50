"""What a converted checkpoint will hold, tensor by tensor, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from ..formats import PACKED
from ..layer.config import check_choice
from .layouts import Named, assemble, holder, layer_tensors
from .packed import Quantizer, part_views, parts_of
from .source import Source

TARGETS = ("native", "hub")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return bool(torch.isfinite(tensor).all())


def finite_bounds(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is finite in `dtype`, without a temporary of the tensor's size: rounding keeps the order."""
    return is_finite(torch.stack(torch.aminmax(tensor)).to(dtype))


class Planned(NamedTuple):
    """A tensor to be written: its name, shape and dtype, how it is made, and whether the values that it stands for are
    finite."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]
    is_finite: Callable[[torch.Tensor], bool] = is_finite

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def target_layout(source: Source, target: str) -> str:
    """The name in CHECKPOINT_LAYOUTS of "native" or "hub" for this checkpoint's family."""
    check_choice("layout", target, TARGETS)
    return "native" if target == "native" else source.family.hub_layout


def plan(
    source: Source, target: str, dtype: torch.dtype | None = None, quantizer: Quantizer | None = None
) -> list[Planned]:
    """The tensors of the converted checkpoint, in the order of the source's files.

    Args:
        source: the opened checkpoint. target: "native" or "hub". dtype: to cast to; None keeps what is stored.
        quantizer: packs the experts' weights. None keeps dense ones, and makes packed ones dense.
    Raises:
        CheckpointError: the experts of a layer differ in dtype, are packed in another format than the quantizer's, or
            have rows that it does not take.
    """
    layout = target_layout(source, target)
    block_of: dict[str, str] = {}
    for block in source.expected.blocks:
        for named in source.expert_tensors(block):
            block_of[named.name] = block
            block_of.update(dict.fromkeys((part.name for part in source.packed_parts(named)), block))
    carried, planned, done = set(source.carried), [], set()
    for name in source.tensors:
        if name in carried:
            planned.append(dense_tensor(source, name, dtype))
        elif name in block_of and block_of[name] not in done:
            done.add(block_of[name])
            planned += _experts_of(source, block_of[name], layout, dtype, quantizer)
    return planned


def dense_tensor(source: Source, name: str, dtype: torch.dtype | None = None) -> Planned:
    """A tensor outside the experts as it is, dequantized where it is quantized."""
    kept = source.dtype_of(name)
    cast = kept.is_floating_point and not source.expected.keep_fp32.intersection(name.split("."))
    wanted = dtype if cast and dtype is not None else kept
    return Planned(
        source.model_name(name),
        source.shape_of(name),
        wanted,
        lambda: _in_range(source.read(name), wanted, name).to(wanted),
    )


def _in_range(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """`tensor`, whose finite values stay finite in `dtype`.

    Raises:
        CheckpointError: some do not.
    """
    if torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max or finite_bounds(tensor, dtype):
        return tensor
    finite = tensor[tensor.isfinite()]
    if finite.numel() and not finite_bounds(finite, dtype):
        raise CheckpointError(
            f"{name} has values up to {finite.abs().max().item():.3g}, which are infinite in {dtype}; cast to bfloat16 "
            "or float32"
        )
    return tensor


def _experts_of(
    source: Source, block: str, layout: str, dtype: torch.dtype | None, quantizer: Quantizer | None
) -> Iterator[Planned]:
    sizes = source.expected.blocks[block]
    for named in layer_tensors(layout, block, sizes):
        experts = range(sizes.num_experts) if named.expert is None else [named.expert]
        needed = {
            f"{block}.{holder(source.layout, part).name.format(expert=expert)}"
            for part in named.stored.parts
            for expert in experts
        }
        packs = None if named.stored.is_bias else quantizer
        if packs is not None and all(source.is_kept(name, packs.format) for name in needed):
            yield from _moved(source, block, named, packs)
            continue
        dtypes = {name: source.dtype_of(name) for name in sorted(needed)}
        if dtype is None and len(set(dtypes.values())) > 1:
            first, other = next((a, b) for a in dtypes for b in dtypes if dtypes[a] != dtypes[b])
            raise CheckpointError(
                f"{first} is {dtypes[first]}, {other} is {dtypes[other]}: {named.name} needs one dtype; give dtype="
            )
        wanted = dtype or next(iter(dtypes.values()))
        make = _assembler(source, block, named, wanted)
        if packs is None:
            yield Planned(named.name, named.shape, wanted, make)
        else:
            for part, make_part in packs.parts(named, make):
                yield Planned(part.name, part.shape, part.dtypes[0], make_part)


def _moved(source: Source, block: str, named: Named, quantizer: Quantizer) -> Iterator[Planned]:
    """A packed weight in native order, its blocks as they are."""
    if source.quantization != quantizer.format:
        raise CheckpointError(
            f"{named.name} would be packed as {quantizer.format}, but is {source.quantization} already, and rounding "
            "twice loses more: keep that format, or convert the bf16 checkpoint"
        )
    if quantizer.format == "nf4":
        raise CheckpointError(
            f"{source.folder} is packed as nf4 already; from_pretrained loads it as it is (NF4's scales have scales of "
            "256 neighbouring blocks, which cannot be put into another order)"
        )
    for place, part in enumerate(parts_of(named.name, named.shape, PACKED[quantizer.format], "native")):
        dtype = source.stored_dtype(block, named, place) or part.dtypes[0]

        def make(place=place, part=part, dtype=dtype):
            tensor = torch.empty(part.shape, dtype=dtype)
            for expert in range(tensor.shape[0]):
                for row_part in named.stored.parts:
                    own = part_views("native", row_part, quantizer.format)[place](tensor[expert])
                    own.copy_(source.packed_parts_of(block, row_part, expert)[place])
            return tensor

        finite = is_finite if place == 0 else lambda scales: _is_finite_dense(source, block, named)
        yield Planned(part.name, part.shape, dtype, make, finite)


def _is_finite_dense(source: Source, block: str, named: Named) -> bool:
    """Whether the values of a packed weight are finite, which its bytes do not show."""
    experts = range(source.expected.blocks[block].num_experts)
    return all(is_finite(source.part(block, part, expert)) for expert in experts for part in named.stored.parts)


def _assembler(source: Source, block: str, named: Named, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    def read(part: str, expert: int) -> torch.Tensor:
        return _in_range(source.part(block, part, expert), dtype, f"{part} of expert {expert} of {block}")

    return lambda: assemble(named, dtype, read)
