"""SonicMoE for Hugging Face Transformers: see README.md.

Importing makes experts_implementation="sonicmoe_hf" and the native layout's model classes known to Transformers as soon
as Transformers itself is imported, and patches nothing. What is exported here is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import registration

if TYPE_CHECKING:
    from . import backends, functional, routing
    from .config import TokenRounding
    from .errors import CheckpointError, UnsupportedExpertsError, UnsupportedModelError
    from .functional import moe_experts
    from .native.adapter import convert_adapter
    from .native.convert import convert_checkpoint
    from .native.inspect import inspect_checkpoint
    from .native.merge import merge_adapter
    from .native.modeling import SonicMoEExperts
    from .patching.patch import (
        PatchReport,
        from_pretrained,
        is_patched,
        patch,
        patch_model,
        set_routing,
        unpatch,
        unpatch_model,
    )
    from .patching.recorded import RecordedRouting
    from .patching.replay import record_routing, replay_routing
    from .patching.support import LayerSupport, supports
    from .peft_config import lora_config
    from .quantization.packed_weight import PackedWeight
    from .quantization.quantize import quantize_experts
    from .trainer.balancing import LoadBalancing
    from .trainer.callbacks import ExpertLoadCallback, TokenRoundingCallback, attach

_MODULES = {  # of this package: what of each is exported here; a module with nothing is exported itself
    "backends": (),
    "functional": ("moe_experts",),
    "routing": (),
    "config": ("TokenRounding",),
    "errors": ("CheckpointError", "UnsupportedExpertsError", "UnsupportedModelError"),
    "native.adapter": ("convert_adapter",),
    "native.convert": ("convert_checkpoint",),
    "native.inspect": ("inspect_checkpoint",),
    "native.merge": ("merge_adapter",),
    "native.modeling": ("SonicMoEExperts",),
    "patching.patch": ("PatchReport", "from_pretrained", "is_patched", "patch", "patch_model", "set_routing",
                       "unpatch", "unpatch_model"),
    "patching.recorded": ("RecordedRouting",),
    "patching.replay": ("record_routing", "replay_routing"),
    "patching.support": ("LayerSupport", "supports"),
    "peft_config": ("lora_config",),
    "quantization.packed_weight": ("PackedWeight",),
    "quantization.quantize": ("quantize_experts",),
    "trainer.balancing": ("LoadBalancing",),
    "trainer.callbacks": ("ExpertLoadCallback", "TokenRoundingCallback", "attach"),
}  # fmt: skip
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CheckpointError",
    "ExpertLoadCallback",
    "LayerSupport",
    "LoadBalancing",
    "PackedWeight",
    "PatchReport",
    "RecordedRouting",
    "SonicMoEExperts",
    "TokenRounding",
    "TokenRoundingCallback",
    "UnsupportedExpertsError",
    "UnsupportedModelError",
    "attach",
    "backends",
    "convert_adapter",
    "convert_checkpoint",
    "from_pretrained",
    "functional",
    "inspect_checkpoint",
    "is_patched",
    "lora_config",
    "merge_adapter",
    "moe_experts",
    "patch",
    "patch_model",
    "quantize_experts",
    "record_routing",
    "replay_routing",
    "routing",
    "set_routing",
    "supports",
    "unpatch",
    "unpatch_model",
]


__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    elif name in __all__:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


registration.register()
