"""SonicMoE for Hugging Face Transformers: see README.md.

Importing imports Transformers where it is installed, and makes experts_implementation="sonicmoe_hf" and the native
layout's model classes known to it (registration.py has all that it changes there, and in PEFT). It patches no model. What
is exported here is imported on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import routing
    from .adapters.convert import convert_adapter
    from .adapters.merge import merge_adapter
    from .attention.function import torch_sinks
    from .checkpoints.convert import convert_checkpoint
    from .checkpoints.modeling import SonicMoEExperts
    from .compiling.layers import compile_layers
    from .errors import CheckpointError, UnsupportedExpertsError, UnsupportedModelError
    from .layer import backends
    from .layer import moe_experts as functional
    from .layer.config import TokenRounding
    from .layer.moe_experts import moe_experts
    from .layer.packed_weight import PackedWeight
    from .lora.config import lora_config
    from .models.classes import patch, unpatch
    from .models.loading import from_pretrained
    from .models.patch import PatchReport, patch_model, unpatch_model
    from .patching.moe_layers import is_patched
    from .patching.quantize import quantize_experts
    from .patching.support import LayerSupport, supports
    from .routing.divergence import serving_divergence
    from .routing.patched_model import set_routing
    from .routing.recorded import RecordedRouting
    from .routing.replay import record_routing, replay_routing
    from .trainer.attach import attach
    from .trainer.balancing import LoadBalancing
    from .trainer.load_callback import ExpertLoadCallback
    from .trainer.rounding_callback import TokenRoundingCallback
    from .trl.factory import vllm_adapters

_MODULES = {  # of this package: what of each is exported here
    "attention.function": ("torch_sinks",),
    "checkpoints.convert": ("convert_checkpoint",),
    "checkpoints.modeling": ("SonicMoEExperts",),
    "errors": ("CheckpointError", "UnsupportedExpertsError", "UnsupportedModelError"),
    "layer.config": ("TokenRounding",),
    "layer.moe_experts": ("moe_experts",),
    "lora.config": ("lora_config",),
    "adapters.convert": ("convert_adapter",),
    "adapters.merge": ("merge_adapter",),
    "models.classes": ("patch", "unpatch"),
    "compiling.layers": ("compile_layers",),
    "models.loading": ("from_pretrained",),
    "models.patch": ("PatchReport", "patch_model", "unpatch_model"),
    "patching.moe_layers": ("is_patched",),
    "patching.support": ("LayerSupport", "supports"),
    "routing.divergence": ("serving_divergence",),
    "routing.patched_model": ("set_routing",),
    "routing.recorded": ("RecordedRouting",),
    "routing.replay": ("record_routing", "replay_routing"),
    "layer.packed_weight": ("PackedWeight",),
    "patching.quantize": ("quantize_experts",),
    "trainer.balancing": ("LoadBalancing",),
    "trainer.attach": ("attach",),
    "trainer.load_callback": ("ExpertLoadCallback",),
    "trainer.rounding_callback": ("TokenRoundingCallback",),
    "trl.factory": ("vllm_adapters",),
}
_EXPORTED_MODULES = {"backends": "layer.backends", "functional": "layer.moe_experts", "routing": "routing"}
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
    "compile_layers",
    "convert_adapter",
    "convert_checkpoint",
    "from_pretrained",
    "functional",
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
    "serving_divergence",
    "set_routing",
    "supports",
    "torch_sinks",
    "unpatch",
    "unpatch_model",
    "vllm_adapters",
]


__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        if name == "lora_config":  # whose adapters PEFT then saves by names that it loads
            importlib.import_module(".registration", __name__).install_in_peft()
    elif name in _EXPORTED_MODULES:
        value = importlib.import_module(f".{_EXPORTED_MODULES[name]}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if importlib.util.find_spec("transformers") is not None:  # tensors and their functions need none
    from . import registration

    registration.install()
