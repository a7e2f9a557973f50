"""peft_form: an adapter as PEFT's save_pretrained writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ..errors import CheckpointError
from ..formats.hub_names import HubNames
from ..lora.factors import Factors, as_alpha, to_peft
from ..lora.names import PREFIX, TAKEN_FOR_EXPERTS, endings
from .adapter import Adapter
from .rules import UNSLOTH_ENTRIES

MERGED = "merge it, and serve the result: sonicmoe-hf merge BASE ADAPTER DST, or PEFT's merge_and_unload"
REPLACED_BY_TARGETS = ("exclude_modules", "layers_to_transform", "layers_pattern")


def wrapper_tensors(module: str, adapted: list[Factors]) -> dict[str, torch.Tensor]:
    """List the tensors of a module's adapted parameters; PEFT's wrapper of the first is the innermost."""
    tensors = {}
    for depth, factors in enumerate(reversed(adapted)):
        wrapper = f"{PREFIX}{module}.{'base_layer.' * depth}"
        tensors[f"{wrapper}lora_A.weight"], tensors[f"{wrapper}lora_B.weight"] = to_peft(factors)
    return tensors


def new_config(
    config: dict, rank: int, alpha: float, target_modules: list[str], target_parameters: list[str], **patterns: dict
) -> dict:
    """Make the adapter_config.json of the same adapter with other factors: the targets name all that is adapted, scales
    are alpha / rank, and the order of columns is PEFT's.

    patterns: rank_pattern and alpha_pattern, for a file whose factors differ.
    """
    mapping = config.get("auto_mapping") or {}
    return {
        **{field: value for field, value in config.items() if field not in UNSLOTH_ENTRIES},
        **dict.fromkeys(REPLACED_BY_TARGETS),
        "auto_mapping": {key: value for key, value in mapping.items() if key not in UNSLOTH_ENTRIES} or None,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        **patterns,
        "target_modules": target_modules,
        "target_parameters": target_parameters or None,
        "lora_dropout": 0.0 if target_parameters else config.get("lora_dropout"),  # PEFT has none for parameters
    }


def peft_form(adapter: Adapter, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict]:
    """Make the tensors and adapter_config.json that PEFT loads into `model`.

    Each weight has its own rank, without the zeros that engines' files pad it with, and its scale by its own alpha.
    Weights whose factors are all zeros are left out: engines' files have them for what is not adapted. Linear layers
    whose names PEFT may take for experts' are named by their parameters.

    Raises:
        CheckpointError: PEFT would load factors under another name than they have.
    """
    hub_names, modules = HubNames(model), dict[str, Any](model.named_modules())
    renames_experts = get_checkpoint_conversion_mapping(model.config.model_type) is not None
    tensors = {f"{PREFIX}{name}": tensor for name, tensor in adapter.replaced.items()}
    settings: dict[str, tuple[int, float]] = {}  # by what PEFT compares with patterns
    adapted: dict[str, list[str]] = {}
    for weight in adapter.factors:
        module, _, parameter = weight.rpartition(".")
        adapted.setdefault(module, []).append(parameter)
    linear = {
        name
        for name in adapted
        if isinstance(modules[name], nn.Linear)
        and not (renames_experts and name.rpartition(".")[2] in TAKEN_FOR_EXPERTS)
    }
    parameters = []
    for module, names in adapted.items():
        factors = {name: adapter.factors[f"{module}.{name}"] for name in modules[module]._parameters if name in names}
        factors = {name: own.strip_padding() for name, own in factors.items() if not own.is_zero()}
        if (loaded := hub_names.in_adapter(module)) is None:
            raise CheckpointError(f"PEFT loads factors of {module} under another name, and would lose them; {MERGED}")
        tensors |= wrapper_tensors(loaded, list(factors.values()))
        for name, own in factors.items():
            target = module if module in linear else f"{module}.{name}"
            settings[target] = (own.rank, as_alpha(own.scale * own.rank))
            parameters += [target] if target != module else []
    default: Any = adapter.config.get("r"), adapter.config.get("lora_alpha")
    common = Counter(settings.values()).most_common(1)
    rank, alpha = default if not common or default in settings.values() else common[0][0]
    everything = [name for name, _ in model.named_parameters()] + list(modules)
    config = new_config(
        adapter.config,
        rank,
        alpha,
        sorted(endings(settings.keys() & linear, modules, lengths=(1, 2))),
        sorted(endings(parameters, everything, lengths=(2, 3))),
        rank_pattern=_pattern({name: own for name, (own, _) in settings.items()}, rank, everything),
        alpha_pattern=_pattern({name: own for name, (_, own) in settings.items()}, alpha, everything),
    )
    return tensors, config


def _pattern(values: dict[str, float], default: float, everything: Iterable[str]) -> dict[str, float]:
    """Make rank_pattern or alpha_pattern: names whose value is another than `default`, by ends that no others have."""
    pattern: dict[str, float] = {}
    for value in sorted(set(values.values()) - {default}):
        names = [name for name, own in values.items() if own == value]
        pattern.update(dict.fromkeys(sorted(endings(names, everything, lengths=(2,))), value))
    return pattern
