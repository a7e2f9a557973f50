"""Balancing the experts of each layer: the loss of a router's call, and the update of a correction bias.

Letters: T tokens, E experts, K experts per token. The loss follows Switch Transformers (arXiv 2101.03961, section 2.2),
of each layer by itself; the bias update follows auxiliary-loss-free balancing (arXiv 2408.15664, algorithm 1).
"""

from __future__ import annotations

import torch

from .expert_load import ExpertLoad, tokens_per_expert
from .state import ModelCall

NO_SCALE = (
    "LoadBalancing(per_layer_loss=...): the backward of a model call began without that of a loss it knows, so it cannot "
    "scale its gradients as the training loss is. Pass labels, so that the model returns its loss, and call backward on "
    "that loss. With a loss computed outside the model, as TRL's trainers and label smoothing do, call "
    "sonicmoe_hf.attach(trainer); in a loop of your own, balancing.scaled_as(model, loss) before loss.backward()"
)


def layer_loss(scores_TE: torch.Tensor, top_k_index_TK: torch.Tensor, valid_T: torch.Tensor | None) -> torch.Tensor:
    """Compute E * sum_e f_e P_e: K where the experts of this layer are balanced, up to E where K of them get all tokens.

    f_e is the share of the tokens that top-k sends to expert e, P_e the mean over tokens of S divided by its sum over the
    experts. Transformers' load_balancing_loss_func gives the same for a softmax router of one layer.

    Args:
        scores_TE: S, fp32, differentiable. top_k_index_TK: the model's own top-k. valid_T: False marks padding, which
            does not count.
    """
    num_tokens, num_experts = scores_TE.shape
    probabilities_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=1e-20)
    f_E = tokens_per_expert(top_k_index_TK, num_experts, valid_T, scores_TE.dtype)
    count: int | torch.Tensor = max(num_tokens, 1)
    if valid_T is not None:
        count = valid_T.sum().clamp(min=1)
        probabilities_TE = torch.where(valid_T.unsqueeze(1), probabilities_TE, 0.0)
    return num_experts * (f_E / count * (probabilities_TE.sum(0) / count)).sum()


class _WithLoss(torch.autograd.Function):
    """The routing weights as they are; backward adds `loss` to what is minimised, scaled as the call's own loss is."""

    @staticmethod
    def forward(ctx, weights, loss, call):
        ctx.call, ctx.device = call, loss.device
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, gradient):
        call = ctx.call
        if call.loss_scale is None:
            raise RuntimeError(NO_SCALE)
        return gradient, call.loss_scale.to(ctx.device) / call.num_layer_losses, None


def with_layer_loss(weights: torch.Tensor, loss: torch.Tensor, call: ModelCall) -> torch.Tensor:
    """Pass `weights` on; their backward adds `loss` to the training loss, divided by the number of layers that ran in
    the call.

    The returned router logits are no place for it: the experts depend on the weights alone, and reentrant checkpointing
    gives gradients to nothing else that is made inside a layer.
    """
    return _WithLoss.apply(weights, loss, call)


class BiasLoad(ExpertLoad):
    """Top-k's pairs since the last update of a router's correction bias; bias_E: the bias itself, fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.bias_E: torch.Tensor | None = None

    def keep_bias(self, bias_E: torch.Tensor) -> torch.Tensor:
        """Make a router's correction bias fp32, in which alone 1e-3 does not vanish, and have it stay so; returns it.

        FSDP1 casts buffers at its first forward: what is no more than a cast of the fp32 bias becomes that again.
        """
        if bias_E.dtype != torch.float32:
            cast_E = bias_E.data.float()
            if self.bias_E is not None:
                kept_E = self.bias_E.to(bias_E.device)
                cast_E = torch.where(kept_E.to(bias_E.dtype) == bias_E, kept_E, cast_E)
            bias_E.data = cast_E
        self.bias_E = bias_E.data
        return bias_E


@torch.no_grad()
def update_bias(bias_E: torch.Tensor, counted_E: torch.Tensor, rate: float | torch.Tensor) -> None:
    """Raise a router's correction bias by `rate` where experts had fewer tokens than the mean, lower it where more.

    counted_E: int64. No floating point: the mean of large counts that are equal would not be one of them."""
    bias_E.add_(rate * (counted_E.sum() - counted_E.numel() * counted_E).sign())
