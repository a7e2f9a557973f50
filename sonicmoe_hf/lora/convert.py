"""LoRA adapters on experts: converted along with the layout of the model they belong to.

lora_B's rows stand in the order of gate and up rows, and the wrappers of an experts module in that of its parameters.
SonicMoEExperts declares its parameters in the reverse of the families' order: weights of an adapter on both that reach,
past any config, a model of the other layout do not fit by shape.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from ..checkpoints.atomic_folder import appearing_whole, copy_file, new_folder, refuse_link_outside, sync, write_json
from ..checkpoints.comparing import same_bytes
from ..checkpoints.configs import family_of
from ..checkpoints.files import (
    ADAPTER_CONFIG,
    CONFIG_FILE,
    WEIGHT_SUFFIXES,
    expanded,
    opened,
    read_json,
    refuse_model_beside_adapter,
)
from ..checkpoints.hub import local_folder
from ..checkpoints.plan import TARGETS, is_finite
from ..errors import CheckpointError
from ..layer.config import check_choice
from .base_model import BaseModel, read_base_model
from .engines import ENGINES
from .hub_form import read_hub_form, write_hub_form
from .per_expert import is_per_expert, read_per_expert
from .rules import (
    ADAPTER_WEIGHTS,
    KEY,
    NATIVE_ORDER,
    PARAMETERS,
    PREFIX,
    adapted_parameters,
    both_factors,
    check_factors,
    experts_shape,
    pattern_name,
    read_adapter_config,
    resolved,
    without_wrappers,
)
from .served import check_servable, serve


def import_peft():
    """The module peft.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ModuleNotFoundError("LoRA needs PEFT: pip install 'sonicmoe-hf[peft]'", name="peft") from None
    return peft


def is_adapter(path: str | os.PathLike) -> bool:
    """Whether `path` is a folder with a PEFT adapter."""
    return (expanded(path) / ADAPTER_CONFIG).is_file()


class AdapterConversion(NamedTuple):
    """What converting an adapter made: the new folder, and for an inference engine how to serve it, in sentences."""

    path: Path
    hints: list[str]


def convert_adapter(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    layout: str = "native",
    *,
    trained_on: str | os.PathLike | None = None,
    base_model: str | None = None,
    verify: bool = False,
) -> Path:
    """Convert a LoRA adapter between the hub layout and the native one, or to the form that an inference engine loads.
    Optimiser states stay behind.

    Args:
        src: a folder that PEFT's save_pretrained or this function wrote. Adapters with factors for single experts, as
            PEFT writes them where experts are linear layers, are taken too.
        dst: the new folder; it must not exist.
        layout: "native", "hub", "vllm" or "sglang". The last two have one rank, scales folded into lora_B, and a pair of
            factors for each expert and projection (for vLLM only where it holds experts so); "hub" brings them back.
        trained_on: folder or hub id of the model it was trained on, of which config.json is read; by default what the
            adapter says.
        base_model: the model that the converted adapter will say it belongs to; by default it says none.
        verify: refuse NaN and infinity, and read back and compare every byte before the result appears.
    Returns:
        The new folder.
    Raises:
        CheckpointError: not a LoRA adapter, or one whose weights on experts cannot be converted, of which a factor is
            missing, or whose shapes are not those of its ranks; or the engine does not load such adapters. Nothing is
            written.
    Example:
        sonicmoe_hf.convert_adapter("outputs/lora", "outputs/lora-vllm", layout="vllm")
    """
    return run_adapter_conversion(src, dst, layout, trained_on, base_model, verify).path


def run_adapter_conversion(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    layout: str,
    trained_on: str | os.PathLike | None = None,
    base_model: str | None = None,
    verify: bool = False,
) -> AdapterConversion:
    """`convert_adapter`, and what a user should hear of it."""
    check_choice("layout", layout, (*TARGETS, *ENGINES))
    src, dst = expanded(src), new_folder(dst)
    config = read_adapter_config(src / ADAPTER_CONFIG)
    refuse_model_beside_adapter(src)
    weights, config, hints = _converted(src, config, _base_folder(src, config, trained_on), layout)
    if verify:
        _check_finite(weights)
    config["base_model_name_or_path"] = base_model
    _write(src, dst, weights, config, verify)
    return AdapterConversion(dst, hints)


def _converted(src: Path, config: dict, base: Path, layout: str) -> tuple[dict[str, torch.Tensor], dict, list[str]]:
    """(tensors, adapter_config.json, hints) in `layout` of the adapter in `src`, trained on the model in `base`."""
    path = src / ADAPTER_WEIGHTS
    with opened(path) as handle:
        weights = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no mapping
    if layout == "native":
        family_of(read_json(base / CONFIG_FILE), base / CONFIG_FILE)
    model = read_base_model(base)
    if layout in ENGINES:
        check_servable(config, weights, model, layout, src / ADAPTER_CONFIG)
    if is_per_expert(weights):
        factors = read_per_expert(weights, config, model, path)
        if layout in ENGINES:
            return serve(factors, config, model, layout)
        weights, config = write_hub_form(factors, config, model)
        model = model._replace(native=False)
    _check_targets(config, model.native)
    adapter = _Adapter(config, weights, model, path)
    if model.native and layout != "native":
        weights, config = adapter.converted_weights(), adapter.converted_config()
        model = model._replace(native=False)
        adapter = _Adapter(config, weights, model, path)
    if layout in ENGINES:
        return serve(read_hub_form(weights, config, adapter.tensors_of, model, path), config, model, layout)
    if not model.native and adapter.has_zero_factors():
        factors = read_hub_form(weights, config, adapter.tensors_of, model, path)
        weights, config = write_hub_form(factors, config, model)
        adapter = _Adapter(config, weights, model, path)
    if layout == "native" and not model.native:
        weights, config = adapter.converted_weights(), adapter.converted_config()
    return weights, config, []


def _write(src: Path, dst: Path, weights: dict[str, torch.Tensor], config: dict, verify: bool) -> None:
    """The folder `dst`, with the other files of `src` beside tensors and config."""
    files = [
        file
        for file in sorted(src.iterdir())
        if file.is_file() and file.name != ADAPTER_CONFIG and not file.name.endswith(WEIGHT_SUFFIXES)
    ]
    for file in files:
        refuse_link_outside(file, src)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    with appearing_whole(dst, nbytes, files, 1) as folder:
        save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        sync(folder / ADAPTER_WEIGHTS)
        if verify:
            _compare(folder / ADAPTER_WEIGHTS, weights)
        write_json(folder / ADAPTER_CONFIG, config)
        for file in files:
            copy_file(file, folder / file.name)


def _check_finite(weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        if not is_finite(tensor):
            raise CheckpointError(f"{name} has NaN or infinite values; nothing is written")


def _compare(path: Path, weights: dict[str, torch.Tensor]) -> None:
    with opened(path) as handle:
        for name, tensor in weights.items():
            if not same_bytes(handle.get_tensor(name), tensor):
                raise CheckpointError(f"{name} came back from disk changed; is the disk sound?")


def _base_folder(src: Path, config: dict, trained_on: str | os.PathLike | None) -> Path:
    """A folder with config.json of the model that the adapter was trained on."""
    name = os.fspath(trained_on or config.get("base_model_name_or_path") or "")
    if not name:
        raise CheckpointError(
            f"{src / ADAPTER_CONFIG} names no base model; say trained_on=, the model it was trained on"
        )
    try:
        folder = local_folder(name, only=[CONFIG_FILE])
        read_json(folder / CONFIG_FILE)
    except CheckpointError as error:
        raise CheckpointError(
            f"the model that the adapter was trained on cannot be read; say trained_on=, its folder: {error}"
        ) from error
    return folder


def _check_targets(config: dict, native: bool) -> None:
    """Raise where the adapter names parameters of the other layout than its base model's."""
    there = PARAMETERS if native else NATIVE_ORDER
    wrong = [target for target in config.get("target_parameters") or () if target.rpartition(".")[2] in there]
    if wrong:
        raise CheckpointError(
            f"the adapter adapts {wrong[0]}, but its base model is in the {'native' if native else 'hub'} layout, which "
            "has no such parameter; say trained_on=, the model it was trained on"
        )


class _Place(NamedTuple):
    """Which parameter of which experts module a tensor of the adapter belongs to, and its side, A or B."""

    experts: str
    parameter: str
    side: str


class _Adapter:
    """An adapter's config and weights, of which those on experts fit the model that it was trained on.

    Attributes:
        adapted: by the name of an experts module, its adapted parameters, the innermost wrapper's first. places: by the
            name of a tensor on experts. tensors_of: by experts module and parameter, the names of lora_A and lora_B.
    Raises:
        CheckpointError: a factor is missing or unknown, or has another shape than by its rank; the message names it.
    """

    def __init__(self, config: dict, weights: dict[str, torch.Tensor], model: BaseModel, path: Path):
        self.config, self.weights, self.path = config, weights, path
        self.native, self.is_interleaved = model.native, model.is_interleaved
        blocks, layout = model.blocks, "native" if model.native else model.layout
        self.adapted = {
            f"{block}.experts": adapted_parameters(f"{block}.experts", sizes, config, self.native)
            for block, sizes in blocks.items()
        }
        self.places = {name: self._place(name) for name in weights if ".experts." in name}
        pairs: dict[str, dict[str, str]] = {f"{m}.{name}": {} for m, names in self.adapted.items() for name in names}
        for name, place in self.places.items():
            pairs[f"{place.experts}.{place.parameter}"][place.side] = name
        self.tensors_of: dict[str, dict[str, tuple[str, str]]] = {}
        for weight, sides in pairs.items():
            factors = both_factors(weight, sides, path)
            module, _, parameter = weight.rpartition(".")
            products = experts_shape(blocks[module.removesuffix(".experts")], parameter, layout)
            rank = resolved(config, "rank_pattern", weight, path.with_name(ADAPTER_CONFIG))
            check_factors(
                weight, [tuple(weights[name].shape) for name in factors], products, rank, layout, config, path
            )
            self.tensors_of.setdefault(module, {})[parameter] = factors
        self.modules = self._modules()

    def _place(self, name: str) -> _Place:
        match = KEY.match(name.removeprefix(PREFIX))
        parameters = self.adapted.get(match["module"], []) if match else []
        depth = match["depth"].count("base_layer.") if match else 0
        if match is None or depth >= len(parameters):
            raise CheckpointError(
                f"{name} is no lora_A or lora_B of the experts' weights that target_parameters names: "
                f"{', '.join(parameters) or 'none there'}; save the adapter with PEFT's save_pretrained"
            )
        return _Place(match["module"], parameters[len(parameters) - 1 - depth], match["side"])

    def has_zero_factors(self) -> bool:
        """Whether lora_A and lora_B of some weight of experts are zeros, as an engine's form has them for what is not
        adapted."""
        pairs = [pair for named in self.tensors_of.values() for pair in named.values()]
        return any(not any(bool(self.weights[name].any()) for name in pair) for pair in pairs)

    def _modules(self) -> list[str]:
        """What PEFT compares with patterns outside the experts. Of linear layers, both factors must be there."""
        weights: set[str] = set()
        pairs: dict[tuple[str, str], dict[str, str]] = {}
        for name in self.weights.keys() - self.places.keys():
            key = name.removeprefix(PREFIX)
            module, lora, _ = without_wrappers(key).partition(".lora_")
            if lora:
                weights.add(f"{module}.weight")
            if match := KEY.match(key):
                pairs.setdefault((f"{module}.weight", match["depth"]), {})[match["side"]] = name
        for (weight, _), sides in pairs.items():
            both_factors(weight, sides, self.path)
        return sorted(pattern_name(weight, self.config) for weight in weights)

    def converted_weights(self) -> dict[str, torch.Tensor]:
        """The weights under the names of the other layout, lora_B's rows in its order."""
        names, order = _new_names(not self.native), tuple(PARAMETERS) if self.native else NATIVE_ORDER
        converted = {}
        for name, tensor in self.weights.items():
            place = self.places.get(name)
            if place is None:
                converted[name] = tensor
                continue
            if place.parameter in ("gate_up_proj", "c_fc") and place.side == "B" and not self.is_interleaved:
                tensor = _reordered(tensor, to_native=not self.native)
            after = sorted((names[old] for old in self.adapted[place.experts]), key=order.index)
            depth = "base_layer." * (len(after) - 1 - after.index(names[place.parameter]))
            prefix = PREFIX if name.startswith(PREFIX) else ""
            converted[f"{prefix}{place.experts}.{depth}lora_{place.side}.weight"] = tensor
        return converted

    def converted_config(self) -> dict:
        """The config for the other layout, by which PEFT gives every adapted weight the same rank and alpha."""
        names = _new_names(not self.native)
        converted = dict(self.config)
        if self.config.get("target_parameters"):
            converted["target_parameters"] = [_renamed(target, names) for target in self.config["target_parameters"]]
        for key in ("rank_pattern", "alpha_pattern"):
            converted[key] = self._converted_pattern(key, names)
        return converted

    def _converted_pattern(self, key: str, names: dict[str, str]) -> dict:
        """The pattern with the parameters' new names at the ends of its entries. Where that gives a weight another value
        than before, the full names of all weights instead, whose order does not matter: PEFT sorts them as it saves."""
        path = self.path.with_name(ADAPTER_CONFIG)
        due = {module: resolved(self.config, key, module, path) for module in self.modules}
        for experts, parameters in self.adapted.items():
            for old in parameters:
                due[f"{experts}.{names[old]}"] = resolved(self.config, key, f"{experts}.{old}", path)
        renamed = {_renamed(entry, names): value for entry, value in (self.config.get(key) or {}).items()}
        for pattern in (renamed, due):
            config = {**self.config, key: pattern}
            if all(resolved(config, key, name, path) == value for name, value in due.items()):
                return pattern
        raise CheckpointError(f"{path}: {key} cannot be written for the other layout, as names of modules end alike")


def _new_names(to_native: bool) -> dict[str, str]:
    return PARAMETERS if to_native else {native: hub for hub, native in PARAMETERS.items()}


def _reordered(lora_B: torch.Tensor, to_native: bool) -> torch.Tensor:
    """[2I, r*E]: all gate rows, then all up rows <-> gate and up rows alternating."""
    split = (2, lora_B.shape[0] // 2) if to_native else (lora_B.shape[0] // 2, 2)
    return lora_B.unflatten(0, split).transpose(0, 1).reshape(lora_B.shape).contiguous()


def _renamed(target: str, names: dict[str, str]) -> str:
    head, dot, last = target.rpartition(".")
    return f"{head}{dot}{names.get(last, last)}"
