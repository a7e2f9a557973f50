"""HubNames: the hub's names of a model's weights and adapters, by Transformers' own conversions."""

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
    """The hub's names of the modules and parameters of `model`, which may be on the meta device."""

    def __init__(self, model: PreTrainedModel):
        conversions: list[WeightTransform] = []
        for conversion in reversed(get_model_conversion_mapping(model, add_legacy=False)):
            with suppress(NotImplementedError):  # of an operation without inverse: its weights keep the model's names
                if not isinstance(conversion, PrefixChange):
                    conversions.append(conversion.reverse_transform())
        self._converters = [item for item in conversions if isinstance(item, WeightConverter)]
        self._renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
        self._loading = [item for item in get_model_conversion_mapping(model) if isinstance(item, WeightRenaming)]

    def parameter(self, name: str) -> str:
        """Find the hub's name of a parameter that no conversion splits, merges or transposes."""
        return rename_source_key(name, self._renamings, [], reverse=True)[0]

    def module(self, name: str) -> str:
        """Find the hub's name of a module that has a weight."""
        return self.parameter(f"{name}.weight").removesuffix(".weight")

    def in_adapter(self, module: str) -> str | None:
        """Find the name under which an adapter file's factors reach a module: its own or the hub's, or None.

        PEFT and Transformers save factors under the module's own name, and rename what they load as if it were the hub's.
        A few names do not survive that.
        """
        return next((name for name in (module, self.module(module)) if self._loaded_as(name) == module), None)

    def _loaded_as(self, module: str) -> str:
        key = f"{module}.lora_A.weight"
        renamed = rename_source_key(key, self._loading, [])[0]
        # PEFT takes back what only drops a prefix
        return module if key.endswith(renamed) else renamed.removesuffix(".lora_A.weight")

    def per_expert(self, name: str) -> list[str]:
        """Find the hub's names of the matrices of a weight that holds all experts, "{expert}" for the number.

        There are none where the hub has no tensor for each expert. Gate comes before up.
        """
        names = self.weights(name)
        return names if names and all("{expert}" in each for each in names) else []

    def weights(self, name: str) -> list[str]:
        """Find the hub's names of the weights that a conversion makes of a parameter, "{expert}" for the number of
        one; there are none where none does."""
        renamed, pattern = rename_source_key(name, [], self._converters, reverse=True)
        targets = next((item.target_patterns for item in self._converters if pattern in item.source_patterns), [])
        names = [self.parameter(renamed.replace(targets[0], target)) for target in targets]
        return [matrix.replace(".*.", ".{expert}.") for matrix in names]
