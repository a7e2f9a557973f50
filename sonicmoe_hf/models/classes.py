"""patch and unpatch, for every model of a family that is built from now on, by whatever builds it."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel

from ..layer.config import TokenRounding, as_routing_policy, check_choice
from ..model_patches import FAMILIES
from ..patching.moe_layers import find_layers
from ..private.replaced import put_back, replace
from .patch import patch_model

_policies: dict[tuple[str, str], TokenRounding | None] = {}  # by module and name of a family's base class


def _follow_models() -> None:
    """Replace the function that Transformers calls when a model has been built."""
    built: Any = PreTrainedModel.post_init

    @functools.wraps(built)
    def post_init(model):
        built(model)
        classes = ((cls.__module__, cls.__name__) for cls in type(model).__mro__)
        family = next((names for names in classes if names in _policies), None)
        if family is not None and next(find_layers(model), None) is not None:
            patch_model(model, _policies[family])

    replace(PreTrainedModel, "post_init", post_init)


def patch(families=None, routing=None) -> None:
    """Patch every model of these families that is built from now on, by whatever builds it.

    Use it before something else (TRL, Axolotl) constructs the model. It replaces the experts_implementation given there.

    Args:
        families: a name of `model_patches.FAMILIES`, such as "qwen3_moe", or several; None: all of them.
        routing: see `patch_model`.
    Raises:
        ValueError: an unknown family, or an unknown routing.
    """
    policy = as_routing_policy(routing)
    names = FAMILIES if families is None else [families] if isinstance(families, str) else list(families)
    for name in names:
        check_choice("family", name, FAMILIES)
    _policies.update({(FAMILIES[name].module, FAMILIES[name].pretrained): policy for name in names})
    _follow_models()


def unpatch() -> None:
    """Undo `patch`. Models built meanwhile stay patched until unpatch_model."""
    _policies.clear()
    put_back(PreTrainedModel, "post_init")
