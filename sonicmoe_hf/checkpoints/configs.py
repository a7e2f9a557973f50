"""config.json of checkpoints: the family and layout that it names, its quantization, and its form in the other layout."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from ..formats.declared import MODELOPT, QUANT_METHOD, DeclaredQuantization, declared_quantization
from ..formats.declared_integers import METHODS
from ..model_patches import NATIVE_FAMILIES, NATIVE_PREFIX, NativeFamily
from .files import CONFIG_FILE
from .layouts import HUB_CONFIG_KEY, LAYOUT_VERSION, VERSION_KEY

QUANTIZATIONS = ("mxfp4", "fp8", MODELOPT, QUANT_METHOD, *METHODS)
HUB_ENTRIES = ("architectures", "auto_map")  # of config.json, which name the family's own classes


def has_native_layout(config: dict) -> bool:
    """Tell whether config.json names a family with a native layout, in either layout."""
    return str(config.get("model_type")).removeprefix(NATIVE_PREFIX) in NATIVE_FAMILIES


def family_of(config: dict, path: Path) -> tuple[NativeFamily, bool]:
    """Return the family that config.json names, and whether it says the native layout."""
    model_type = config.get("model_type")
    name = str(model_type).removeprefix(NATIVE_PREFIX)
    if not isinstance(model_type, str) or not has_native_layout(config):
        raise CheckpointError(
            f"{path}: model_type is {model_type!r}; {', '.join(NATIVE_FAMILIES)} have a native layout and packed experts "
            "in the hub's. Of others, sonicmoe-hf convert SRC DST --layout hub makes quantized weights bf16, "
            "sonicmoe_hf.from_pretrained(SRC, experts_quantization=FORMAT) packs experts, and sonicmoe-hf merge BASE "
            "ADAPTER DST, without --layout, and without --quantize or with --quantize keep, merges adapters"
        )
    native = model_type.startswith(NATIVE_PREFIX)
    if native and config.get(VERSION_KEY) != LAYOUT_VERSION:
        raise CheckpointError(
            f"{path}: {VERSION_KEY} is {config.get(VERSION_KEY)!r}; this sonicmoe-hf reads version {LAYOUT_VERSION}"
        )
    return NATIVE_FAMILIES[name], native


def hub_config(config: dict, family: NativeFamily) -> dict:
    """Make config.json of the same model in the hub layout."""
    kept = {key: value for key, value in config.items() if key not in (VERSION_KEY, HUB_CONFIG_KEY)}
    if config.get("model_type") == family.name:
        return kept
    kept.pop("auto_map", None)
    replaced = config.get(HUB_CONFIG_KEY)
    hubs = {key: replaced[key] for key in HUB_ENTRIES if key in replaced} if isinstance(replaced, dict) else {}
    return {**kept, "architectures": [family.causal_lm], **hubs, "model_type": family.name}


def native_config(config: dict, family: NativeFamily) -> dict:
    """Make config.json of the same model in the native layout; what it replaces is kept for the way back."""
    if config["model_type"] != family.name:
        return dict(config)
    kept = {key: value for key, value in config.items() if key != "auto_map"}
    replaced = {key: config[key] for key in HUB_ENTRIES if key in config}
    return {
        **kept,
        "architectures": [f"SonicMoE{family.causal_lm}"],
        "model_type": NATIVE_PREFIX + family.name,
        VERSION_KEY: LAYOUT_VERSION,
        HUB_CONFIG_KEY: replaced,
    }


def quantization_of(config: dict, folder: Path) -> DeclaredQuantization | None:
    """Read the quantization that the checkpoint in `folder` declares; None where it is not quantized.

    Raises:
        CheckpointError: it is quantized in a way that conversion does not read.
    """
    path = folder / CONFIG_FILE
    declared = declared_quantization(config, folder)
    if declared is None:
        return None
    if declared.method not in QUANTIZATIONS:
        raise CheckpointError(f"{path}: quantized by {declared.method!r}; conversion reads {', '.join(QUANTIZATIONS)}")
    if declared.is_packed_here and declared.entries.get("linear") is not None:
        raise CheckpointError(
            f"{folder}: the linear layers are bitsandbytes', which conversion does not read: merge the adapter "
            "into the model's bf16 checkpoint, or into one packed by sonicmoe-hf convert --quantize"
        )
    return declared
