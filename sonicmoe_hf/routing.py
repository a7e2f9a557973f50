"""Routing decisions: top-k as a model gives it, and token rounding. Pure functions of tensors, on any device."""

from __future__ import annotations

import torch

class Routing:
    def __init__(self, expert_index, weights, token_index=None, *, sentinels=False):
        self.expert_index=expert_index; self.weights=weights; self.token_index=token_index; self.sentinels=sentinels
