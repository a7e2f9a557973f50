"""`sonicmoe-hf doctor`. It finds plain data, which --json prints and doctor_tables.py shows."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection
from typing import Any

import torch

from ...attention.models import describe_attention
from ...checkpoints.reading.config_only import build_on_meta
from ...errors import CheckpointError
from ...formats.declared import DeclaredQuantization, declared_quantization
from ...formats.declared_integers import COMPRESSED
from ...layer import backends
from ...layer.config import TokenRounding
from ...layer.experts_module import weight_names, whole_shape
from ...patching.experts import experts_facts, sizes_of
from ...patching.layer_ranges import LayerRange, collapse
from ...patching.support import LayerSupport, accelerated_layers, loading_remedy, supports
from ...private.versions import untested_versions, versions
from ...routing.support import why_left_unrounded, with_rounding_reasons
from .linear_attention import describe_linear_attention
from .warmup_kernels import describe_kernels

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RANK = 16  # lora_config's own
PACKED_AS = "packed as "
NO_REMEDY = "use a checkpoint that is not quantized"


def doctor(
    model: str | None, as_json: bool, batch_size: int | None, sequence_length: int | None, tile: int | None
) -> int:
    """Run `sonicmoe-hf doctor`."""
    batch = (batch_size, sequence_length, tile)
    if any(batch) and not (model and batch_size and sequence_length):
        raise ValueError(
            "--batch-size and --sequence-length belong together, and need a model; --tile needs both: "
            "sonicmoe-hf doctor MODEL --batch-size B --sequence-length S"
        )
    facts = machine()
    if model is not None:
        facts["model"] = examine(model, batch_size=batch_size, sequence_length=sequence_length, tile=tile)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        from .doctor_tables import print_doctor

        print_doctor(facts)
    return 0 if model is None or facts["model"]["supported"] else 1


def machine() -> dict[str, Any]:
    """Collect versions, and every device with the backend that is chosen on it for each dtype, and why."""
    devices = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        description = f"{card.name}, sm_{card.major}{card.minor}, {card.total_memory / 2**30:.1f} GiB"
        devices.append((torch.device("cuda", index), description))
    devices.append((torch.device("cpu"), f"{platform.machine()}, {torch.get_num_threads()} threads"))
    return {
        "versions": versions(),
        "untested_versions": untested_versions(),
        "backend_override": os.environ.get(backends.BACKEND_VARIABLE),
        "devices": [
            {
                "name": str(device),
                "description": description,
                "backends": {_name(dtype): _choose_backend(device, dtype) for dtype in DTYPES},
            }
            for device, description in devices
        ],
    }


def _choose_backend(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Choose the backend, and say why; or "error" and the error of choosing one."""
    try:
        name, reason = backends.choose(device, dtype)
        return name, reason
    except ValueError as error:
        return "error", str(error)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def examine(
    name: str, *, batch_size: int | None = None, sequence_length: int | None = None, tile: int | None = None
) -> dict[str, Any]:
    """Find the support, backend and kernels of a model's layers on this machine's best device. Only its config is read.

    Args:
        name: hub id or folder. batch_size, sequence_length: of one forward on one device; with both, "token_rounding"
            says whether it applies. tile: M, rows; None is the policy's own.
    Raises:
        CheckpointError: no such folder, the hub cannot be reached, config.json describes no model that can be built, or
            its experts are packed in no format that is known.
    """
    model = build_on_meta(name)
    declared = declared_quantization(model.config)
    support = _with_quantization(with_rounding_reasons(supports(model), model), declared)
    not_rounding = why_left_unrounded(model)
    rounding = []
    if batch_size is not None and sequence_length is not None:
        rounding = _forecast_rounding(
            model, support, not_rounding, batch_size * sequence_length, TokenRounding(tile=tile)
        )
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.get_default_dtype() if model.dtype is None else model.dtype
    backend, reason = _choose_backend(device, dtype)
    has_kernels = backend in backends.KERNELS and device.type != "cpu"  # and not the reference in plain PyTorch
    layers = [
        _describe_layers(layers, not_rounding, has_kernels)
        for layers in collapse(support, _kernels_by_layer(model, support))
    ]
    supported = bool(layers) and all(layer["supported"] for layer in layers)
    return {
        "name": name,
        "architecture": type(model).__name__,
        "quantization": _name_quantization(declared),
        "supported": supported,
        "accelerated": supported and has_kernels,
        "here": {"device": str(device), "dtype": _name(dtype), "backend": backend, "reason": reason},
        "layers": layers,
        "token_rounding": rounding,
        "attention": [*describe_attention(model), *describe_linear_attention(model)],
        "adapters": _count_adapters(model, support),
    }


def _name_quantization(declared: DeclaredQuantization | None) -> str | None:
    """Name the checkpoint's quantization; None for plain weights."""
    if declared is None:
        return None
    return PACKED_AS + declared.format_name() if declared.is_packed_here else declared.method


def _with_quantization(support: list[LayerSupport], declared: DeclaredQuantization | None) -> list[LayerSupport]:
    """Say in the reasons of layers what becomes of their quantized experts, which may not be supported."""
    if declared is None:
        return support
    if declared.is_packed_here:
        experts = f"its experts are {_name_quantization(declared)}, frozen"
    elif _comes_in_bf16(declared):
        at_load = f"at every load Transformers makes its {declared.format_name()} experts bf16 (by compressed-tensors)"
        experts = f"{at_load}; {_remedy(declared)}"
    else:
        reason = (
            f"the checkpoint is quantized ({declared.method}): its experts would never reach sonicmoe_hf; "
            f"{_remedy(declared)}"
        )
        return [layer._replace(accelerated=False, reason=reason) for layer in support]
    return [layer._replace(reason=f"{layer.reason}; {experts}") for layer in support]


def _comes_in_bf16(declared: DeclaredQuantization) -> bool:
    """Tell whether Transformers makes dense weights of the checkpoint's experts: it does of symmetric integers of
    compressed-tensors."""
    try:
        return declared.method == COMPRESSED and declared.format_name() in ("int4", "int8")
    except CheckpointError:
        return False


def _remedy(declared: DeclaredQuantization) -> str:
    """Say how to load a quantized checkpoint, or what of its scheme no format takes."""
    try:
        format = declared.format_name()
    except CheckpointError as error:
        return str(error)
    is_read = declared.stores_matrices or declared.method == "mxfp4"
    return loading_remedy(declared.method, format) if is_read else NO_REMEDY


def _describe_layers(layers: LayerRange, not_rounding: Collection[str], has_kernels: bool) -> dict[str, Any]:
    name, family, supported, reason = layers.support
    return {
        "layers": layers.name,
        "count": layers.count,
        "name": name,
        "family": family,
        "token_rounding": supported and name not in not_rounding,
        "reason": reason,
        "supported": supported,
        "accelerated": supported and has_kernels,
        "kernels": layers.kernels,
    }


def _forecast_rounding(
    model, support: list[LayerSupport], not_rounding: Collection[str], tokens: int, policy: TokenRounding
) -> list[dict[str, Any]]:
    """Forecast token rounding of so many tokens, for each kind of layer (experts, top-k) where it works."""
    layers = [layer for layer in accelerated_layers(model, support) if layer.name not in not_rounding]
    kinds = dict.fromkeys((layer.experts.num_experts, layer.router.top_k) for layer in layers)
    return [_forecast_kind(tokens, num_experts, top_k, policy) for num_experts, top_k in kinds]


def _forecast_kind(tokens: int, num_experts: int, top_k: int, policy: TokenRounding) -> dict[str, Any]:
    tile, applies = policy.tile_rows, policy.applies(tokens, top_k, num_experts)
    needed = -(-policy.min_pairs(num_experts) // top_k)
    rows = tokens * top_k / num_experts
    routing = f"{tokens} tokens, top-{top_k} of {num_experts} experts: {rows:.0f} rows per expert, "
    routing += f"{rows / tile:.1f} tiles of {tile}"
    sentence = f"token rounding applies ({routing})"
    if not applies:
        sentence = (
            f"token rounding falls back to top-k ({routing}); it needs {needed} tokens per forward on each device: raise "
            "the batch size or the sequence length, or pass a smaller tile"
        )
    return {
        "tokens": tokens,
        "num_experts": num_experts,
        "top_k": top_k,
        "tile": tile,
        "applies": applies,
        "tokens_needed": needed,
        "sentence": sentence,
    }


def _in_words(parameters: int) -> str:
    """Write a number of parameters in millions, or in thousands if it is smaller than one."""
    return f"{parameters / 1e6:,.0f} million" if parameters >= 1e6 else f"{parameters / 1e3:,.0f} thousand"


def _count_adapters(model, support: list[LayerSupport]) -> dict[str, Any] | None:
    """Count the parameters that LoRA has on the experts of supported layers whose routers are known, at rank r and at r /
    experts per token; None without any."""
    layers = [layer for layer in accelerated_layers(model, support) if layer.router is not None]
    if not layers:
        return None
    shapes = [
        whole_shape(getattr(layer.experts, weight)) for layer in layers for weight in weight_names(layer.experts)
    ]
    at_rank_1 = sum(num_experts * (rows + columns) for num_experts, rows, columns in shapes)
    experts_r = max(1, RANK // layers[0].router.top_k)
    at_r, at_experts_r = RANK * at_rank_1, experts_r * at_rank_1
    sentence = f"LoRA on the experts has {_in_words(at_r)} parameters at r = {RANK}, 16 bytes each to train"
    if experts_r != RANK:
        sentence += (
            f"; where that does not fit, lora_config(model, r={RANK}, experts_r={experts_r}), which is r / experts per "
            f"token, learns less (docs/lora.md) and has {_in_words(at_experts_r)}"
        )
    return {
        "r": RANK,
        "parameters": at_r,
        "experts_r": experts_r,
        "parameters_at_experts_r": at_experts_r,
        "sentence": sentence,
    }


def _kernels_by_layer(model, support: list[LayerSupport]) -> dict[str, str]:
    """Say by layer what runs on the Hopper kernels on a Hopper GPU."""
    if backends.missing_for_hopper():
        return {}
    kernels = {}
    for layer in accelerated_layers(model, support):
        sizes, activation = sizes_of(layer.experts), experts_facts(layer.experts).activation
        kernels[layer.name] = describe_kernels(sizes.hidden, sizes.intermediate, activation)
    return kernels
