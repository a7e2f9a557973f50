"""Hypotheses of what became of an adapter: the same adapter with some of its layers left out, or read in another way."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import AuxiliaryTrainingWrapper

from ...adapters.adapter import is_interleaved
from ...layer.experts_module import has_gate, is_experts, weight_names

# kinds of hypotheses: some layers of the adapter are missing, read in another way, or at another scale
LEFT_OUT, MISREAD, SCALED = "left out", "misread", "scaled"
ALL = "the adapter"
LORA = "its LoRA"
BIASES = "its biases"
EXPERTS, REST = "its experts", "what is beside its experts"
REMEDIES = {
    EXPERTS: "the engine takes no adapters of experts, or not in this form; convert (--layout) or merge it",
    "kv_b_proj": "vLLM decodes without the adapter of this layer; merge it",
}
OTHER_COLUMN_ORDER = (
    "its experts' lora_B read in the other order of columns, of PEFT's and older Unsloth's; bring it into PEFT's first: "
    "sonicmoe-hf convert ADAPTER DST --layout hub"
)
OTHER_ROW_ORDER = "gate's and up's rows of lora_B read in the other order (halves, or in turn)"
OTHER_SCALE = "without its alpha_pattern and rsLoRA: scaled by lora_alpha / rank"


class AdaptedLayer(NamedTuple):
    """A layer that the adapter is on.

    target: the last component of the adapted module's or parameter's name. experts: the module, where the layer adapts a
    weight of experts. decoder_layer: the number of the one it is in; "" outside those.
    """

    wrapper: Any
    adapter: str
    target: str
    experts: Any
    decoder_layer: str = ""

    @property
    def b(self) -> torch.Tensor:
        """Read lora_B."""
        return self.wrapper.lora_B[self.adapter].weight

    @property
    def rank(self) -> int:
        """Read r, of each expert where it adapts experts."""
        return self.wrapper.r[self.adapter]

    @property
    def scale(self) -> float:
        """Read the scale of B A."""
        return self.wrapper.scaling[self.adapter]

    @property
    def is_gate_up(self) -> bool:
        """Tell whether the layer adapts experts' gate and up."""
        return self.experts is not None and has_gate(self.experts) and self.target == weight_names(self.experts)[0]


class Whole(NamedTuple):
    """A module or tensor that was trained whole, beside LoRA.

    switch: sets it to the trained values (True) or the base's (False).
    """

    name: str
    switch: Callable[[bool], None]


class Hypothesis(NamedTuple):
    """A hypothesis of what a place computes instead of the adapter.

    change: computes the lora_B that the place has in a layer; None where it is the adapter's. left_out: tells of a
    Whole's name whether the place lacks it. decoder_layer: its number, where only one is changed; otherwise "".
    """

    kind: str
    name: str
    change: Callable[[AdaptedLayer], torch.Tensor | None]
    left_out: Callable[[str], bool] = lambda name: False
    decoder_layer: str = ""

    @contextmanager
    def simulated(self, layers: list[AdaptedLayer], wholes: list[Whole]) -> Iterator[None]:
        """Change the model's adapter inside the block to what the hypothesis says."""
        originals = [layer.b.data for layer in layers]
        switched = [whole for whole in wholes if self.left_out(whole.name)]
        try:
            for layer in layers:
                if (changed := self.change(layer)) is not None:
                    layer.b.data = changed
            for whole in switched:
                whole.switch(False)
            yield
        finally:
            for layer, b in zip(layers, originals):
                layer.b.data = b
            for whole in switched:
                whole.switch(True)


def layers_of(model: Any) -> list[AdaptedLayer]:
    """List the layers of a PEFT model that its active adapter is on."""
    layers = []
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or model.active_adapter not in module.lora_B:
            continue
        inner: Any = module.get_base_layer()  # type: ignore[operator]
        target = module.parameter_name if isinstance(module, ParamWrapper) else name.rpartition(".")[2]
        experts = inner if is_experts(inner) and target in weight_names(inner) else None
        number = re.search(r"\.(\d+)\.", name)
        layers.append(AdaptedLayer(module, model.active_adapter, target, experts, number[1] if number else ""))
    return layers


def wholes_of(model: Any, biases: list[tuple[torch.nn.Parameter, torch.Tensor]]) -> list[Whole]:
    """List the weights that an adapter of a PEFT model has trained whole: modules_to_save, tokens and biases.

    biases: parameters that hold the adapter's biases, each with the base's values.
    """
    wholes = []
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            wholes.append(Whole(name.rpartition(".")[2], module.enable_adapters))
    for bias, base_values in biases:
        values = {True: bias.data, False: base_values}

        def switch(on: bool, bias: torch.nn.Parameter = bias, values: dict[bool, torch.Tensor] = values) -> None:
            bias.data = values[on]

        wholes.append(Whole(BIASES, switch))
    return wholes


def hypotheses_for(model: Any, layers: list[AdaptedLayer], wholes: list[Whole]) -> list[Hypothesis]:
    """List the hypotheses of how a server may have misread a PEFT model's adapter, on these layers and whole weights."""
    experts = [layer for layer in layers if layer.experts is not None]
    groups = groups_of(layers)
    numbers = list(dict.fromkeys(layer.decoder_layer for layer in layers if layer.decoder_layer))
    groups |= {f"layer {number}": partial(_has_number, number) for number in numbers}
    for number in dict.fromkeys(layer.decoder_layer for layer in experts if layer.decoder_layer):
        groups[f"layer {number}'s experts"] = partial(_has_experts_of, number)
    hypotheses, seen = [], []
    for name, is_in in groups.items():
        if name == ALL:
            continue
        members = [is_in(layer) for layer in layers]
        if all(members) or members in seen:  # the base or all LoRA, or a group under another name
            continue
        seen.append(members)
        changed = {layer.decoder_layer for layer, is_member in zip(layers, members) if is_member}
        number = changed.pop() if len(changed) == 1 else ""
        hypotheses.append(Hypothesis(LEFT_OUT, name, scaled_by(is_in, 0), decoder_layer=number))
    names = list(dict.fromkeys(whole.name for whole in wholes))
    for name in names:
        if layers or len(names) > 1:
            hypotheses.append(Hypothesis(LEFT_OUT, name, lambda layer: None, partial(operator.eq, name)))
    if layers and wholes:
        hypotheses.append(Hypothesis(LEFT_OUT, LORA, scaled_by(lambda layer: True, 0)))
        if len(names) > 1:
            everything = " and ".join(names)
            hypotheses.append(Hypothesis(LEFT_OUT, everything, lambda layer: None, lambda name: True))
    if any(layer.rank > 1 for layer in experts):
        hypotheses += [Hypothesis(MISREAD, OTHER_COLUMN_ORDER, change) for change in (_as_by_rank, _as_by_expert)]
    if any(layer.is_gate_up for layer in layers):
        hypotheses.append(Hypothesis(MISREAD, OTHER_ROW_ORDER, _in_other_rows))
    alpha = model.peft_config[model.active_adapter].lora_alpha
    if any(layer.scale != alpha / layer.rank for layer in layers):
        hypotheses.append(
            Hypothesis(MISREAD, OTHER_SCALE, lambda layer: layer.b.data * (alpha / layer.rank / layer.scale))
        )
    return hypotheses


def hypotheses_of_targets(layers: list[AdaptedLayer], number: str) -> list[Hypothesis]:
    """List the hypotheses that one target of a decoder layer is left out. Over all layers they are as many as a model has
    weights, so they are listed for a layer of which something is missing."""
    targets = dict.fromkeys(layer.target for layer in layers if layer.decoder_layer == number)
    if len(targets) == 1:  # leaving it out leaves out the layer
        return []
    return [
        Hypothesis(
            LEFT_OUT, f"layer {number}'s {target}", scaled_by(partial(_has, target, number), 0), decoder_layer=number
        )
        for target in targets
    ]


def groups_of(layers: list[AdaptedLayer]) -> dict[str, Callable[[AdaptedLayer], bool]]:
    """Group the layers that engines treat alike: all, those of each target, the experts' and the rest. By name, a test of
    membership."""
    groups: dict[str, Callable[[AdaptedLayer], bool]] = {ALL: lambda layer: True}
    if any(layer.experts is not None for layer in layers) and any(layer.experts is None for layer in layers):
        groups[EXPERTS] = lambda layer: layer.experts is not None
        groups[REST] = lambda layer: layer.experts is None
    for target in dict.fromkeys(layer.target for layer in layers):
        groups[target] = partial(_has_target, target)
    return groups


def _has_target(target: str, layer: AdaptedLayer) -> bool:
    return layer.target == target


def _has_number(number: str, layer: AdaptedLayer) -> bool:
    return layer.decoder_layer == number


def _has(target: str, number: str, layer: AdaptedLayer) -> bool:
    return _has_target(target, layer) and _has_number(number, layer)


def _has_experts_of(number: str, layer: AdaptedLayer) -> bool:
    return layer.decoder_layer == number and layer.experts is not None


def scaled_by(is_in: Callable[[AdaptedLayer], bool], scale: float) -> Callable[[AdaptedLayer], torch.Tensor | None]:
    """Make the change of a hypothesis that scales lora_B in the layers of a group."""
    return lambda layer: layer.b.data * scale if is_in(layer) else None


def _as_by_rank(layer: AdaptedLayer) -> torch.Tensor | None:
    """Read columns that were written expert by expert as PEFT's, which stand rank by rank."""
    return None if layer.experts is None else _transpose_blocks(layer.b.data, 1, (layer.rank, -1))


def _as_by_expert(layer: AdaptedLayer) -> torch.Tensor | None:
    """Invert `_as_by_rank`."""
    return None if layer.experts is None else _transpose_blocks(layer.b.data, 1, (-1, layer.rank))


def _in_other_rows(layer: AdaptedLayer) -> torch.Tensor | None:
    """Read gate's and up's rows in the other order: as two halves where they alternate, or the reverse."""
    if not layer.is_gate_up:
        return None
    return _transpose_blocks(layer.b.data, 0, (2, -1) if is_interleaved(layer.experts) else (-1, 2))


def _transpose_blocks(b: torch.Tensor, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    return b.unflatten(dim, sizes).transpose(dim, dim + 1).flatten(dim, dim + 1)
