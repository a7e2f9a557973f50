"""What the hub's checkpoints call the weights of a model, by Transformers' own conversions read in reverse."""

from __future__ import annotations

from contextlib import suppress

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)


class HubNames:
    """The hub's names of the parameters of `model`, which may be on the meta device."""

    def __init__(self, model: PreTrainedModel):
        conversions: list[WeightTransform] = []
        for conversion in reversed(get_model_conversion_mapping(model, add_legacy=False)):
            with suppress(NotImplementedError):  # of an operation without inverse: its weights keep the model's names
                if not isinstance(conversion, PrefixChange):
                    conversions.append(conversion.reverse_transform())
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self._renamings = [each for each in conversions if isinstance(each, WeightRenaming)]

    def parameter(self, name: str) -> str:
        """Of a parameter that no conversion splits, merges or transposes: nothing but its name is changed."""
        return rename_source_key(name, self._renamings, [], reverse=True)[0]

    def module(self, name: str) -> str:
        """Of a module that has a weight."""
        return self.parameter(f"{name}.weight").removesuffix(".weight")

    def per_expert(self, name: str) -> list[str]:
        """Of a weight that holds all experts, its matrices in the hub's names, each with "{expert}" for the number; none
        where the hub has no tensor for each expert. Gate comes before up."""
        renamed, pattern = rename_source_key(name, [], self._converters, reverse=True)
        targets = next((each.target_patterns for each in self._converters if pattern in each.source_patterns), [])
        if not targets or not all(".*." in target for target in targets):
            return []
        names = [renamed.replace(targets[0], target) for target in targets]
        return [self.parameter(each).replace(".*.", ".{expert}.") for each in names]
