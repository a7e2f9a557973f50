"""The layers of a model that sonicmoe_hf accelerates, and why it does not the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedExpertsError, UnsupportedModelError
from ..formats.declared import declared_quantization
from .experts import check_weights, experts_facts
from .forwards import is_bound_by_liger, unbind_liger, why_not_reached
from .moe_layers import QUANTIZED, MoELayer, check_module, every_experts, experts_and_wrappers, find_layers, unwrap

KEEP_PACKED = (
    "to keep its experts packed and frozen, load it with "
    'sonicmoe_hf.from_pretrained(..., experts_quantization="{format}")'
)
PLAIN_REMEDY = {  # quantization method: how Transformers makes plain experts; those of others it leaves random
    "mxfp4": "quantization_config=Mxfp4Config(dequantize=True)",
    "fp8": "quantization_config=FineGrainedFP8Config(dequantize=True)",
    "compressed-tensors": "quantization_config=CompressedTensorsConfig(dequantize=True) if they are symmetric integers",
}
EXPERTS_NAME = re.compile(r"(Experts|MoE|Moe|MoeBlock|SparseMLP)$")  # of classes outside the experts interface
OUTSIDE = (
    "is outside Transformers' experts interface: experts_implementation has no effect on it{more}; train this model "
    "without sonicmoe_hf"
)
IDENTITIES = (  # LongCat-Flash's
    ", and {count} of its {of} experts are identity experts, without weights, which sonicmoe_hf does not have"
)


class LayerSupport(NamedTuple):
    """Support of one mixture-of-experts layer.

    name: of the block in the model. family: name of the model's family, or None where model_patches has no facts of it.
    accelerated: sonicmoe_hf computes the experts. reason: why something does not work, with the remedy, or "fully
    supported".
    """

    name: str
    family: str | None
    accelerated: bool
    reason: str


def loading_remedy(method: str, format: str) -> str:
    """Say how to load a checkpoint quantized by `method`, as from_pretrained takes its experts: first what loses nothing.

    format: of the experts, as `DeclaredQuantization.format_name` gives it.
    """
    kept = KEEP_PACKED.format(format="int4" if format in ("uint4", "int8") else format)
    return f"{kept}; for plain weights, with {PLAIN_REMEDY[method]}" if method in PLAIN_REMEDY else kept


def outside_interface(model: nn.Module) -> dict[str, nn.Module]:
    """Find by name what looks like mixture-of-experts layers, in a model without experts of the interface."""
    outside: dict[str, nn.Module] = {}
    if not every_experts(model):
        for name, module in model.named_modules():
            inside = any(name.startswith(f"{other}.") for other in outside)
            if EXPERTS_NAME.search(type(module).__name__) and not inside:
                outside[name] = module
    return outside


def _identities(block: Any) -> str:
    """Say how many experts of a block outside the interface are the identity."""
    count = getattr(getattr(block, "experts", None), "zero_expert_num", 0)
    return IDENTITIES.format(count=count, of=count + block.experts.num_routed_experts) if count else ""


def _uses_hub_kernel(model: nn.Module, block: nn.Module | None) -> bool:
    """Tell whether use_kernels=True replaced the block's forward (MegaBlocks), past our experts."""
    return bool(getattr(model, "use_kernels", False)) and hasattr(type(block), "kernel_layer_name")


def _why_not_accelerated(
    model: nn.Module, layer: MoELayer, bound_by_liger: Mapping[nn.Module, str | None]
) -> str | None:
    name = type(layer.experts).__name__
    if (method := QUANTIZED.get(name)) is not None:
        config: Any = model.config
        declared = declared_quantization(config)
        remedy = loading_remedy(method, declared.format_name() if declared is not None else method)
        return f"its experts are quantized ({name}) and never reach sonicmoe_hf; {remedy}"
    if _uses_hub_kernel(model, layer.block):
        return "use_kernels=True replaces the whole block by a hub kernel; load the model with use_kernels=False"
    reason = bound_by_liger.get(layer.experts) or why_not_reached(layer.experts)
    if reason is not None:
        return reason
    try:
        experts_facts(layer.experts)
        check_weights(layer.experts)
    except UnsupportedExpertsError as error:
        return str(error)
    return None


def supports(model: nn.Module) -> list[LayerSupport]:
    """Tell for every mixture-of-experts layer of `model` (also on the meta device) what works, and why not."""
    check_module(model)
    root = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    layers = []
    bound_by_liger = {
        unwrap(module): why_not_reached(module) for module in experts_and_wrappers(model) if is_bound_by_liger(module)
    }
    for layer in find_layers(model):
        family = None if layer.family is None else layer.family.name
        reason = _why_not_accelerated(root, layer, bound_by_liger)
        layers.append(LayerSupport(layer.name, family, reason is None, reason or "fully supported"))
    return layers or [
        LayerSupport(name, None, False, f"{type(module).__name__} {OUTSIDE.format(more=_identities(module))}")
        for name, module in outside_interface(model).items()
    ]


def accelerated_layers(model: nn.Module, support: list[LayerSupport]) -> list[MoELayer]:
    """List the layers that are accelerated according to `support`, what `supports` says."""
    names = {layer.name for layer in support if layer.accelerated}
    return [layer for layer in find_layers(model) if layer.name in names]


def check_accelerated(model: nn.Module) -> list[LayerSupport]:
    """Compute `supports(model)`, or raise UnsupportedModelError where a layer is not accelerated or there is none."""
    layers = supports(model)
    if not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no mixture-of-experts layer that goes through Transformers' experts interface; "
            "docs/models.md lists the models that have"
        )
    refused = [layer for layer in layers if not layer.accelerated]
    if refused:
        lines = "\n".join(f"  {layer.name}: {layer.reason}" for layer in refused[:4])
        more = f"\n  ... and {len(refused) - 4} more" if len(refused) > 4 else ""
        raise UnsupportedModelError(
            f"{len(refused)} of {len(layers)} mixture-of-experts layers of {type(model).__name__} cannot be "
            f"accelerated:\n{lines}{more}"
        )
    return layers


def undo_liger_and_check(model: nn.Module) -> list[LayerSupport]:
    """Undo Liger's changes of the experts, and check that every layer can be accelerated.

    Raises:
        UnsupportedModelError: one cannot; but for Liger the model is as it was.
    """
    for module in experts_and_wrappers(model):
        unbind_liger(module)
    return check_accelerated(model)
