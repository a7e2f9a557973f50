"""lora_config: a LoRA configuration for a mixture-of-experts model, with names that are read off its own modules."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..formats.hub_names import HubNames
from ..layer.experts_module import packable, weight_names
from ..patching.moe_layers import find_layers
from ..patching.support import check_accelerated
from .names import TAKEN_FOR_EXPERTS, Names, endings, is_in_router, is_target_parameter, without_base_layer

if TYPE_CHECKING:
    from peft import LoraConfig

TASKS = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
MODULES_ALONE = ("use_dora", "lora_bias", "fan_in_fan_out", "velora_config", "kasa_config")
INITS_OF_MODULES = ("pissa", "olora", "orthogonal", "corda", "loftq", "eva", "lora_ga")
READ_PAST = {  # linear layers whose weight their module reads past them, so that an adapter would have no effect
    "GraniteMoeHybridMambaLayer": "out_proj",
    "JambaMambaMixer": "dt_proj",
    "NemotronHMamba2Mixer": "out_proj",
}
REMEDY = "drop it, or adapt no experts: target_parameters=[]"


def lora_config(model: nn.Module, r: int = 16, *, experts_r: int | None = None, **options) -> LoraConfig:
    """Make a `peft.LoraConfig` for LoRA on the experts and the attention projections of `model`, and not its routers.

    Args:
        model: a model with experts that sonicmoe_hf supports, in the hub layout or the native one, patched or not; one on
            the meta device will do, and one that has adapters already.
        r: the rank of every adapter; each expert has factors of its own.
        experts_r: the rank on the experts, if it should not be r. A common choice is r / experts per token, because an
            expert's adapters see fewer tokens than the attention's by that ratio; they then also take less memory by it
            (docs/lora.md). It goes into rank_pattern and alpha_pattern, so that lora_alpha / r stays the same; with
            use_rslora lora_alpha itself does.
        options: any other field of `LoraConfig`; what is given replaces the default. By default lora_alpha is 2 * r,
            task_type follows from the model's class, target_parameters are the experts' weights, target_modules the
            linear layers of the attention beside them. target_modules="all-linear" means every linear layer of the
            decoder that has the experts: linear attention, Mamba and shared experts too, but no router, indexer, head or
            vision tower. Both leave out names that PEFT takes for experts' of older checkpoints (AFMoE's attention
            gate_proj), and what Mamba's kernels read past an adapter. layers_to_transform chooses experts too.
    Returns:
        The configuration, for `peft.get_peft_model`, TRL's `peft_config=` or `model.add_adapter`, which Transformers
        5.24 has for PEFT 0.22 and newer alone.
    Raises:
        ModuleNotFoundError: PEFT is not installed.
        UnsupportedModelError: a mixture-of-experts layer is not supported, or there is none.
        ValueError: PEFT cannot do with parameters what is asked; the message names the field and the remedy.
    Example:
        model = peft.get_peft_model(model, sonicmoe_hf.lora_config(model, r=16))
        config = sonicmoe_hf.lora_config(model, r=16, experts_r=2)  # of a model with 8 experts per token
    """
    import peft

    if isinstance(model, peft.PeftModel):
        model = model.get_base_model()
    defaults = {
        "lora_alpha": 2 * r,
        "task_type": next((task for end, task in TASKS.items() if type(model).__name__.endswith(end)), None),
        "target_parameters": experts_targets(model, options.get("layers_to_transform")),
    }
    settings = {**defaults, **options, "r": r}
    modules = options.get("target_modules", "attention")
    if modules == "attention" or (isinstance(modules, str) and modules.lower() == "all-linear"):
        settings["target_modules"] = _linear_targets(model, modules == "attention")
    if settings["target_parameters"]:
        check_parameter_options(settings)
    check_loaded_names(model, settings)
    if experts_r is not None:
        settings |= experts_patterns(settings, experts_targets(model), experts_r)
    return peft.LoraConfig(**settings)


def experts_patterns(settings: dict, weights: list[str], experts_r: int) -> dict[str, dict[str, float]]:
    """Add the experts' own rank to the rank_pattern and alpha_pattern that are given.

    Raises:
        ValueError: nothing of the experts is adapted, or a pattern names them already.
    """
    if not settings["target_parameters"]:
        raise ValueError(f"experts_r is {experts_r}, but target_parameters adapts no experts: leave one of them out")
    given = {name: settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    for name, pattern in given.items():
        for key in pattern:
            if any(_names(key, weight) for weight in weights):
                raise ValueError(f"{name} names {key!r}, which is the experts' too: leave it or experts_r out")
    alpha = settings["lora_alpha"]
    if not settings.get("use_rslora"):  # PEFT's scale is alpha / rank, of rsLoRA alpha / sqrt(rank)
        alpha = alpha * experts_r / settings["r"]
        alpha = int(alpha) if alpha == int(alpha) else alpha
    return {
        "rank_pattern": {**given["rank_pattern"], **dict.fromkeys(weights, experts_r)},
        "alpha_pattern": {**given["alpha_pattern"], **dict.fromkeys(weights, alpha)},
    }


@contextlib.contextmanager
def without_false_alarms(config: Any, model: nn.Module) -> Iterator[None]:
    """Filter a false warning of PEFT 0.21 inside. It looks for the names in rank_pattern and alpha_pattern among modules
    alone, and warns that those of parameters are ignored, which they are not. Where a config targets the experts of an
    older Transformers, as "all-linear" does, PEFT itself writes such names."""
    names = [without_base_layer(name) for name, _ in model.named_parameters()]
    targets = vars(config) if getattr(config, "target_parameters", None) else None
    adapted = [name for name in names if targets and is_target_parameter(name, targets)]
    by_peft = {rf".*\.{re.escape(name)}" for module in model.modules() for name in packable(module)}
    with warnings.catch_warnings():
        for field in ("rank_pattern", "alpha_pattern"):
            given = {key for key in getattr(config, field, None) or {} if any(_names(key, name) for name in adapted)}
            keys = "|".join(re.escape(repr(key)) for key in given | by_peft)
            message = rf"The following {field} keys did not match any .* were ignored: \[(({keys})(, )?)+\]\.$"
            warnings.filterwarnings("ignore", message, RuntimeWarning)
        yield


def _names(key: str, name: str) -> bool:
    """Tell whether PEFT takes an entry of a pattern for what is called `name`."""
    return re.match(rf"(.*\.)?({key})$", name) is not None


def experts_targets(model: nn.Module, chosen: int | list[int] | None = None) -> list[str]:
    """List the target_parameters for the experts' weights of `model`, by endings that no other parameter's name has.

    Where `chosen` names layers, they are of these alone. Raises UnsupportedModelError as `lora_config`.
    """
    weights = [f"{name}.{weight}" for name, module in _experts(model).items() for weight in weight_names(module)]
    if chosen is None:
        return endings(weights, [without_base_layer(name) for name, _ in model.named_parameters()], lengths=(2,))
    layers = {chosen} if isinstance(chosen, int) else set(chosen)
    return [name for name in weights if layers.intersection(map(int, re.findall(r"(?<=\.)\d+(?=\.)", name)))]


def _experts(model: nn.Module) -> dict[str, nn.Module]:
    check_accelerated(model)
    names = {module: without_base_layer(name) for name, module in model.named_modules()}
    return {names[layer.experts]: layer.experts for layer in find_layers(model)}


def check_parameter_options(settings: dict, remedy: str = REMEDY) -> None:
    """Raise ValueError for options that PEFT has for modules alone, where it adapts the experts' parameters too."""
    given = {field: settings[field] for field in MODULES_ALONE if settings.get(field)}
    init = settings.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(INITS_OF_MODULES):
        given["init_lora_weights"] = init
    if given:
        field, value = next(iter(given.items()))
        raise ValueError(f"{field} is {value!r}: PEFT does not support it for experts (target_parameters); {remedy}")


def check_loaded_names(model: nn.Module, settings: dict) -> None:
    """Raise ValueError where target_modules has a layer whose factors PEFT saves under a name that it loads as
    another's."""
    hub_names, targets = HubNames(cast(Any, model)), Names(settings.get("target_modules"))
    excluded = Names(settings.get("exclude_modules"))
    for name in [without_base_layer(name) for name, _ in model.named_modules()]:
        if name in targets and name not in excluded and hub_names.in_adapter(name) is None:
            raise ValueError(
                f"target_modules has {name}, whose factors PEFT and Transformers save but do not load again: leave it out"
            )


def _linear_targets(model: nn.Module, attention_alone: bool) -> list[str]:
    """List the linear layers of the stacks that have the experts (no vision tower's), or of their attention alone.

    A family's own class of them (DeepSeek-V4's grouped one) computes something else than PEFT adds. An indexer chooses
    which keys attention reads, so that no gradient reaches it.
    """
    stacks = tuple({re.split(r"(?<=\.)\d+\.", name)[0] for name in _experts(model)})
    taken, hub_names = _taken_for_experts(model), HubNames(cast(Any, model))
    targets = [
        f"{name}.{child}"
        for name, module in model.named_modules()
        if f"{name}.".startswith(stacks)
        and ("Attention" in type(module).__name__ or not attention_alone)
        and "Indexer" not in type(module).__name__
        for child, layer in module.named_children()
        if _is_plain_linear(getattr(layer, "base_layer", layer))
        and child not in taken
        and not is_in_router(f"{name}.{child}")
        and READ_PAST.get(type(module).__name__) != child
        and hub_names.in_adapter(without_base_layer(f"{name}.{child}")) is not None
    ]
    return endings(targets, [name for name, _ in model.named_modules()], lengths=(1,))


def _is_plain_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not type(layer).__module__.startswith("transformers.models.")


def _taken_for_experts(model: nn.Module) -> set[str]:
    """List the names of linear layers that PEFT takes for this model's experts or router of older checkpoints."""
    import peft
    from peft.utils import transformers_weight_conversion

    config: Any = peft.LoraConfig(target_modules=list(TAKEN_FOR_EXPERTS))
    transformers_weight_conversion.convert_peft_config_for_transformers(config, model, None)
    return set(TAKEN_FOR_EXPERTS) - set(config.target_modules)
