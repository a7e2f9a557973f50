"""LoRA adapters on experts: converted along with the layout of the model they belong to.

PEFT adapts an experts parameter [E, out, in] with lora_A [r*E, in] and lora_B [out, r*E]: lora_B's rows stand in the
order of gate and up rows. Names: PEFT wraps a module once for every parameter of it that is adapted, the first one
innermost, so "experts.base_layer.lora_A" is the first of two and "experts.lora_A" the second. SonicMoEExperts declares
its parameters in the reverse of the families' order: weights of an adapter on both that reach, past any config, a model
of the other layout do not fit by shape.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..config import check_choice
from ..errors import CheckpointError
from ..model_patches import NativeFamily
from .atomic_folder import appearing_whole, copy_file, new_folder, refuse_link_outside, sync, write_json
from .configs import family_of
from .files import ADAPTER_CONFIG, CONFIG_FILE, WEIGHT_SUFFIXES, opened, read_json, refuse_model_beside_adapter
from .hub import local_folder
from .plan import TARGETS

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PARAMETERS = {  # hub name -> native name, in the order in which the families' experts modules declare them
    "gate_up_proj": "c_fc",
    "gate_up_proj_bias": "c_fc_bias",
    "down_proj": "c_proj",
    "down_proj_bias": "c_proj_bias",
}
NATIVE_ORDER = ("c_proj", "c_proj_bias", "c_fc", "c_fc_bias")  # in which SonicMoEExperts declares them
EXPERTS_KEY = re.compile(
    r"^(?:base_model\.model\.)?(?P<experts>.*\.experts)\.(?P<depth>(?:base_layer\.)*)lora_(?P<side>[AB])\.weight$"
)


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
    return (Path(path).expanduser() / ADAPTER_CONFIG).is_file()


def convert_adapter(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    layout: str = "native",
    *,
    trained_on: str | os.PathLike | None = None,
    base_model: str | None = None,
) -> Path:
    """Convert a LoRA adapter between the hub layout and the native one. Optimiser states stay behind.

    Args:
        src: folder that PEFT's save_pretrained wrote. dst: the new folder; it must not exist. layout: "native" or "hub".
        trained_on: folder or hub id of the model it was trained on, of which config.json is read; by default what the
            adapter says.
        base_model: the model that the converted adapter will say it belongs to; by default it says none.
    Returns:
        The new folder.
    Raises:
        CheckpointError: not a LoRA adapter, or one whose weights on experts cannot be converted; nothing is written.
    """
    check_choice("layout", layout, TARGETS)
    src, dst = Path(src).expanduser(), new_folder(dst)
    config = read_adapter_config(src / ADAPTER_CONFIG)
    refuse_model_beside_adapter(src)
    model_config = _base_config(src, config, trained_on)
    family, native = family_of(model_config, src)
    with opened(src / ADAPTER_WEIGHTS) as handle:
        weights = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no mapping
    to_native = layout == "native"
    if native != to_native:
        weights = _converted_weights(weights, config, family, model_config, to_native)
        config = _converted_config(config, to_native)
    else:
        _check_targets(config, native)
    config["base_model_name_or_path"] = base_model
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
        write_json(folder / ADAPTER_CONFIG, config)
        for file in files:
            copy_file(file, folder / file.name)
    return dst


def read_adapter_config(path: Path) -> dict:
    """adapter_config.json, whose entries that are read here are of the right kinds.

    Raises:
        CheckpointError: there is none, or it is not that of a LoRA adapter.
    """
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA adapters are known here")
    kinds = {"base_model_name_or_path": str, "target_parameters": list, "rank_pattern": dict, "alpha_pattern": dict}
    for key, kind in kinds.items():
        value = config.get(key)
        names = value if isinstance(value, (list, dict)) else []
        if not isinstance(value, (kind, type(None))) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{path}: {key} is {value!r}; PEFT writes a {kind.__name__} of names there")
    return config


def _base_config(src: Path, config: dict, trained_on: str | os.PathLike | None) -> dict:
    """config.json of the model that the adapter was trained on."""
    name = os.fspath(trained_on or config.get("base_model_name_or_path") or "")
    if not name:
        raise CheckpointError(
            f"{src / ADAPTER_CONFIG} names no base model; say trained_on=, the model it was trained on"
        )
    try:
        return read_json(local_folder(name, only=[CONFIG_FILE]) / CONFIG_FILE)
    except CheckpointError as error:
        raise CheckpointError(
            f"the model that the adapter was trained on cannot be read; say trained_on=, its folder: {error}"
        ) from error


def _check_targets(config: dict, native: bool) -> None:
    """Raise where the adapter names parameters of the other layout than its base model's."""
    there = PARAMETERS if native else NATIVE_ORDER
    wrong = [target for target in config.get("target_parameters") or () if target.rpartition(".")[2] in there]
    if wrong:
        raise CheckpointError(
            f"the adapter adapts {wrong[0]}, but its base model is in the {'native' if native else 'hub'} layout, which "
            "has no such parameter; say trained_on=, the model it was trained on"
        )


def adapted_parameters(experts: str, targets: list[str], order) -> list[str]:
    """Which parameters of the module `experts` these targets adapt, the innermost first, as PEFT matches names."""
    names = {name: f"{experts}.{name}" for name in order}
    return [name for name in order if any(f".{names[name]}".endswith(f".{target}") for target in targets)]


def _converted_weights(weights, config: dict, family: NativeFamily, model_config: dict, to_native: bool):
    """The adapter's weights under the names of the other layout, lora_B's rows in its order."""
    _check_targets(config, native=not to_native)
    names = _new_names(to_native)
    targets = config.get("target_parameters") or []
    orders = (tuple(PARAMETERS), NATIVE_ORDER) if to_native else (NATIVE_ORDER, tuple(PARAMETERS))
    converted = {}
    for name, tensor in weights.items():
        if ".experts." not in name:
            converted[name] = tensor
            continue
        match = EXPERTS_KEY.search(name)
        before = [] if match is None else adapted_parameters(match["experts"], targets, orders[0])
        wrappers = 0 if match is None else match["depth"].count("base_layer.")
        if match is None or wrappers >= len(before):
            raise CheckpointError(
                f"{name} is not LoRA on the experts' fused parameters (target_parameters); adapters on single experts "
                "come from Transformers 4: load them with PEFT in Transformers 5, save, and convert the result"
            )
        parameter = before[len(before) - 1 - wrappers]
        _check_shape(name, tensor, match["side"], parameter, model_config)
        if parameter in ("gate_up_proj", "c_fc") and match["side"] == "B" and family.hub_layout != "gpt_oss":
            tensor = _reordered(tensor, to_native)
        after = sorted((names[old] for old in before), key=orders[1].index)
        depth = "base_layer." * (len(after) - 1 - after.index(names[parameter]))
        converted[f"{name[: match.start('depth')]}{depth}lora_{match['side']}.weight"] = tensor
    return converted


def _new_names(to_native: bool) -> dict[str, str]:
    return PARAMETERS if to_native else {native: hub for hub, native in PARAMETERS.items()}


def _check_shape(name: str, tensor: torch.Tensor, side: str, parameter: str, model_config: dict) -> None:
    """Raise where lora_A's columns or lora_B's rows are not those of the weight that they adapt."""
    hidden = model_config.get("hidden_size")
    intermediate = model_config.get("moe_intermediate_size", model_config.get("intermediate_size"))
    if not isinstance(hidden, int) or not isinstance(intermediate, int):
        raise CheckpointError(
            f"the base model's config.json has sizes {hidden!r} and {intermediate!r}; give the right trained_on="
        )
    due = {"gate_up_proj": (hidden, 2 * intermediate), "down_proj": (intermediate, hidden)}
    due.update({PARAMETERS[hub]: sizes for hub, sizes in due.items()})
    columns, rows = due.get(parameter, (None, None))
    what, dimension, size = ("columns", 1, columns) if side == "A" else ("rows", 0, rows)
    if size is not None and (tensor.dim() != 2 or tensor.shape[dimension] != size):
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)}, where {size} {what} are due; "
            "PEFT up to 0.19.0 laid such weights out otherwise: save the adapter again with a newer PEFT"
        )


def _reordered(lora_B: torch.Tensor, to_native: bool) -> torch.Tensor:
    """[2I, r*E]: all gate rows, then all up rows <-> gate and up rows alternating."""
    split = (2, lora_B.shape[0] // 2) if to_native else (lora_B.shape[0] // 2, 2)
    return lora_B.unflatten(0, split).transpose(0, 1).reshape(lora_B.shape).contiguous()


def _converted_config(config: dict, to_native: bool) -> dict:
    names = _new_names(to_native)
    converted = dict(config)
    if config.get("target_parameters"):
        converted["target_parameters"] = [_renamed(target, names) for target in config["target_parameters"]]
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        clear = {"gate_up_proj", "c_fc", "c_proj"}
        for target in pattern:
            last = target.rpartition(".")[2]
            if last in names and last not in clear and "experts" not in target:
                raise CheckpointError(f"{key} has {target!r}: write experts.{last} if it means the experts' parameter")
        converted[key] = {_renamed(target, names): value for target, value in pattern.items()}
    return converted


def _renamed(target: str, names: dict[str, str]) -> str:
    head, dot, last = target.rpartition(".")
    return f"{head}{dot}{names.get(last, last)}"
