"""from_pretrained, which loads and patches a model, with packed experts or experts in host memory on request."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..attention.models import choose_attention
from ..checkpoints.reading.files import not_there
from ..errors import UnsupportedModelError
from ..formats.conversion_errors import named_errors
from ..formats.tensor_files import open_tensors
from ..layer.config import COMPUTE_CHOICES, as_routing_policy, check_choice
from ..layer.experts_module import IMPLEMENTATION
from ..patching.loading_packed import check_not_packed, config_for, with_packed_experts
from ..patching.patch import guard_streamed
from ..private.transformers import auto_class_of, loaded_one_by_one
from ..streaming.placement import LoadingPlacement
from .patch import patch_model

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}


def from_pretrained(
    pretrained_model_name_or_path,
    *args,
    routing=None,
    save: str = "preactivation",
    experts_quantization: str | None = None,
    experts_memory: str | int | None = None,
    experts_compute: str | None = None,
    auto_class=None,
    **kwargs,
) -> PreTrainedModel:
    """Load a model by `auto_class.from_pretrained(...)`, then `patch_model(model, routing, save=save)`.

    A model with attention sinks gets attn_implementation="torch_sinks" where it runs, or "torch_pieces"
    (docs/attention.md), unless attn_implementation is given.

    Args:
        pretrained_model_name_or_path, args, kwargs: as `auto_class.from_pretrained` takes them.
        routing, save: see `patch_model`.
        experts_quantization: "nf4", "mxfp4", "fp8", "nvfp4" or "int4": experts are packed and frozen, one after the other
            as the checkpoint streams in (see `quantize_experts`). Experts that the checkpoint has in that format (FP8 in
            DeepSeek-V3's blocks of 128 x 128, gpt-oss's MXFP4, ModelOpt's NVFP4, INT4 of compressed-tensors, GPTQ,
            AutoRound or AWQ) are taken as they are, bit for bit, and its linear layers become dense. Those of all
            of these but gpt-oss are packed again if a smaller format is asked for, one expert after the other.
            A BitsAndBytesConfig given as quantization_config is for the linear layers.
        experts_memory: the experts are frozen, so many bytes of them stay on the GPU, and the others live in host memory
            (see `patch_model`), where each weight goes as soon as it is loaded. Without device_map the model is loaded on
            the current GPU, where there is one.
        experts_compute: "fp8" beside experts_quantization="fp8": see `patch_model`.
        auto_class: the Auto class that loads the model. None: that of the class which the config's `architectures` names,
            such as AutoModelForImageTextToText for Qwen3.5-MoE with images; else AutoModelForCausalLM, or the first that
            has the config's model.
    Returns:
        The patched model; with output_loading_info=True, (model, what Transformers says of the names).
    Raises:
        ValueError: experts_implementation names another implementation, or the checkpoint is quantized otherwise; or
            experts_compute without experts in FP8; or a dtype that torch has not, or load_in_4bit, load_in_8bit.
        UnsupportedModelError: as patch_model; or the checkpoint is in FP8, NVFP4 or integers, and experts_quantization is
            None.
        UnsupportedExpertsError: experts of a size that the format does not take, or that experts_memory does not.
        MemoryError: host memory does not hold the experts.
        OSError: there is no such model; the message says what the folder lacks.
        TypeError: an argument that has nearly the name of one of these.
    """
    policy = as_routing_policy(routing)
    check_choice("experts_compute", experts_compute, COMPUTE_CHOICES)
    _check_foreign_arguments(kwargs)
    if auto_class is None:
        auto_class = _auto_class(pretrained_model_name_or_path, kwargs)
    implementation = kwargs.setdefault("experts_implementation", IMPLEMENTATION)
    if implementation != IMPLEMENTATION:
        raise ValueError(
            f"experts_implementation={implementation!r} contradicts sonicmoe_hf.from_pretrained; leave it out, or "
            f"load with {auto_class.__name__}.from_pretrained"
        )
    with _naming_source(Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")):
        if experts_quantization is None:
            check_not_packed(pretrained_model_name_or_path, kwargs)
        else:
            kwargs = with_packed_experts(pretrained_model_name_or_path, kwargs, experts_quantization)
        loading = None
        if experts_memory is not None:
            kwargs, loading = with_experts_memory(kwargs, experts_memory)
        one_by_one: Any = contextlib.nullcontext()
        if loading is not None or _packs_again(kwargs):  # threads would read faster than weights are taken or packed
            one_by_one = loaded_one_by_one(loading.place if loading is not None else _leave)
        with named_errors(), one_by_one:
            loaded: Any = auto_class.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
    if experts_quantization is None and not os.path.isdir(pretrained_model_name_or_path):
        check_not_packed(pretrained_model_name_or_path, kwargs)  # now that the hub's files are here
    named_by_config = getattr(kwargs.get("config"), "_attn_implementation", None)
    if kwargs.get("attn_implementation") is None and named_by_config is None:
        choose_attention(model)
    if loading is not None:
        loading.finish(model)
        guard_streamed(model)
    patch_model(model, policy, save=save, experts_compute=experts_compute)
    return loaded


def _check_foreign_arguments(kwargs: dict[str, Any]) -> None:
    """Raise for arguments of other programs, and misspelled ones of this one, of which Transformers' own errors name no
    remedy: TypeError for a name, ValueError for a value."""
    own = list(inspect.signature(from_pretrained).parameters)
    for name in set(kwargs) - {"experts_implementation"}:
        if meant := difflib.get_close_matches(name, own, 1, cutoff=0.8):
            raise TypeError(f"from_pretrained has no argument {name}; did you mean {meant[0]}?")
    for field in ("load_in_4bit", "load_in_8bit"):
        if kwargs.get(field):
            format = "nf4" if field == "load_in_4bit" else "fp8"
            raise ValueError(
                f"{field}={kwargs[field]!r} is no argument of Transformers 5: experts_quantization={format!r} packs the "
                f"experts, and quantization_config=BitsAndBytesConfig({field}=True) beside it the linear layers"
            )
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        names = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
        name = SHORT_DTYPES.get(dtype, (difflib.get_close_matches(dtype, names, 1) or ["bfloat16"])[0])
        raise ValueError(f"dtype is {dtype!r}, which torch does not know; give {name!r}")


@contextlib.contextmanager
def _naming_source(source: Path) -> Iterator[None]:
    """Name the model's folder or hub id, and what it lacks, in errors of loading it: OSError, which Transformers'
    ValueError for a folder without config.json becomes too, and CheckpointError for a safetensors file that is not whole.
    Errors of a more special type say enough."""
    try:
        yield
    except SafetensorError:  # names no file
        for file in sorted(source.glob("*.safetensors")):
            open_tensors(file)
        raise
    except (OSError, ValueError) as error:
        lacks_config = source.is_dir() and not (source / "config.json").is_file()
        if not (type(error) is OSError or (type(error) is ValueError and lacks_config)):
            raise
        reason = " ".join(str(error).split())
        raise OSError(f"{_what_is_lacking(source)}: {reason}") from error


def _what_is_lacking(source: Path) -> str:
    if not source.is_dir():
        return not_there(source)
    if (source / "adapter_config.json").is_file():
        return f"{source} holds an adapter, whose base is read from where base_model_name_or_path says"
    if not (source / "config.json").is_file():
        return f"{source} has no config.json, so it is no model's folder"
    return f"{source} has a config.json, but Transformers cannot load its weights"


def _auto_class(name, kwargs: dict[str, Any]):
    try:
        return auto_class_of(config_for(name, kwargs)) or AutoModelForCausalLM
    except (OSError, ValueError):  # an adapter's folder, or what from_pretrained itself says more of
        return AutoModelForCausalLM


def _packs_again(kwargs: dict[str, Any]) -> bool:
    """Tell whether the checkpoint's experts are in one format and are to be in another."""
    wanted: Any = getattr(kwargs.get("config"), "quantization_config", None)
    declared = wanted.get("declared") if isinstance(wanted, dict) else None
    return declared is not None and declared["experts"] != wanted["experts"]


def _leave(model: PreTrainedModel, name: str) -> None:
    """Leave a loaded weight where it is."""


def with_experts_memory(kwargs: dict[str, Any], experts_memory: str | int) -> tuple[dict[str, Any], LoadingPlacement]:
    """Make keyword arguments of from_pretrained for a model on one device, and the placement of its experts.

    Raises:
        UnsupportedModelError: ranks share or shard the model. ValueError: experts_memory.
    """
    if kwargs.get("distributed_config") is not None or is_deepspeed_zero3_enabled():
        raise UnsupportedModelError(
            "experts_memory takes experts that ranks neither share nor shard (distributed_config, DeepSpeed's ZeRO-3); "
            "leave it out, or let each rank hold the whole model (DDP)"
        )
    if kwargs.get("device_map") is None and torch.cuda.is_available():
        kwargs = {**kwargs, "device_map": {"": torch.cuda.current_device()}}
    return kwargs, LoadingPlacement(experts_memory)
