"""SonicMoEExpertParallelism: what DistributedConfig(ep_implementation="sonicmoe_hf") stands for."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.distributed import fsdp
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, EPImplementation

from ..layer.adapters_argument import Adapters
from ..layer.experts_module import IMPLEMENTATION, is_native
from ..layer.holding import Holder, Holding, expert_parallelism
from ..layer.routing import Routing
from ..private import attributes
from ..private.transformers import experts_implementation
from .collectives import mean_of_gradients, ranks_with_same_experts, sum_gradients, sum_over_ranks
from .exchange import Experts, local_ids, local_routing, pairs_of, reach_experts

_FULLY_SHARD = fsdp.fully_shard
_INSTALL_FORWARD = EpDispatchExpertsParallel.install_forward


def fully_shard(module: Any, *, mesh=None, **options):
    """Shard a module, or a list of them, as torch's function does, but not experts that one rank has whole: FSDP2 would
    copy all their weights in forward and again in backward, and their gradients three times. With a policy of precision
    or offloading it gets these too."""
    roots = module if isinstance(module, list) else [module]
    ours: Any = None if isinstance(module, list) else expert_parallelism(module)
    has_no_policy = options == {"reshard_after_forward": True}  # only FSDP2 does what a policy says
    if ours is not None and mesh.size() == 1 and has_no_policy:
        ours.is_outside_fsdp = True
        vars(module)["set_gradient_divide_factor"] = _leave_gradients  # which Transformers calls next
        return module
    ignored: set[nn.Parameter] = set()
    for each in itertools.chain.from_iterable(root.modules() for root in roots):
        ours = expert_parallelism(each)
        if ours is not None and ours.is_outside_fsdp:
            ignored.update(parameter for parameter in each._parameters.values() if parameter is not None)
    return _FULLY_SHARD(module, mesh=mesh, ignored_params=ignored, **options)


def _leave_gradients(factor: float) -> None:
    """Do nothing: with_mean_gradient divides them."""


class IndicesWithAdapters(NamedTuple):
    """The router's top_k_index, and adapters: Transformers hands three arguments to an EPImplementation."""

    top_k_index: Any
    adapters: Adapters


def install_forward(self, module: Any, *args, **options):
    """Put an EPImplementation around experts as Transformers' method does, and have ours take adapters."""
    installed = _INSTALL_FORWARD(self, module, *args, **options)
    if expert_parallelism(module) is None:
        return installed
    forward = module.forward

    @functools.wraps(forward)
    def forward_with_adapters(hidden_states, top_k_index, top_k_weights, sonicmoe_hf_adapters=None):
        if sonicmoe_hf_adapters is not None:
            top_k_index = IndicesWithAdapters(top_k_index, sonicmoe_hf_adapters)
        return forward(hidden_states, top_k_index, top_k_weights)

    module.forward = forward_with_adapters
    return installed


class SonicMoEExpertParallelism(EPImplementation):
    """The EPImplementation that brings a rank's experts their tokens, by top-k or token rounding; sonicmoe_hf computes
    them.

    - Ranks that share a batch (ep_size == tp_size) run their own experts on all tokens, and sum the outputs.
    - Ranks with different batches gather all tokens and scatter the sum of the outputs, or exchange tokens with an
      all-to-all, each token once for every rank that has experts of it (exchange.choose_exchange). Ranks of a
      tensor-parallel group send a slice of the batch each.
    """

    def __init__(self, experts, ep_mesh, tp_mesh):
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        num_local: Any = self.num_local_experts
        group, rank = ep_mesh.get_group(), ep_mesh.get_local_rank()
        self.holding = Holding(Holder.EXPERT_PARALLEL, num_local, group, rank, ep_mesh.size())
        self.batch_group = tp_mesh.get_group() if tp_mesh.size() > 1 else None  # the ranks that hold the same batch
        self.is_outside_fsdp = False
        setattr(experts, attributes.PARALLELISM, self)
        when_split = vars(experts).pop(attributes.WHEN_SPLIT, None)
        if when_split is not None:
            when_split(experts)

    def __deepcopy__(self, memo):
        return self  # as Transformers' forward around it, a function, is not copied either

    def with_summed_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum the gradient of a tensor that ranks with the same batch share: each rank has its own experts' summand."""
        return tensor if self.batch_group is None else sum_gradients(tensor, self.batch_group)

    def with_mean_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        """Scale the gradient of a tensor of this rank's experts to that of the mean of the batches' losses, because
        experts get the tokens of all batches; it is the same on all ranks that hold these experts."""
        num_batches = dist.get_world_size() // self.tp_mesh.size()
        return mean_of_gradients(tensor, num_batches, ranks_with_same_experts(self.holding.group))

    def take_values_of_first_rank(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor's first values from the first of the ranks that hold these experts."""
        group = ranks_with_same_experts(self.holding.group)
        if group is not None:
            dist.broadcast(tensor, dist.get_process_group_ranks(group)[0], group=group)

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        """Compute the experts' output [T, H] for this rank's tokens [T, H].

        `top_k_index` [T, K] and `top_k_weights` [T, K] are the router's; or `top_k_index` is a Routing, made by token
        rounding, and `top_k_weights` its weights; either may come in an IndicesWithAdapters, with adapters.

        Raises:
            ValueError: another implementation computes the experts.
        """
        implementation = experts_implementation(self.experts.config)
        if implementation != IMPLEMENTATION and not is_native(self.experts):
            raise ValueError(
                f'ep_implementation="{IMPLEMENTATION}" needs experts_implementation="{IMPLEMENTATION}", but these '
                f'experts use "{implementation}"; load the model with experts_implementation="{IMPLEMENTATION}", or call '
                "sonicmoe_hf.patch_model(model)"
            )
        if torch.is_autocast_enabled(hidden_states.device.type):  # send what the experts would cast to anyway
            hidden_states = hidden_states.to(torch.get_autocast_dtype(hidden_states.device.type))
        with self._weights_with_mean_gradients():
            return self._compute(hidden_states, top_k_index, top_k_weights)

    @contextlib.contextmanager
    def _weights_with_mean_gradients(self) -> Iterator[None]:
        """Scale the weights' gradients to those of the mean of the batches' losses, as FSDP2 scales those that it has."""
        weights: Any = self.experts._parameters
        given = dict(weights)
        if self.is_outside_fsdp and torch.is_grad_enabled():
            weights.update({name: self.with_mean_gradient(w) for name, w in given.items() if w.requires_grad})
        try:
            yield
        finally:
            weights.update(given)

    def _compute(self, hidden_states, top_k_index, top_k_weights):
        experts: Any = self.experts_forward  # which takes adapters too
        if isinstance(top_k_index, IndicesWithAdapters):
            top_k_index, adapters = top_k_index
            adapters.take()  # a rank without tokens does not call its experts
            experts = functools.partial(experts, sonicmoe_hf_adapters=adapters)
        if isinstance(top_k_index, Routing):
            routing = top_k_index.with_weights(top_k_weights)
        else:
            routing = Routing(top_k_index, top_k_weights)
        if self.batch_group is None:
            return reach_experts(hidden_states, routing, self.holding, experts)
        weights = self.with_summed_gradient(routing.weights)
        routing = Routing(routing.expert_index, weights, routing.token_index)
        hidden_states = self.with_summed_gradient(hidden_states)
        if self.shares_batch:
            return self._on_shared_batch(hidden_states, routing, experts, self.batch_group)
        return self._exchange_slice(hidden_states, routing, experts, self.batch_group)

    def _on_shared_batch(self, x_TH, routing: Routing, experts: Experts, group: dist.ProcessGroup):
        expert = local_ids(routing.expert_index, self.holding)
        local = local_routing(expert, routing.weights, routing.token_index, len(x_TH), self.holding)
        return sum_over_ranks(experts(x_TH, local, routing.weights), group)

    def _exchange_slice(self, x_TH, routing: Routing, experts: Experts, group: dist.ProcessGroup):
        """Send this rank's slice of the tokens of the batch, which ranks of a tensor-parallel group have in common."""
        num_tokens, size = len(x_TH), self.tp_mesh.size()
        start, stop = (
            num_tokens * rank // size for rank in (self.tp_mesh.get_local_rank(), self.tp_mesh.get_local_rank() + 1)
        )
        expert_P, token_P, weight_P = pairs_of(routing, num_tokens)
        is_in_slice_P = (token_P >= start) & (token_P < stop)
        own = Routing(torch.where(is_in_slice_P, expert_P, -1), weight_P, token_P - start)
        out = reach_experts(x_TH[start:stop], own, self.holding, experts)
        return sum_over_ranks(F.pad(out, (0, 0, start, num_tokens - stop)), group)
