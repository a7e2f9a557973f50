"""Adapter: a LoRA adapter in the terms of its base model, the factors of what is added to each weight by its name.

`Adapter.read` is the one reader, of PEFT's form for fused experts (target_parameters), of the form with factors for
single experts that engines load and older PEFTs wrote, and of either layout of the base. peft_form.py writes the first,
engines.py what engines load. Of a layer with 2 experts, rank r and target_parameters, for example:

    file (trained model's names, PEFT's wrappers)                       Adapter.factors (the model's names)
    ...mlp.experts.base_layer.lora_A.weight [r*2, H]    first wrapper   ...mlp.experts.gate_up_proj
    ...mlp.experts.base_layer.lora_B.weight [2I, r*2]   -> the 1st        a [2, r, H], b [2, 2I, r], scale
    ...mlp.experts.lora_A.weight [r*2, I]               second wrapper  ...mlp.experts.down_proj
    ...mlp.experts.lora_B.weight [H, r*2]               -> the 2nd        a [2, r, I], b [2, H, r], scale

`TrainedModel` says which weight a name means, `AdapterConfig` the rank and the scale.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoints.converters import WITH_PEFT
from ..checkpoints.files import headers_of, opened, refuse_model_beside_adapter
from ..checkpoints.output import finite_bounds
from ..errors import CheckpointError
from ..kernels.low_rank import by_expert
from ..layer.experts_module import has_gate, is_native, weight_names
from ..lora.factors import Factors, fused_gate_up, interchanged, stacked
from ..lora.names import KEY, PREFIX, is_target_parameter, without_wrappers
from ..model_patches import NATIVE_FAMILIES, NATIVE_PREFIX
from ..patching.experts import experts_facts
from .rules import ADAPTER_WEIGHTS, AdapterConfig, NotPlainLoRAError, name_in_trained_model
from .trained_model import PARTS_BY_NAME, AdaptedWeight, TrainedModel

SHOWN = 4  # of the names in an error
EXPERT = re.compile(r"^(?P<experts>.+)\.(?P<expert>\d+)\.(?P<projection>\w+)$")
SAVED_TWICE = re.compile(r"\.(modules_to_save|original_module)(?=\.\w+$)")  # of a model whose vocabulary was resized
NOT_FINITE = (
    "{path}: {name} has NaN or infinite values, so the training that saved it had diverged; take an earlier checkpoint"
)
MIXED = "{path} has factors of {name} for all experts and for single ones: the file mixes two forms"


class LazyMapping(UserDict):
    """A mapping whose values are functions: looking one up calls it and returns its result."""

    def __getitem__(self, name: str) -> Any:
        return self.data[name]()


class Adapter(NamedTuple):
    """A LoRA adapter, checked against its base model.

    Names are those of the model's own parameters ("model.layers.0.mlp.experts.gate_up_proj"), rows in the order of the
    model's own weights. Values are read when they are looked up, so that one weight's factors at a time need memory.

    config: the entries of adapter_config.json. factors: of each adapted weight. replaced: tensors that take a weight's
    place (modules_to_save, and the base's own embeddings and head, which PEFT saves beside adapters of these). decoder:
    the name of the stack of layers in the class that was trained.
    """

    config: dict
    factors: Mapping[str, Factors]
    replaced: Mapping[str, torch.Tensor]
    decoder: str

    @classmethod
    def read(cls, folder: Path, model: PreTrainedModel) -> Adapter:
        """Read the adapter in `folder`, trained on `model`, on the model of the same weights in the other layout, or on
        the text model inside it. The model may be on the meta device.

        Raises:
            CheckpointError: it is not plain LoRA; something that its config names is missing, or the model has no place
                for a tensor; or a shape is not that of the rank and the weight. The message names what, and the remedy.
        """
        refuse_model_beside_adapter(folder)
        config = AdapterConfig(folder)
        reader = _Reader(folder / ADAPTER_WEIGHTS, config, model)
        return cls(config.entries, LazyMapping(reader.factors()), LazyMapping(reader.replaced), reader.trained.decoder)


def is_in_pefts_form(folder: Path, model: PreTrainedModel) -> bool:
    """Tell whether PEFT itself loads the adapter in `folder` into `model`, each factor in its place. Raises as
    `Adapter.read`, except for what is not plain LoRA, which PEFT alone loads."""
    try:
        reader = _Reader(folder / ADAPTER_WEIGHTS, AdapterConfig(folder), model)
    except NotPlainLoRAError:
        return True
    as_named = all(name == f"{PREFIX}{key}" for key, name in reader.stored.items())
    in_layout = reader.trained.is_native == any(map(is_native, reader.trained.experts.values()))
    return as_named and in_layout and not any(each.part or reader.is_grouped_by_expert(each) for each in reader.sides)


class _Reader:
    """The tensors of a file by the weights of the model that they are for."""

    def __init__(self, path: Path, config: AdapterConfig, model: PreTrainedModel):
        self.path, self.config, self.headers = path, config, headers_of(path)
        self.stored: dict[str, str] = {}  # by the name in the trained model, that in the file
        for name in self.headers:
            if (other := self.stored.setdefault(name_in_trained_model(name), name)) != name:
                raise CheckpointError(
                    f"{path} has {name} and {other}, which are one name; keep the one that was trained"
                )
        base = config.entries.get("base_model_name_or_path") or "a model that it does not name"
        self.whose = f"the adapter was trained on {base}, and this model is a {type(model).__name__}"
        self.trained = TrainedModel(model, config, self.stored)
        self.family = model.config.model_type.removeprefix(NATIVE_PREFIX)
        family = NATIVE_FAMILIES.get(self.family)
        self.hub_is_interleaved = family is not None and family.hub_layout == "gpt_oss"  # as the native layout is
        self.replaced: dict[str, Callable[[], torch.Tensor]] = {}
        self.sides: dict[AdaptedWeight, dict[str, str]] = {}  # the names of lora_A and lora_B in the file
        for key, name in self.stored.items():
            self._assign(key, name)
        single = {adapted.module for adapted in self.sides if adapted.part is not None}
        for module in single & {adapted.module for adapted in self.sides if adapted.part is None}:
            raise CheckpointError(MIXED.format(path=path, name=module))
        self._check_complete(bool(single))
        if not (self.sides or self.replaced):
            raise CheckpointError(f"{path} has no weights")

    def _assign(self, key: str, name: str) -> None:
        """Assign the file's tensor `name` to a weight, by `key`, its name in the trained model."""
        match = KEY.match(key)
        if match is None:
            self._assign_replacement(name, without_wrappers(key))
        elif (adapted := self._adapted(match["module"], match["depth"].count("base_layer."))) is None:
            raise self._unknown(name, match["module"])
        else:
            self.sides.setdefault(adapted, {})[match["side"]] = name

    def _adapted(self, trained: str, depth: int) -> AdaptedWeight | None:
        """Find the weight that the wrapper at this depth around a module of the trained model adapts, or None."""
        module, single = self.trained.in_model(trained), EXPERT.match(trained)
        if module in self.trained.modules:
            adapted = self.trained.target_parameters(module)
            if depth < len(adapted):
                return adapted[-1 - depth]
            if module not in self.trained.experts and not depth and f"{module}.weight" in self.trained.state:
                return AdaptedWeight(f"{module}.weight", f"{self.trained.as_trained(module)}.weight")
        elif single and (experts := self.trained.in_model(single["experts"])) in self.trained.experts and not depth:
            return self._adapted_expert(experts, single["projection"], int(single["expert"]), trained)
        return None

    def _adapted_expert(self, name: str, projection: str, expert: int, trained: str) -> AdaptedWeight | None:
        module, part = self.trained.modules[name], PARTS_BY_NAME.get(projection)
        if part is None or (part == "gate" and not has_gate(module)):
            return None
        parameter = weight_names(module)[part == "down"]
        num_experts, *_ = _product_shape(module, parameter)
        if num_experts is None or expert >= num_experts:
            return None
        return AdaptedWeight(f"{name}.{parameter}", f"{trained}.weight", part, expert)

    def _unknown(self, name: str, module: str) -> CheckpointError:
        keys = map(KEY.match, self.stored)
        if self.trained.in_model(module) in self.trained.experts and any(
            key and EXPERT.match(key["module"]) for key in keys
        ):
            return CheckpointError(MIXED.format(path=self.path, name=name))
        targets = ", ".join(self.config.entries.get("target_parameters") or ()) or "none"
        experts = self.trained.as_trained(next(iter(self.trained.experts), "model.layers.0.mlp.experts"))
        known = f"{PREFIX}{experts}.0.up_proj.lora_A.weight or, by target_parameters, {PREFIX}{experts}.lora_A.weight"
        return CheckpointError(
            f"{self.path}: {name} adapts nothing that the model has, by its config.json: {self.whose}; "
            f"target_parameters: {targets}. Give the model that it was trained on (merge: the base; convert: "
            f"--trained-on), or rename its tensors: factors of experts, two-dimensional, are named {known}"
        )

    def _assign_replacement(self, name: str, weight: str) -> None:
        if (own := SAVED_TWICE.sub("", weight)) != weight and own in self.stored:
            return
        module, _, parameter = weight.rpartition(".")
        module = self.trained.in_model(module)
        weight = f"{module}.{parameter}"
        if "lora_" in name or weight not in self.trained.state or module in self.trained.experts:
            raise NotPlainLoRAError(
                f"{self.path}: {name} is neither lora_A nor lora_B of a layer, nor the weight of a single layer; where "
                f"PEFT saved it, {WITH_PEFT}"
            )
        shape, expected = self.headers[name].shape, tuple(self.trained.state[weight].shape)
        if shape != expected:
            raise CheckpointError(
                f"{self.path}: {name} has shape {shape}, the base's {expected}; if the vocabulary was resized, resize "
                f"the base's too, by model.resize_token_embeddings({shape[0]}), save it and give that folder for the base"
            )
        self.replaced[weight] = partial(self._read, partial(self._tensor, name))

    def _check_complete(self, has_single: bool) -> None:
        """Raise CheckpointError, with the names, where the file lacks what its config names: a layer, a rank's experts.

        Args:
            has_single: whether the file has factors for single experts, as all layers then do.
        """
        present = {adapted._replace(trained="") for adapted in self.sides}
        for adapted in self.trained.adapted_by_config(has_single):
            if adapted._replace(trained="") not in present:
                self.sides[adapted] = {}
        for side in "AB":
            if missing := [adapted.trained for adapted, sides in self.sides.items() if side not in sides]:
                raise self._lacks(f"lora_{side} of ", missing)
        if missing := [name for name in self.trained.replaced_by_config() if name not in self.replaced]:
            raise self._lacks("", missing)

    def _lacks(self, what: str, names: list[str]) -> CheckpointError:
        listed = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        return CheckpointError(
            f"{self.path} has no {what}{listed}, though it is adapted: {self.config.path.name} names it. Save the whole "
            "adapter again, or name there only what was trained (target_modules, target_parameters, modules_to_save)"
        )

    def factors(self) -> dict[str, Callable[[], Factors]]:
        """Return the functions that read the factors of each adapted weight."""
        weights: dict[str, list[AdaptedWeight]] = {}
        for adapted in self.sides:
            self._check_shapes(adapted)
            weights.setdefault(adapted.weight, []).append(adapted)
        return {weight: partial(self._read, partial(self._weight, own)) for weight, own in weights.items()}

    def _check_shapes(self, adapted: AdaptedWeight) -> None:
        """Raise CheckpointError where the shapes of a pair of factors are not those of its rank and weight."""
        module = self.trained.modules[adapted.module]
        num_experts, (size_out, size_in), is_transposed = _product_shape(module, adapted.parameter)
        if adapted.part is not None:
            num_experts = None
            if adapted.part != "down" and has_gate(module):
                size_out //= 2
        may_be_swapped = num_experts is not None and num_experts > 1 and (self.trained.is_native or not is_transposed)
        shapes = tuple(self.headers[self.sides[adapted][side]].shape for side in "AB")
        rank = self.config.rank(self._in_patterns(adapted))
        sizes = size_out, size_in
        try:
            self.config.check_factors(adapted.trained, shapes, num_experts or 1, sizes, rank, may_be_swapped)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {self.whose[0].upper()}{self.whose[1:]}") from None

    def _in_patterns(self, adapted: AdaptedWeight) -> str:
        """Return the name that PEFT compares with rank_pattern and alpha_pattern: a linear layer's, or a parameter's."""
        is_parameter = is_target_parameter(adapted.trained, self.config.entries)
        return adapted.trained if is_parameter else adapted.trained.removesuffix(".weight")

    def _weight(self, parts: list[AdaptedWeight], handle: Any) -> Factors:
        """Read the factors of one weight from the open file, in the order of its own rows."""
        adapted = parts[0]
        module = self.trained.modules[adapted.module]
        num_experts, _, is_transposed = _product_shape(module, adapted.parameter)
        if num_experts is None:
            return self._pair(adapted, handle)
        if adapted.part is not None:
            return self._single_experts(module, num_experts, parts, handle)._replace(is_transposed=is_transposed)
        a, b, scale, _ = self._pair(adapted, handle)
        if self.is_grouped_by_expert(adapted):
            b = b.unflatten(1, (num_experts, -1)).transpose(0, 1)
        a, b = by_expert(a, b, num_experts)
        factors = Factors(a, b, scale, is_transposed)
        is_first = adapted.module in self.trained.experts and adapted.parameter == weight_names(module)[0]
        if is_first and is_native(module) != self.trained.is_native and not self.hub_is_interleaved:
            return interchanged(factors, interleaved=self.trained.is_native)
        return factors

    def is_grouped_by_expert(self, adapted: AdaptedWeight) -> bool:
        """Tell whether lora_B's columns stand expert by expert. Raises CheckpointError where neither is known."""
        module = self.trained.modules[adapted.module]
        # Unsloth tells families apart by the folder that has the class of their experts
        family = self.family if is_native(module) else type(module).__module__.split(".")[-2]
        return self.config.is_grouped_by_expert(adapted.trained.rpartition(".")[2], family)

    def _single_experts(self, module: nn.Module, num_experts: int, parts: list[AdaptedWeight], handle: Any) -> Factors:
        factors: dict[str | None, Factors] = {}
        for part in dict.fromkeys(adapted.part for adapted in parts):
            own = {adapted.expert: self._pair(adapted, handle) for adapted in parts if adapted.part == part}
            zero = next(iter(own.values())).unchanging()
            factors[part] = stacked([own.get(expert, zero) for expert in range(num_experts)])
        one = next(iter(factors.values()))
        if "down" in factors or not has_gate(module):
            return one
        gate, up = (factors.get(part) or one.unchanging() for part in ("gate", "up"))
        return fused_gate_up(gate, up, is_interleaved(module))

    def _pair(self, adapted: AdaptedWeight, handle: Any) -> Factors:
        a, b = (self._tensor(self.sides[adapted][side], handle) for side in "AB")
        return Factors(a, b, self.config.scale(self._in_patterns(adapted)))

    def _tensor(self, name: str, handle: Any) -> torch.Tensor:
        """Read a tensor of the open file. Raises CheckpointError for NaN and infinity."""
        tensor = handle.get_tensor(name)
        if not finite_bounds(tensor, tensor.dtype):
            raise CheckpointError(NOT_FINITE.format(path=self.path, name=name))
        return tensor

    def _read(self, read: Callable[[Any], Any]) -> Any:
        """Read a weight's tensors of the file, which is open meanwhile only: its mapped pages count as memory. Opening it
        for each tensor would take time as the square of their number."""
        with opened(self.path) as handle:
            return read(handle)


def is_interleaved(experts: nn.Module) -> bool:
    """Tell whether gate's and up's rows alternate in the experts' first weight."""
    return experts_facts(experts).layout.endswith("interleaved")


def _product_shape(module: Any, parameter: str) -> tuple[int | None, tuple[int, int], bool]:
    """Return (E, (out, in), whether it is stored as [E, in, out]) of a parameter by PEFT's rules; of one matrix E is
    None."""
    shape = tuple(module._parameters[parameter].shape)
    if len(shape) not in (2, 3):
        return None, (0, 0), False
    is_transposed = len(shape) == 3 and getattr(module, "is_transposed", False)
    sizes = shape[:-3:-1] if is_transposed else shape[-2:]
    return shape[0] if len(shape) == 3 else None, sizes, is_transposed
