"""What `import sonicmoe_hf` changes in other packages, all of it, and `uninstall`, which puts their functions back.
docs/patching.md has the list for users.

Entries in Transformers' registers add our names, and change nothing for others. Functions of PEFT and of Transformers are
replaced by ones that call the original for every model that is not ours. PEFT, with what it imports, takes as long to
import as Transformers. So its functions are replaced at once only where it is imported already, and else when the first
config or model names our experts, before PEFT can meet them. A model whose experts are packed guards DeepSpeed's
initialize (formats/refusals.py), which comes later too.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from .attention.implementation import sinks_attention_forward
from .attention.mask import sinks_mask
from .attention.models import NAME as ATTENTION
from .checkpoints.modeling import NATIVE
from .formats.declared import QUANT_METHOD
from .formats.quantizer import ExpertsQuantizationConfig, ExpertsQuantizer
from .formats.refusals import unguard_deepspeed
from .layer.experts_module import IMPLEMENTATION, has_expert_parallelism
from .patching.experts import sonicmoe_hf_experts_forward
from .private.transformers import (
    experts_implementation,
    scalars_read_whole,
)
from .private.versions import TESTED, untested_versions

logger = logging.getLogger(__name__)


class _Replaced(NamedTuple):
    """A function of another package: where it stands, under which name, itself, and what stands there in its place."""

    owner: Any
    name: str
    original: Any
    ours: Any


_replaced: list[_Replaced] = []


def install() -> None:
    """Register with Transformers, and with PEFT where it is imported. Doing so again changes nothing.

    Raises:
        ImportError: the imported PEFT is older than the oldest that works.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, sonicmoe_hf_experts_forward)
    AttentionInterface.register(ATTENTION, sinks_attention_forward)
    AttentionMaskInterface.register(ATTENTION, sinks_mask)
    AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = ExpertsQuantizationConfig
    AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = ExpertsQuantizer
    for classes in NATIVE.values():
        classes.register()
    if has_expert_parallelism():
        from transformers.distributed.expert_parallel import EPImplementationInterface

        from .expert_parallel.implementation import SonicMoEExpertParallelism

        EPImplementationInterface.register(IMPLEMENTATION, SonicMoEExpertParallelism)
    if not _replaced:
        for sentence in untested_versions():
            logger.warning(f"sonicmoe_hf: {sentence}")
        _replace([*scalars_read_whole(), *_where_our_experts_are_named()])
    if "peft" in sys.modules:
        install_in_peft()


def install_in_peft() -> None:
    """Replace PEFT's functions where it is installed. Doing so again changes nothing.

    Raises:
        ImportError: PEFT is older than the oldest that works.
    """
    if _has_peft():
        from .lora import peft_wrapper

        if not any(change.owner is peft_wrapper.ParamWrapper for change in _replaced):
            _replace(peft_wrapper.replacements())


def _replace(replacements: Iterable[tuple[Any, str, Any]]) -> None:
    for owner, name, ours in replacements:
        _replaced.append(_Replaced(owner, name, getattr(owner, name), ours))
        setattr(owner, name, ours)


def uninstall() -> None:
    """Put back the functions of Transformers and PEFT that `install` has replaced, unless another package has since put
    one in the place of ours. Our names stay in Transformers' registers, where they concern only models that use them."""
    unguard_deepspeed()
    while _replaced:
        owner, name, original, ours = _replaced.pop()
        if getattr(owner, name) is ours:
            setattr(owner, name, original)


def _where_our_experts_are_named() -> Iterator[tuple[Any, str, Any]]:
    """Of what sets the experts of a config, and of what a model is built, switched to other experts and unpickled by."""
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

    yield PreTrainedConfig, "_experts_implementation", chosen.setter(set_chosen)
    yield PreTrainedModel, "get_correct_experts_implementation", get_correct_experts_implementation
    yield PreTrainedModel, "__setstate__", __setstate__


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
