"""SonicMoE for Hugging Face Transformers: see README.md.

Importing registers experts_implementation="sonicmoe_hf" and the native layout's model classes with Transformers, and
patches nothing.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "kernels").is_dir() and (_checkout / "kernels" / "interface.py").is_file():
    __path__.append(str(_checkout))  # a source checkout keeps kernels/ and model_patches/ beside this folder

from . import auto, backends, functional, notice, routing  # noqa: E402
from .auto import SonicMoEExperts  # noqa: E402
from .callbacks import ExpertLoadCallback, TokenRoundingCallback, attach  # noqa: E402
from .checkpoint import convert_checkpoint  # noqa: E402
from .checkpoint_inspect import inspect_checkpoint  # noqa: E402
from .experts import UnsupportedExpertsError, register  # noqa: E402
from .layouts import CheckpointError  # noqa: E402
from .lora import convert_adapter  # noqa: E402
from .patching import (  # noqa: E402
    PatchReport,
    from_pretrained,
    is_patched,
    patch,
    patch_model,
    set_routing,
    unpatch,
    unpatch_model,
)
from .support import LayerSupport, UnsupportedModelError, supports  # noqa: E402

__all__ = [
    "CheckpointError",
    "ExpertLoadCallback",
    "LayerSupport",
    "PatchReport",
    "SonicMoEExperts",
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
    "patch",
    "patch_model",
    "routing",
    "set_routing",
    "supports",
    "unpatch",
    "unpatch_model",
]
__version__ = "0.1.0"

register()
auto.register()
notice.register()
