"""Hypotheses of what became of an adapter: the same adapter with a part left out, or read in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper

from ...layer.experts_module import has_gate, is_experts, weight_names
from ...lora.adapter import is_interleaved

LEFT_OUT = "left out"  # the kind of hypotheses that a part of the adapter is missing
MISREAD = "misread"
EXPERTS, REST = "its experts", "what is beside its experts"
KNOWN = {  # remedies
    EXPERTS: "the engine takes no adapters of experts, or not in this form; convert (--layout) or merge it",
    "kv_b_proj": "vLLM decodes without the adapter of this layer; merge it",
}
COLUMNS = (
    "its experts' lora_B read in the other order of columns, of PEFT's and older Unsloth's; bring it into PEFT's first: "
    "sonicmoe-hf convert ADAPTER DST --layout hub"
)
ROWS = "gate's and up's rows of lora_B read in the other order (halves, or in turn)"
SCALES = "without its alpha_pattern and rsLoRA: scaled by lora_alpha / rank"


class Layer(NamedTuple):
    """A layer that the adapter is on. target: the last part of what is adapted, a layer's name or a parameter's.

    experts: the module, where it adapts a weight of experts."""

    wrapper: Any
    adapter: str
    target: str
    experts: Any

    @property
    def b(self) -> torch.Tensor:
        """lora_B."""
        return self.wrapper.lora_B[self.adapter].weight

    @property
    def rank(self) -> int:
        """r, of each expert."""
        return self.wrapper.r[self.adapter]

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.wrapper.scaling[self.adapter]

    @property
    def is_gate_up(self) -> bool:
        """Whether it adapts experts' gate and up."""
        return self.experts is not None and has_gate(self.experts) and self.target == weight_names(self.experts)[0]


class Hypothesis(NamedTuple):
    """The adapter under another reading. change: what is in lora_B's place, in a layer; None where it is the same."""

    kind: str
    name: str
    change: Callable[[Layer], torch.Tensor | None]

    @contextmanager
    def holds(self, layers: list[Layer]) -> Iterator[None]:
        """Change the adapter inside the block."""
        kept = [layer.b.data for layer in layers]
        try:
            for layer in layers:
                if (changed := self.change(layer)) is not None:
                    layer.b.data = changed
            yield
        finally:
            for layer, b in zip(layers, kept):
                layer.b.data = b


def layers_of(model: Any) -> list[Layer]:
    """List the layers of a PEFT model that its active adapter is on."""
    layers = []
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or model.active_adapter not in module.lora_B:
            continue
        inner: Any = module.get_base_layer()  # type: ignore[operator]
        target = module.parameter_name if isinstance(module, ParamWrapper) else name.rpartition(".")[2]
        experts = inner if is_experts(inner) and target in weight_names(inner) else None
        layers.append(Layer(module, model.active_adapter, target, experts))
    return layers


def hypotheses_for(model: Any, layers: list[Layer]) -> list[Hypothesis]:
    """List what may have become of the active adapter of a PEFT model, whose layers these are."""
    targets = dict.fromkeys(layer.target for layer in layers)
    experts = [layer for layer in layers if layer.experts is not None]
    hypotheses = [_without(target, lambda layer, name: layer.target == name) for target in targets]
    if len(targets) == 1:  # which is the base
        hypotheses = []
    if experts and len(experts) < len(layers):
        hypotheses.append(_without(EXPERTS, lambda layer, _: layer.experts is not None))
        hypotheses.append(_without(REST, lambda layer, _: layer.experts is None))
    if any(layer.rank > 1 for layer in experts):
        hypotheses += [Hypothesis(MISREAD, COLUMNS, change) for change in (_as_by_rank, _as_by_expert)]
    if any(layer.is_gate_up for layer in layers):
        hypotheses.append(Hypothesis(MISREAD, ROWS, _in_other_rows))
    alpha = model.peft_config[model.active_adapter].lora_alpha
    if any(layer.scale != alpha / layer.rank for layer in layers):
        hypotheses.append(Hypothesis(MISREAD, SCALES, lambda layer: layer.b.data * (alpha / layer.rank / layer.scale)))
    return hypotheses


def _without(name: str, is_left_out: Callable[[Layer, str], bool]) -> Hypothesis:
    zeros = torch.zeros_like
    return Hypothesis(LEFT_OUT, name, lambda layer: zeros(layer.b.data) if is_left_out(layer, name) else None)


def _as_by_rank(layer: Layer) -> torch.Tensor | None:
    """Take columns that were written expert by expert for PEFT's, which stand rank by rank."""
    return None if layer.experts is None else _turned(layer.b.data, 1, (layer.rank, -1))


def _as_by_expert(layer: Layer) -> torch.Tensor | None:
    """Invert `_as_by_rank`."""
    return None if layer.experts is None else _turned(layer.b.data, 1, (-1, layer.rank))


def _in_other_rows(layer: Layer) -> torch.Tensor | None:
    """Take gate's and up's rows, one half after the other, for rows in turn, or the reverse."""
    if not layer.is_gate_up:
        return None
    return _turned(layer.b.data, 0, (2, -1) if is_interleaved(layer.experts) else (-1, 2))


def _turned(b: torch.Tensor, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    return b.unflatten(dim, sizes).transpose(dim, dim + 1).flatten(dim, dim + 1)
