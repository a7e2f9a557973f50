"""Packed weights in state dicts: as plain tensors, codes and scales, under their own names."""

from __future__ import annotations

from torch import nn

from ..kernels.packed import FORMATS
from ..layer.packed_weight import PackedWeight, as_parameter
from ..private import attributes


def state_dict_names(module: nn.Module) -> set[str]:
    """List the names of the module's own parameters in a state dict."""
    names = set()
    for name, parameter in module._parameters.items():
        if isinstance(parameter, PackedWeight) and parameter.format:  # a HostWeight's may be ""
            names |= set(FORMATS[parameter.format].names(name))
        else:
            names.add(name)
    return names


def hold_packed(module: nn.Module, name: str, weight: PackedWeight | nn.Parameter) -> None:
    """Make `weight` the module's frozen parameter `name`."""
    setattr(module, name, weight if isinstance(weight, nn.Parameter) else as_parameter(weight))
    hook_state_dicts(module)


def hook_state_dicts(module: nn.Module) -> None:
    """Make the module's state dicts hold the tensors of its packed weights, under `state_dict_names`."""
    if not hasattr(module, attributes.HAS_STATE_DICT_HOOKS):
        setattr(module, attributes.HAS_STATE_DICT_HOOKS, True)
        module.register_state_dict_post_hook(_write_tensors)
        module.register_load_state_dict_pre_hook(_read_tensors)


def _write_tensors(module, state_dict, prefix, local_metadata):
    for name, parameter in module._parameters.items():
        if isinstance(parameter, PackedWeight) and parameter.format and prefix + name in state_dict:
            packed = state_dict.pop(prefix + name).packed
            state_dict.update(FORMATS[parameter.format].tensors(prefix + name, packed))


def _read_tensors(module, state_dict, prefix, *_):
    for name, parameter in module._parameters.items():
        if isinstance(parameter, PackedWeight) and parameter.format:
            format = FORMATS[parameter.format]
            names = format.names(prefix + name)
            if all(tensor in state_dict for tensor in names):
                tensors = {tensor: state_dict.pop(tensor) for tensor in names}
                packed = format.read(prefix + name, tensors)
                options = parameter.format, parameter.dtype, parameter.is_transposed
                state_dict[prefix + name] = PackedWeight.of(packed, *options)
