"""The hooks that patching installs: one on each router, and one pair on each model that contains routers.

All are module-level classes holding plain data, so that patched models copy, pickle and compile as before. On and off
is an attribute of the state they share (torch.compile ignores hooks added or removed after compilation).
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .config import TokenRounding
from .experts import IMPLEMENTATION
from .load import ExpertLoad
from .model_patches import FAMILIES
from .routing import MISPLACED, rounded_routing
from .support import check_accelerated, check_rounding

logger = logging.getLogger(__name__)


class ModelCall(NamedTuple):
    """What a call of the model tells its routers: are gradients on, its [B, S] attention mask, and the policy."""

    gradients: bool
    attention_mask: torch.Tensor | None
    policy: TokenRounding | None


class PatchState:
    """Shared by all hooks of one model.

    policy: token rounding, or None for top-k. counting: whether routers count their loads.
    call: the model call in progress. backward_call: the one whose backward runs, for recomputation of layers.
    """

    def __init__(self, previous_implementation: dict):
        self.previous_implementation = previous_implementation
        self.policy: TokenRounding | None = None
        self.counting = False
        self.call: ModelCall | None = None
        self.backward_call: ModelCall | None = None
        self.said_top_k = False

    @property
    def active(self) -> bool:
        """Whether routers have anything to do."""
        return self.policy is not None or self.counting


def _is_recomputing(state: PatchState) -> bool:
    """Whether gradient checkpointing runs this layer again during backward."""
    if torch.compiler.is_compiling():  # autograd cannot be asked, but what is recomputed then runs outside any call
        return state.call is None and state.backward_call is not None
    return torch._C._current_graph_task_id() != -1


def _valid_tokens(attention_mask, num_tokens: int, device) -> torch.Tensor | None:
    """Which of the T tokens are real, where a mask of that many entries says so."""
    if attention_mask is None or attention_mask.numel() != num_tokens:
        return None
    return attention_mask.reshape(-1).to(device) != 0


class RouterHook:
    """Forward hook of a router: returns a Routing in place of the indices while token rounding is active.

    That is: a policy is set, the router is in training mode, and the outermost model call had gradients enabled.
    """

    def __init__(self, family_name: str, layer_name: str, config, state: PatchState):
        self.family_name = family_name
        self.layer_name = layer_name
        self.config = config
        self.state = state
        self.load = ExpertLoad()

    def __call__(self, router: nn.Module, args, output):
        state = self.state
        recomputing = _is_recomputing(state)
        if not router.training or not (state.active or recomputing):
            return None
        call = state.backward_call if recomputing else state.call
        if call is None or not call.gradients:
            return None
        logits_TE, _, index_TK = output
        num_tokens, num_experts = logits_TE.shape
        valid_T = _valid_tokens(call.attention_mask, num_tokens, logits_TE.device)
        policy, rounded, fell_back = call.policy, None, False
        if policy is not None:
            fell_back = not policy.applies(num_tokens, index_TK.shape[1], num_experts)
            if fell_back:
                self._say_top_k(policy, num_tokens, index_TK.shape[1], num_experts)
            else:
                self._check_implementation()
                rounded, fell_back = rounded_routing(
                    FAMILIES[self.family_name], router, logits_TE, index_TK, policy, valid_T
                )
        if state.counting and not recomputing:
            tile = 1 if policy is None else policy.tile_rows
            rows_E = None if rounded is None else rounded.rows.offsets.diff()
            with torch.no_grad():
                self.load.record(index_TK, num_experts, rows_E=rows_E, fell_back=fell_back, tile=tile, valid_T=valid_T)
        # the weights beside it too: DeepSpeed gathers the router's own for backward where a tensor of a tuple asks for it
        return None if rounded is None else (logits_TE, rounded.weights, rounded)

    def _check_implementation(self):
        if self.config._experts_implementation != IMPLEMENTATION:
            raise RuntimeError(
                f'{self.layer_name}: experts_implementation is "{self.config._experts_implementation}". {MISPLACED}'
            )

    def _say_top_k(self, policy: TokenRounding, num_tokens: int, top_k: int, num_experts: int):
        if not self.state.said_top_k and not torch.compiler.is_compiling():
            self.state.said_top_k = True
            logger.warning(
                f"sonicmoe_hf: {num_tokens} tokens with top-{top_k} of {num_experts} experts are "
                f"{num_tokens * top_k / num_experts:.0f} rows per expert, fewer than {policy.min_tiles_per_expert:g} "
                f"tiles of {policy.tile_rows}: such calls use top-k, not token rounding"
            )


class ModelEntryHook:
    """Forward pre-hook (with kwargs) of a model: notes whether gradients are on, and which tokens are padding.

    Before the first call, and the first under a policy, it also checks that the layers can do what is asked: quantisers,
    use_kernels and parallelism may have changed them since patching.
    """

    def __init__(self, state: PatchState, mask_position: int | None):
        self.state = state
        self.mask_position = mask_position
        self.verified = False
        self.verified_policy: TokenRounding | None = None

    def __call__(self, model: nn.Module, args, kwargs):
        policy = self.state.policy
        if not torch.compiler.is_compiling() and not (self.verified and self.verified_policy == policy):
            check_rounding(check_accelerated(model), policy)
            self.verified, self.verified_policy = True, policy
        if self.state.active and getattr(model, "_is_replica", False):
            raise RuntimeError(
                "token rounding and load counting do not work under nn.DataParallel, whose replicas share hooks: launch "
                "one process per GPU (torchrun, accelerate launch), or show it a single GPU (CUDA_VISIBLE_DEVICES=0)"
            )
        mask = kwargs.get("attention_mask")
        if mask is None and self.mask_position is not None and len(args) > self.mask_position:
            mask = args[self.mask_position]
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            mask = None
        self.state.call = ModelCall(torch.is_grad_enabled(), mask, policy)


class ModelExitHook:
    """Forward hook of a model: its call is over. Its outputs' gradients will announce its backward.

    Gradient checkpointing recomputes layers during backward, outside any model call; autograd runs a later call's whole
    backward before an earlier one's, so the last output whose gradient arrived tells whose layers are recomputed.
    torch.compile cannot hold hooks of tensors: there the last call made is the one whose layers are recomputed.
    """

    def __init__(self, state: PatchState):
        self.state = state

    def __call__(self, model: nn.Module, args, output):
        state, call = self.state, self.state.call
        state.call = None
        if call is None or not call.gradients:
            return
        if torch.compiler.is_compiling():
            state.backward_call = call
            return

        def announce(gradient):
            state.backward_call = call

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(announce)
