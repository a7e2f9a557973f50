"""Hypotheses of what became of an adapter: the same adapter with layers left out, misread, or at another scale."""

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
from .adapted_model import Biases

# kinds of hypotheses
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

    wrapper: PEFT's module. target: the last component of the adapted module's or parameter's name. experts: the module,
    where the layer adapts a weight of experts. decoder_layer: the number of the one it is in; "" outside those.
    """

    wrapper: Any
    adapter_name: str
    target: str
    experts: Any
    decoder_layer: str = ""

    @property
    def b(self) -> torch.Tensor:
        """Read lora_B."""
        return self.wrapper.lora_B[self.adapter_name].weight

    @property
    def rank(self) -> int:
        """Read r, of each expert where it adapts experts."""
        return self.wrapper.r[self.adapter_name]

    @property
    def scale(self) -> float:
        """Read the scale of B A."""
        return self.wrapper.scaling[self.adapter_name]

    @property
    def is_gate_up(self) -> bool:
        """Tell whether the layer adapts experts' gate and up."""
        return self.experts is not None and has_gate(self.experts) and self.target == weight_names(self.experts)[0]


Group = Callable[[AdaptedLayer], bool]  # tells which layers are in it
LoraB = Callable[[AdaptedLayer], torch.Tensor | None]  # computes a layer's lora_B; None where it is the adapter's


class WholeWeight(NamedTuple):
    """A module or tensor that was trained whole, beside LoRA.

    switch: sets it to the trained values (True) or the base's (False).
    """

    name: str
    switch: Callable[[bool], None]


class Hypothesis(NamedTuple):
    """A hypothesis of what a place computes instead of the adapter.

    kind: LEFT_OUT, MISREAD or SCALED; "" of the adapter as it was trained. lora_b: the place's. lacks: tells of a
    WholeWeight's name whether the place is without it. decoder_layer: its number, where the place differs in one only;
    otherwise "".
    """

    kind: str
    name: str
    lora_b: LoraB
    lacks: Callable[[str], bool] = lambda name: False
    decoder_layer: str = ""

    @contextmanager
    def simulated(self, layers: list[AdaptedLayer], whole_weights: list[WholeWeight]) -> Iterator[None]:
        """Put the place's adapter, as this hypothesis has it, on the model inside the block."""
        originals = [layer.b.data for layer in layers]
        missing = [each for each in whole_weights if self.lacks(each.name)]
        try:
            for layer in layers:
                if (b := self.lora_b(layer)) is not None:
                    layer.b.data = b
            for each in missing:
                each.switch(False)
            yield
        finally:
            for layer, b in zip(layers, originals):
                layer.b.data = b
            for each in missing:
                each.switch(True)


def _as_trained(layer: AdaptedLayer) -> None:
    """Change no lora_B."""


AS_TRAINED = Hypothesis("", ALL, _as_trained)
THE_BASE = Hypothesis(LEFT_OUT, "the base", lambda layer: torch.zeros_like(layer.b.data), lambda name: True)


def layers_of(model: Any) -> list[AdaptedLayer]:
    """List the layers of a PEFT model that its active adapter is on."""
    layers = []
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or model.active_adapter not in module.lora_B:
            continue
        inner: Any = module.get_base_layer()  # type: ignore[operator]
        target = module.parameter_name if isinstance(module, ParamWrapper) else name.rpartition(".")[2]
        experts = inner if is_experts(inner) and target in weight_names(inner) else None
        match = re.search(r"\.(\d+)\.", name)
        layers.append(AdaptedLayer(module, model.active_adapter, target, experts, match[1] if match else ""))
    return layers


def whole_weights_of(model: Any, biases: Biases) -> list[WholeWeight]:
    """List the weights that an adapter of a PEFT model has trained whole: modules_to_save, tokens and biases."""
    whole_weights = []
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            whole_weights.append(WholeWeight(name.rpartition(".")[2], module.enable_adapters))
    for bias, base_values in biases:
        values = {True: bias.data, False: base_values}

        def switch(on: bool, bias: torch.nn.Parameter = bias, values: dict[bool, torch.Tensor] = values) -> None:
            bias.data = values[on]

        whole_weights.append(WholeWeight(BIASES, switch))
    return whole_weights


def hypotheses_for(model: Any, layers: list[AdaptedLayer], whole_weights: list[WholeWeight]) -> list[Hypothesis]:
    """List the hypotheses of what may have become of a PEFT model's adapter, on these layers and whole weights."""
    names = list(dict.fromkeys(each.name for each in whole_weights))
    return [*_without_groups(layers), *_without_whole_weights(names, bool(layers)), *_misreadings(model, layers)]


def hypotheses_of_targets(layers: list[AdaptedLayer], number: str) -> list[Hypothesis]:
    """List the hypotheses that one target of a decoder layer is left out. Over all layers they are as many as a model has
    weights, so they are listed for a layer of which something is missing."""
    targets = dict.fromkeys(layer.target for layer in layers if layer.decoder_layer == number)
    if len(targets) == 1:  # leaving it out leaves out the layer
        return []
    return [
        Hypothesis(LEFT_OUT, f"layer {number}'s {target}", scaled(_target_in(number, target), 0), decoder_layer=number)
        for target in targets
    ]


def groups_of(layers: list[AdaptedLayer]) -> dict[str, Group]:
    """Group the layers that engines treat alike, by name: all, those of each target, the experts' and the rest."""
    groups: dict[str, Group] = {ALL: lambda layer: True}
    if any(layer.experts is not None for layer in layers) and any(layer.experts is None for layer in layers):
        groups[EXPERTS] = lambda layer: layer.experts is not None
        groups[REST] = lambda layer: layer.experts is None
    return groups | {target: _with_target(target) for target in dict.fromkeys(layer.target for layer in layers)}


def scaled(is_in: Group, scale: float) -> LoraB:
    """Make the lora_B of a place that scales the adapter's in the layers of a group."""
    return lambda layer: layer.b.data * scale if is_in(layer) else None


def _with_target(target: str) -> Group:
    return lambda layer: layer.target == target


def _in_layer(number: str) -> Group:
    return lambda layer: layer.decoder_layer == number


def _experts_in(number: str) -> Group:
    return lambda layer: layer.decoder_layer == number and layer.experts is not None


def _target_in(number: str, target: str) -> Group:
    return lambda layer: layer.decoder_layer == number and layer.target == target


def _without_groups(layers: list[AdaptedLayer]) -> list[Hypothesis]:
    """List the hypotheses that a group of layers is left out, a decoder layer, or the experts of one."""
    numbers = dict.fromkeys(layer.decoder_layer for layer in layers if layer.decoder_layer)
    groups = groups_of(layers)
    groups |= {f"layer {number}": _in_layer(number) for number in numbers}
    groups |= {f"layer {number}'s experts": _experts_in(number) for number in numbers}
    hypotheses, seen = [], []
    for name, is_in in groups.items():
        members = [is_in(layer) for layer in layers]
        if all(members) or not any(members) or members in seen:  # all LoRA, none, or a group under another name
            continue
        seen.append(members)
        in_layers = {layer.decoder_layer for layer in layers if is_in(layer)}
        number = in_layers.pop() if len(in_layers) == 1 else ""
        hypotheses.append(Hypothesis(LEFT_OUT, name, scaled(is_in, 0), decoder_layer=number))
    return hypotheses


def _without_whole_weights(names: list[str], has_lora: bool) -> list[Hypothesis]:
    """List the hypotheses that LoRA, one of the whole weights of these names, or all of these are left out, where
    something of the adapter remains."""
    hypotheses = []
    if has_lora or len(names) > 1:
        hypotheses += [Hypothesis(LEFT_OUT, name, _as_trained, partial(operator.eq, name)) for name in names]
    if has_lora and names:
        hypotheses.append(Hypothesis(LEFT_OUT, LORA, scaled(lambda layer: True, 0)))
        if len(names) > 1:
            hypotheses.append(Hypothesis(LEFT_OUT, " and ".join(names), _as_trained, lambda name: True))
    return hypotheses


def _misreadings(model: Any, layers: list[AdaptedLayer]) -> list[Hypothesis]:
    """List the hypotheses that all of the adapter is there, and its lora_B or its scale are read in another way."""
    hypotheses = []
    if any(layer.experts is not None and layer.rank > 1 for layer in layers):
        hypotheses += [Hypothesis(MISREAD, OTHER_COLUMN_ORDER, lora_b) for lora_b in (_as_by_rank, _as_by_expert)]
    if any(layer.is_gate_up for layer in layers):
        hypotheses.append(Hypothesis(MISREAD, OTHER_ROW_ORDER, _in_other_rows))
    alpha = model.peft_config[model.active_adapter].lora_alpha
    if any(layer.scale != alpha / layer.rank for layer in layers):
        hypotheses.append(
            Hypothesis(MISREAD, OTHER_SCALE, lambda layer: layer.b.data * (alpha / layer.rank / layer.scale))
        )
    return hypotheses


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
