"""Experts' matrices that Transformers is kept from merging, so that no tensor of all of them is made: they are packed one
after the other."""

from __future__ import annotations

import torch
from transformers.core_model_loading import ConversionOps, MergeModulelist
from transformers.quantizers.quantizers_utils import get_module_from_name

from ..kernels.packed import FORMATS
from ..kernels.packed.format import Mean
from ..layer.experts_module import is_transposed, packable
from ..layer.packed_weight import PackedWeight


class Apart(list):
    """Matrices of experts by part, [gates, ups] or [downs]."""

    @property
    def shape(self) -> torch.Size:
        """The shape [E, N, K] of their merged weight. Raises RuntimeError, as merging does, where they do not fit."""
        return torch.cat([torch.stack([each.to("meta") for each in source]) for source in self], dim=1).shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices."""
        return self[0][0].dtype

    @property
    def device(self) -> torch.device:
        """The device that has the matrices."""
        return self[0][0].device

    def pack(self, format: str, dtype: torch.dtype, order: str, mean: Mean = torch.mean) -> PackedWeight:
        """Pack their merged weight, in `dtype`, as PackedWeight.quantize does."""
        experts = (torch.cat(matrices).to(dtype) for matrices in zip(*self))
        packed = FORMATS[format].pack(experts, self.shape, order, mean, self.device)
        return PackedWeight(packed, format, dtype)


class LeaveApart(MergeModulelist):
    """Hand on the matrices of experts that are to be packed, and merge others as the `operations` do. Transformers 5.17
    gives a rank of expert parallelism whole experts where it finds a MergeModulelist among a conversion's."""

    def __init__(self, operations: list[ConversionOps]):
        super().__init__()
        self.operations = operations

    # mypy takes torch.no_grad, by which the other is decorated, for what it returns
    def convert(self, input_dict, source_patterns, target_patterns, **options):  # type: ignore[override]
        module, name = get_module_from_name(options["model"], options["full_layer_name"])
        if name in packable(module) and not is_transposed(module):
            return {
                target_patterns[0]: Apart(input_dict[source] for source in source_patterns if source in input_dict)
            }
        for operation in self.operations:
            input_dict = operation.convert(input_dict, source_patterns, target_patterns, **options)
        return input_dict
