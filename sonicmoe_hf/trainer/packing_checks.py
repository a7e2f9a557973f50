"""Checks of what rows need so that their losses and gradients are those of their micro-batches one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.loss.loss_utils import ForCausalLMLoss

from ..compiling.compiled_module import compiled_modules
from ..compiling.layers import CAPTURED_MODES
from ..errors import UnlikeApartError
from ..layer.experts_module import IMPLEMENTATION
from ..layer.holding import expert_parallelism
from ..patching.moe_layers import every_experts, transformers_model
from ..routing.patched_model import find_state
from .methods import is_own

PROBE_TOKENS = 8
LEAK = 2e-2  # of logits' norm: bf16 rounds to 0.4%, and other tokens in the same attention move it by tens of percent
REMEDY = "leave packed_tokens of attach(trainer) out"
LINEAR_IN_MEMORY = "sdpa", "flash", "torch_sinks"  # in names of attention; others keep scores of all pairs of tokens
_replacing = threading.Lock()


def check_steps(trainer: Any, max_tokens: int) -> None:
    """Check what a Trainer's loss and ranks need so that rows of at most `max_tokens` tokens give the gradients of
    micro-batches.

    Raises:
        UnlikeApartError: they would differ, or ranks with different numbers of rows would wait for each other.
    """
    model = transformers_model(trainer.model)
    config, args = model.config.get_text_config(), trainer.args
    kinds = DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU
    shared = any(expert_parallelism(experts) is not None for experts in every_experts(model))
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    chunk = getattr(config, "attention_chunk_size", None)
    _raise_first(
        {
            "the loss is not the Trainer's own": not is_own(trainer, "compute_loss"),
            "compute_loss_func may not be a sum over tokens": trainer.compute_loss_func is not None,
            "label_smoothing_factor is another loss": trainer.label_smoother is not None,
            "the model's loss is a mean of each micro-batch": not trainer.model_accepts_loss_kwargs,
            "the model's loss is not that of next tokens": model.loss_function is not ForCausalLMLoss,
            "the auxiliary loss is not a sum over tokens (output_router_logits)": getattr(
                config, "output_router_logits", False
            ),
            "NEFTune's noise depends on the length of a row": args.neftune_noise_alpha is not None,
            "attention counts its chunks from a row's first token": chunk is not None and chunk < max_tokens,
            "DataParallel splits micro-batches between GPUs": args.n_gpu > 1,
            "ranks with different numbers of rows would wait for each other": (
                trainer.accelerator.distributed_type not in kinds or shared or parallelism is not None
            ),
        }
    )


def check_automatic(trainer: Any) -> None:
    """Check what rows that nobody asked for need beside that: they are to take no more memory than micro-batches, and to
    replace nothing that was asked for.

    Raises:
        UnlikeApartError: they may.
    """
    attention = transformers_model(trainer.model).config.get_text_config()._attn_implementation or ""
    _raise_first(
        {
            "training_step is not the Trainer's own": not is_own(trainer, "training_step"),
            "CUDA graphs (torch_compile_mode) are of one length": trainer.args.torch_compile_mode in CAPTURED_MODES,
            "CUDA graphs (mode of compile_layers) are of one length": any(
                module.is_captured for module in compiled_modules(trainer.model)
            ),
            f"attention {attention!r} may take more memory for one row than for several": not any(
                name in attention for name in LINEAR_IN_MEMORY
            ),
        }
    )


def check_routers(model: nn.Module) -> None:
    """Check what callbacks ask of a model's routers in this step.

    Raises:
        UnlikeApartError: it depends on which tokens are computed together.
    """
    state = find_state(model)
    if state is not None:
        balances = state.balancing is not None and bool(state.balancing.loss_weight)
        rounds = state.policy is not None
        _raise_first(
            {
                "the balancing loss is not a sum over tokens": balances,
                "token rounding depends on which tokens are computed together": rounds,
            }
        )


@torch.no_grad()
def check_rows_apart(model: Any) -> None:
    """Check, by two forwards of a few random tokens, that a sequence's logits are the same whatever comes before it.

    Raises:
        UnlikeApartError: they are not, as linear attention, convolutions and attention without position_ids reach over
            borders; or the model takes no position_ids.
    """
    device, was_training = next(model.parameters()).device, model.training
    generator = torch.Generator().manual_seed(0)
    config = transformers_model(model).config
    size = config.get_text_config().vocab_size
    ids = torch.randint(size, (3, PROBE_TOKENS), generator=generator, dtype=torch.int64, device="cpu").to(device)
    rows = (torch.cat([earlier, ids[2]])[None] for earlier in ids[:2])
    positions = torch.arange(PROBE_TOKENS, dtype=torch.int64, device=device).repeat(2)[None]
    model.eval()
    try:
        with _without_experts(model):
            first, second = (
                model(input_ids=row, position_ids=positions, use_cache=False).logits[0, PROBE_TOKENS:].float()
                for row in rows
            )
    except (AttributeError, TypeError) as error:
        reason = f"{type(model).__name__} takes no position_ids, or returns no logits"
        raise _unlike_apart(reason) from error
    finally:
        model.train(was_training)
    change = ((first - second).norm() / first.norm()).item()
    if not change <= LEAK:
        raise _unlike_apart(
            f"tokens of one sequence change the logits of the next one in its row by {change:.0%} in "
            f"{type(model).__name__}, as linear attention, convolutions and attention {config._attn_implementation!r} "
            "without regard to position_ids do"
        )


@contextmanager
def _without_experts(model: Any) -> Iterator[None]:
    """Replace the outputs of the model's experts by zeros: they depend on no other token. So few tokens take kernels of
    their own, which compile for seconds, and experts in host memory would all be copied. Experts of other models, which
    threads may train, compute as ever."""
    own = set(every_experts(transformers_model(model)))

    def forward(experts, hidden_states, *args, sonicmoe_hf_adapters=None, **kwargs):
        if experts not in own:
            return registered(experts, hidden_states, *args, sonicmoe_hf_adapters=sonicmoe_hf_adapters, **kwargs)
        if sonicmoe_hf_adapters is not None:
            sonicmoe_hf_adapters.take()
        return torch.zeros_like(hidden_states)

    with _replacing:
        registered = ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]
        ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = forward  # which stands before what is registered, and leaves it there
        try:
            yield
        finally:
            del ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]  # so that what is registered counts again


def _raise_first(reasons: dict[str, bool]) -> None:
    """Raise UnlikeApartError of the first reason that holds, if one does."""
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise _unlike_apart(reason)


def _unlike_apart(reason: str) -> UnlikeApartError:
    return UnlikeApartError(f"micro-batches cannot be packed: {reason}; {REMEDY}", reason)
