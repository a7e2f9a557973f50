"""Layouts of a checkpoint: what config.json says in each, names of experts' weights, and the order of their rows.

Letters: E experts, H hidden size, I expert intermediate size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from ..layer.experts_module import Sizes
from ..model_patches import NATIVE_FAMILIES, NATIVE_PREFIX, NativeFamily

# to choose from; the hub's is a family's own, one of those that detect_layout names
CHECKPOINT_LAYOUTS = ("native", "hub")
LAYOUT_VERSION = 1
VERSION_KEY = "sonicmoe_layout_version"
HUB_CONFIG_KEY = "sonicmoe_hub_config"
HUB_ENTRIES = ("architectures", "auto_map")  # of config.json, which name the family's own classes
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
HUB_MATRICES = {  # of a weight of experts: the matrices of one expert in the hub's files
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
ROW_ORDERS = {  # of gate's and up's rows in a weight that holds both; elsewhere "whole"
    "native": "interleaved",
    "upstream": "interleaved",
    "gpt_oss": "interleaved",
    "fused": "concatenated",
}


class ExpertsParameter(NamedTuple):
    """A parameter of a block's experts, as the weights of a layout store it.

    names: of the one weight that holds all experts; or of an expert's own, gate and up or down, with "{expert}" for its
    number. num_experts, shape: E, and (rows, columns) of one expert's weight; (rows,) of biases. order: of rows, one of
    kernels.packed.ORDERS. is_transposed: whether dense weights are [E, columns, rows].
    """

    names: tuple[str, ...]
    num_experts: int
    shape: tuple[int, ...]
    order: str = "whole"
    is_transposed: bool = False

    @property
    def is_per_expert(self) -> bool:
        """Tell whether each expert has weights of its own."""
        return "{expert}" in self.names[0]

    def names_of(self, expert: int | None) -> list[str]:
        """Name the weights that hold an expert."""
        return [name.format(expert=expert) for name in self.names]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of each dense weight."""
        shape = self.shape[::-1] if self.is_transposed else self.shape
        return shape if self.is_per_expert else (self.num_experts, *shape)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """List the shapes of all weights, by name."""
        experts = range(self.num_experts if self.is_per_expert else 1)
        return {name: self.weight_shape for expert in experts for name in self.names_of(expert)}

    def split(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """Take one expert's weights, [rows, ...] each, apart into gate's and up's rows, or down's."""
        if self.order == "interleaved":
            return [weights[0][0::2], weights[0][1::2]]
        return list(weights[0].chunk(2)) if self.order == "concatenated" else weights

    def join(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Put parts together, as the inverse of `split`."""
        if self.order == "interleaved":
            return [torch.stack(parts, dim=1).flatten(0, 1)]
        return [torch.cat(parts)] if self.order == "concatenated" else parts


def experts_parameters(family: NativeFamily, layout: str, blocks: Mapping[str, Sizes]) -> dict[str, ExpertsParameter]:
    """Name every parameter of a model's experts as the family's own model does, and say how a layout stores it.

    Args:
        blocks: the sizes of the experts, by name of their block.
    """
    return {
        f"{block}.experts.{name}": _parameter(family, layout, block, name, sizes)
        for block, sizes in blocks.items()
        for name in NATIVE_NAMES
        if sizes.has_bias or not name.endswith("_bias")
    }


def _parameter(family: NativeFamily, layout: str, block: str, name: str, sizes: Sizes) -> ExpertsParameter:
    num_experts, hidden, intermediate, _ = sizes
    is_first, is_bias = name.startswith("gate_up_proj"), name.endswith("_bias")
    rows, columns = (2 * intermediate, hidden) if is_first else (hidden, intermediate)
    if layout == "per_expert":
        names = tuple(f"{block}.experts.{{expert}}.{each}.weight" for each in HUB_MATRICES[name])
        return ExpertsParameter(names, num_experts, (rows // len(names), columns))
    own_names = {"native": f"experts.{NATIVE_NAMES[name]}", "upstream": UPSTREAM_NAMES[NATIVE_NAMES[name]]}
    shape = (rows,) if is_bias else (rows, columns)
    order, is_transposed = ROW_ORDERS[layout] if is_first else "whole", layout == "gpt_oss" and not is_bias
    return ExpertsParameter(
        (f"{block}.{own_names.get(layout, f'experts.{name}')}",), num_experts, shape, order, is_transposed
    )


def name_in_layout(name: str, layout: str, family: NativeFamily, blocks: Collection[str]) -> str:
    """Name a model's parameter that is no expert's as a layout does: SonicMoE's own modules rename the router."""
    block, _, rest = name.rpartition(f".{family.router_attribute}.")
    return f"{block}.router.{rest}" if layout == "upstream" and block in blocks else name


def detect_layout(weights: Collection[str], block: str, family: NativeFamily) -> str | None:
    """Detect the layout of the weights of one block by their names; None for none of them."""
    if f"{block}.experts.c_fc" in weights:
        return "native"
    if f"{block}.c_fc.weight" in weights:
        return "upstream"
    if f"{block}.experts.gate_up_proj" in weights:
        return "gpt_oss" if family.hub_layout == "gpt_oss" else "fused"
    has_matrices = f"{block}.experts.0.gate_proj.weight" in weights and family.hub_layout == "per_expert"
    return "per_expert" if has_matrices else None


def has_native_layout(config: dict) -> bool:
    """Tell whether config.json names a family with a native layout, in either layout."""
    return str(config.get("model_type")).removeprefix(NATIVE_PREFIX) in NATIVE_FAMILIES


def check_has_native_layout(config: dict, path: Path) -> None:
    """Raise CheckpointError where config.json, at `path`, names no family with a native layout."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not has_native_layout(config):
        raise CheckpointError(
            f"{path}: model_type is {model_type!r}; {', '.join(NATIVE_FAMILIES)} have a native layout and packed experts "
            "in the hub's. Of others, sonicmoe-hf convert SRC DST --layout hub makes quantized weights bf16, "
            "sonicmoe_hf.from_pretrained(SRC, experts_quantization=FORMAT) packs experts, and sonicmoe-hf merge BASE "
            "ADAPTER DST, without --layout, and without --quantize or with --quantize keep, merges adapters"
        )


def family_of(config: dict, path: Path) -> tuple[NativeFamily, bool]:
    """Read the family that config.json, at `path`, names, and whether it says the native layout.

    Raises:
        CheckpointError: the family has none, or its layout is of a version that is not read here.
    """
    check_has_native_layout(config, path)
    model_type = config["model_type"]
    native = model_type.startswith(NATIVE_PREFIX)
    if native and config.get(VERSION_KEY) != LAYOUT_VERSION:
        raise CheckpointError(
            f"{path}: {VERSION_KEY} is {config.get(VERSION_KEY)!r}; this sonicmoe-hf reads version {LAYOUT_VERSION}"
        )
    return NATIVE_FAMILIES[model_type.removeprefix(NATIVE_PREFIX)], native


def hub_config(config: dict, family: NativeFamily) -> dict:
    """Make config.json of the same model in the hub layout."""
    kept = {key: value for key, value in config.items() if key not in (VERSION_KEY, HUB_CONFIG_KEY)}
    if config.get("model_type") == family.name:
        return kept
    kept.pop("auto_map", None)
    replaced = config.get(HUB_CONFIG_KEY)
    hubs = {key: replaced[key] for key in HUB_ENTRIES if key in replaced} if isinstance(replaced, dict) else {}
    return {**kept, "architectures": [family.causal_lm], **hubs, "model_type": family.name}


def native_config(config: dict, family: NativeFamily) -> dict:
    """Make config.json of the same model in the native layout; what it replaces is kept for the way back."""
    if config["model_type"] != family.name:
        return dict(config)
    kept = {key: value for key, value in config.items() if key != "auto_map"}
    replaced = {key: config[key] for key in HUB_ENTRIES if key in config}
    return {
        **kept,
        "architectures": [f"SonicMoE{family.causal_lm}"],
        "model_type": NATIVE_PREFIX + family.name,
        VERSION_KEY: LAYOUT_VERSION,
        HUB_CONFIG_KEY: replaced,
    }
