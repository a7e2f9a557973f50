"""What `import sonicmoe_hf` changes in other packages, all of it, and `uninstall`, which undoes it. docs/patching.md has
the list for users.

Entries in Transformers' registers add our names, and change nothing for others. Functions of PEFT, and one of
Transformers, are replaced by ones that call the original for every model that is not ours. A model whose experts are
packed guards DeepSpeed's initialize (formats/refusals.py), the one change that comes later.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface
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
from .private.transformers import forget_auto_classes, forget_implementation, scalars_read_whole

OLDEST_PEFT = "0.20"


class _Replaced(NamedTuple):
    """A function of another package: where it stands, under which name, itself, and what stands there in its place."""

    owner: Any
    name: str
    original: Any
    ours: Any


_replaced: list[_Replaced] = []


def install() -> None:
    """Register with Transformers, and with PEFT where it is installed. Doing so again changes nothing.

    Raises:
        ImportError: the installed PEFT is older than the oldest that works.
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
        for owner, name, ours in list(_replacements()):  # all or, where PEFT is too old, none
            _replaced.append(_Replaced(owner, name, getattr(owner, name), ours))
            setattr(owner, name, ours)


def uninstall() -> None:
    """Undo `install`: Transformers knows our names no longer, and PEFT's functions are its own again.

    What another package has since put in the place of ours stays. Models that need our names no longer work.
    """
    forget_implementation(ALL_EXPERTS_FUNCTIONS, IMPLEMENTATION)
    forget_implementation(AttentionInterface, ATTENTION)
    forget_implementation(AttentionMaskInterface, ATTENTION)
    AUTO_QUANTIZATION_CONFIG_MAPPING.pop(QUANT_METHOD, None)
    AUTO_QUANTIZER_MAPPING.pop(QUANT_METHOD, None)
    for classes in NATIVE.values():
        forget_auto_classes(classes.config)
    if has_expert_parallelism():
        from transformers.distributed.expert_parallel import EPImplementationInterface

        forget_implementation(EPImplementationInterface, IMPLEMENTATION)
    unguard_deepspeed()
    while _replaced:
        owner, name, original, ours = _replaced.pop()
        if getattr(owner, name) is ours:
            setattr(owner, name, original)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    yield from scalars_read_whole()  # nvfp4's scale of a tensor, where ranks read parts of a checkpoint
    if _has_peft():
        from .lora import peft_wrapper

        yield from peft_wrapper.replacements()


def _has_peft() -> bool:
    if importlib.util.find_spec("peft") is None:
        return False
    installed = importlib.metadata.version("peft")
    if Version(installed) < Version(OLDEST_PEFT):
        raise ImportError(
            f"peft {installed} is installed, but sonicmoe_hf works with {OLDEST_PEFT} or newer, or without PEFT: "
            "pip install -U 'sonicmoe-hf[peft]'"
        )
    return True
