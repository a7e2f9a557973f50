"""The mixture-of-experts layers in a model, their experts, and the Transformers models in wrappers."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ..layer.experts_module import is_experts
from ..model_patches import FAMILIES, Family
from ..private import attributes
from .forwards import LIGERS

QUANTIZED = {
    "Mxfp4GptOssExperts": "mxfp4",
    "FP8Experts": "fp8",
}  # classes that Transformers' quantizers put in: the method
# what wrappers call the module inside them: PEFT's, and as a private attribute FSDP's, checkpointing's, torch.compile's
WRAPPED = re.compile(r"base_layer|_\w+")
WRAPPERS = re.compile(rf"(?:^|(?<=\.))(?:original_module|modules_to_save\.[^.]+|{WRAPPED.pattern})(?:\.|$)")


class MoELayer(NamedTuple):
    """One layer of a model with mixture of experts: its modules, `block`, `router` and `experts`. Outside our families
    `family`, `block` and `router` are None."""

    name: str
    family: Family | None
    block: Any  # the modules' attributes are their classes' own
    router: Any
    experts: Any


def _saved_copies(module: nn.Module) -> nn.ModuleDict | None:
    """Get the copies by adapter of PEFT's ModulesToSaveWrapper, which hands other attributes on to one of them; or
    None."""
    submodules: dict[str, Any] = module._modules
    wraps = "original_module" in submodules and "modules_to_save" in submodules
    return submodules["modules_to_save"] if wraps else None


def _called_copy(wrapper: Any, copies: nn.ModuleDict) -> nn.Module:
    """Find the module that a ModulesToSaveWrapper's forward calls."""
    adapters = wrapper.active_adapters
    if wrapper.disable_adapters or not adapters or adapters[0] not in copies:
        return wrapper.original_module
    return copies[adapters[0]]


def unwrap(module: nn.Module) -> nn.Module:
    """Find the module that is called inside the wrappers of PEFT, FSDP, checkpointing and torch.compile."""
    while True:
        copies = _saved_copies(module)
        inner = next((child for name, child in module.named_children() if WRAPPED.fullmatch(name)), None)
        if copies is not None:
            module = _called_copy(module, copies)
        elif inner is not None:
            module = inner
        else:
            return module


def every_copy(module: Any) -> list[nn.Module]:
    """List `unwrap(module)`, and what PEFT's modules_to_save keeps beside it and may call another time."""
    copies = _saved_copies(module)
    if copies is None:
        return [unwrap(module)]
    return [bare for copy in (module.original_module, *copies.values()) for bare in every_copy(copy)]


def _in_uncalled_copies(model: nn.Module) -> set[nn.Module]:
    """Collect all that is inside the modules that PEFT's modules_to_save keeps and does not call now."""
    unused: set[nn.Module] = set()
    for module in model.modules():
        copies = _saved_copies(module)
        if copies is not None:
            kept: set[Any] = {module.original_module, *copies.values()}
            for other in kept - {_called_copy(module, copies)}:
                unused.update(other.modules())
    return unused


def _family_class(family: Family, role: str) -> type[Any] | None:
    """Find the family's class in that role; None where no instance exists: its module was never imported, or this version
    of Transformers calls the class something else."""
    return getattr(sys.modules.get(family.module), getattr(family, role), None)


def load_family_class(family: Family, role: str) -> type[Any]:
    """Import the family's class in that role."""
    return getattr(importlib.import_module(family.module), getattr(family, role))


def _is_or_was_experts(module: nn.Module) -> bool:
    """Tell whether this module is experts of the interface, or stands in the place of some."""
    return is_experts(module) or type(module).__name__ in (*QUANTIZED, LIGERS)


def every_experts(model: nn.Module) -> list[nn.Module]:
    """List every experts module that goes, or should go, through the experts interface; also copies not called now."""
    return [module for module in model.modules() if _is_or_was_experts(module)]


def experts_and_wrappers(model: nn.Module) -> list[nn.Module]:
    """List `every_experts` and the wrappers around them: Liger binds its forward to whichever a block calls."""
    return [module for module in model.modules() if any(map(_is_or_was_experts, every_copy(module)))]


def find_layers(model: nn.Module, *, copies: bool = False) -> Iterator[MoELayer]:
    """Yield every mixture-of-experts layer of the model: those of our families with their router, any other experts
    without.

    copies: also layers that PEFT's modules_to_save keeps and does not call now.
    """
    blocks = {cls: family for family in FAMILIES.values() if (cls := _family_class(family, "block")) is not None}
    skipped = set() if copies else _in_uncalled_copies(model)
    for name, module in model.named_modules():
        if module in skipped:
            continue
        family = next((family for cls, family in blocks.items() if isinstance(module, cls)), None)
        if family is not None:
            router, experts = unwrap(getattr(module, family.router_attribute)), unwrap(module.experts)
            skipped.update(every_copy(module.experts))
            yield MoELayer(WRAPPERS.sub("", name).rstrip("."), family, module, router, experts)
        elif _is_or_was_experts(module):
            yield MoELayer(WRAPPERS.sub("", name).rstrip("."), None, None, None, module)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Find the Transformers model inside wrappers (PEFT, DDP, torch.compile); a model that contains others is one.

    Raises:
        TypeError: there is none. ValueError: there are several with experts.
    """
    check_module(model)
    if isinstance(model, PreTrainedModel):
        return model
    models = _outermost_models(model)
    if not models:
        raise TypeError(f"{type(model).__name__} holds no Transformers model; pass the PreTrainedModel or its wrapper")
    if len(models) == 1:
        return next(iter(models.values()))
    with_layers = {name: module for name, module in models.items() if any(find_layers(module))}
    if len(with_layers) > 1:
        names = " and ".join(f"{name} ({type(module).__name__})" for name, module in with_layers.items())
        raise ValueError(
            f"{type(model).__name__} holds {len(with_layers)} models with experts: {names}; pass one of them"
        )
    return next(iter((with_layers or models).values()))


def _outermost_models(wrapper: nn.Module) -> dict[str, PreTrainedModel]:
    """Find the Transformers models in a wrapper, by name. A Trainer's step asks several times, so that no module inside
    them is looked at unless there are several."""
    models: dict[str, PreTrainedModel] = {}
    seen, waiting = {wrapper}, [("", wrapper)]
    while waiting:
        path, module = waiting.pop(0)
        for name, child in module.named_children():
            if child in seen:
                continue
            seen.add(child)
            if isinstance(child, PreTrainedModel):
                models[path + name] = child
            else:
                waiting.append((f"{path}{name}.", child))
    if len(models) > 1:
        inside = {each for model in models.values() for each in model.modules() if each is not model}
        models = {name: model for name, model in models.items() if model not in inside}
    return models


def models_with_experts(model: nn.Module) -> list[PreTrainedModel]:
    """List every Transformers model that contains experts: `model`, and those inside it."""
    every = set(every_experts(model))
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [module for module in models if not every.isdisjoint(module.modules())]


def is_replica(model: nn.Module) -> bool:
    """Tell whether nn.DataParallel made this copy of a model for one call: its weights are no parameters."""
    return next(model.parameters(), None) is None


def is_patched(model: nn.Module) -> bool:
    """Tell whether patch_model was applied to this model, and not undone in a model inside it."""
    return any(attributes.UNPATCHED in vars(experts) for experts in every_experts(transformers_model(model)))


def check_module(model: Any) -> None:
    """Raise TypeError for what is no model, such as a Trainer or a name."""
    if not isinstance(model, nn.Module):
        remedy = "give its model, trainer.model" if hasattr(model, "callback_handler") else "load it first"
        raise TypeError(f"this takes a model and got a {type(model).__name__}: {remedy}")
