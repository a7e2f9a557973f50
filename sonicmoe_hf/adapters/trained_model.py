"""TrainedModel: the model that an adapter was trained on, in the terms of the model that the adapter is read for.

The same weights may have other names there, and experts another layout. For a vision-language model whose adapter was
trained on its text model, for example:

    trained on                        in_model ->  the model that is read for
    model.layers.3.self_attn.q_proj                model.language_model.layers.3.self_attn.q_proj
    model.layers.3.mlp.experts        <- as_trained  model.language_model.layers.3.mlp.experts

lora_B's rows stand in the order of gate and up rows, and the wrappers of an experts module in that of its parameters.
SonicMoEExperts declares its parameters in the reverse of the families' order: weights of an adapter on both that reach,
past any config, a model of the other layout do not fit by shape.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from ..checkpoints.layouts import NATIVE_NAMES
from ..errors import CheckpointError
from ..formats.hub_names import HubNames
from ..layer.experts_module import has_gate, is_experts, is_native, weight_names
from ..lora.names import KEY, is_target_parameter, without_base_layer
from .rules import AdapterConfig

NATIVE_ORDER = ("c_proj", "c_proj_bias", "c_fc", "c_fc_bias")  # in which SonicMoEExperts declares them
PARTS_BY_NAME = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
TEXT_MODEL = re.compile(r"^(model\.language_model|language_model\.model|model)\.")  # as the classes of a model name it


class AdaptedWeight(NamedTuple):
    """A weight that one pair of factors in the file is for, or one expert's part of a weight that holds all experts.

    weight: its name in the model. trained_name: in the model that was trained. part, expert: of PARTS_BY_NAME, and the
    number.
    """

    weight: str
    trained_name: str
    part: str | None = None
    expert: int | None = None

    @property
    def module(self) -> str:
        """The module that has the weight."""
        return self.weight.rpartition(".")[0]

    @property
    def parameter(self) -> str:
        """The weight's name in its module."""
        return self.weight.rpartition(".")[2]


class TrainedModel:
    """The model that an adapter was trained on: `model`, or one that has its weights under other names.

    That is the model of the other layout, of the hub's names, or the text model inside `model`.

    Args:
        model: may be on the meta device. keys: the names of the adapter's tensors in the trained model.
    Attributes:
        decoder: the trained model's name of its stack of layers of text.
    """

    def __init__(self, model: PreTrainedModel, config: AdapterConfig, keys: Collection[str]):
        self.config = config
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.experts = {name: module for name, module in self.modules.items() if is_experts(module)}
        self.state = model.state_dict()
        self.is_native = self._is_native()
        self._own_decoder = decoder_name(model)
        self._by_hub_name = self._names_by_hub_name(HubNames(model))
        self.decoder = self._find_decoder(keys)
        modules = {match["module"] for match in map(KEY.match, keys) if match}
        by_hub_name = any(name not in self.modules and name in self._by_hub_name for name in modules)
        self._hub_names = {name: hub for hub, name in self._by_hub_name.items()} if by_hub_name else {}

    def _is_native(self) -> bool:
        targets = self.config.entries.get("target_parameters") or []
        last = {target.rpartition(".")[2] for target in targets}
        if last & set(NATIVE_NAMES) and last & set(NATIVE_ORDER):
            raise CheckpointError(f"{self.config.path}: target_parameters {targets} name experts of both layouts")
        return bool(last & set(NATIVE_ORDER))

    def _names_by_hub_name(self, hub_names: HubNames) -> dict[str, str]:
        """Map the hub's names of modules with weights to the model's."""
        names = {hub_names.module(name): name for name, module in self.modules.items() if module._parameters}
        for name, module in self.experts.items():
            for parameter in module._parameters:
                for template in hub_names.per_expert(f"{name}.{parameter}"):
                    names[template.split(".{expert}.")[0]] = name
        return names

    def _find_decoder(self, keys: Collection[str]) -> str:
        """Find the decoder's name in the class that was trained."""
        for name in keys:
            match = TEXT_MODEL.match(key := without_base_layer(name))
            if match and match[1] != self._own_decoder:
                module = key.partition(".lora_")[0]
                ours = f"{self._own_decoder}.{module[match.end() :]}"
                if module not in self.modules and module not in self._by_hub_name and ours in self.modules:
                    return match[1]
        return self._own_decoder

    def in_model(self, module: str) -> str:
        """Find the model's name of a module that the adapter calls so."""
        if self.decoder != self._own_decoder and module.startswith(f"{self.decoder}."):
            module = self._own_decoder + module.removeprefix(self.decoder)
        return module if module in self.modules else self._by_hub_name.get(module, module)

    def as_trained(self, name: str) -> str:
        """Invert `in_model`, of a name that is the model's own."""
        if self.decoder != self._own_decoder and name.startswith(f"{self._own_decoder}."):
            return self.decoder + name.removeprefix(self._own_decoder)
        return name

    def _parameters(self, module: str) -> dict[str, str]:
        """List the parameters of a module in the order of the trained model's: their names there and here."""
        own = [name for name, parameter in self.modules[module]._parameters.items() if parameter is not None]
        if module not in self.experts or is_native(self.modules[module]) == self.is_native:
            return {name: name for name in own}
        order = NATIVE_ORDER if self.is_native else tuple(NATIVE_NAMES)
        here = {native: hub for hub, native in NATIVE_NAMES.items()} if self.is_native else NATIVE_NAMES
        return {name: here[name] for name in order if here[name] in own}

    def target_parameters(self, module: str) -> list[AdaptedWeight]:
        """List the parameters of a module that target_parameters names, the innermost wrapper's first."""
        trained, names = self.as_trained(module), self._parameters(module).items()
        adapted = [AdaptedWeight(f"{module}.{here}", f"{trained}.{there}") for there, here in names]
        return [weight for weight in adapted if is_target_parameter(weight.trained_name, self.config.entries)]

    def adapted_by_config(self, has_single: bool) -> Iterator[AdaptedWeight]:
        """Yield the modules and parameters that PEFT adapts under the config. has_single: experts as single linear
        layers."""
        for name in self.modules:
            if not self._is_trained(name):
                continue
            if name in self.experts and has_single:
                yield from self._single_experts(name)
                continue
            adapted, trained = self.target_parameters(name), self.as_trained(name)
            yield from adapted
            is_layer = not adapted and name not in self.experts and f"{name}.weight" in self.state
            if is_layer and any(map(self.config.adapts_module, {trained, self._hub_names.get(name, trained)})):
                yield AdaptedWeight(f"{name}.weight", f"{trained}.weight")

    def replaced_by_config(self) -> Iterator[str]:
        """Yield the names of the weights that PEFT trains whole under the config."""
        for name, module in self.modules.items():
            if name and self._is_trained(name) and self.config.replaces_module(name):
                yield from (f"{name}.{own}" for own in module.state_dict())

    def _is_trained(self, name: str) -> bool:
        """Tell whether the trained model has this one's module `name`: a text model has the decoder, and maybe a head."""
        is_whole = self.decoder == self._own_decoder
        return is_whole or name.startswith(f"{self._own_decoder}.") or "." not in name

    def _single_experts(self, name: str) -> Iterator[AdaptedWeight]:
        """Yield the projections of single experts that target_modules names, by any name that they have."""
        module = self.modules[name]
        prefixes = {self.as_trained(name), *(hub for hub, own in self._by_hub_name.items() if own == name)}
        for part in ("gate", "up", "down") if has_gate(module) else ("up", "down"):
            parameter = weight_names(module)[part == "down"]
            endings = [projection for projection, own in PARTS_BY_NAME.items() if own == part]
            for expert in range(len(module._parameters[parameter])):
                keys = (f"{prefix}.{expert}.{ending}" for prefix in prefixes for ending in endings)
                if key := next(filter(self.config.adapts_module, keys), None):
                    yield AdaptedWeight(f"{name}.{parameter}", f"{key}.weight", part, expert)


def decoder_name(model: PreTrainedModel) -> str:
    """Find the model's name of its stack of layers of text."""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if name and module is decoder), "model")


def product_shape(module: Any, parameter: str) -> tuple[int | None, tuple[int, int], bool]:
    """Compute (E, (out, in), whether it is transposed, [E, in, out]) of a parameter by PEFT's rules; of one matrix E is
    None."""
    shape = tuple(module._parameters[parameter].shape)
    if len(shape) not in (2, 3):
        return None, (0, 0), False
    is_transposed = len(shape) == 3 and getattr(module, "is_transposed", False)
    sizes = shape[:-3:-1] if is_transposed else shape[-2:]
    return shape[0] if len(shape) == 3 else None, sizes, is_transposed
