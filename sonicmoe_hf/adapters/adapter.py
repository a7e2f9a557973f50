"""Adapter: a LoRA adapter in the terms of its base model, the factors of what is added to each weight by its name.

`Adapter.read` is the one reader, of PEFT's form for fused experts (target_parameters), of the form with factors for
single experts that engines load and older PEFTs wrote, and of either layout of the base. peft_form.py writes the first,
engines.py what engines load. Of a layer with 2 experts, rank r and target_parameters, for example:

    file (trained model's names, PEFT's wrappers)                       Adapter.factors (the model's names)
    ...mlp.experts.base_layer.lora_A.weight [r*2, H]    first wrapper   ...mlp.experts.gate_up_proj
    ...mlp.experts.base_layer.lora_B.weight [2I, r*2]   -> the 1st        a [2, r, H], b [2, 2I, r], scale
    ...mlp.experts.lora_A.weight [r*2, I]               second wrapper  ...mlp.experts.down_proj
    ...mlp.experts.lora_B.weight [H, r*2]               -> the 2nd        a [2, r, I], b [2, H, r], scale

`Assignment` says which weight a tensor is for, `AdapterConfig` the rank and the scale.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoints.reading.files import check_float, check_no_model_beside_adapter
from ..checkpoints.writing.output import finite_bounds
from ..errors import CheckpointError
from ..formats.tensor_files import open_tensors
from ..kernels.low_rank import by_expert
from ..layer.experts_module import has_gate, is_native, weight_names
from ..lora.factors import Factors, fuse_gate_and_up, reorder_gate_up, stack_experts
from ..lora.names import PREFIX
from ..model_patches import NATIVE_FAMILIES, NATIVE_PREFIX
from ..patching.experts import experts_facts
from .assignment import Assignment
from .rules import ADAPTER_WEIGHTS, AdapterConfig, NotPlainLoRAError
from .trained_model import AdaptedWeight, product_shape

NOT_FINITE = (
    "{path}: {name} has NaN or infinite values, so the training that saved it had diverged; take an earlier checkpoint"
)


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
        check_no_model_beside_adapter(folder)
        assignment = Assignment(folder / ADAPTER_WEIGHTS, AdapterConfig(folder), model)
        reader = _Reader(assignment, model)
        factors, replaced = LazyMapping(reader.factors()), LazyMapping(reader.replaced())
        return cls(assignment.config.entries, factors, replaced, assignment.trained_model.decoder)


def is_in_pefts_form(folder: Path, model: PreTrainedModel) -> bool:
    """Tell whether PEFT itself loads the adapter in `folder` into `model`, each factor in its place. Raises as
    `Adapter.read`, except for what is not plain LoRA, which PEFT alone loads."""
    try:
        assignment = Assignment(folder / ADAPTER_WEIGHTS, AdapterConfig(folder), model)
    except NotPlainLoRAError:
        return True
    trained, sides = assignment.trained_model, assignment.sides
    as_named = all(name == f"{PREFIX}{key}" for key, name in assignment.names_in_file.items())
    in_layout = trained.is_native == any(map(is_native, trained.experts.values()))
    return as_named and in_layout and not any(each.part or assignment.is_grouped_by_expert(each) for each in sides)


class _Reader:
    """The functions that read factors and whole weights from an adapter's file."""

    def __init__(self, assignment: Assignment, model: PreTrainedModel):
        self.path, self.assignment, self.trained_model = assignment.path, assignment, assignment.trained_model
        family = NATIVE_FAMILIES.get(model.config.model_type.removeprefix(NATIVE_PREFIX))
        self.hub_is_interleaved = family is not None and family.hub_layout == "gpt_oss"  # as the native layout is

    def replaced(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Map each whole weight, or table of integers, to the function that reads it."""
        names, state = self.assignment.replaced.items(), self.trained_model.state
        readers = {weight: self._tensor if state[weight].is_floating_point() else self._table for weight, _ in names}
        return {weight: partial(self._read, partial(readers[weight], name)) for weight, name in names}

    def factors(self) -> dict[str, Callable[[], Factors]]:
        """Map each adapted weight to the function that reads its factors."""
        weights: dict[str, list[AdaptedWeight]] = {}
        for adapted in self.assignment.sides:
            weights.setdefault(adapted.weight, []).append(adapted)
        return {weight: partial(self._read, partial(self._weight, own)) for weight, own in weights.items()}

    def _weight(self, parts: list[AdaptedWeight], handle: Any) -> Factors:
        """Read the factors of one weight from the open file, in the order of its own rows."""
        adapted = parts[0]
        module = self.trained_model.modules[adapted.module]
        num_experts, _, is_transposed = product_shape(module, adapted.parameter)
        if num_experts is None:
            return self._read_factors(adapted, handle)
        if adapted.part is not None:
            return self._single_experts(module, num_experts, parts, handle)._replace(is_transposed=is_transposed)
        a, b, scale, _ = self._read_factors(adapted, handle)
        if self.assignment.is_grouped_by_expert(adapted):
            b = b.unflatten(1, (num_experts, -1)).transpose(0, 1)
        a, b = by_expert(a, b, num_experts)
        factors = Factors(a, b, scale, is_transposed)
        is_first = adapted.module in self.trained_model.experts and adapted.parameter == weight_names(module)[0]
        if is_first and is_native(module) != self.trained_model.is_native and not self.hub_is_interleaved:
            return reorder_gate_up(factors, interleaved=self.trained_model.is_native)
        return factors

    def _single_experts(self, module: nn.Module, num_experts: int, parts: list[AdaptedWeight], handle: Any) -> Factors:
        factors: dict[str | None, Factors] = {}
        for part in dict.fromkeys(adapted.part for adapted in parts):
            own = {adapted.expert: self._read_factors(adapted, handle) for adapted in parts if adapted.part == part}
            zero = next(iter(own.values())).with_zero_product()
            factors[part] = stack_experts([own.get(expert, zero) for expert in range(num_experts)])
        one = next(iter(factors.values()))
        if "down" in factors or not has_gate(module):
            return one
        gate, up = (factors.get(part) or one.with_zero_product() for part in ("gate", "up"))
        return fuse_gate_and_up(gate, up, is_interleaved(module))

    def _read_factors(self, adapted: AdaptedWeight, handle: Any) -> Factors:
        a, b = (self._tensor(self.assignment.sides[adapted][side], handle) for side in "AB")
        return Factors(a, b, self.assignment.config.scale(adapted.trained_name))

    def _tensor(self, name: str, handle: Any) -> torch.Tensor:
        """Read a tensor of the open file. Raises CheckpointError for NaN, infinity and what is no float."""
        tensor = handle.get_tensor(name)
        check_float(self.path, name, tensor.dtype)
        if not finite_bounds(tensor, tensor.dtype):
            raise CheckpointError(NOT_FINITE.format(path=self.path, name=name))
        return tensor

    def _table(self, name: str, handle: Any) -> torch.Tensor:
        """Read a tensor of the open file that the model has in integers."""
        return handle.get_tensor(name)

    def _read(self, read: Callable[[Any], Any]) -> Any:
        """Read a weight's tensors of the file, which is open meanwhile only: its mapped pages count as memory. Opening it
        for each tensor would take time as the square of their number."""
        with open_tensors(self.path) as handle:
            return read(handle)


def is_interleaved(experts: nn.Module) -> bool:
    """Tell whether gate's and up's rows alternate in the experts' first weight."""
    return experts_facts(experts).layout.endswith("interleaved")
