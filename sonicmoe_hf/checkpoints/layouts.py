"""Where experts' weights lie in a checkpoint: one table, read in both directions, so that conversion only moves bits.

Letters: E experts, H hidden size, I expert intermediate size. An expert has the parts gate [I, H], up [I, H],
down [H, I], and where there are biases gate_bias [I], up_bias [I], down_bias [H]. A layout says in which tensor, and
where in it, each part lies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from ..layer.experts_module import Sizes
from ..model_patches import NativeFamily

LAYOUT_VERSION = 1
NATIVE_PREFIX = "sonicmoe_"
VERSION_KEY = "sonicmoe_layout_version"
HUB_CONFIG_KEY = "sonicmoe_hub_config"
PACKED = ("", "_blocks", "_codes", "_values", "_packed")  # how a name goes on: dense, MXFP4, NF4, FP8, NVFP4

View = Callable[[torch.Tensor], torch.Tensor]


class Stored(NamedTuple):
    """A tensor of a layout. `name` follows the block's; with "{expert}" in it there is one tensor per expert.

    letters: its shape. parts: for each part in it, the view of one expert's slice in which it lies.
    """

    name: str
    letters: tuple[str, ...]
    parts: dict[str, View]

    @property
    def per_expert(self) -> bool:
        """Whether every expert has a tensor of its own."""
        return "{expert}" in self.name

    @property
    def is_bias(self) -> bool:
        """Whether it holds biases."""
        return all(part.endswith("bias") for part in self.parts)


def _whole(expert):
    return expert


def _even(expert):
    return expert[0::2]


def _odd(expert):
    return expert[1::2]


def _first_half(expert):
    return expert[: expert.shape[0] // 2]


def _second_half(expert):
    return expert[expert.shape[0] // 2 :]


def _transposed(view: View) -> View:
    return lambda expert: view(expert.T)


def _interleaved(c_fc: str, c_proj: str, c_fc_bias: str, c_proj_bias: str) -> tuple[Stored, ...]:
    return (
        Stored(c_fc, ("E", "2I", "H"), {"gate": _even, "up": _odd}),
        Stored(c_proj, ("E", "H", "I"), {"down": _whole}),
        Stored(c_fc_bias, ("E", "2I"), {"gate_bias": _even, "up_bias": _odd}),
        Stored(c_proj_bias, ("E", "H"), {"down_bias": _whole}),
    )


CHECKPOINT_LAYOUTS: dict[str, tuple[Stored, ...]] = {
    "native": _interleaved("experts.c_fc", "experts.c_proj", "experts.c_fc_bias", "experts.c_proj_bias"),
    "upstream": _interleaved("c_fc.weight", "c_proj.weight", "c_fc.bias", "c_proj.bias"),  # SonicMoE's own MoE module
    "per_expert": (
        Stored("experts.{expert}.gate_proj.weight", ("I", "H"), {"gate": _whole}),
        Stored("experts.{expert}.up_proj.weight", ("I", "H"), {"up": _whole}),
        Stored("experts.{expert}.down_proj.weight", ("H", "I"), {"down": _whole}),
    ),
    "fused": (
        Stored("experts.gate_up_proj", ("E", "2I", "H"), {"gate": _first_half, "up": _second_half}),
        Stored("experts.down_proj", ("E", "H", "I"), {"down": _whole}),
    ),
    "gpt_oss": (
        Stored("experts.gate_up_proj", ("E", "H", "2I"), {"gate": _transposed(_even), "up": _transposed(_odd)}),
        Stored("experts.down_proj", ("E", "I", "H"), {"down": _transposed(_whole)}),
        Stored("experts.gate_up_proj_bias", ("E", "2I"), {"gate_bias": _even, "up_bias": _odd}),
        Stored("experts.down_proj_bias", ("E", "H"), {"down_bias": _whole}),
    ),
}
DESCRIPTIONS = {
    "native": "native (experts.c_fc interleaved, experts.c_proj)",
    "upstream": "a SonicMoE MoE module's (c_fc.weight interleaved, c_proj.weight)",
    "per_expert": "hub, one tensor per expert and projection",
    "fused": "fused as in Transformers 5 (experts.gate_up_proj concatenated, experts.down_proj)",
    "gpt_oss": "hub, gpt-oss (experts.gate_up_proj transposed and interleaved, experts.down_proj)",
}


class Named(NamedTuple):
    """One tensor of a layer under its full name; `expert` is None where it holds all experts."""

    name: str
    shape: tuple[int, ...]
    stored: Stored
    expert: int | None


def layer_tensors(layout: str, block: str, sizes: Sizes) -> Iterator[Named]:
    """The tensors that hold the experts of the block called `block` in this layout, an expert's own side by side."""
    wanted = [stored for stored in CHECKPOINT_LAYOUTS[layout] if sizes.has_bias or not stored.is_bias]
    own = [stored for stored in wanted if stored.per_expert]
    for expert in range(sizes.num_experts if own else 0):
        for stored in own:
            name = f"{block}.{stored.name.format(expert=expert)}"
            yield Named(name, sizes.shape(stored.letters), stored, expert)
    for stored in wanted:
        if not stored.per_expert:
            yield Named(f"{block}.{stored.name}", sizes.shape(stored.letters), stored, None)


def holder(layout: str, part: str) -> Stored:
    """The tensor of the layout in which `part` lies."""
    return next(stored for stored in CHECKPOINT_LAYOUTS[layout] if part in stored.parts)


def assemble(named: Named, dtype: torch.dtype, read: Callable[[str, int], torch.Tensor]) -> torch.Tensor:
    """The tensor `named`, filled from `read(part, expert)`; nothing but moves."""
    tensor = torch.empty(named.shape, dtype=dtype)
    if named.expert is not None:
        for part, view in named.stored.parts.items():
            view(tensor).copy_(read(part, named.expert))
        return tensor
    for expert in range(tensor.shape[0]):
        for part, view in named.stored.parts.items():
            view(tensor[expert]).copy_(read(part, expert))
    return tensor


def detect_layout(names, block: str, family: NativeFamily) -> str | None:
    """Which layout the tensors of one block are in, by their names; None for none of them."""
    if any(f"{block}.experts.c_fc{packed}" in names for packed in PACKED):
        return "native"
    if f"{block}.c_fc.weight" in names:
        return "upstream"
    if any(f"{block}.experts.gate_up_proj{packed}" in names for packed in PACKED):
        return "gpt_oss" if family.hub_layout == "gpt_oss" else "fused"
    if f"{block}.experts.0.gate_proj.weight" in names:
        return "per_expert"
    return None


def from_upstream(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of an upstream SonicMoE `MoE` module -> that of a `SonicMoEExperts`; the router stays behind.

    Args:
        state: c_fc.weight [E, 2I, H] interleaved, c_proj.weight [E, H, I], and c_fc.bias, c_proj.bias where it has them.
    """
    renamed = {
        "c_fc.weight": "c_fc",
        "c_proj.weight": "c_proj",
        "c_fc.bias": "c_fc_bias",
        "c_proj.bias": "c_proj_bias",
    }
    missing = [name for name in ("c_fc.weight", "c_proj.weight") if name not in state]
    if missing:
        raise CheckpointError(
            f"the state dict of a SonicMoE MoE module has {missing[0]}; this one has {sorted(state)}"
        )
    return {ours: state[theirs] for theirs, ours in renamed.items() if theirs in state}


def to_upstream(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a `SonicMoEExperts` -> the same weights as an upstream SonicMoE `MoE` module names them."""
    return {re.sub(r"^(c_fc|c_proj)(_bias)?$", _upstream_name, name): tensor for name, tensor in state.items()}


def _upstream_name(match: re.Match) -> str:
    return f"{match[1]}.{'bias' if match[2] else 'weight'}"
