"""Counting what a router sends where, on the device and without a host sync."""

from __future__ import annotations

import torch

TOTALS = ("calls", "top_k_fallbacks", "rows_added", "rows_dropped", "padded_rows_avoided")


class ExpertLoad:
    """Sums over training forwards of one layer, int64 on the router's device: rows per expert [E], then TOTALS."""

    def __init__(self) -> None:
        self.counted: torch.Tensor | None = None

    def start(self, num_experts: int, device: torch.device) -> None:
        """Count from zero. (torch.compile takes a checkpointed layer only if its counter was there before.)"""
        self.counted = torch.zeros(num_experts + len(TOTALS), dtype=torch.int64, device=device)

    def record(self, top_k_index_TK, num_experts: int, *, rows_E=None, fell_back=False, tile: int = 1, valid_T=None):
        """Count one forward.

        Args:
            top_k_index_TK: the model's own top-k. rows_E: every expert's rows after rounding, None where top-k stands.
            fell_back: bool, or a bool tensor of no dimensions: rounding was asked for and top-k stands all the same.
            tile: M, rows. valid_T: False marks padding tokens, which top-k's side leaves out.
        """
        index_TK = top_k_index_TK.long()
        ones_TK = torch.ones_like(index_TK) if valid_T is None else valid_T.long().unsqueeze(1).expand_as(index_TK)
        f_E = index_TK.new_zeros(num_experts).scatter_add_(0, index_TK.reshape(-1), ones_TK.reshape(-1))
        fell_back = f_E.new_zeros(()) + fell_back
        # where padding made rounding fall back, top-k routes padding too, which is not counted
        n_E = f_E if rows_E is None else torch.where(fell_back > 0, f_E, rows_E)
        change_E = n_E - f_E
        avoided_E = (-f_E) % tile - (-n_E) % tile
        per_call = (f_E.new_ones(()), fell_back)
        rounded = torch.stack([change_E.clamp(min=0).sum(), (-change_E).clamp(min=0).sum(), avoided_E.sum()])
        now = torch.cat([n_E, torch.stack(per_call), rounded * (1 - fell_back)])
        if self.counted is None or self.counted.device != now.device:
            self.counted = torch.zeros_like(now)
        self.counted.add_(now)

    def take(self) -> torch.Tensor | None:
        """[E + len(TOTALS)] since the last call, None where counting never started; it starts again from zero."""
        if self.counted is None:
            return None
        counted = self.counted.clone()
        self.counted.zero_()
        return counted
