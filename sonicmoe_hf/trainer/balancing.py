"""LoadBalancing: a Trainer callback, or an object for a loop of one's own, that keeps the experts of every layer busy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..errors import UnsupportedModelError
from ..layer.holding import Holder, expert_parallel_remedy, holding_of
from ..patching.moe_layers import MoELayer, find_layers, transformers_model
from ..routing.balance import update_bias
from ..routing.call_scale import ScaleHook
from ..routing.expert_load import summed_over_ranks
from ..routing.hooks import hook_of, routers
from ..routing.patched_model import check_and_hook_routers, is_pipelined, routing_state
from ..routing.state import Balancing
from .router_loss import router_loss
from .step_callback import StepCallback

logger = logging.get_logger(__name__)

DEFAULTS = {"per_layer_loss": 0.05, "bias_update": 1e-3}


def _check_rate(name: str, value: float | None) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):
        raise ValueError(f"{name} is {value!r}; give a number above 0, such as {DEFAULTS[name]}, or None")


class LoadBalancing(StepCallback):
    """Balances the experts of every layer: by a loss, by the routers' correction biases, or both.

    Tokens are counted as top-k sends them, before token rounding, without padding. Layers that gradient checkpointing
    recomputes count once. Layers whose experts a table gives (the first of DeepSeek-V4) are left as they are.

    Args:
        per_layer_loss: weight of the balancing loss, which is computed for every layer by itself and averaged over the
            layers that run in a call. Use it in place of the model's own (`router_aux_loss_coef`,
            `output_router_logits`), which pools the counts of all layers. Its gradient is scaled as the model's returned
            loss is: by gradient accumulation, `num_items_in_batch`, a GradScaler, DDP; or as a loss computed outside the
            model is, in a Trainer by `attach`, else by `scaled_as`. The load is that of one micro-batch of one rank.
        bias_update: by how much the correction bias of an expert moves at every optimiser step: up where it had fewer
            tokens than the mean, down where it had more. For routers that have one (DeepSeek-V3 and its kin). The load
            is that of all ranks and micro-batches of the step. The biases are saved with the model, and made fp32.
    Raises:
        ValueError: neither is given, or not a number above 0.
        Later, from `start` or the Trainer: UnsupportedModelError, where a layer's router is not known or has no bias.
    Example:
        Trainer(..., callbacks=[sonicmoe_hf.LoadBalancing(per_layer_loss=0.05)])

        balancing = sonicmoe_hf.LoadBalancing(per_layer_loss=0.05, bias_update=1e-3)
        balancing.start(model)
        for batch in batches:
            (model(**batch).loss / accumulation).backward()
            ...
            optimizer.step()
            balancing.step(model)
    """

    def __init__(self, per_layer_loss: float | None = None, bias_update: float | None = None):
        if per_layer_loss is None and bias_update is None:
            raise ValueError("LoadBalancing does nothing: give it per_layer_loss=0.05, bias_update=1e-3, or both")
        _check_rate("per_layer_loss", per_layer_loss)
        _check_rate("bias_update", bias_update)
        self.per_layer_loss = per_layer_loss
        self.bias_update = bias_update

    def start(self, model: nn.Module) -> None:
        """Balance this patched model's experts from now on, whenever it trains. Biases that move are made fp32, and their
        loads are counted from zero.

        Raises:
            ValueError: the model is not patched; or the biases would change but not be saved, with PEFT's adapters.
            UnsupportedModelError: a layer's router is not known, or has no bias to update.
        """
        routing_state(model).balancing = self._prepare(model)
        self._warn_of_second_loss(None, model)

    def _prepare(self, model: nn.Module) -> Balancing:
        """Check as `start` says, hook the routers, make biases that move fp32 with loads of zero, and return what routers
        are to do."""
        check_and_hook_routers(model)
        if is_pipelined(model):
            raise UnsupportedModelError(
                "LoadBalancing does not work under pipeline parallelism, whose ranks have different layers"
            )
        for layer in find_layers(model):
            self._check(layer)
        if self.bias_update is not None:
            _check_saved(model)
            for family, _, router in routers(transformers_model(model)):
                if family.has_fixed_experts(router):
                    continue
                load = hook_of(router).bias_load
                bias_E = load.keep_bias(router.e_score_correction_bias)
                load.start(bias_E.numel(), bias_E.device)
        return Balancing(self.per_layer_loss or 0.0, self.bias_update is not None)

    def step(self, model: nn.Module) -> None:
        """Update the biases after an optimiser step, with the tokens of all ranks since the last call."""
        if self.bias_update is None:
            return
        with_bias = _routers_with_bias(model)
        loads = [hook_of(router).bias_load for router in with_bias]
        totals = summed_over_ranks([load.pairs_E for load in loads])
        for router, load, total_E in zip(with_bias, loads, totals):
            bias_E = load.keep_bias(router.e_score_correction_bias)
            update_bias(bias_E, total_E.to(bias_E.device), self.bias_update)
            load.counted.zero_()

    def stop(self, model: nn.Module) -> None:
        """Stop balancing; the biases stay as they are."""
        state = routing_state(model)
        state.balancing = state.last = None

    def scaled_as(self, model: nn.Module, loss: torch.Tensor, share: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Tell how training scales the model's last call: for a loss that is computed outside the model.

        Args:
            loss: a scalar; backward is called on it, or on something made from it. share: what part of the optimiser
                step's tokens the call has, where `loss` is a sum that was divided by the number of all of them.
        Returns:
            `loss`.
        Raises:
            RuntimeError: the model was not called while it balances.
        """
        call: Any = routing_state(model).last
        if call is None:
            raise RuntimeError(
                "LoadBalancing.scaled_as: this model was not called in training since balancing.start(model); call it "
                "first, and compute the loss from what it returns"
            )
        loss.register_hook(ScaleHook([call], share))
        return loss

    def _check(self, layer: MoELayer) -> None:
        """Raise UnsupportedModelError where this layer cannot be balanced as is asked."""
        if layer.family is None:
            reason = "its router is not known; docs/models.md lists the models that are"
        elif holding_of(layer.experts).by is Holder.THEIR_EXPERT_PARALLEL:
            reason = f"it does not work under Transformers' own expert parallelism; {expert_parallel_remedy()}"
        elif self.bias_update is not None and not (
            hasattr(layer.router, "e_score_correction_bias") or layer.family.has_fixed_experts(layer.router)
        ):
            reason = f"{type(layer.router).__name__} has no correction bias for bias_update; use per_layer_loss"
        else:
            return
        raise UnsupportedModelError(f"LoadBalancing: {layer.name}: {reason}")

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Patch the model if it is not patched, and do all that `start` does but balance, which a step does."""
        super().on_train_begin(args, state, control, model, **kwargs)
        self._warn_of_second_loss(args, model)
        self._balancing = self._prepare(model)

    def _warn_of_second_loss(self, args, model) -> None:
        """Warn where Transformers' or TRL's own router loss is added too. args: of the Trainer; None without one."""
        coefficient, is_trainers = router_loss(model, args)
        if self.per_layer_loss is None or not coefficient:
            return
        off = f"pass router_aux_loss_coef=0.0 to {type(args).__name__}"
        off = off if is_trainers else "set model.config.output_router_logits = False"
        logger.warning(
            f"sonicmoe_hf: a router loss of {'this trainer' if is_trainers else 'the model'}'s own, times {coefficient}, "
            f"is added to that of LoadBalancing(per_layer_loss={self.per_layer_loss}), so that both count; {off}, or "
            "leave LoadBalancing out"
        )

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Balance in this step.

        Raises:
            ValueError: another LoadBalancing does.
        """
        settings = routing_state(model)
        if "balancing" in settings.step.replaced and settings.balancing is not self._balancing:
            raise ValueError(
                "the Trainer has two LoadBalancing callbacks, of which one would do nothing; give one of them "
                "per_layer_loss and bias_update"
            )
        self.begin_step(model, balancing=self._balancing)

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Update the biases."""
        self.step(model)


def _routers_with_bias(model: nn.Module) -> list[nn.Module]:
    """List the routers in use whose correction bias moves: all but those whose experts a table gives."""
    layers = ((layer.family, layer.router) for layer in find_layers(model))
    return [router for family, router in layers if family is not None and not family.has_fixed_experts(router)]


def _check_saved(model: nn.Module) -> None:
    """Raise ValueError where PEFT would save adapters without the routers' biases."""
    saved = {module for name, module in model.named_modules() if ".modules_to_save." in name}
    has_adapters = any(hasattr(module, "peft_config") for module in model.modules())
    if has_adapters and any(router not in saved for router in _routers_with_bias(model)):
        raise ValueError(
            "LoadBalancing(bias_update=...) changes the routers' biases, which an adapter's checkpoint leaves out; put "
            "the routers into modules_to_save of the PEFT config, or use per_layer_loss"
        )
