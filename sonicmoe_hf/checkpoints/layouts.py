"""Where experts' weights lie in a checkpoint: every layout is what Transformers' conversions make the model's parameters
of, so that conversion reads one and writes another, and only moves bits.

Letters: E experts, H hidden size, I expert intermediate size.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    ConversionOps,
    Interleave,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)

from ..errors import CheckpointError
from ..model_patches import NativeFamily
from .converters import WeightGroup, weight_groups

LAYOUT_VERSION = 1
NATIVE_PREFIX = "sonicmoe_"
VERSION_KEY = "sonicmoe_layout_version"
HUB_CONFIG_KEY = "sonicmoe_hub_config"
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")  # a parameter of experts that is packed
NATIVE_NAMES = {  # of the parameters of experts, as the families declare them: what SonicMoEExperts calls them
    "gate_up_proj": "c_fc",
    "gate_up_proj_bias": "c_fc_bias",
    "down_proj": "c_proj",
    "down_proj_bias": "c_proj_bias",
}
UPSTREAM_NAMES = {  # of a SonicMoEExperts' parameters: their names in SonicMoE's own MoE module
    "c_fc": "c_fc.weight",
    "c_fc_bias": "c_fc.bias",
    "c_proj": "c_proj.weight",
    "c_proj_bias": "c_proj.bias",
}
INTERLEAVED = ("native", "upstream")  # layouts of [E, 2I, H] with gate and up rows in turn


def detect_layout(weights: Collection[str], block: str, family: NativeFamily) -> str | None:
    """Which layout the weights of one block are in, by their names; None for none of them."""
    if f"{block}.experts.c_fc" in weights:
        return "native"
    if f"{block}.c_fc.weight" in weights:
        return "upstream"
    if f"{block}.experts.gate_up_proj" in weights:
        return "gpt_oss" if family.hub_layout == "gpt_oss" else "fused"
    if f"{block}.experts.0.gate_proj.weight" in weights:
        return "per_expert"
    return None


def layout_groups(
    model: PreTrainedModel, family: NativeFamily, layout: str, blocks: Collection[str]
) -> dict[str, WeightGroup]:
    """By name of a parameter of the family's own model, the weights that stand for it in a layout.

    Args:
        model: on the meta device. blocks: the names of those with experts.
    """
    state = model.state_dict()
    if layout == "per_expert":
        shapes = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}
        return {group.targets[0]: group for group in weight_groups(model, shapes)}
    groups = {}
    for target, parameter in state.items():
        name, operation = _interleaved(target, family, layout, blocks)
        converter = None if operation is None else WeightConverter(name, target, [operation])
        group = WeightGroup(converter, target, state, model.config)
        turned = isinstance(operation, Transpose)
        group.add(name, name, tuple(parameter.transpose(1, 2).shape if turned else parameter.shape))
        if target.endswith(f".experts.{EXPERT_WEIGHTS[0]}"):
            group.order = "concatenated" if layout == "fused" else "interleaved"
        groups[target] = group
    return groups


def _interleaved(
    target: str, family: NativeFamily, layout: str, blocks: Collection[str]
) -> tuple[str, ConversionOps | None]:
    """The name of a parameter in a layout of INTERLEAVED, and what makes the parameter of it; in others its own."""
    block, _, parameter = target.rpartition(".experts.")
    if layout in INTERLEAVED and block in blocks:
        own = NATIVE_NAMES[parameter]
        name = f"{block}.experts.{own}" if layout == "native" else f"{block}.{UPSTREAM_NAMES[own]}"
        if family.hub_layout == "gpt_oss":
            return name, Transpose(1, 2) if parameter in EXPERT_WEIGHTS else None
        return name, Interleave(1) if parameter == EXPERT_WEIGHTS[0] else None
    block, _, rest = target.rpartition(f".{family.router_attribute}.")
    return f"{block}.router.{rest}" if layout == "upstream" and block in blocks else target, None


def from_upstream(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of an upstream SonicMoE `MoE` module -> that of a `SonicMoEExperts`; the router stays behind.

    Args:
        state: c_fc.weight [E, 2I, H] interleaved, c_proj.weight [E, H, I], and c_fc.bias, c_proj.bias where it has them.
    """
    missing = [name for name in ("c_fc.weight", "c_proj.weight") if name not in state]
    if missing:
        raise CheckpointError(
            f"the state dict of a SonicMoE MoE module has {missing[0]}; this one has {sorted(state)}"
        )
    return {ours: state[theirs] for ours, theirs in UPSTREAM_NAMES.items() if theirs in state}


def to_upstream(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a `SonicMoEExperts` -> the same weights as an upstream SonicMoE `MoE` module names them."""
    return {UPSTREAM_NAMES.get(name, name): tensor for name, tensor in state.items()}
