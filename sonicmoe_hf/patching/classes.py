"""patch / unpatch: every model of a family that is built from now on, by whatever builds it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..layer.config import TokenRounding, as_routing_policy, check_choice
from ..model_patches import FAMILIES, Family
from .patch import patch_model
from .support import find_layers, load_family_class

_patched_classes: set[type[Any]] = set()


def _post_init_with(routing: TokenRounding | None) -> Callable[[PreTrainedModel], None]:
    """`post_init` of a family's base class while `patch` is on: Transformers calls it when a model has been built."""

    def post_init(model: PreTrainedModel) -> None:
        PreTrainedModel.post_init(model)
        if next(find_layers(model), None) is not None:
            patch_model(model, routing)

    return post_init


def _is_in_transformers(family: Family) -> bool:
    """Whether this version has the family."""
    folder, _, _ = family.module.rpartition(".")
    return importlib.util.find_spec(folder) is not None


def patch(families=None, routing=None) -> None:
    """Patch every model of these families that is built from now on, by whatever builds it.

    Use it before something else (TRL, Axolotl) constructs the model. It replaces the experts_implementation given there.

    Args:
        families: a name of `model_patches.FAMILIES`, such as "qwen3_moe", or several; None: all of this Transformers
            version.
        routing: see `patch_model`.
    Raises:
        ValueError: an unknown family, or an unknown routing.
    """
    policy = as_routing_policy(routing)
    every = [name for name, family in FAMILIES.items() if _is_in_transformers(family)]
    names = every if families is None else [families] if isinstance(families, str) else list(families)
    for name in names:
        check_choice("family", name, FAMILIES)
    for name in names:
        cls = load_family_class(FAMILIES[name], "pretrained")
        if "post_init" in vars(cls) and cls not in _patched_classes:
            raise UnsupportedModelError(
                f"{cls.__name__} of this Transformers version has a post_init of its own, which patch() would replace; "
                "call sonicmoe_hf.patch_model(model) on each model"
            )
        cls.post_init = _post_init_with(policy)
        _patched_classes.add(cls)


def unpatch() -> None:
    """Undo `patch`. Models built meanwhile stay patched until unpatch_model."""
    while _patched_classes:
        del _patched_classes.pop().post_init
