"""A LoRA adapter in the terms of its base model: by name of a weight, the factors of what is added to it.

`Adapter.read` is the one reader, of PEFT's form for fused experts (target_parameters), of the form with factors for
single experts that engines load and older PEFTs wrote, and of either layout of the base. peft_form.py writes the first,
engines.py what engines load.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from ..checkpoints.converters import WITH_PEFT
from ..checkpoints.files import ADAPTER_CONFIG, headers_of, opened, refuse_model_beside_adapter
from ..checkpoints.layouts import NATIVE_NAMES, NATIVE_PREFIX
from ..errors import CheckpointError
from ..kernels.factors import by_expert
from ..layer.experts_module import has_gate, is_experts, is_native, weight_names
from ..model_patches import NATIVE_FAMILIES
from ..patching.experts import experts_facts
from .factors import Factors, fused_gate_up, interchanged, scale_of, stacked
from .hub_names import HubNames
from .rules import (
    ADAPTER_WEIGHTS,
    KEY,
    NATIVE_ORDER,
    PREFIX,
    check_factors,
    is_target_parameter,
    read_adapter_config,
    resolved,
    without_wrappers,
)

EXPERT = re.compile(r"^(?P<experts>.+)\.(?P<expert>\d+)\.(?P<projection>\w+)$")
PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
MIXED = "{path} has factors of {name} for all experts and for single ones: the file mixes two forms"
TEXT_MODEL = re.compile(r"^(model\.language_model|language_model\.model|model)\.")  # as the classes of a model name it


class _Lazy(UserDict):
    """A mapping of functions, which gives what they return."""

    def __getitem__(self, name: str) -> Any:
        return self.data[name]()


class Adapter(NamedTuple):
    """A LoRA adapter, checked against its base model.

    Names are those of the model's own parameters ("model.layers.0.mlp.experts.gate_up_proj"), rows in the order of the
    model's own weights. Values are read when they are looked up, so that one weight's factors at a time need memory.

    config: adapter_config.json. factors: of each adapted weight. replaced: tensors that take a weight's place
    (modules_to_save, and the base's own embeddings and head, which PEFT saves beside adapters of these).
    """

    config: dict
    factors: Mapping[str, Factors]
    replaced: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, folder: Path, model: PreTrainedModel) -> Adapter:
        """The adapter in `folder`, trained on `model` or on the model of the same weights in the other layout, or on the
        text model inside it. The model may be on the meta device.

        Raises:
            CheckpointError: it is not plain LoRA, a factor is missing or unknown, or a shape is not that of the rank and
                the weight; the message names what, and the remedy.
        """
        refuse_model_beside_adapter(folder)
        config = read_adapter_config(folder / ADAPTER_CONFIG)
        reader = _Reader(folder / ADAPTER_WEIGHTS, config, model)
        return cls(config, _Lazy(reader.factors()), _Lazy(reader.replaced))


class _Place(NamedTuple):
    """What a pair of factors in the file is of: a weight of the model; or, of one that holds all experts, one expert's
    part (PROJECTIONS). trained: what the model that was trained calls it."""

    weight: str
    trained: str
    part: str | None = None
    expert: int | None = None

    @property
    def module(self) -> str:
        """The module that has the weight."""
        return self.weight.rpartition(".")[0]


class _Pair(NamedTuple):
    """Where the factors of a place are in the file."""

    a: str
    b: str
    scale: float


class _Reader:
    """The tensors of a file, each given its place in the model."""

    def __init__(self, path: Path, config: dict, model: PreTrainedModel):
        self.path, self.config, self.config_path = path, config, path.with_name(ADAPTER_CONFIG)
        self.headers = headers_of(path)
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.experts = {name: module for name, module in self.modules.items() if is_experts(module)}
        self.native = self._trained_on_native()
        family = NATIVE_FAMILIES.get(model.config.model_type.removeprefix(NATIVE_PREFIX))
        self.hub_is_interleaved = family is not None and family.hub_layout == "gpt_oss"  # as the native layout is
        self.decoder = decoder_name(model)
        self.by_hub_name = self._by_hub_name(model)
        self.trained_decoder = self._trained_decoder()
        self.replaced: dict[str, Callable[[], torch.Tensor]] = {}
        self.sides: dict[_Place, dict[str, str]] = {}  # the names of lora_A and lora_B
        state = model.state_dict()
        for name in self.headers:
            self._put(name, state)
        single = {place.module for place in self.sides if place.part is not None}
        for module in single & {place.module for place in self.sides if place.part is None}:
            raise CheckpointError(MIXED.format(path=path, name=module))
        for name in self.experts if not single else ():  # whose factors must be there, as target_parameters names them
            for place in self._adapted(name):
                self.sides.setdefault(place, {})
        if not (self.sides or self.replaced):
            raise CheckpointError(f"{path} has no weights")

    def _trained_on_native(self) -> bool:
        targets = self.config.get("target_parameters") or []
        last = {target.rpartition(".")[2] for target in targets}
        if last & set(NATIVE_NAMES) and last & set(NATIVE_ORDER):
            raise CheckpointError(f"{self.config_path}: target_parameters {targets} name experts of both layouts")
        return bool(last & set(NATIVE_ORDER))

    def _by_hub_name(self, model: PreTrainedModel) -> dict[str, str]:
        """The names of linear and experts modules in the model, by the hub's."""
        hub = HubNames(model)
        own = [name for name, module in self.modules.items() if module._parameters]
        names = {hub.module(name): name for name in own}
        for name, module in self.experts.items():
            for parameter in module._parameters:
                for template in hub.per_expert(f"{name}.{parameter}"):
                    names[template.split(".{expert}.")[0]] = name
        return names

    def _trained_decoder(self) -> str:
        """What the class that was trained calls the model's decoder."""
        for name in self.headers:
            match = TEXT_MODEL.match(key := without_wrappers(name.removeprefix(PREFIX)))
            if match and match[1] != self.decoder:
                module = key.partition(".lora_")[0]
                ours = f"{self.decoder}.{module[match.end() :]}"
                if module not in self.modules and module not in self.by_hub_name and ours in self.modules:
                    return match[1]
        return self.decoder

    def _in_model(self, module: str) -> str:
        """What the model calls a module that the adapter calls so."""
        if self.trained_decoder != self.decoder and module.startswith(f"{self.trained_decoder}."):
            module = self.decoder + module.removeprefix(self.trained_decoder)
        return module if module in self.modules else self.by_hub_name.get(module, module)

    def _as_trained(self, name: str) -> str:
        """The inverse of `_in_model`, of a name that is the model's own."""
        if self.trained_decoder != self.decoder and name.startswith(f"{self.decoder}."):
            return self.trained_decoder + name.removeprefix(self.decoder)
        return name

    def _parameters(self, module: str) -> dict[str, str]:
        """The parameters of a module, as the model that was trained declares them: their names there and here."""
        own = [name for name, parameter in self.modules[module]._parameters.items() if parameter is not None]
        if module not in self.experts or is_native(self.modules[module]) == self.native:
            return {name: name for name in own}
        order = NATIVE_ORDER if self.native else tuple(NATIVE_NAMES)
        here = {native: hub for hub, native in NATIVE_NAMES.items()} if self.native else NATIVE_NAMES
        return {name: here[name] for name in order if here[name] in own}

    def _adapted(self, module: str) -> list[_Place]:
        """The parameters of a module that target_parameters names, the innermost wrapper's first."""
        trained, names = self._as_trained(module), self._parameters(module).items()
        places = [_Place(f"{module}.{here}", f"{trained}.{there}") for there, here in names]
        return [place for place in places if is_target_parameter(place.trained, self.config)]

    def _put(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        """Put the tensor `name` where it belongs."""
        key = name.removeprefix(PREFIX)
        match = KEY.match(key)
        if match is None:
            self._put_replacement(name, without_wrappers(key), state)
        else:
            place = self._place(match["module"], match["depth"].count("base_layer."), state)
            if place is None:
                raise self._unknown(name, match["module"])
            self.sides.setdefault(place, {})[match["side"]] = name

    def _place(self, trained: str, depth: int, state: Mapping[str, torch.Tensor]) -> _Place | None:
        """What the wrapper at this depth around a module of the trained model adapts."""
        module, single = self._in_model(trained), EXPERT.match(trained)
        if module in self.modules:
            places = self._adapted(module)
            if depth < len(places):
                return places[-1 - depth]
            if module not in self.experts and not depth and f"{module}.weight" in state:
                return _Place(f"{module}.weight", f"{self._as_trained(module)}.weight")
        elif single and (experts := self._in_model(single["experts"])) in self.experts and not depth:
            return self._place_of_expert(experts, single["projection"], int(single["expert"]), trained)
        return None

    def _place_of_expert(self, name: str, projection: str, expert: int, trained: str) -> _Place:
        module, part = self.modules[name], PROJECTIONS.get(projection)
        if part is None or (part == "gate" and not has_gate(module)):
            raise CheckpointError(f"{self.path}: {trained} is no expert's projection of the model")
        parameter = weight_names(module)[part == "down"]
        num_experts, *_ = _product_shape(module, parameter)
        if num_experts is None or expert >= num_experts:
            raise CheckpointError(f"{self.path}: {trained} is of expert {expert}, but there are {num_experts}")
        return _Place(f"{name}.{parameter}", f"{trained}.weight", part, expert)

    def _unknown(self, name: str, module: str) -> CheckpointError:
        keys = (KEY.match(other.removeprefix(PREFIX)) for other in self.headers)
        if self._in_model(module) in self.experts and any(key and EXPERT.match(key["module"]) for key in keys):
            return CheckpointError(MIXED.format(path=self.path, name=name))
        targets = ", ".join(self.config.get("target_parameters") or ()) or "none"
        return CheckpointError(
            f"{self.path}: {name} adapts nothing that the model has, by its config.json; target_parameters: {targets}. "
            f"Give the model that it was trained on (merge: the base; convert: --trained-on, trained_on=), or {WITH_PEFT}"
        )

    def _put_replacement(self, name: str, weight: str, state: Mapping[str, torch.Tensor]) -> None:
        module, _, parameter = weight.rpartition(".")
        weight = f"{self._in_model(module)}.{parameter}"
        if "lora_" in name or weight not in state:
            raise CheckpointError(
                f"{self.path}: {name} is neither lora_A nor lora_B of a layer, nor a weight of the model; {WITH_PEFT}"
            )
        if self.headers[name].shape != tuple(state[weight].shape):
            raise CheckpointError(
                f"{self.path}: {name} has shape {self.headers[name].shape}, the base's {tuple(state[weight].shape)}; if "
                "the vocabulary was resized, resize the base's and save it first"
            )
        self.replaced[weight] = lambda: self._tensor(name)

    def factors(self) -> dict[str, Callable[[], Factors]]:
        """How to make those of each adapted weight."""
        pairs: dict[str, dict[_Place, _Pair]] = {}
        for place, sides in self.sides.items():
            pairs.setdefault(place.weight, {})[place] = self._pair(place, sides)
        return {weight: partial(self._factors, own) for weight, own in pairs.items()}

    def _pair(self, place: _Place, sides: dict[str, str]) -> _Pair:
        """Where factors are, with their scale: none is missing, and the shapes fit."""
        module = self.modules[place.module]
        num_experts, (size_out, size_in), is_transposed = _product_shape(module, place.weight.rpartition(".")[2])
        if place.part is not None:
            num_experts = None
            if place.part != "down" and has_gate(module):
                size_out //= 2
        may_be_swapped = num_experts is not None and num_experts > 1 and (self.native or not is_transposed)
        if missing := {"A", "B"} - set(sides):
            raise CheckpointError(f"{self.path} has no lora_{min(missing)} of {place.trained}, though it is adapted")
        a, b, name = sides["A"], sides["B"], place.trained
        if not is_target_parameter(name, self.config):
            name = name.removesuffix(".weight")  # PEFT compares the name of a linear layer with patterns
        rank = resolved(self.config, "rank_pattern", name, self.config_path)
        alpha = resolved(self.config, "alpha_pattern", name, self.config_path)
        shapes, sizes = (self.headers[a].shape, self.headers[b].shape), (size_out, size_in)
        check_factors(place.trained, shapes, num_experts or 1, sizes, rank, self.config, self.path, may_be_swapped)
        return _Pair(a, b, scale_of(rank, alpha, self.config))

    def _factors(self, pairs: dict[_Place, _Pair]) -> Factors:
        """Those of one weight, in the order of its own rows."""
        (place, pair), *_ = pairs.items()
        module, parameter = self.modules[place.module], place.weight.rpartition(".")[2]
        num_experts, _, is_transposed = _product_shape(module, parameter)
        if num_experts is None:
            return self._read(pair)
        if place.part is not None:
            return self._of_single_experts(module, num_experts, pairs)._replace(is_transposed=is_transposed)
        stored = self._read(pair)
        a, b = by_expert(stored.a, stored.b, num_experts)
        factors = Factors(a, b, stored.scale, is_transposed)
        is_first = place.module in self.experts and parameter == weight_names(module)[0]
        if is_first and is_native(module) != self.native and not self.hub_is_interleaved:
            return interchanged(factors, interleaved=self.native)
        return factors

    def _of_single_experts(self, module: nn.Module, num_experts: int, pairs: dict[_Place, _Pair]) -> Factors:
        parts: dict[str, Factors] = {}
        for part in {place.part: None for place in pairs if place.part is not None}:
            own = {place.expert: self._read(pair) for place, pair in pairs.items() if place.part == part}
            zero = next(iter(own.values())).unchanging()
            parts[part] = stacked([own.get(expert, zero) for expert in range(num_experts)])
        one = next(iter(parts.values()))
        if "down" in parts or not has_gate(module):
            return one
        gate, up = (parts.get(part) or one.unchanging() for part in ("gate", "up"))
        return fused_gate_up(gate, up, is_interleaved(module))

    def _read(self, pair: _Pair) -> Factors:
        return Factors(self._tensor(pair.a), self._tensor(pair.b), pair.scale)

    def _tensor(self, name: str) -> torch.Tensor:
        """A tensor of the file, which is open meanwhile only: its mapped pages count as memory."""
        try:
            with opened(self.path) as handle:
                return handle.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error


def decoder_name(model: PreTrainedModel) -> str:
    """What the model calls its stack of layers of text."""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if name and module is decoder), "model")


def is_interleaved(experts: nn.Module) -> bool:
    """Whether gate's and up's rows alternate in the experts' first weight."""
    return experts_facts(experts).layout.endswith("interleaved")


def _product_shape(module: Any, parameter: str) -> tuple[int | None, tuple[int, int], bool]:
    """(E, (out, in), whether the weight is stored as [E, in, out]) of what is added to a parameter, by PEFT's rules; E is
    None for one matrix."""
    shape = tuple(module._parameters[parameter].shape)
    if len(shape) not in (2, 3):
        return None, (0, 0), False
    is_transposed = len(shape) == 3 and getattr(module, "is_transposed", False)
    sizes = shape[:-3:-1] if is_transposed else shape[-2:]
    return shape[0] if len(shape) == 3 else None, sizes, is_transposed
