"""Assignment: which weight of a model each tensor of an adapter's file is for, and whether all are there and fit."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import PreTrainedModel

from ..checkpoints.reading.files import headers_of
from ..errors import CheckpointError
from ..layer.experts_module import has_gate, is_native, weight_names
from ..lora.names import KEY, PREFIX, without_base_layer
from ..model_patches import NATIVE_PREFIX
from .rules import WITH_PEFT, AdapterConfig, NotPlainLoRAError, name_in_trained_model
from .trained_model import PARTS_BY_NAME, AdaptedWeight, TrainedModel, product_shape

SHOWN = 4  # of the names in an error
EXPERT_MODULE = re.compile(r"^(?P<experts>.+)\.(?P<expert>\d+)\.(?P<projection>\w+)$")
SAVED_TWICE = re.compile(r"\.(modules_to_save|original_module)(?=\.\w+$)")  # of a model whose vocabulary was resized
MIXED = "{path} has factors of {name} for all experts and for single ones: the file mixes two forms"


class Assignment:
    """The tensors of an adapter's file by the weights of the model that they are for.

    Attributes:
        path, config, headers: the file, its adapter_config.json, and its tensors' headers. names_in_file: by those in the
            trained model. trained_model: that one. sides: of each weight, or of an expert's own, the names of lora_A and
            lora_B in the file. replaced: the names of whole weights in the file, by those of the model.
    Raises:
        CheckpointError: as `Adapter.read`.
    """

    def __init__(self, path: Path, config: AdapterConfig, model: PreTrainedModel):
        self.path, self.config, self.headers = path, config, headers_of(path)
        self.names_in_file: dict[str, str] = {}
        for name in self.headers:
            if (other := self.names_in_file.setdefault(name_in_trained_model(name), name)) != name:
                raise CheckpointError(
                    f"{path} has {name} and {other}, which are one name; keep the one that was trained"
                )
        base = config.entries.get("base_model_name_or_path") or "a model that it does not name"
        origin = f" of {folder}" if (folder := model.config.name_or_path) else ""
        # for errors: the model of training beside the given one
        self.both_models = f"the adapter was trained on {base}, and this model is a {type(model).__name__}{origin}"
        self.trained_model = TrainedModel(model, config, self.names_in_file)
        self.family = model.config.model_type.removeprefix(NATIVE_PREFIX)
        self.replaced: dict[str, str] = {}
        self.sides: dict[AdaptedWeight, dict[str, str]] = {}
        for key, name in self.names_in_file.items():
            self._assign(key, name)
        single = {adapted.module for adapted in self.sides if adapted.part is not None}
        if mixed := single & {adapted.module for adapted in self.sides if adapted.part is None}:
            raise CheckpointError(MIXED.format(path=path, name=min(mixed)))
        self._check_complete(bool(single))
        if not (self.sides or self.replaced):
            raise CheckpointError(f"{path} has no weights")
        for adapted in self.sides:
            self._check_shapes(adapted)

    def _assign(self, key: str, name: str) -> None:
        """Assign the file's tensor `name` to a weight, by `key`, its name in the trained model."""
        match = KEY.match(key)
        if match is None:
            self._assign_replacement(name, without_base_layer(key))
        elif (adapted := self._find_weight(match["module"], match["depth"].count("base_layer."))) is None:
            raise self._unknown(name, match["module"])
        else:
            self.sides.setdefault(adapted, {})[match["side"]] = name

    def _find_weight(self, trained_name: str, depth: int) -> AdaptedWeight | None:
        """Find the weight that the wrapper at this depth around a module of the trained model adapts, or None."""
        model = self.trained_model
        module, single = model.in_model(trained_name), EXPERT_MODULE.match(trained_name)
        if module in model.modules:
            adapted = model.target_parameters(module)
            if depth < len(adapted):
                return adapted[-1 - depth]
            if module not in model.experts and not depth and f"{module}.weight" in model.state:
                return AdaptedWeight(f"{module}.weight", f"{model.as_trained(module)}.weight")
        elif single and (experts := model.in_model(single["experts"])) in model.experts and not depth:
            return self._find_expert_weight(experts, single["projection"], int(single["expert"]), trained_name)
        return None

    def _find_expert_weight(self, name: str, projection: str, expert: int, trained_name: str) -> AdaptedWeight | None:
        module, part = self.trained_model.modules[name], PARTS_BY_NAME.get(projection)
        if part is None or (part == "gate" and not has_gate(module)):
            return None
        parameter = weight_names(module)[part == "down"]
        num_experts, *_ = product_shape(module, parameter)
        if num_experts is None or expert >= num_experts:
            return None
        return AdaptedWeight(f"{name}.{parameter}", f"{trained_name}.weight", part, expert)

    def _unknown(self, name: str, module: str) -> CheckpointError:
        keys = map(KEY.match, self.names_in_file)
        if self.trained_model.in_model(module) in self.trained_model.experts and any(
            key and EXPERT_MODULE.match(key["module"]) for key in keys
        ):
            return CheckpointError(MIXED.format(path=self.path, name=name))
        targets = ", ".join(self.config.entries.get("target_parameters") or ()) or "none"
        experts = self.trained_model.as_trained(next(iter(self.trained_model.experts), "model.layers.0.mlp.experts"))
        known = f"{PREFIX}{experts}.0.up_proj.lora_A.weight or, by target_parameters, {PREFIX}{experts}.lora_A.weight"
        return CheckpointError(
            f"{self.path}: {name} adapts nothing that the model has, by its config.json: {self.both_models}; "
            f"target_parameters: {targets}. Give the model that it was trained on (merge: the base; convert: "
            f"--trained-on), or rename its tensors: factors of experts, two-dimensional, are named {known}"
        )

    def _assign_replacement(self, name: str, weight: str) -> None:
        if (own := SAVED_TWICE.sub("", weight)) != weight and own in self.names_in_file:
            return
        module, _, parameter = weight.rpartition(".")
        module = self.trained_model.in_model(module)
        weight = f"{module}.{parameter}"
        if "lora_" in name or weight not in self.trained_model.state or module in self.trained_model.experts:
            raise NotPlainLoRAError(
                f"{self.path}: {name} is neither lora_A nor lora_B of a layer, nor the weight of a single layer; where "
                f"PEFT saved it, {WITH_PEFT}"
            )
        shape, expected = self.headers[name].shape, tuple(self.trained_model.state[weight].shape)
        if shape != expected:
            raise CheckpointError(
                f"{self.path}: {name} has shape {shape}, the base's {expected}; if the vocabulary was resized, resize "
                f"the base's too, by model.resize_token_embeddings({shape[0]}), save it and give that folder for the base"
            )
        self.replaced[weight] = name

    def _check_complete(self, has_single: bool) -> None:
        """Raise CheckpointError, with the names, where the file lacks what its config names: a layer, a rank's experts.

        Args:
            has_single: whether the file has factors for single experts, as all layers then do.
        """
        present, sides_of_all = {adapted._replace(trained_name="") for adapted in self.sides}, dict(self.sides)
        for adapted in self.trained_model.adapted_by_config(has_single):
            if adapted._replace(trained_name="") not in present:
                sides_of_all[adapted] = {}
        for side in "AB":
            if missing := [adapted.trained_name for adapted, sides in sides_of_all.items() if side not in sides]:
                raise self._lacks(f"lora_{side} of ", missing)
        if missing := [name for name in self.trained_model.replaced_by_config() if name not in self.replaced]:
            raise self._lacks("", missing)

    def _lacks(self, what: str, names: list[str]) -> CheckpointError:
        listed = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        return CheckpointError(
            f"{self.path} has no {what}{listed}, though it is adapted: {self.config.path.name} names it. Save the whole "
            "adapter again, or name there only what was trained (target_modules, target_parameters, modules_to_save), or "
            f"give the base that it was trained on, if this is another: {self.both_models}"
        )

    def _check_shapes(self, adapted: AdaptedWeight) -> None:
        """Raise CheckpointError where the shapes of a pair of factors are not those of its rank and weight."""
        module = self.trained_model.modules[adapted.module]
        num_experts, (size_out, size_in), is_transposed = product_shape(module, adapted.parameter)
        if adapted.part is not None:
            num_experts = None
            if adapted.part != "down" and has_gate(module):
                size_out //= 2
        is_out_in = self.trained_model.is_native or not is_transposed
        may_be_swapped = num_experts is not None and num_experts > 1 and is_out_in
        shapes = tuple(self.headers[self.sides[adapted][side]].shape for side in "AB")
        rank = self.config.rank(adapted.trained_name)
        sizes = size_out, size_in
        try:
            self.config.check_factors(adapted.trained_name, shapes, num_experts or 1, sizes, rank, may_be_swapped)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {self.both_models[0].upper()}{self.both_models[1:]}") from None

    def is_grouped_by_expert(self, adapted: AdaptedWeight) -> bool:
        """Tell whether lora_B's columns stand expert by expert. Raises CheckpointError where neither is known."""
        module = self.trained_model.modules[adapted.module]
        # Unsloth tells families apart by the folder that has the class of their experts
        family = self.family if is_native(module) else type(module).__module__.split(".")[-2]
        return self.config.is_grouped_by_expert(adapted.trained_name.rpartition(".")[2], family)
