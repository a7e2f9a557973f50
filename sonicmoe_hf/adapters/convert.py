"""convert_adapter: a LoRA adapter for the other layout of its model, or for an inference engine."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..checkpoints.layouts import CHECKPOINT_LAYOUTS, family_of, hub_config, native_config
from ..checkpoints.reading.config_only import build_from_config
from ..checkpoints.reading.files import ADAPTER_CONFIG, CONFIG_FILE, expand_home, local_folder, read_config
from ..checkpoints.writing.atomic_folder import (
    appearing_whole,
    copy_file,
    new_folder,
    save_tensors,
    write_json,
)
from ..checkpoints.writing.companions import companions
from ..checkpoints.writing.model_card import Origin, add_card, origin_of
from ..errors import CheckpointError
from ..layer.config import check_choice
from ..lora.packed_base import option_to_load
from ..model_patches import NATIVE_PREFIX
from .adapter import Adapter
from .engines import ENGINES, MERGED, engine_form
from .peft_form import peft_form
from .rules import ADAPTER_WEIGHTS, AdapterConfig
from .trained_model import decoder_name


def is_adapter(path: str | os.PathLike) -> bool:
    """Tell whether `path` is a folder with a PEFT adapter."""
    return (expand_home(path) / ADAPTER_CONFIG).is_file()


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
            Names are those of the class that was trained, such as the text model of Qwen3.5-MoE.
        trained_on: folder or hub id of the model it was trained on, of which config.json is read; by default what the
            adapter says.
        base_model: the model that the converted adapter will say it belongs to. By default that of `src`, or
            `trained_on`, where that has the layout which the converted adapter is for, and else none.
        verify: read back and compare every byte that is written.
    Returns:
        The new folder.
    Raises:
        CheckpointError: not a LoRA adapter, or one whose weights on experts cannot be converted, of which a factor is
            missing, has NaN or infinity, or has a shape that is not that of its rank; or the engine does not load such
            adapters. Nothing is written.
    Example:
        sonicmoe_hf.convert_adapter("outputs/lora", "outputs/lora-vllm", layout="vllm")
    """
    run_adapter_conversion(src, dst, layout, trained_on, base_model, verify)
    return expand_home(dst).absolute()


def run_adapter_conversion(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    layout: str,
    trained_on: str | os.PathLike | None = None,
    base_model: str | None = None,
    verify: bool = False,
) -> list[str]:
    """Convert as `convert_adapter` does, and return how to serve the result in an engine, in sentences."""
    check_choice("layout", layout, (*CHECKPOINT_LAYOUTS, *ENGINES))
    src, dst = expand_home(src), new_folder(dst)
    given = config = AdapterConfig(src).entries
    if layout in ENGINES and (saved := config.get("modules_to_save")):
        raise CheckpointError(f"modules_to_save is {saved!r}, of which engines take none; {MERGED}")
    base, base_config = _read_base(src, config, trained_on)
    model = _model(base_config, base, native=layout == "native")
    adapter = Adapter.read(src, model)
    if layout in ENGINES:
        tensors, config, hints = engine_form(adapter, model, layout)
    else:
        if adapter.decoder != decoder_name(model):
            model = _text_model(base_config, base, adapter.decoder) or model
            adapter = Adapter.read(src, model)
        (tensors, config), hints = peft_form(adapter, model), []
    if base_model is None and _is_native(base_config) == (layout == "native"):
        base_model = given.get("base_model_name_or_path") or os.fspath(trained_on or "")
    config["base_model_name_or_path"] = base_model or None
    named = given.get("base_model_name_or_path") or trained_on or ""
    card = origin_of("convert", named, src, option_to_load(given.get("auto_mapping"), base.parent))
    _write(src, dst, tensors, config, verify, card, f"{layout} layout")
    return hints


def _model(config: dict, path: Path, native: bool) -> PreTrainedModel:
    """Build the model that a config.json, at `path`, describes, in the native layout or the hub's, on the meta device."""
    if native or _is_native(config):
        family, _ = family_of(config, path)
        config = native_config(config, family) if native else hub_config(config, family)
    return build_from_config(config, path)


def _is_native(config: dict) -> bool:
    """Tell whether a config.json is that of a checkpoint in the native layout."""
    return str(config.get("model_type")).startswith(NATIVE_PREFIX)


def _text_model(config: dict, path: Path, decoder: str) -> PreTrainedModel | None:
    """Build the text model inside the one that a config.json, at `path`, describes; None where its decoder has another
    name than `decoder`, that of the model that was trained."""
    text_model = build_from_config({**config, "architectures": None}, path)  # which AutoModelForCausalLM loads
    return text_model if decoder_name(text_model) == decoder else None


def _write(
    src: Path, dst: Path, weights: dict[str, torch.Tensor], config: dict, verify: bool, card: Origin, format: str
) -> None:
    """Write the folder `dst`, with the other files of `src` beside tensors and config, and a model card."""
    files = companions(src, {ADAPTER_CONFIG, ADAPTER_WEIGHTS}).sources
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    with appearing_whole(dst, nbytes, list(files), 1) as folder:
        save_tensors(folder / ADAPTER_WEIGHTS, weights, verify)
        write_json(folder / ADAPTER_CONFIG, dict(sorted(config.items())))  # the order of PEFT
        for file, source in files.items():
            copy_file(source, folder / file)
        add_card(folder, dst.name, card, format, [])


def _read_base(src: Path, config: dict, trained_on: str | os.PathLike | None) -> tuple[Path, dict]:
    """Read config.json of the model that the adapter of `src`, whose own config is given, was trained on: its path, and
    what it holds."""
    name = os.fspath(trained_on or config.get("base_model_name_or_path") or "")
    if not name:
        raise CheckpointError(
            f"{src / ADAPTER_CONFIG} names no base model; say trained_on= (--trained-on), the model it was trained on"
        )
    try:
        folder = local_folder(name, only=[CONFIG_FILE])
        return folder / CONFIG_FILE, read_config(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"the model that the adapter was trained on cannot be read; say trained_on= (--trained-on), its folder: "
            f"{error}"
        ) from error
