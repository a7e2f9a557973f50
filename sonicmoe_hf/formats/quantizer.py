"""Transformers' quantizer of experts: packs them one by one while a checkpoint streams in, or takes packed ones as they
are, beside a quantizer of the linear layers.

registration.py makes its quant_method "sonicmoe_hf" in a checkpoint's config.json known to Transformers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import BitsAndBytesConfig, QuantizationConfigMixin

from ..errors import CheckpointError, UnsupportedExpertsError
from ..kernels.packed import FORMATS
from ..layer.experts_module import matrix_shape, packable, row_order, why_replaced_by_liger
from ..layer.holding import Holder, holding_of, is_partitioned
from ..layer.packed_weight import PackedWeight
from .conversions import packed_experts_conversions, with_experts_apart, with_matrix_format
from .declared import QUANT_METHOD, DeclaredQuantization, check_format
from .declared_integers import METHODS
from .distribution_checks import check_distributed, guard_deepspeed
from .experts_conversions import PackExperts
from .shares import gather_for_saving, has_packed_shares, keep_from_fsdp, restore_parameters
from .state_dicts import hook_state_dicts
from .stored_as_declared import check_stored, check_undeclared

PACKED_MODEL_ATTRIBUTES = (  # attributes of a model with packed experts
    "_weight_conversions",
    "_ddp_params_and_buffers_to_ignore",
    "gather_sharded_state_dict_for_save",
)
MAX_PARAMETERS = 4  # of experts: two weights and two biases, each with a wrapper of PEFT's around those before it


class ExpertsQuantizationConfig(QuantizationConfigMixin):
    """experts: a name of FORMATS. linear: a BitsAndBytesConfig (or its dict) for the linear layers, or None.

    declared: the quantization_config of a checkpoint whose experts are stored in a MatrixFormat, and as "experts" the
    format that they have there; it is not saved.
    """

    def __init__(
        self,
        experts: str = "nf4",
        linear: BitsAndBytesConfig | dict | None = None,
        declared: dict | None = None,
        **_,
    ):
        check_format("experts_quantization", experts)
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]  # a str is what register_quantizer takes
        self.experts = experts
        self.declared = declared
        self.linear = BitsAndBytesConfig.from_dict(linear) if isinstance(linear, dict) else linear

    def to_dict(self) -> dict:
        """Make the entry of config.json."""
        linear = None if self.linear is None else self.linear.to_dict()
        return {"quant_method": self.quant_method, "experts": self.experts, "linear": linear}


def check_packable(model: nn.Module, format: str) -> list[tuple[str, nn.Module, str]]:
    """Find the weights to pack: (name, experts module, its parameter) of each.

    Raises:
        UnsupportedExpertsError: there is none, or one is sharded, on the meta device without a checkpoint to come, or of
            a size that the format does not take.
    """
    weights = []
    for prefix, module in model.named_modules():
        for name in packable(module):
            weight, full_name = getattr(module, name), f"{prefix}.{name}"
            if type(weight) not in (nn.Parameter, torch.Tensor, PackedWeight) or is_partitioned(weight):
                raise UnsupportedExpertsError(
                    f"{full_name} is sharded ({type(weight).__name__}); quantize experts before the model is sharded"
                )
            try:
                FORMATS[format].shapes(matrix_shape(module, weight), row_order(module, name))
            except ValueError as error:
                raise UnsupportedExpertsError(f"{full_name}: {error}") from error
            weights.append((full_name, module, name))
        if (replaced := why_replaced_by_liger(module)) is not None:
            raise UnsupportedExpertsError(f"{prefix}: {replaced}")
    if not weights:
        raise UnsupportedExpertsError(
            f"{type(model).__name__} has no experts that go through Transformers' experts interface; leave out "
            "experts_quantization"
        )
    return weights


class ExpertsQuantizer(HfQuantizer):
    """Transformers' quantizer of experts. linear: the quantizer of the linear layers, or None."""

    quantization_config: ExpertsQuantizationConfig

    def __init__(self, quantization_config: ExpertsQuantizationConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self.linear: Any = None
        if quantization_config.linear is not None:
            linear = copy.deepcopy(quantization_config.linear)
            pre_quantized = self.pre_quantized and quantization_config.declared is None
            self.linear = AutoHfQuantizer.from_config(linear, pre_quantized=pre_quantized)
        self.tensor_names: list[str] = []  # of the packed weights of the model that is loaded, in its state dict

    def packs(self, model: PreTrainedModel, param_name: str) -> bool:
        """Tell whether the parameter is a weight of experts."""
        module, name = get_module_from_name(model, param_name)
        return name in packable(module)

    def validate_environment(self, *args, device_map=None, **kwargs):
        devices = set(device_map.values()) if isinstance(device_map, dict) else set()
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError(
                "device_map puts modules on the CPU or the disk beside other devices, from where packed experts cannot "
                'be brought back for each call; use one device (device_map={"": 0}) or GPUs alone'
            )
        kwargs["device_map"] = device_map
        if self.linear is not None:
            self.linear.validate_environment(*args, **kwargs)

    def update_device_map(self, device_map):
        return device_map if self.linear is None else self.linear.update_device_map(device_map)

    def param_element_size(self, model, param_name, param) -> float:
        if self.packs(model, param_name):
            return FORMATS[self.quantization_config.experts].element_size
        owner: Any = super() if self.linear is None else self.linear
        return owner.param_element_size(model, param_name, param)

    def param_needs_quantization(self, model, param_name, **kwargs) -> bool:
        if self.packs(model, param_name):
            return True
        return self.linear is not None and self.linear.param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self):
        return PackExperts(self)

    def get_weight_conversions(self):
        conversions = [] if self.linear is None else self.linear.get_weight_conversions()
        if not self.pre_quantized:
            return conversions
        return [*packed_experts_conversions(self), *conversions]

    def update_weight_conversions(self, weight_conversions, *model):
        declared = self.quantization_config.declared
        if declared is None:
            if self.pre_quantized:
                weight_conversions = [each for each in weight_conversions if not _renames(each, self.tensor_names)]
            conversions = super().update_weight_conversions(weight_conversions, *model)
            return conversions if self.pre_quantized else with_experts_apart(conversions)
        format = DeclaredQuantization(declared["quant_method"], declared).loadable_matrix_format()
        return with_matrix_format(weight_conversions, self, format)

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        files = [Path(file) for file in checkpoint_files or () if str(file).endswith(".safetensors")]
        declared = self.quantization_config.declared
        if not self.pre_quantized:
            check_undeclared(files)
        elif (
            files and declared is not None and declared["quant_method"] in METHODS
        ):  # FP8's codes have a weight's name
            check_stored(files, DeclaredQuantization(declared["quant_method"], declared).loadable_matrix_format())
        weights = check_packable(model, self.quantization_config.experts)
        check_distributed(model, [name for name, *_ in weights], self.linear is not None, declared)
        format = FORMATS[self.quantization_config.experts]
        self.tensor_names = [tensor for name, *_ in weights for tensor in format.names(name)]
        for module in {module for _, module, _ in weights}:
            keep_from_fsdp(module, packable(module), self.quantization_config.experts)
        if self.linear is not None:
            self.linear._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **kwargs)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        for prefix, module in model.named_modules():
            restore_parameters(module)
            for name in packable(module):
                weight = module._parameters[name]
                if isinstance(weight, PackedWeight):
                    hook_state_dicts(module)
                elif holding_of(module).by is not Holder.THEIR_EXPERT_PARALLEL:  # its shares are DTensors
                    raise CheckpointError(f"the checkpoint has no {prefix}.{name}: some of its experts are missing")
        mark_model_packed(model)
        return model if self.linear is None else self.linear._process_model_after_weight_loading(model, **kwargs)

    def _dequantize(self, model, dtype=None):
        """Make experts dense and trainable, and linear layers as their quantizer does; model.dequantize() calls it."""
        for module in model.modules():
            for name, weight in list(module._parameters.items()):
                if isinstance(weight, PackedWeight):
                    setattr(module, name, nn.Parameter(weight.dequantize(dtype).contiguous()))
        for name in PACKED_MODEL_ATTRIBUTES:
            vars(model).pop(name, None)  # saved under the hub's names again
        return model if self.linear is None else self.linear._dequantize(model, dtype=dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _renames(conversion, names: list[str]) -> bool:
    """Tell whether a conversion of the hub's names would rename one that the model itself has. Transformers leaves such a
    name alone where it is a parameter's, and a packed weight's tensors are none."""
    if not isinstance(conversion, WeightRenaming):
        return False
    renaming = copy.deepcopy(conversion)  # it notes that it was used
    return any(renaming.rename_source_key(name)[0] != name for name in names)


def mark_model_packed(model: PreTrainedModel) -> None:
    """Put on a model with packed experts the attributes that it needs beside them, and, for the whole process, the check
    of `guard_deepspeed` in the place of deepspeed.initialize."""
    guard_deepspeed()
    # saved under the names it has: nothing splits packed weights into one per expert
    vars(model)["_weight_conversions"] = []
    if has_packed_shares(model):
        vars(model)["gather_sharded_state_dict_for_save"] = gather_for_saving
    ignore_packed_in_ddp(model)


def ignore_packed_in_ddp(model: PreTrainedModel) -> None:
    """Keep DDP, which broadcasts parameters as dense tensors when it starts, from packed experts."""
    names = [name for name, weight in model.named_parameters() if isinstance(weight, PackedWeight)]
    if not names:
        return
    # PEFT puts prefixes before their names
    vars(model)["_ddp_params_and_buffers_to_ignore"] = [
        f"{prefix}{module}.{nested}{name}"
        for module, _, name in (name.rpartition(".") for name in names)
        for prefix in ("", "base_model.model.")
        for nested in (depth * "base_layer." for depth in range(MAX_PARAMETERS + 1))
    ]
