"""Experts with LoRA to compare: functions of (x, expert_TK, weight_TK) with PEFT's own parameters as adapters.

`PEERS` maps names to makers of `Experts`; a maker raises `Unavailable` with a reason where its package is missing.
Axolotl's (axolotl/integrations/kernels/libs/scattermoe_lora) and Unsloth's (unsloth_zoo/temporary_patches/moe_utils.py)
are importable alone, their folders on sys.path; unsloth_zoo and its temporary_patches with empty __init__.py, for their
own ask for a GPU and patch Transformers. Both get the adapters as their own PEFT hooks would hand them over. unsloth_zoo
reads lora_B's columns as PEFT does since 2026.9; before, the expert was slowest, and its errors were of order one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.common.contenders import peer_module, upstream
from benchmarks.common.shapes import Shape

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
RELATIVE_SIZE = 0.3  # of the adapters' products, elementwise against the weights


class Experts(NamedTuple):
    """A layer to time. call: (x, expert_TK, weight_TK) -> out. adapters: "A1", "B1", "A2", "B2" as PEFT stores them."""

    call: Callable
    adapters: dict[str, nn.Parameter]
    scale: float


def experts_module(shape: Shape, gate_up, down, implementation: str, trained: bool = False) -> Qwen3MoeExperts:
    """Make Transformers' own experts module of given weights."""
    config = Qwen3MoeConfig(
        hidden_size=shape.H,
        moe_intermediate_size=shape.I,
        num_experts=shape.E,
        num_experts_per_tok=shape.K,
        experts_implementation=implementation,
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj = nn.Parameter(gate_up.detach(), requires_grad=trained)
    module.down_proj = nn.Parameter(down.detach(), requires_grad=trained)
    return module


def with_lora(module: nn.Module, rank: int, seed: int = 1) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Put PEFT's wrapper around the experts with fp32 adapters, none of them zero; return it and the wrapper of each
    parameter."""
    model = nn.Module()
    model.experts = module
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=TARGETS)
    wrapper = get_peft_model(model, config).base_model.model.experts
    outer = wrapper
    wrappers = {}
    while hasattr(wrapper, "parameter_name"):
        wrappers[wrapper.parameter_name] = wrapper
        wrapper = wrapper.base_layer
    generator = torch.Generator(module.down_proj.device).manual_seed(seed)
    with torch.no_grad():
        for wrapper in wrappers.values():
            a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
            a.normal_(0, a.shape[1] ** -0.5, generator=generator)
            b.normal_(0, RELATIVE_SIZE / (wrapper.scaling["default"] * rank**0.5), generator=generator)
    return outer, wrappers


def _experts(call, wrappers) -> Experts:
    gate_up, down = wrappers["gate_up_proj"], wrappers["down_proj"]
    adapters = {
        f"{side}{number}": getattr(wrapper, f"lora_{side}")["default"].weight
        for number, wrapper in ((1, gate_up), (2, down))
        for side in "AB"
    }
    return Experts(call, adapters, down.scaling["default"])


def through_peft(shape: Shape, gate_up, down, rank: int, implementation: str) -> Experts:
    """Adapt as a user does: get_peft_model on a model with this experts_implementation."""
    return _experts(*with_lora(experts_module(shape, gate_up, down, implementation), rank))


def over_grouped_mm(shape: Shape, gate_up, down, rank: int) -> Experts:
    """Put PEFT over Transformers' experts_implementation="grouped_mm"."""
    return through_peft(shape, gate_up, down, rank, "grouped_mm")


def over_upstream(shape: Shape, gate_up, down, rank: int) -> Experts:
    """Put PEFT over the kernels behind Transformers' experts_implementation="sonicmoe"; its first calls tune for
    minutes."""
    layer = upstream(shape)

    def forward(self, x, expert, weight):
        return layer(x, self.gate_up_proj, self.down_proj, expert, weight)

    name = f"sonicmoe as a module, {shape}"
    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    return through_peft(shape, gate_up, down, rank, name)


def axolotl(shape: Shape, gate_up, down, rank: int) -> Experts:
    """Build Axolotl's ScatterMoE with fused LoRA, called as its HFScatterMoEGatedMLP does."""
    peer = peer_module("scattermoe_lora")
    convert = peer_module("scattermoe_lora.layers").peft_lora_to_scattermoe
    wrappers = with_lora(experts_module(shape, gate_up, down, "grouped_mm"), rank)[1]
    weights = {"gate_up_proj": gate_up.transpose(2, 1), "down_proj": down.transpose(2, 1)}
    options = {"use_fused_dX": True, "use_fused_gather": True}

    def product(name, x, k, order, **where):
        wrapper = wrappers[name]
        factors = (getattr(wrapper, f"lora_{side}")["default"].weight.to(x.dtype) for side in "AB")
        a, b = convert(*factors, shape.E, rank)
        scale = wrapper.scaling["default"]
        return peer.parallel_linear_lora(
            x, weights[name], k, *order, lora_A=a, lora_B=b, scaling=scale, **where, **options
        )

    def layer(x, expert, weight):
        order = peer.flatten_sort_count(expert, num_experts=shape.E)
        gate, up = product("gate_up_proj", x, shape.K, order, grouped_in=False, grouped_out=True).chunk(2, dim=-1)
        return product("down_proj", F.silu(gate) * up, 1, order, gates=weight, grouped_in=True, grouped_out=False)

    return _experts(layer, wrappers)


def unsloth(shape: Shape, gate_up, down, rank: int) -> Experts:
    """Build Unsloth's separate low-rank products over grouped GEMMs, given what its ParamWrapper hook leaves on the
    module."""
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", tempfile.mkdtemp())  # or it writes sources into this folder
    peer = peer_module("unsloth_zoo.temporary_patches.moe_utils")
    module = experts_module(shape, gate_up, down, "grouped_mm")
    wrappers = with_lora(module, rank)[1]

    def layer(x, expert, weight):
        for name, wrapper in wrappers.items():
            setattr(module, f"_unsloth_lora_{name}", peer._extract_lora_from_wrapper(wrapper))
        return peer.forward_moe_backend(module, x, expert, weight)

    return _experts(layer, wrappers)


UPSTREAM, AXOLOTL = "PEFT over sonicmoe (Transformers)", "Axolotl ScatterMoE LoRA"
PEERS = {"PEFT over grouped_mm": over_grouped_mm, UPSTREAM: over_upstream, AXOLOTL: axolotl, "Unsloth": unsloth}
