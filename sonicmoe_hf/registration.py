"""Registration with Transformers and PEFT, when sonicmoe_hf is imported, and `uninstall`, which puts their functions
back. docs/patching.md has the list for users.

Entries in Transformers' registers add our names, and change nothing for others. Functions of PEFT and of Transformers are
replaced by ones that call the original for every model that is not ours, beside what changes no value. PEFT, with what
it imports, takes as long to import as Transformers. So its functions are replaced at once only where it is imported
already, and else when the first config or model names our experts, before PEFT can meet them. Other functions are
replaced when patch_model or from_pretrained needs it; private/replaced.py knows all of them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import sys
from typing import Any

from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations import peft as adapters_of_transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from .attention.implementation import sinks_attention_forward
from .attention.mask import sinks_mask
from .attention.names import TORCH_PIECES, TORCH_SINKS
from .attention.piecewise import attention_in_pieces, mask_in_pieces
from .checkpoints.modeling import NATIVE
from .formats.declared import QUANT_METHOD
from .formats.quantizer import ExpertsQuantizationConfig, ExpertsQuantizer
from .formats.sharding import OPERATIONS
from .layer.experts_module import IMPLEMENTATION
from .layer.holding import has_expert_parallelism
from .layer.packed_weight import PackedWeight
from .patching.experts import sonicmoe_hf_experts_forward
from .private.replaced import is_replaced, put_back, replace
from .private.transformers import experts_implementation, read_scalars_whole
from .private.versions import TESTED, check_peft_version, untested_versions

logger = logging.getLogger(__name__)
_PEFT_CHECK = adapters_of_transformers.check_peft_version


def install() -> None:
    """Register with Transformers, and with PEFT where it is imported. Doing so again changes nothing.

    Raises:
        ImportError: the imported PEFT is older than the oldest that works.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, sonicmoe_hf_experts_forward)
    AttentionInterface.register(TORCH_SINKS, sinks_attention_forward)
    AttentionMaskInterface.register(TORCH_SINKS, sinks_mask)
    AttentionInterface.register(TORCH_PIECES, attention_in_pieces)
    AttentionMaskInterface.register(TORCH_PIECES, mask_in_pieces)
    AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = ExpertsQuantizationConfig
    AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = ExpertsQuantizer
    PackedWeight.operations.update(OPERATIONS)
    for classes in NATIVE.values():
        classes.register()
    if has_expert_parallelism():
        from transformers.distributed import fsdp
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, EPImplementationInterface

        from .expert_parallel.implementation import SonicMoEExpertParallelism, fully_shard, install_forward

        EPImplementationInterface.register(IMPLEMENTATION, SonicMoEExpertParallelism)
        replace(fsdp, "fully_shard", fully_shard)
        replace(EpDispatchExpertsParallel, "install_forward", install_forward)
    replace(adapters_of_transformers, "check_peft_version", functools.partial(check_peft_version, _PEFT_CHECK))
    if not is_replaced(PreTrainedModel, "__setstate__"):
        for sentence in untested_versions():
            logger.warning(f"sonicmoe_hf: {sentence}")
        read_scalars_whole()
        _follow_names_of_our_experts()
    if "peft" in sys.modules:
        install_in_peft()


def install_in_peft() -> None:
    """Replace PEFT's functions where it is installed. Doing so again changes nothing.

    Raises:
        ImportError: PEFT is older than the oldest that works.
    """
    if _has_peft():
        from .lora import peft_wrapper

        for owner, name, ours in peft_wrapper.replacements():
            replace(owner, name, ours)


def uninstall() -> None:
    """Put back all functions of other packages that we have replaced, unless another package has since put one in the
    place of ours. Our names stay in Transformers' registers, where they concern only models that use them."""
    put_back()


def _follow_names_of_our_experts() -> None:
    """Replace the functions that set the experts of a config, and those that build, switch and unpickle a model."""
    chosen: Any = PreTrainedConfig._experts_implementation
    choose: Any = PreTrainedModel.get_correct_experts_implementation
    restore: Any = PreTrainedModel.__setstate__

    def set_chosen(config, value):
        chosen.fset(config, value)
        if experts_implementation(config) == IMPLEMENTATION:
            install_in_peft()

    @functools.wraps(choose)
    def get_correct_experts_implementation(self, requested_experts):
        implementation = choose(self, requested_experts)
        if implementation == IMPLEMENTATION:
            install_in_peft()
        return implementation

    @functools.wraps(restore)
    def __setstate__(self, state):
        restore(self, state)
        if experts_implementation(self.config) == IMPLEMENTATION:
            install_in_peft()

    replace(PreTrainedConfig, "_experts_implementation", chosen.setter(set_chosen))
    replace(PreTrainedModel, "get_correct_experts_implementation", get_correct_experts_implementation)
    replace(PreTrainedModel, "__setstate__", __setstate__)


def _has_peft() -> bool:
    if importlib.util.find_spec("peft") is None:
        return False
    installed = importlib.metadata.version("peft")
    oldest, _ = TESTED["peft"]
    if Version(installed) < Version(oldest):
        raise ImportError(
            f"peft {installed} is installed, but sonicmoe_hf works with {oldest} or newer, or without PEFT: "
            "pip install -U 'sonicmoe-hf[peft]'"
        )
    return True
