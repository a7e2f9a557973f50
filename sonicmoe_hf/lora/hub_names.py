"""What the hub's checkpoints call the weights of a model, by Transformers' own conversions read in reverse."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
)


class HubNames:
    """The hub's names of the parameters of `model`, which may be on the meta device."""

    def __init__(self, model: PreTrainedModel):
        conversions = [
            conversion.reverse_transform()
            for conversion in reversed(get_model_conversion_mapping(model, add_legacy=False))
            if not isinstance(conversion, PrefixChange)
        ]
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self._renamings = [each for each in conversions if isinstance(each, WeightRenaming)]

    def parameter(self, name: str) -> str:
        """Of a parameter that no conversion splits, merges or transposes: nothing but its name is changed."""
        return apply_renamings(name, self._renamings)

    def per_expert(self, name: str) -> list[str]:
        """Of a weight that holds all experts, its matrices in the hub's names, each with "{expert}" for the number; none
        where the hub has no tensor for each expert. Gate comes before up."""
        renamed, pattern = apply_converters(name, self._converters)
        targets = next((each.target_patterns for each in self._converters if pattern in each.source_patterns), [])
        if not targets or not all(".*." in target for target in targets):
            return []
        names = [renamed.replace(targets[0], target) for target in targets]
        return [apply_renamings(each, self._renamings).replace(".*.", ".{expert}.") for each in names]


def linear_modules(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
