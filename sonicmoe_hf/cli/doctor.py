"""What `sonicmoe-hf doctor` reports: versions, devices and backends, and what a model's layers get, without weights."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..attention.models import describe_attention
from ..checkpoints.config_only import build_on_meta
from ..errors import CheckpointError
from ..formats.declared import Declared, declared_quantization
from ..layer import backends
from ..layer.config import TokenRounding
from ..layer.experts_module import expert_parallel_remedy, has_expert_parallelism, weight_names, whole_shape
from ..patching.experts import experts_facts, sizes_of
from ..patching.layer_ranges import LayerRange, collapse
from ..patching.support import REMEDIES, LayerSupport, supported_layers, supports
from ..private.versions import untested_versions, versions
from .warmup import placement

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RANK = 16  # lora_config's own
PACKED_AS = "packed as "
NO_REMEDY = "use a checkpoint that is not quantized"


@dataclass(frozen=True)
class Device:
    """A device, and for each dtype the backend that would run on it, or the error of choosing one, and why."""

    name: str
    description: str
    backends: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class RoundingForecast:
    """What token rounding would do for one batch size; rows are means over the experts."""

    tokens: int
    num_experts: int
    top_k: int
    tile: int
    applies: bool
    tokens_needed: int

    def sentence(self) -> str:
        """The forecast in words."""
        rows = self.tokens * self.top_k / self.num_experts
        routing = f"{self.tokens} tokens, top-{self.top_k} of {self.num_experts} experts: {rows:.0f} rows per expert, "
        routing += f"{rows / self.tile:.1f} tiles of {self.tile}"
        if self.applies:
            return f"token rounding applies ({routing})"
        return (
            f"token rounding falls back to top-k ({routing}); it needs {self.tokens_needed} tokens per forward on each "
            "device: raise the batch size or the sequence length, or pass a smaller tile"
        )


@dataclass(frozen=True)
class AdapterForecast:
    """How many parameters LoRA on the experts has: at rank r, and at r / experts per token, `experts_r`."""

    r: int
    parameters: int
    experts_r: int
    parameters_at_experts_r: int

    def sentence(self) -> str:
        """The forecast in words."""
        counts = self.parameters, self.parameters_at_experts_r
        at_r, at_experts_r = (f"{count / 1e6:,.0f} million" for count in counts)
        words = f"LoRA on the experts has {at_r} parameters at r = {self.r}, 16 bytes each to train"
        if self.experts_r == self.r:
            return words
        return (
            f"{words}; where that does not fit, lora_config(model, r={self.r}, experts_r={self.experts_r}), which is r / "
            f"experts per token, learns less (docs/lora.md) and has {at_experts_r}"
        )


@dataclass(frozen=True)
class Here:
    """What would compute the layers on this machine: its best device, the checkpoint's dtype, the backend and why."""

    device: str
    dtype: str
    backend: str
    reason: str

    @property
    def accelerates(self) -> bool:
        """Whether kernels run on a GPU, and not the reference in plain PyTorch."""
        return self.backend in backends.KERNELS and self.device != "cpu"


@dataclass(frozen=True)
class ModelReport:
    """What the layers of one model get. `quantization` is the checkpoint's method, None for plain weights."""

    name: str
    architecture: str
    quantization: str | None
    layers: list[LayerRange]
    here: Here
    rounding: list[RoundingForecast] = field(default_factory=list)
    adapters: AdapterForecast | None = None
    attention: list[str] = field(default_factory=list)

    @property
    def supported(self) -> bool:
        """Whether there are mixture-of-experts layers and sonicmoe_hf computes all of them, on whatever machine."""
        return bool(self.layers) and all(layers.support.accelerated for layers in self.layers)

    @property
    def accelerated(self) -> bool:
        """Whether all layers are supported, and this machine has kernels for them."""
        return self.supported and self.here.accelerates


def devices() -> list[Device]:
    """Every CUDA device, and the CPU."""
    devices = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        description = f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"
        devices.append(Device(f"cuda:{index}", description, _backends(torch.device("cuda", index))))
    description = f"{platform.machine()}, {torch.get_num_threads()} threads"
    devices.append(Device("cpu", description, _backends(torch.device("cpu"))))
    return devices


def _backends(device: torch.device) -> dict[str, tuple[str, str]]:
    return {_name(dtype): _backend(device, dtype) for dtype in DTYPES}


def _backend(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The backend and why, or "error" and the error of choosing one."""
    try:
        name, reason = backends.choose(device, dtype)
        return name, reason
    except ValueError as error:
        return "error", str(error)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _here(dtype: torch.dtype | None) -> Here:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return Here(str(device), _name(dtype), *_backend(device, dtype))


def examine(
    name: str, *, batch_size: int | None = None, sequence_length: int | None = None, tile: int | None = None
) -> ModelReport:
    """What the layers of a hub model or a local folder get. Only its config is read.

    Args:
        name: hub id or folder. batch_size, sequence_length: of one forward on one device; with both, the report says
            whether token rounding applies. tile: M, rows; None is the policy's own.
    Raises:
        DoctorError: no such folder, the hub cannot be reached, or config.json describes no model that can be built.
        CheckpointError: its experts are packed in no format that is known.
    """
    model = build_on_meta(name)
    quantization, declared, support = None, declared_quantization(model.config), supports(model)
    if declared is not None and declared.is_packed_here:
        quantization = PACKED_AS + declared.format()
        support = [
            layer._replace(reason=f"{layer.reason}; its experts are {quantization}, frozen") for layer in support
        ]
    elif declared is not None:
        quantization = declared.method
        reason = (
            f"the checkpoint is quantized ({quantization}): its experts would never reach sonicmoe_hf; "
            f"{_remedy(declared)}"
        )
        support = [layer._replace(accelerated=False, token_rounding=False, reason=reason) for layer in support]
    rounding = []
    if batch_size is not None and sequence_length is not None:
        rounding = _forecasts(model, support, batch_size * sequence_length, TokenRounding(tile=tile))
    layers = collapse(support, _placements(model, support))
    adapters = _adapter_forecast(model, support)
    here, attention = _here(model.dtype), describe_attention(model)
    return ModelReport(name, type(model).__name__, quantization, layers, here, rounding, adapters, attention)


def _remedy(declared: Declared) -> str:
    """How to load a quantized checkpoint, or what of its scheme no format takes."""
    try:
        declared.format()
    except CheckpointError as error:
        return str(error)
    return REMEDIES.get(declared.method, NO_REMEDY)


def _forecasts(model, support: list[LayerSupport], tokens: int, policy: TokenRounding) -> list[RoundingForecast]:
    """One forecast for each kind of layer (experts, top-k) where token rounding works."""
    kinds: dict[tuple[int, int], bool] = {}
    for layer in supported_layers(model, support, "token_rounding"):
        num_experts, top_k = layer.experts.num_experts, layer.router.top_k
        kinds[num_experts, top_k] = policy.applies(tokens, top_k, num_experts)
    needed = policy.min_tiles_per_expert * policy.tile_rows
    return [
        RoundingForecast(tokens, experts, top_k, policy.tile_rows, applies, int(-(-needed * experts // top_k)))
        for (experts, top_k), applies in kinds.items()
    ]


def _adapter_forecast(model, support: list[LayerSupport]) -> AdapterForecast | None:
    """Of the supported layers whose routers are known; None without any."""
    layers = [layer for layer in supported_layers(model, support, "accelerated") if layer.router is not None]
    if not layers:
        return None
    shapes = [
        whole_shape(getattr(layer.experts, weight)) for layer in layers for weight in weight_names(layer.experts)
    ]
    at_rank_1 = sum(num_experts * (rows + columns) for num_experts, rows, columns in shapes)
    experts_r = max(1, RANK // layers[0].router.top_k)
    return AdapterForecast(RANK, RANK * at_rank_1, experts_r, experts_r * at_rank_1)


def _placements(model, support: list[LayerSupport]) -> dict[str, str]:
    """For supported layers by name: what runs on the Hopper kernels on a Hopper GPU."""
    if backends.missing_for_hopper():
        return {}
    placements = {}
    for layer in supported_layers(model, support, "accelerated"):
        sizes, activation = sizes_of(layer.experts), experts_facts(layer.experts).activation
        placements[layer.name] = placement(sizes.hidden, sizes.intermediate, activation)
    return placements


def as_json(report: ModelReport | None) -> dict:
    """Everything doctor prints, as plain data."""
    facts: dict[str, Any] = {
        "versions": versions(),
        "untested_versions": untested_versions(),
        "backend_override": os.environ.get(backends.VARIABLE),
        "expert_parallelism": {"token_rounding": has_expert_parallelism(), "how": expert_parallel_remedy()},
        "devices": [asdict(device) for device in devices()],
    }
    if report is not None:
        layers = [_layer_as_json(layers, report.here) for layers in report.layers]
        rounding = [{**asdict(forecast), "sentence": forecast.sentence()} for forecast in report.rounding]
        facts["model"] = {
            "name": report.name,
            "architecture": report.architecture,
            "quantization": report.quantization,
            "supported": report.supported,
            "accelerated": report.accelerated,
            "here": asdict(report.here),
            "layers": layers,
            "token_rounding": rounding,
            "attention": report.attention,
            "adapters": report.adapters and {**asdict(report.adapters), "sentence": report.adapters.sentence()},
        }
    return facts


def _layer_as_json(layers: LayerRange, here: Here) -> dict:
    support = layers.support._asdict()
    supported = support.pop("accelerated")
    return {
        "layers": layers.name,
        "count": layers.count,
        **support,
        "supported": supported,
        "accelerated": supported and here.accelerates,
        "kernels": layers.kernels,
    }
