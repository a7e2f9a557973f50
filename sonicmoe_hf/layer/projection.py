"""Projections of experts: the two products of a layer, from `moe_experts` to the kernels.

Letters: E experts, r an adapter's rank, J the rank padded to a multiple of 8 (16 bytes in bf16, which the GPU's copy
engine asks for).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..kernels.interface import Backend, LoraTerm, PackedOperand, Rows
from ..kernels.low_rank import a_by_expert, b_by_expert, by_expert, swapped
from ..kernels.packed import FORMATS, Quantized
from .packed_weight import PackedWeight

RANK_MULTIPLE = 8


class LowRank(NamedTuple):
    """An adapter of a weight: expert e computes with W_e + scale * B_e A_e, which is never formed.

    a: [E, r, in], b: [E, out, r], of any float dtype and any strides, with `out` in the order of the weight's own rows.
    Or both as PEFT stores them: a [r*E, in] with the expert slowest, b [out, r*E] with the expert fastest.
    Gradients are summed in fp32 and arrive in a's and b's dtype.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


class Projection(NamedTuple):
    """One of a layer's two products: its weight as it is held, its bias, its adapter.

    weight, scales, state, format: of a packed weight, the codes and its other tensors (kernels/packed), which
        have no gradient; of a dense one, itself, None, None and "".
    a, b, scale: LowRank's, or None, None, 1.0. `prepare_adapters` brings a and b into the kernels' form.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    state: torch.Tensor | None = None
    format: str = ""
    bias: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0

    def requires_grad(self) -> bool:
        """Tell whether one of its tensors does."""
        return any(t is not None and t.requires_grad for t in (self.weight, self.bias, self.a, self.b))

    def quantized(self) -> Quantized:
        """List the tensors of the packed weight."""
        return Quantized(self.weight, self.scales, self.state)  # type: ignore[arg-type]

    def logical_shape(self) -> tuple[int, int, int]:
        """Compute (E, out, in) of the packed weight."""
        return FORMATS[self.format].shape(self.quantized())

    def operand(self) -> PackedOperand:
        """Describe the packed weight as the kernels take it."""
        return PackedOperand(self.weight, self.scales, self.state, self.format)  # type: ignore[arg-type]

    def dequantize(self, kernels: Backend, dtype: torch.dtype, rows: Rows) -> torch.Tensor:
        """Expand the packed weight to [E, out, in]."""
        return kernels.dequantize(self.weight, self.scales, self.state, self.format, dtype, rows)

    def term(self, shrunk_PJ: torch.Tensor) -> LoraTerm:
        """Make the term that a prepared adapter adds to the product with W."""
        assert self.b is not None
        return LoraTerm(shrunk_PJ, self.b)

    def transposed_term(self, shrunk_PJ: torch.Tensor | None) -> LoraTerm:
        """Make the term that a prepared adapter adds to the product with W^T."""
        assert self.a is not None and shrunk_PJ is not None
        return LoraTerm(shrunk_PJ, self.a.mT)


def projection(
    name: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    adapter: LowRank | Sequence[LowRank] | None,
    transposed: bool,
) -> Projection:
    """Take a weight with its bias and its adapter, or several adapters as one.

    Raises:
        ValueError: the adapter does not fit the weight, or the weight is not packed in this layout.
    """
    a, b, scale = None, None, 1.0
    if adapter:
        adapter = side_by_side(adapter, weight.shape[0])
        shape_EON = weight.shape[:1] + weight.shape[:0:-1] if transposed else weight.shape
        check_low_rank(f"{name}_adapter", adapter, shape_EON, weight.device)
        a, b, scale = adapter.a, adapter.b, adapter.scale
    if not isinstance(weight, PackedWeight):
        return Projection(weight, bias=bias, a=a, b=b, scale=scale)
    if weight.is_transposed != transposed:
        raise ValueError(
            f"{name} is packed from a weight that is {'' if weight.is_transposed else 'not '}stored transposed, which "
            "`layout` contradicts; quantize it in the layout that it is used in"
        )
    # no property: torch.compile traces attributes. Nor _replace, which torch 2.11 cannot trace
    return Projection(
        weight.codes,
        scales=weight.scales,
        state=weight.state,
        format=weight.format,
        bias=bias,
        a=a,
        b=b,
        scale=scale,
    )


def side_by_side(adapter: LowRank | Sequence[LowRank], num_experts: int) -> LowRank:
    """Join several adapters into one of all their ranks, in fp32 (fp64, if one is), with their scales in b."""
    if isinstance(adapter, LowRank):
        return adapter
    if len(adapter) == 1:
        return adapter[0]
    factors = (factor for one in adapter for factor in (one.a, one.b))
    dtype = functools.reduce(torch.promote_types, (factor.dtype for factor in factors), torch.float32)
    views = [by_expert(one.a, one.b, num_experts) for one in adapter]
    b = torch.cat([b.to(dtype) * one.scale for one, (_, b) in zip(adapter, views)], dim=2)
    return LowRank(torch.cat([a.to(dtype) for a, _ in views], dim=1), b)


def check_low_rank(name: str, adapter: LowRank, shape_EON: torch.Size, device: torch.device) -> None:
    """Raise ValueError where `adapter` does not fit the weight, whose logical view [E, out, in] has this shape."""
    num_experts, size_out, size_in = shape_EON
    a, b = adapter.a, adapter.b
    for side, factor in (("a", a), ("b", b)):
        if factor.device != device:
            raise ValueError(
                f"{name}.{side} is on {factor.device} but its weight is on {device}; move them to one device"
            )
    if a.dim() == 2 and b.dim() == 2:
        columns = a.shape[0]
        fits = columns and columns % num_experts == 0 and (a.shape[1], *b.shape) == (size_in, size_out, columns)
    else:
        rank = a.shape[1] if a.dim() == 3 else 0
        fits = rank and (a.shape, b.shape) == ((num_experts, rank, size_in), (num_experts, size_out, rank))
    if not fits:
        raise ValueError(
            f"{name} has a {tuple(a.shape)} and b {tuple(b.shape)}; they must be [E, r, in] and [E, out, r], or "
            f"[r*E, in] and [out, r*E], with E = {num_experts}, in = {size_in}, out = {size_out} and r at least 1"
        )


def padded_rank(a: torch.Tensor, num_experts: int) -> int:
    """Compute J of a factor A."""
    rank = a.shape[1] if a.dim() == 3 else a.shape[0] // num_experts
    return _round_up(rank)


def _round_up(rank: int) -> int:
    """Round a rank up to the multiple that kernels take."""
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def prepare_adapters(
    projections: Sequence[Projection], transposed: bool, dtype: torch.dtype, kernels: Backend
) -> list[Projection]:
    """Bring the adapters of up to two projections into the form that a backend's kernels take.

    That is a [E, J, in] and b [E, out, J] in `dtype` and without gaps, where J lies contiguous if `in` does in the
    logical view [E, out, in] of the weight. What differs from it is copied, all in one launch into one buffer.
    """
    factors: list[torch.Tensor] = []
    described: list[tuple] = []
    for one in projections:
        a, b = one.a, one.b
        if a is not None and b is not None:
            factors += a, b
            in_last = bool(one.format) or one.weight.stride(1 if transposed else 2) == 1
            described.append((a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride(), in_last))
    if not factors:
        return list(projections)
    preparation = _preparation(projections[0].weight.shape[0], dtype, tuple(described))
    if preparation.elements:
        buffer = torch.empty(preparation.elements, dtype=dtype, device=factors[0].device)
    copies: list[torch.Tensor] = []
    prepared: list[torch.Tensor] = []
    for factor, (is_copied, *view) in zip(factors, preparation.views):
        prepared.append((buffer if is_copied else factor).as_strided(*view))
        if is_copied:
            copies += factor, prepared[-1]
    if copies:
        kernels.reorder(*copies, jobs=preparation.jobs)
    arranged = iter(prepared)
    return [one if one.a is None else one._replace(a=next(arranged).mT, b=next(arranged)) for one in projections]


class _Preparation(NamedTuple):
    """The elements of the buffer for copies of factors; of each factor, whether it is copied, and as_strided's arguments
    for the buffer or itself; the jobs of the copies, for the backend's `reorder`."""

    elements: int
    views: list
    jobs: tuple


@functools.lru_cache(maxsize=256)
def _preparation(num_experts: int, dtype: torch.dtype, described: tuple) -> _Preparation:
    elements, views = 0, []
    jobs: list[tuple] = []
    for a_dtype, a_shape, a_strides, b_dtype, b_shape, b_strides, in_last in described:
        a_EKr = swapped(a_by_expert(a_shape, a_strides, num_experts))
        b_ENr = b_by_expert(b_shape, b_strides, num_experts)
        of_a, of_b = (a_dtype, *a_EKr, not in_last), (b_dtype, *b_ENr, in_last)
        for source_dtype, shape, source_strides, rank_last in (of_a, of_b):
            _, size, rank = shape
            padded = _round_up(rank)
            target, strides = (num_experts, size, padded), (size * padded, *((padded, 1) if rank_last else (1, size)))
            is_copied = (rank, source_dtype, source_strides) != (padded, dtype, strides)
            views.append((is_copied, target, strides, *((elements,) if is_copied else ())))
            if is_copied:
                elements += num_experts * size * padded
                jobs += (source_dtype, shape, source_strides), (dtype, target, strides)
    return _Preparation(elements, views, tuple(jobs))
