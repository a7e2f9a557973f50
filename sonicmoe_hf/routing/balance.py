"""Balancing the experts of each layer: the loss of a router's call, and the update of a correction bias.

Letters: T tokens, E experts, K experts per token. The loss follows Switch Transformers (arXiv 2101.03961, section 2.2),
of each layer by itself; the bias update follows auxiliary-loss-free balancing (arXiv 2408.15664, algorithm 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

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


def _is_causal(model: Any) -> bool:
    """Tell whether the model's loss shifts its labels: the Trainer's own test."""
    loss_function = LOSS_MAPPING.get(str(getattr(model, "loss_type", None)), ForCausalLMLoss)
    return loss_function is ForCausalLMLoss and not getattr(model.config, "is_encoder_decoder", False)


def count_labels(model: nn.Module, inputs) -> torch.Tensor | None:
    """Count the labels of a batch as the Trainer does for num_items_in_batch, in fp32; None where it has none."""
    labels: Any = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        labels = labels[..., 1:] if labels is not None and _is_causal(model) else labels
    return None if labels is None else (labels != -100).sum(dtype=torch.float32)


def share_of_batch(model: nn.Module, kwargs: dict) -> torch.Tensor | float:
    """Compute the fraction of the optimiser step's tokens that a model call with these arguments has, where the model
    divides its loss by their number, num_items_in_batch (as the Trainer has it do); 1.0 otherwise, where the loss is
    scaled as a whole.

    Of the models with experts only causal language models divide by it: classification heads return a mean.
    """
    num_items: torch.Tensor | int | None = kwargs.get("num_items_in_batch")
    if num_items is None or not _is_causal(model):
        return 1.0
    labels = count_labels(model, kwargs)
    return 1.0 if labels is None else labels / num_items


class ScaleHook:
    """Hook of a loss: its gradient, times `share`, says how training scales these calls. DDP hands None to the hooks of
    outputs that training does not use."""

    def __init__(self, calls: list[ModelCall], share: torch.Tensor | float):
        self.calls, self.share = calls, share

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        share = self.share.to(gradient.device) if isinstance(self.share, torch.Tensor) else self.share
        for call in self.calls:
            call.loss_scale = gradient.detach().float() * share


def hook_loss(call: ModelCall, output) -> None:
    """Learn the scale of an outermost call from the gradient of the loss that it returned, if it did."""
    loss = output.get("loss") if isinstance(output, dict) else output[0] if isinstance(output, tuple) else None
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
        loss.register_hook(ScaleHook([call], call.share))


class BiasLoad(ExpertLoad):
    """Top-k's rows since the last update of a router's correction bias; bias_E: the bias itself, fp32."""

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
