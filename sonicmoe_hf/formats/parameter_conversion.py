"""ParameterConversion: what the conversions have in common that make one parameter of the tensors which store it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.quantizers_utils import get_module_from_name

from ..errors import CheckpointError
from ..layer.experts_module import packable
from ..layer.holding import Holding, holding_of
from ..layer.packed_weight import PackedWeight, as_parameter
from .conversion_errors import keeping_errors
from .matrix_format import WEIGHT

WHOLE_NAME = r"(?<=\.)"  # how the pattern of a whole name begins
StoredTensors = dict[str, Any]  # by name: tensors in a list, those of the experts in their order; or Apart


class LoadedParameter(NamedTuple):
    """The parameter that a conversion makes: `full_name` of the model, `name` of `module`. meta_parameter: the one on
    the meta device that stands there until then. holding: of the module's experts."""

    full_name: str
    module: nn.Module
    name: str
    meta_parameter: Any
    holding: Holding


@contextmanager
def naming_weight(weight: str, separator: str = ": ") -> Iterator[None]:
    """Name the weight in errors of the formats, inside `with`."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{weight}{separator}{error}") from error


def pattern_of(name: str) -> str:
    """Make the pattern of tensors of this name in any module. Names that do not begin with "weight" are whole ones."""
    return f"{name}$" if name.startswith(WEIGHT) else f"{WHOLE_NAME}{name}$"


class ParameterConversion(ConversionOps):
    """A conversion that makes one parameter of the tensors that store it."""

    def __init__(self, hf_quantizer):
        self.hf_quantizer = hf_quantizer  # by this name Transformers knows that it must not cast

    @property
    def wanted_format(self) -> str:
        """The name of the format in which the quantizer wants experts."""
        return self.hf_quantizer.quantization_config.experts

    @keeping_errors
    def convert(self, input_dict, *, full_layer_name, model, **options):
        """Make {full_layer_name: parameter} of lists of tensors by the patterns of their names, or of bare tensors."""
        module, name = get_module_from_name(model, full_layer_name)
        target = LoadedParameter(full_layer_name, module, name, getattr(module, name), holding_of(module))
        stored = {
            pattern.removeprefix(WHOLE_NAME).removesuffix("$"): tensors if isinstance(tensors, list) else [tensors]
            for pattern, tensors in input_dict.items()
        }
        made = self.make(target, stored)
        made = as_parameter(made) if isinstance(made, PackedWeight) else made
        linear = self.hf_quantizer.linear
        is_linear = name not in packable(module) and not made.is_meta
        if is_linear and linear is not None and linear.param_needs_quantization(model, full_layer_name):
            operation = linear.get_quantize_ops()
            return operation.convert({full_layer_name: made}, full_layer_name=full_layer_name, model=model, **options)
        return {full_layer_name: made}

    def make(self, target: LoadedParameter, stored: StoredTensors) -> torch.Tensor:
        """Make the parameter."""
        raise NotImplementedError
