"""Low-rank adapters of the experts' weights, as `moe_experts` takes them and as the kernels do.

Letters: E experts, r an adapter's rank, J the rank padded to a multiple of 8 (16 bytes in bf16, which the GPU's copy
engine asks for).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels import eager
from ..kernels.factors import a_by_expert, b_by_expert, by_expert, swapped
from ..kernels.interface import LoraTerm

RANK_MULTIPLE = 8
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class LowRank(NamedTuple):
    """An adapter of a weight: expert e computes with W_e + scale * B_e A_e, which is never formed.

    a: [E, r, in], b: [E, out, r], of any float dtype and any strides, with `out` in the order of the weight's own rows.
    Or both as PEFT stores them: a [r*E, in] with the expert slowest, b [out, r*E] with the expert fastest.
    Gradients are summed in fp32 and arrive in a's and b's dtype.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


def side_by_side(adapter: LowRank | Sequence[LowRank], num_experts: int) -> LowRank:
    """Several adapters as one of all their ranks, in fp32 (fp64, if one is); their scales become factors of b."""
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
    for part, factor in (("a", a), ("b", b)):
        if factor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name}.{part} has dtype {factor.dtype}; use fp64, fp32, bf16 or fp16")
        if factor.device != device:
            raise ValueError(
                f"{name}.{part} is on {factor.device} but its weight is on {device}; move them to one device"
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
    """J of a factor A."""
    rank = a.shape[1] if a.dim() == 3 else a.shape[0] // num_experts
    return _padded(rank)


def _padded(rank: int) -> int:
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


class LoraOperands(NamedTuple):
    """An adapter as kernels take it: A [E, in, J] and B [E, out, J] in the weight's dtype, order, and without gaps."""

    a_EKJ: torch.Tensor
    b_ENJ: torch.Tensor
    scale: float

    def forward_term(self, rank_PJ) -> LoraTerm:
        """What the adapter adds to the product with W."""
        return LoraTerm(rank_PJ, self.b_ENJ)

    def backward_term(self, drank_PJ, copied: bool = False) -> LoraTerm:
        """What the adapter adds to the product with W^T. copied: W^T is a copy, in which `out` lies contiguous."""
        return LoraTerm(drank_PJ, self.a_EKJ.contiguous() if copied else self.a_EKJ)


def pack(
    a: torch.Tensor, b: torch.Tensor, scale: float, weight_EON: torch.Tensor, kernels: Any = eager
) -> LoraOperands:
    """The adapter of a weight [E, out, in], copied where it differs in dtype, rank or order. kernels: the backend."""
    (packed,) = pack_all([(a, b, scale, weight_EON.stride(2) == 1)], len(weight_EON), weight_EON.dtype, kernels)
    assert packed is not None
    return packed


LoraFactors = tuple[torch.Tensor | None, torch.Tensor | None, float, bool]


def pack_all(
    adapters: Sequence[LoraFactors], num_experts: int, dtype: torch.dtype, kernels: Any
) -> list[LoraOperands | None]:
    """`pack` of each (a, b, scale, whether `in` is what lies contiguous in the weight) of up to two, all copies in one
    launch and one buffer; None where a is."""
    factors: list[torch.Tensor] = []
    described: list[tuple] = []
    for a, b, _, in_last in adapters:
        if a is not None and b is not None:
            factors += a, b
            described.append((a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride(), in_last))
    if not factors:
        return [None] * len(adapters)
    packing = _packing(num_experts, dtype, tuple(described))
    if packing.elements:
        buffer = torch.empty(packing.elements, dtype=dtype, device=factors[0].device)
    copies: list[torch.Tensor] = []
    packed: list[torch.Tensor] = []
    for factor, (is_copied, *view) in zip(factors, packing.views):
        packed.append((buffer if is_copied else factor).as_strided(*view))
        if is_copied:
            copies += factor, packed[-1]
    if copies:
        kernels.reorder(*copies, jobs=packing.jobs)
    pairs = iter(packed)
    return [None if a is None else LoraOperands(next(pairs), next(pairs), scale) for a, _, scale, _ in adapters]


class _Packing(NamedTuple):
    """How factors are packed: the elements of the copies' buffer; of each factor, whether it is copied, and as_strided's
    arguments for the buffer or itself; the jobs of the copies, for the backend's `reorder`."""

    elements: int
    views: list
    jobs: tuple


@functools.lru_cache(maxsize=256)
def _packing(num_experts: int, dtype: torch.dtype, described: tuple) -> _Packing:
    elements, views = 0, []
    jobs: list[tuple] = []
    for a_dtype, a_shape, a_strides, b_dtype, b_shape, b_strides, in_last in described:
        a_EKr = swapped(a_by_expert(a_shape, a_strides, num_experts))
        b_ENr = b_by_expert(b_shape, b_strides, num_experts)
        of_a, of_b = (a_dtype, *a_EKr, not in_last), (b_dtype, *b_ENr, in_last)
        for source_dtype, shape, source_strides, rank_last in (of_a, of_b):
            _, size, rank = shape
            padded = _padded(rank)
            packed, strides = (num_experts, size, padded), (size * padded, *((padded, 1) if rank_last else (1, size)))
            is_copied = (rank, source_dtype, source_strides) != (padded, dtype, strides)
            views.append((is_copied, packed, strides, *((elements,) if is_copied else ())))
            if is_copied:
                elements += num_experts * size * padded
                jobs += (source_dtype, shape, source_strides), (dtype, packed, strides)
    return _Packing(elements, views, tuple(jobs))
