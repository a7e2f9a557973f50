"""How packed weights stand in state dicts and checkpoints: as the plain tensors that are stored, under their own names.

NF4: <weight>_codes, <weight>_absmax, <weight>_state. MXFP4: <weight>_blocks, <weight>_scales, as gpt-oss's are.
"""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.quantized import NF4_VALUES, VALUE_MAP, Quantized, check_quantized
from ..layer.packed_weight import PackedWeight, as_parameter
from . import sharding  # noqa: F401 - what FSDP2 does with packed weights

STORED = {"nf4": ("codes", "absmax", "state"), "mxfp4": ("blocks", "scales")}
HOOKED = "_sonicmoe_hf_stored_names"  # attribute of modules that have our hooks


def stored_as(name: str, format: str) -> list[str]:
    """The names of the tensors that stand for the parameter `name`, in the order of Quantized."""
    return [f"{name}_{part}" for part in STORED[format]]


def stored_tensors(name: str, weight: PackedWeight) -> dict[str, torch.Tensor]:
    """The tensors that stand for the parameter `name`, by their names."""
    parts = (part for part in weight.packed if part is not None)
    return dict(zip(stored_as(name, weight.format), parts, strict=True))


def from_stored(
    name: str, tensors: dict[str, torch.Tensor], format: str, dtype: torch.dtype, is_transposed: bool
) -> PackedWeight:
    """The weight that `stored_tensors` took apart. Raises ValueError as `check_stored`."""
    packed = Quantized(*(tensors[stored] for stored in stored_as(name, format)))
    check_stored(name, packed, format)
    return PackedWeight.of(packed, format, dtype, is_transposed)


def check_stored(name: str, packed: Quantized, format: str) -> None:
    """Raise ValueError where tensors of a checkpoint do not fit together, their scales are not finite, or the code book
    is not NF4's, which the kernels know."""
    try:
        check_quantized(packed, format)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    state = packed.state
    if state is not None and not state.is_meta and not bool(torch.isfinite(state).all()):
        raise ValueError(f"{stored_as(name, format)[2]} has NaN or infinite values: the checkpoint is damaged")
    if state is not None and not state.is_meta and not torch.equal(state[VALUE_MAP].cpu(), torch.tensor(NF4_VALUES)):
        raise ValueError(f"{stored_as(name, format)[2]} has other values than NF4's 16: damaged, or another format")


def stored_names(module: nn.Module) -> set[str]:
    """The names of the module's own parameters in a state dict."""
    names = set()
    for name, parameter in module._parameters.items():
        names |= set(stored_tensors(name, parameter)) if isinstance(parameter, PackedWeight) else {name}
    return names


def hold_packed(module: nn.Module, name: str, weight: PackedWeight) -> None:
    """Make `weight` the module's frozen parameter `name`."""
    setattr(module, name, as_parameter(weight))
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
