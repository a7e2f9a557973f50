"""The module that holds a layer's weights: whether it is one, its weights and their shapes.

Letters: E experts, H hidden size, I expert intermediate size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

LIGER_SWITCH = (
    "keep Liger from the experts by its switch swiglu=False (Trainer: liger_kernel_config={'swiglu': False}), given "
    "before this model is built; its other kernels work beside sonicmoe_hf"
)
IMPLEMENTATION = "sonicmoe_hf"  # our name as experts_implementation and as ep_implementation
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # E's names in configs


class Sizes(NamedTuple):
    """E, H, I of a layer's experts, and whether they have biases."""

    num_experts: int
    hidden: int
    intermediate: int
    has_bias: bool

    def shape(self, letters: tuple[str, ...]) -> tuple[int, ...]:
        """Look up the sizes of letters: ("E", "2I", "H") -> (num_experts, 2 * intermediate, hidden)."""
        size = {"E": self.num_experts, "H": self.hidden, "I": self.intermediate, "2I": 2 * self.intermediate}
        return tuple(size[letter] for letter in letters)


def is_native(module: nn.Module) -> bool:
    """Tell whether this is a SonicMoEExperts: experts in the native layout, which sonicmoe_hf alone computes."""
    return hasattr(type(module), "weight_names")


def is_experts(module: nn.Module) -> bool:
    """Tell whether this module holds experts that go through Transformers' experts interface, or native ones."""
    return hasattr(type(module), "_apply_gate") or is_native(module)


def why_replaced_by_liger(module: nn.Module) -> str | None:
    """Say why a module of Liger's stands in an experts module's place, with the remedy; None of another module."""
    if not type(module).__module__.startswith("liger_kernel.") or not type(module).__name__.endswith("Experts"):
        return None
    return (
        f"Liger put {type(module).__name__} in the place of its experts class before the model was built, as it does for "
        f"all later models of the process when it is applied to one; {LIGER_SWITCH}"
    )


def has_gate(experts: nn.Module) -> bool:
    """Tell whether the experts have gate and up projections, not an up projection alone."""
    return vars(experts).get("has_gate", True)


def weight_names(experts: nn.Module) -> tuple[str, str]:
    """Name the experts' weights, of the first product and of the second."""
    first = "gate_up_proj" if has_gate(experts) else "up_proj"
    return getattr(type(experts), "weight_names", (first, "down_proj"))


def packable(module: nn.Module) -> tuple[str, ...]:
    """Name an experts module's weights, where it holds them: they are packed, and kept in host memory; none
    of another module."""
    names = weight_names(module)
    held = module._parameters.keys() | module._buffers.keys()  # buffers: see formats.shares.keep_from_fsdp
    return names if is_experts(module) and held.issuperset(names) else ()


def is_transposed(experts: nn.Module) -> bool:
    """Tell whether the module stores weights as [E, in, out]."""
    return bool(getattr(experts, "is_transposed", False))


def row_order(experts: nn.Module, name: str) -> str:
    """Find the order of kernels.packed.ORDERS in which the rows of an experts module's weight stand."""
    if name != weight_names(experts)[0] or not has_gate(experts):
        return "whole"
    return "interleaved" if is_native(experts) or not getattr(experts, "is_concatenated", True) else "concatenated"


def matrix_shape(experts: nn.Module, weight: torch.Tensor) -> tuple[int, int, int]:
    """Compute (E, out, in) of an experts module's weight."""
    num_experts, *sides = whole_shape(weight)
    size_out, size_in = reversed(sides) if is_transposed(experts) else sides
    return num_experts, size_out, size_in


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """Read the shape of a weight, gathered or not: DeepSpeed's ZeRO-3 notes it beside the empty tensor that it leaves."""
    return getattr(weight, "ds_shape", weight.shape)


def num_experts_in(config: Any) -> int | None:
    """Read E of a model's config; None where it does not say, or where layers differ."""
    totals = (getattr(config, name, None) for name in COUNTS)
    return next((total for total in totals if isinstance(total, int)), None)
