"""Low-rank adapters of the experts' weights, as `moe_experts` takes them and as the kernels do.

Letters: E experts, r an adapter's rank, J the rank padded to a multiple of 8 (16 bytes in bf16, which the GPU's copy
engine asks for).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .kernels import eager
from .kernels.interface import Extra

RANK_MULTIPLE = 8


class LowRank(NamedTuple):
    """An adapter of a weight: expert e computes with W_e + scale * B_e A_e, which is never formed.

    a: [E, r, in], b: [E, out, r], of any float dtype and any strides, with `out` in the order of the weight's own rows.
    Gradients are summed in fp32 and arrive in a's and b's dtype.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


def side_by_side(adapter: LowRank | Sequence[LowRank]) -> LowRank:
    """Several adapters as one of all their ranks, in fp32 (fp64, if one is); their scales become factors of b."""
    if isinstance(adapter, LowRank):
        return adapter
    if len(adapter) == 1:
        return adapter[0]
    dtype = torch.promote_types(torch.float32, adapter[0].a.dtype)
    a = torch.cat([one.a.to(dtype) for one in adapter], dim=1)
    return LowRank(a, torch.cat([one.b.to(dtype) * one.scale for one in adapter], dim=2))


def check_low_rank(name: str, adapter: LowRank, shape_EON: torch.Size, device: torch.device) -> None:
    """Raise ValueError where `adapter` does not fit the weight, whose logical view [E, out, in] has this shape."""
    num_experts, size_out, size_in = shape_EON
    for part, factor in (("a", adapter.a), ("b", adapter.b)):
        if not factor.dtype.is_floating_point or factor.dtype.itemsize < 2:
            raise ValueError(f"{name}.{part} has dtype {factor.dtype}; use fp64, fp32, bf16 or fp16")
        if factor.device != device:
            raise ValueError(
                f"{name}.{part} is on {factor.device} but its weight is on {device}; move them to one device"
            )
    rank = adapter.a.shape[1] if adapter.a.dim() == 3 else 0
    shapes = (num_experts, rank, size_in), (num_experts, size_out, rank)
    if not rank or (adapter.a.shape, adapter.b.shape) != shapes:
        raise ValueError(
            f"{name} has a {tuple(adapter.a.shape)} and b {tuple(adapter.b.shape)}; they must be [E, r, in] and "
            f"[E, out, r] with E = {num_experts}, in = {size_in}, out = {size_out} and r at least 1"
        )


def padded_rank(a: torch.Tensor) -> int:
    """J of a factor A [E, r, in]."""
    return -(-a.shape[1] // RANK_MULTIPLE) * RANK_MULTIPLE


class Packed(NamedTuple):
    """An adapter as kernels take it: A [E, J, in] and B [E, out, J] in the weight's dtype, order, and without gaps."""

    a_EJK: torch.Tensor
    b_ENJ: torch.Tensor
    scale: float

    def extra_forward(self, rank_PJ) -> Extra:
        """What the adapter adds to the product with W."""
        return Extra(rank_PJ, self.b_ENJ)

    def extra_backward(self, drank_PJ) -> Extra:
        """What the adapter adds to the product with W^T."""
        return Extra(drank_PJ, self.a_EJK.transpose(1, 2))


Given = tuple[torch.Tensor | None, torch.Tensor | None, float, torch.Tensor]


def pack(
    a: torch.Tensor | None, b: torch.Tensor | None, scale: float, weight_EON: torch.Tensor, kernels: Any = eager
) -> Packed | None:
    """The adapter of a weight [E, out, in], copied where it differs in dtype, rank or order; None where `a` is.
    kernels: the backend."""
    return pack_all([(a, b, scale, weight_EON)], kernels)[0]


def pack_all(adapters: Sequence[Given], kernels: Any) -> list[Packed | None]:
    """`pack` of each (a, b, scale, weight_EON) of up to two, with all copies in one launch."""
    copies: list[torch.Tensor] = []
    packed: list[Packed | None] = []
    for a, b, scale, weight_EON in adapters:
        if a is None or b is None:
            packed.append(None)
            continue
        rank, in_last, dtype = padded_rank(a), weight_EON.stride(2) == 1, weight_EON.dtype
        a_EKJ = _packed(a.transpose(1, 2), rank, dtype, not in_last, copies)
        packed.append(Packed(a_EKJ.transpose(1, 2), _packed(b, rank, dtype, in_last, copies), scale))
    if copies:
        kernels.reorder(*copies)
    return packed


def _packed(factor_ENr, padded, dtype, rank_last, copies):
    """[E, N, J] of a factor [E, N, r], with J or N contiguous; to be written, if it is not the factor, by `copies`."""
    num_experts, size, rank = factor_ENr.shape
    strides = (size * padded, padded, 1) if rank_last else (size * padded, 1, size)
    if rank == padded and factor_ENr.dtype == dtype and factor_ENr.stride() == strides:
        return factor_ENr
    packed = torch.empty_strided((num_experts, size, padded), strides, dtype=dtype, device=factor_ENr.device)
    copies += factor_ENr, packed
    return packed
