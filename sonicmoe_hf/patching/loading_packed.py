"""The keyword arguments with which from_pretrained(experts_quantization=...) has Transformers load experts packed."""

from __future__ import annotations

import copy
from pathlib import Path

import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME
from transformers.utils.quantization_config import BitsAndBytesConfig

from ..errors import CheckpointError, UnsupportedModelError
from ..formats.conversions import LOADS_MATRICES
from ..formats.declared import MODELOPT_FILE, TO_BF16, DeclaredQuantization, check_format, declared_quantization
from ..formats.json_files import read_json
from ..formats.quantizer import ExpertsQuantizationConfig
from ..formats.stored_as_declared import check_undeclared
from ..kernels.packed import FORMATS
from .support import loading_remedy

FOR_FILE = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")
FOR_MODEL = ("dtype", "torch_dtype", "quantization_config", "attn_implementation", "experts_implementation", "config")
FOR_CONFIG = (*FOR_FILE, "trust_remote_code")


def with_packed_experts(name, kwargs: dict, format: str) -> dict:
    """Make the keyword arguments of from_pretrained(name, **kwargs) with which Transformers loads experts packed.

    Raises:
        ValueError: an unknown format, a quantizer of the linear layers that is not bitsandbytes', or a checkpoint that is
            quantized otherwise.
        UnsupportedModelError: the checkpoint stores packed matrices, and Transformers is older than 5.19.
    """
    check_format("experts_quantization", format)
    linear = kwargs.get("quantization_config")
    if linear is not None and not isinstance(linear, BitsAndBytesConfig):
        raise ValueError(
            f"quantization_config is a {type(linear).__name__}; beside experts_quantization={format!r} it may be a "
            "BitsAndBytesConfig, for the linear layers, or None"
        )
    config, declared = declared_for(name, kwargs)
    if declared is None:
        return {**kwargs, "quantization_config": ExpertsQuantizationConfig(format, linear)}
    own = declared.format_name()
    format = own if (format, own) == ("int4", "uint4") else format  # which of both the checkpoint says
    is_smaller = (
        declared.stores_matrices and FORMATS[format].element_size < declared.loadable_matrix_format().element_size
    )
    is_refused = linear is not None and not declared.stores_matrices
    if is_refused or (own != format and not is_smaller):
        asked = "quantization_config is given" if is_refused else f"experts_quantization is {format!r}"
        remedy = "" if own not in FORMATS else "leave it out, or " if is_refused else "name that format, or "
        raise ValueError(f"{asked}, but the checkpoint is quantized already ({own}); {remedy}{TO_BF16}")
    if declared.stores_matrices and not LOADS_MATRICES:
        raise UnsupportedModelError(
            f"Transformers {transformers.__version__} casts what a checkpoint has packed; install 5.19 or "
            f"newer, or convert the checkpoint first: sonicmoe-hf convert SRC DST --layout native --quantize {format}"
        )
    if config is kwargs.get("config"):
        config = copy.deepcopy(config)
    else:  # Transformers takes overrides only where it reads the config itself
        given = {key: value for key, value in kwargs.items() if key not in FOR_MODEL}
        config, unused = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **given)
        kept = (*FOR_MODEL, *FOR_CONFIG, *unused)
        kwargs = {key: value for key, value in kwargs.items() if key in kept}
    if not declared.is_packed_here:  # as the hub has it
        entries = {**declared.entries, "experts": own} if declared.stores_matrices else None
        vars(config.get_text_config()).pop("quantization_config", None)  # a model inside may be what declares it
        config.quantization_config = {**ExpertsQuantizationConfig(format, linear).to_dict(), "declared": entries}
    return {**without_linear(kwargs), "config": config}


def without_linear(kwargs: dict) -> dict:
    """Select the keyword arguments without quantization_config, which Transformers would put beside the config's."""
    return {name: value for name, value in kwargs.items() if name != "quantization_config"}


def check_not_packed(name, kwargs: dict) -> None:
    """Raise where from_pretrained(name, **kwargs) names no format, and the checkpoint's experts are packed matrices as
    the hub has them. On GPUs Transformers would keep FP8 for kernels of its own, elsewhere it tries to make bf16 of it.

    Raises:
        UnsupportedModelError: with the remedy. CheckpointError: the checkpoint has FP8 weights, and does not say so;
            files of the hub that are not here yet are passed over.
    """
    try:
        config, folder = config_for(name, kwargs), _folder_of(name, kwargs, CONFIG_NAME)
    except CheckpointError:
        raise
    except (OSError, ValueError):  # an adapter's folder, or an error of which from_pretrained says more
        return
    declared = declared_quantization(config, folder)
    if declared is None:
        check_undeclared(sorted(folder.glob("*.safetensors")) if folder is not None else ())
        return
    if not declared.stores_matrices or declared.entries.get("dequantize"):
        return
    if getattr(kwargs.get("quantization_config"), "dequantize", False):
        return
    format = declared.format_name()
    raise UnsupportedModelError(f"{name} has {format.upper()} experts: {loading_remedy(declared.method, format)}")


def declared_for(name, kwargs: dict) -> tuple[PreTrainedConfig, DeclaredQuantization | None]:
    """Find the config with which from_pretrained(name, **kwargs) would build a model, and its quantization."""
    config = config_for(name, kwargs)
    return config, declared_quantization(config, _folder_of(name, kwargs, MODELOPT_FILE))


def config_for(name, kwargs: dict) -> PreTrainedConfig:
    """Find the config with which from_pretrained(name, **kwargs) would build a model.

    Raises:
        CheckpointError: that of a folder is damaged so that Transformers fails without naming it.
    """
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        return config
    file = Path(name, kwargs.get("subfolder") or "", CONFIG_NAME)
    if file.is_file():
        read_json(file, quantization_config=dict)
    options = {key: kwargs[key] for key in FOR_CONFIG if key in kwargs}
    return AutoConfig.from_pretrained(name, **options)


def _folder_of(name, kwargs: dict, file: str) -> Path | None:
    """Find the folder of a checkpoint that is here; of one of the hub, its place in the cache once it has this file."""
    if Path(name).is_dir():
        return Path(name, kwargs.get("subfolder") or "")
    try:
        return Path(hf_hub_download(str(name), file, **{k: kwargs[k] for k in FOR_FILE if k in kwargs})).parent
    except (EntryNotFoundError, HFValidationError):
        return None
