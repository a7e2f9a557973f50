"""A check of a training step on a tiny model before it is timed: gradients beside those in fp32."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.step.models import kernel_functions
from sonicmoe_hf import PackedWeight

LAYERS, TOKENS = 3, 256  # the third layer of a hybrid model hands gradients through its linear attention
MAX_ERROR = 0.1  # of a weight's gradient in bf16, relative to its norm; a wrong gate is off by half


def check(model: PreTrainedModel, finish: Callable, others: dict[str, Callable], autocast: bool) -> None:
    """Compare gradients of tiny models, each token at all experts, with Transformers' own functions in fp32.

    Args:
        model: the tiny model, in bf16, packed or not.
        finish: makes of it what is trained, with adapters.
        others: name -> what makes of such a model the one that a contender trains.
        autocast: whether they compute under autocast.

    Raises:
        SystemExit: a gradient is off by more than MAX_ERROR.
    """
    device = model.device.type
    tokens = torch.randint(model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(3)).to(device)
    exact = _make_plain(copy.deepcopy(model))
    modeling = sys.modules[type(model).__module__]
    torch_functions = {name: function.__wrapped__ for name, function in kernel_functions(modeling).items()}
    with mock.patch.dict(vars(modeling), torch_functions):
        expected = _gradients(finish(exact), tokens, autocast=False)
    for contender, make in others.items():
        actual = _gradients(make(copy.deepcopy(model)), tokens, autocast)
        errors = {name: ((actual[name] - grad).norm() / grad.norm()).item() for name, grad in expected.items()}
        worst = max(errors, key=errors.__getitem__)
        print(f"  {contender}: largest error of a gradient {errors[worst]:.4f} ({worst})", flush=True)
        if not errors[worst] < MAX_ERROR:
            raise SystemExit(f"{contender} computes another gradient of {worst} than Transformers in fp32")


def _make_plain(model: PreTrainedModel) -> PreTrainedModel:
    """Make the model plain: in fp32, nothing packed, with Transformers' eager experts and attention."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if isinstance(weight, PackedWeight):
                module._parameters[name] = nn.Parameter(weight.dequantize())
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    return model.float()


def _gradients(model: nn.Module, tokens: torch.Tensor, autocast: bool) -> dict[str, torch.Tensor]:
    """Compute the gradients of all that is trained, by name; adapters begin with the same non-zero values in each
    model."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
