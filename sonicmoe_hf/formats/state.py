"""How packed weights stand in state dicts and checkpoints: as the plain tensors that are stored, under their own names.

NF4: <weight>_codes, <weight>_absmax, <weight>_state. MXFP4: <weight>_blocks, <weight>_scales, as gpt-oss's are. FP8:
<weight>_values, <weight>_scale_inv. NVFP4: <weight>_packed, <weight>_scale, <weight>_scale_2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels.minifloat import has_e4m3_nan
from ..kernels.quantized import NF4_VALUES, VALUE_MAP, Quantized, check_quantized
from ..layer.packed_weight import PackedWeight, as_parameter
from . import sharding  # noqa: F401 - what FSDP2 does with packed weights

STORED = {
    "nf4": ("codes", "absmax", "state"),
    "mxfp4": ("blocks", "scales"),
    "fp8": ("values", "scale_inv"),
    "nvfp4": ("packed", "scale", "scale_2"),
}
E8M0_NAN = 255  # of the bytes that stand for powers of two
HOOKED = "_sonicmoe_hf_stored_names"  # attribute of modules that have our hooks


def stored_as(name: str, format: str) -> list[str]:
    """The names of the tensors that stand for the parameter `name`, in the order of Quantized."""
    return [f"{name}_{part}" for part in STORED[format]]


def stored_tensors(name: str, weight: PackedWeight) -> dict[str, torch.Tensor]:
    """The tensors that stand for the parameter `name`, by their names."""
    parts = (part for part in weight.packed if part is not None)
    return dict(zip(stored_as(name, weight.format), parts, strict=True))


def from_stored(
    name: str, tensors: dict[str, torch.Tensor], format: str, dtype: torch.dtype, is_transposed: bool, first: int = 0
) -> PackedWeight:
    """The weight that `stored_tensors` took apart. Raises ValueError as `check_stored`."""
    packed = Quantized(*(tensors[stored] for stored in stored_as(name, format)))
    check_stored(name, packed, format, first)
    return PackedWeight.of(packed, format, dtype, is_transposed)


def check_shape(name: str, weight: torch.Tensor, dense: torch.Tensor) -> None:
    """Raise ValueError where a weight that a checkpoint brings is not of the shape of `dense`, the model's parameter, or
    of this rank's part of it. Transformers does not compare the shapes of what a quantizer takes."""
    shape = local_shape(dense)
    if weight.shape != shape:
        raise ValueError(f"{name} has shape {tuple(weight.shape)} in the checkpoint; the model's is {tuple(shape)}")


def local_shape(weight: Any) -> torch.Size:
    """That of a weight, or of this rank's part where Transformers itself splits it."""
    return (weight.to_local() if hasattr(weight, "device_mesh") else weight).shape


def check_stored(name: str, packed: Quantized, format: str, first: int = 0) -> None:
    """Raise ValueError where tensors of a checkpoint do not fit together, a scale or an FP8 value is not finite, or the
    code book is not NF4's, which the kernels know. first: which expert of the layer is the weight's first."""
    try:
        check_quantized(packed, format)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    for part, tensor in zip(stored_as(name, format), packed):
        if tensor is not None and not tensor.is_meta and not _is_sound(tensor, part, format):
            unsound = (expert for expert, one in enumerate(tensor, first) if not _is_sound(one, part, format))
            where = f" in expert {next(unsound)}" if tensor.dim() > 1 else ""
            raise ValueError(f"{part} has NaN or infinite values{where}: the checkpoint is damaged")
    state = packed.state if format == "nf4" else None
    if state is not None and not state.is_meta and not torch.equal(state[VALUE_MAP].cpu(), torch.tensor(NF4_VALUES)):
        raise ValueError(f"{stored_as(name, format)[2]} has other values than NF4's 16: damaged, or another format")


def _is_sound(tensor: torch.Tensor, part: str, format: str) -> bool:
    """Whether what is stored stands for finite values."""
    if tensor.dtype == torch.float32:
        return bool(torch.isfinite(tensor).all())
    if part.endswith({"fp8": "_scale_inv", "mxfp4": "_scales"}.get(format, "no part")):
        return not bool((tensor == E8M0_NAN).any())
    is_e4m3 = part.endswith({"fp8": "_values", "nvfp4": "_scale"}.get(format, "no part"))
    return not (is_e4m3 and has_e4m3_nan(tensor))


def stored_names(module: nn.Module) -> set[str]:
    """The names of the module's own parameters in a state dict."""
    names = set()
    for name, parameter in module._parameters.items():
        names |= set(stored_tensors(name, parameter)) if isinstance(parameter, PackedWeight) else {name}
    return names


def hold_packed(module: nn.Module, name: str, weight: PackedWeight | nn.Parameter) -> None:
    """Make `weight` the module's frozen parameter `name`."""
    setattr(module, name, weight if isinstance(weight, nn.Parameter) else as_parameter(weight))
    use_stored_names(module)


def use_stored_names(module: nn.Module) -> None:
    """Have the module's state dicts hold what its packed weights store, under `stored_names`."""
    if not hasattr(module, HOOKED):
        setattr(module, HOOKED, True)
        module.register_state_dict_post_hook(_write_stored)
        module.register_load_state_dict_pre_hook(_read_stored)


def _write_stored(module, state_dict, prefix, local_metadata):
    for name, parameter in module._parameters.items():
        if isinstance(parameter, PackedWeight) and prefix + name in state_dict:
            state_dict.update(stored_tensors(prefix + name, state_dict.pop(prefix + name)))


def _read_stored(module, state_dict, prefix, *_):
    for name, parameter in module._parameters.items():
        if isinstance(parameter, PackedWeight):
            names = stored_tensors(prefix + name, parameter)
            if all(stored in state_dict for stored in names):
                tensors = {stored: state_dict.pop(stored) for stored in names}
                state_dict[prefix + name] = from_stored(
                    prefix + name, tensors, parameter.format, parameter.dtype, parameter.is_transposed
                )
