"""Counting the pairs that routers send to each expert, on the device and without a host sync, and sums over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..private.torch import mark_as_static

# what grows by one in a call of top-k, in one where it stands in place of rounding, and all that is counted beside pairs
OF_TOP_K = ("calls",)
OF_FALLBACK = (*OF_TOP_K, "rounding_calls", "top_k_fallbacks")
TOTALS = (*OF_FALLBACK, "rows_added", "rows_dropped", "padded_rows_avoided")


def tokens_per_expert(
    top_k_index_TK: torch.Tensor, num_experts: int, valid_T: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Count the tokens that top-k sends to every expert, [E]; without padding, which `valid_T` marks False."""
    index_TK = top_k_index_TK.long()
    ones_TK = torch.ones_like(index_TK, dtype=dtype)
    if valid_T is not None:
        ones_TK = ones_TK * valid_T.to(dtype).unsqueeze(1)
    return ones_TK.new_zeros(num_experts).scatter_add_(0, index_TK.reshape(-1), ones_TK.reshape(-1))


def split_counts(counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split counts [E + len(TOTALS)] into the pairs of each expert and TOTALS."""
    return counted[: -len(TOTALS)], counted[-len(TOTALS) :]


def summed_over_ranks(counts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sum the layers' counts [n] over all ranks, by one collective, on the first layer's device."""
    flat = torch.cat([count.to(counts[0].device) for count in counts])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(flat)
    return list(flat.split([len(count) for count in counts]))


class ExpertLoad:
    """Sums over training forwards of one layer, int64 on the router's device: pairs of each expert [E], then TOTALS.
    "rounding_calls" are those that rounding was asked of, also where top-k stands."""

    def __init__(self) -> None:
        self.counted: torch.Tensor | None = None

    @property
    def pairs_E(self) -> torch.Tensor | None:
        """Get the number of every expert's pairs so far."""
        return None if self.counted is None else split_counts(self.counted)[0]

    def start(self, num_experts: int, device: torch.device) -> torch.Tensor:
        """Count from zero, and return the counter. (torch.compile takes a checkpointed layer only where there was one
        before.)"""
        self.counted = torch.zeros(num_experts + len(TOTALS), dtype=torch.int64, device=device)
        if not torch.compiler.is_compiling():
            mark_as_static(self.counted)
        return self.counted

    def count(self, top_k_index_TK, num_experts: int, *, rows_E=None, fell_back=False, tile: int = 1, valid_T=None):
        """Count one forward.

        Args:
            top_k_index_TK: the model's own top-k. rows_E: every expert's rows after rounding, None where top-k stands.
            fell_back: rounding was asked for and top-k stands all the same; a bool, or with `rows_E` also a bool tensor
                of no dimensions.
            tile: M, rows. valid_T: False marks padding tokens, which top-k's side leaves out.
        """
        counted = self.counted
        if counted is None or counted.device != top_k_index_TK.device:
            counted = self.start(num_experts, top_k_index_TK.device)
        f_E = tokens_per_expert(top_k_index_TK, num_experts, valid_T, torch.int64)
        if rows_E is None:
            counted[:num_experts].add_(f_E)
            num_increased = len(OF_FALLBACK if fell_back else OF_TOP_K)  # the first of TOTALS, by one kernel
            counted[num_experts : num_experts + num_increased].add_(1)
            return
        fell_back = f_E.new_zeros(()) + fell_back
        # where padding made rounding fall back, top-k routes padding too, which is not counted
        n_E = torch.where(fell_back > 0, f_E, rows_E)
        change_E = n_E - f_E
        avoided_E = (-f_E) % tile - (-n_E) % tile
        one = f_E.new_ones(())
        totals = {
            "calls": one,
            "rounding_calls": one,
            "top_k_fallbacks": fell_back,
            "rows_added": change_E.clamp(min=0).sum(),
            "rows_dropped": (-change_E).clamp(min=0).sum(),
            "padded_rows_avoided": avoided_E.sum(),
        }
        counted.add_(torch.cat([n_E, torch.stack([totals[name] for name in TOTALS])]))

    def take(self) -> torch.Tensor | None:
        """Take the counts since the last call, for `split_counts`, None where counting never started, and start from
        zero."""
        if self.counted is None:
            return None
        counted = self.counted.clone()
        self.counted.zero_()
        return counted
