"""What `sonicmoe-hf doctor` reports: versions, devices and backends, and what a model's layers get, without weights."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from . import backends
from .auto import sizes_of
from .config import TokenRounding
from .support import REMEDIES, LayerSupport, supported_layers, supports
from .warmup import placement

PACKAGES = (
    "sonicmoe-hf", "torch", "transformers", "triton", "nvidia-cutlass-dsl", "accelerate", "peft", "datasets", "trl",
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_REMEDY = "use a checkpoint that is not quantised"


class DoctorError(Exception):
    """The model cannot be examined; the message says why and what to do."""


@dataclass(frozen=True)
class Device:
    """A device, and for each dtype the backend that would run on it, or the error of choosing one, and why."""

    name: str
    description: str
    backends: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class LayerRange:
    """Consecutive layers that get the same: `name` reads model.layers[0-47].mlp. `kernels`: what runs on the Hopper
    kernels there, None for layers that are not accelerated and where those kernels' packages are missing."""

    name: str
    count: int
    support: LayerSupport
    kernels: str | None = None


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
class ModelReport:
    """What the layers of one model get. `quantisation` is the checkpoint's method, None for plain weights."""

    name: str
    architecture: str
    quantisation: str | None
    layers: list[LayerRange]
    rounding: list[RoundingForecast] = field(default_factory=list)

    @property
    def accelerated(self) -> bool:
        """Whether there are mixture-of-experts layers and all of them are accelerated."""
        return bool(self.layers) and all(layers.support.accelerated for layers in self.layers)


def versions() -> dict[str, str]:
    """Python's version and those of the packages that matter; "not installed" where one is missing."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__
    return found


def devices() -> list[Device]:
    """Every CUDA device, and the CPU."""
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        description = f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"
        found.append(Device(f"cuda:{index}", description, _backends(torch.device("cuda", index))))
    description = f"{platform.machine()}, {torch.get_num_threads()} threads"
    found.append(Device("cpu", description, _backends(torch.device("cpu"))))
    return found


def _backends(device: torch.device) -> dict[str, tuple[str, str]]:
    chosen = {}
    for dtype in DTYPES:
        try:
            chosen[str(dtype).removeprefix("torch.")] = tuple(backends.choose(device, dtype))
        except ValueError as error:
            chosen[str(dtype).removeprefix("torch.")] = ("error", str(error))
    return chosen


def examine(
    name: str, *, batch_size: int | None = None, sequence_length: int | None = None, tile: int | None = None
) -> ModelReport:
    """What the layers of a hub model or a local folder get. Only its config is read.

    Args:
        name: hub id or folder. batch_size, sequence_length: of one forward on one device; with both, the report says
            whether token rounding applies. tile: M, rows; None is the policy's own.
    Raises:
        DoctorError: no such folder, the hub cannot be reached, or Transformers cannot build the model.
    """
    model = build_on_meta(name)
    quantisation = _quantisation(model.config)
    found = supports(model)
    if quantisation is not None:
        reason = (
            f"the checkpoint is quantised ({quantisation}): its experts would never reach sonicmoe_hf; "
            f"{REMEDIES.get(quantisation, NO_REMEDY)}"
        )
        found = [layer._replace(accelerated=False, token_rounding=False, reason=reason) for layer in found]
    rounding = []
    if batch_size is not None and sequence_length is not None:
        rounding = _forecasts(model, found, batch_size * sequence_length, TokenRounding(tile=tile))
    layers = _collapse(found, _placements(model, found))
    return ModelReport(name, type(model).__name__, quantisation, layers, rounding)


def _load_config(name: str):
    path = Path(name).expanduser()
    if path.exists():
        if not (path / "config.json").is_file():
            raise DoctorError(f"{name} has no config.json; give the folder that save_pretrained wrote, or a hub id")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DoctorError(f"there is no folder {name}; give an existing one, or a hub id such as Qwen/Qwen3-30B-A3B")
    try:
        return AutoConfig.from_pretrained(str(path) if path.exists() else name)
    except (OSError, ValueError) as error:
        raise DoctorError(_explain(name, path.exists(), error)) from error


def _explain(name: str, local: bool, error: Exception) -> str:
    """Why a config did not load. Transformers' own message is kept: it names the cause."""
    cause = " ".join(str(error).split())
    if local:
        return f"{name}/config.json cannot be read by this Transformers: {cause}"
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    hint = "HF_HUB_OFFLINE is set: unset it, or" if offline else "check the name and the network, or"
    return f"the config of {name} cannot be loaded; {hint} give a local folder. Transformers says: {cause}"


def _quantisation(config) -> str | None:
    """The quantisation method that the checkpoint's config declares, also inside a multimodal model."""
    for part in (config, config.get_text_config()):
        declared = getattr(part, "quantization_config", None)
        if declared:
            declared = declared if isinstance(declared, dict) else declared.to_dict()
            method = declared.get("quant_method", "unnamed method")
            return str(getattr(method, "value", method))
    return None


def build_on_meta(name: str) -> PreTrainedModel:
    """The modules of a hub model or a local folder, with weights that take no memory. Only its config is read.

    Raises:
        DoctorError: no such folder, the hub cannot be reached, or Transformers cannot build the model.
    """
    config = _load_config(name)
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel):
        if type(config) in auto_class._model_mapping:
            verbosity = logging.get_verbosity()
            logging.set_verbosity_error()
            try:
                with torch.device("meta"):
                    return auto_class.from_config(config)
            finally:
                logging.set_verbosity(verbosity)
    raise DoctorError(f"{name} is a {config.model_type}, of which this Transformers knows no model class")


def _forecasts(model, found: list[LayerSupport], tokens: int, policy: TokenRounding) -> list[RoundingForecast]:
    """One forecast for each kind of layer (experts, top-k) where token rounding works."""
    kinds = {}
    for layer in supported_layers(model, found, "token_rounding"):
        num_experts, top_k = layer.experts.num_experts, layer.router.top_k
        kinds[num_experts, top_k] = policy.applies(tokens, top_k, num_experts)
    needed = policy.min_tiles_per_expert * policy.tile_rows
    return [
        RoundingForecast(tokens, experts, top_k, policy.tile_rows, applies, int(-(-needed * experts // top_k)))
        for (experts, top_k), applies in kinds.items()
    ]


def _placements(model, found: list[LayerSupport]) -> dict[str, str]:
    """For accelerated layers by name: what runs on the Hopper kernels on a Hopper GPU."""
    if backends.missing_for_hopper():
        return {}
    sizes = {layer.name: sizes_of(layer.experts) for layer in supported_layers(model, found, "accelerated")}
    return {name: placement(size.hidden, size.intermediate) for name, size in sizes.items()}


def _collapse(found: list[LayerSupport], placements: dict[str, str]) -> list[LayerRange]:
    """Consecutive layers that differ only in their number, as one range."""
    ranges: list[tuple[tuple, list[LayerSupport]]] = []
    for layer in found:
        kind = layer._replace(name=re.sub(r"\.\d+\.", ".[].", layer.name, count=1)), placements.get(layer.name)
        if ranges and ranges[-1][0] == kind:
            ranges[-1][1].append(layer)
        else:
            ranges.append((kind, [layer]))
    return [LayerRange(_range_name(layers), len(layers), layers[0], kernels) for (_, kernels), layers in ranges]


def _range_name(layers: list[LayerSupport]) -> str:
    if len(layers) == 1:
        return layers[0].name
    first, last = (re.search(r"\.(\d+)\.", layer.name)[1] for layer in (layers[0], layers[-1]))
    return re.sub(r"\.\d+\.", f"[{first}-{last}].", layers[0].name, count=1)


def as_json(report: ModelReport | None) -> dict:
    """Everything doctor prints, as plain data."""
    facts = {
        "versions": versions(),
        "backend_override": os.environ.get(backends.VARIABLE),
        "devices": [asdict(device) for device in devices()],
    }
    if report is not None:
        layers = [
            {"layers": r.name, "count": r.count, **r.support._asdict(), "kernels": r.kernels} for r in report.layers
        ]
        rounding = [{**asdict(forecast), "sentence": forecast.sentence()} for forecast in report.rounding]
        facts["model"] = {
            "name": report.name,
            "architecture": report.architecture,
            "quantisation": report.quantisation,
            "accelerated": report.accelerated,
            "layers": layers,
            "token_rounding": rounding,
        }
    return facts
