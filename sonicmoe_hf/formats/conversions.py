"""The conversions with which Transformers loads experts packed: what a checkpoint's tensors become as they stream in.

    a checkpoint has                    conversion     makes
    experts in floats                   PackExperts    a packed weight
    experts that were packed here       TakePacked     the same packed weight
    experts in a matrix format          TakeExperts    a packed weight, in that format or in another
    linear layers beside these          TakeDense      a dense weight, or what the linear layers' quantizer makes of it

Where a checkpoint in floats has a tensor for each expert and part, LeaveApart comes before PackExperts.
"""

from __future__ import annotations

import copy
import re

from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.quantizers.base import HfQuantizer

from ..kernels.packed import FORMATS
from .dense_conversion import TakeDense
from .experts_conversions import TakeExperts, TakePacked
from .float_matrices import FP8Matrix
from .matrices_apart import LeaveApart
from .matrix_format import WEIGHT, MatrixFormat
from .parameter_conversion import pattern_of

LOADS_MATRICES = hasattr(HfQuantizer, "get_new_dtype")  # since 5.19: it casts nothing on its own
# a renaming: DeepSeek-V4's names of scales to those of other FP8 checkpoints
SHORT_NAMES = (r"^(.+)(?<!_l2_clip)\.scale$", r"\1.weight_scale_inv")
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj", "c_fc", "c_proj")
MERGES = (
    [(MergeModulelist, 0)],
    [(MergeModulelist, 0), (Concatenate, 1)],  # gate and up
)


def with_experts_apart(conversions: list[WeightTransform]) -> list[WeightTransform]:
    """Change Transformers' conversions of a model so that experts are not merged before they are packed."""

    def leave_apart(conversion: WeightTransform) -> WeightTransform:
        if not isinstance(conversion, WeightConverter):
            return conversion
        if [(type(each), getattr(each, "dim", None)) for each in conversion.operations] not in MERGES:
            return conversion
        changed = copy.copy(conversion)
        changed.operations = [LeaveApart(conversion.operations)]
        return changed

    return [leave_apart(conversion) for conversion in conversions]


def packed_experts_conversions(hf_quantizer) -> list[WeightConverter]:
    """Make the conversions of a checkpoint whose experts were packed here, in the quantizer's format."""
    format = FORMATS[hf_quantizer.quantization_config.experts]
    return [
        WeightConverter(
            [f"experts.{tensor}$" for tensor in format.names(name)], f"experts.{name}", [TakePacked(hf_quantizer)]
        )
        for name in WEIGHTS
    ]


def with_matrix_format(conversions: list, hf_quantizer, format: MatrixFormat) -> list:
    """Change Transformers' conversions of a model so that experts in a matrix format stay packed and the
    rest becomes dense."""
    return [
        *([WeightRenaming(*SHORT_NAMES)] if isinstance(format.linear, FP8Matrix) else []),
        *(_keep_packed(converter, hf_quantizer, format) for converter in conversions),
        WeightConverter(
            [
                *map(pattern_of, format.linear.all_names(WEIGHT)),
                *(f"{end.removeprefix('.')}$" for end in format.unused),
            ],
            WEIGHT,
            [TakeDense(hf_quantizer, format.linear)],
        ),
    ]


def _keep_packed(converter, hf_quantizer, format: MatrixFormat):
    """Change the conversion of experts' matrices to TakeExperts; return any other as it is."""
    if not isinstance(converter, WeightConverter):
        return converter
    sources, targets = converter._original_source_patterns, converter._original_target_patterns
    is_of_weights = all(source.endswith(f".{WEIGHT}") for source in sources)
    if len(targets) != 1 or not re.search(r"experts\.\w+$", targets[0]) or not is_of_weights:
        return converter
    patterns = [f"{name}$" for source in sources for name in format.all_names(source)]
    patterns += [source.removesuffix(f".{WEIGHT}") + f"{end}$" for source in sources for end in format.unused]
    return WeightConverter(patterns, targets[0], [TakeExperts(hf_quantizer, format, sources)])
