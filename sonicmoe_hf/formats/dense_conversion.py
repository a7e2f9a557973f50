"""The conversion of linear layers beside packed experts, which the checkpoint stores in a matrix format too."""

from __future__ import annotations

import torch

from ..errors import CheckpointError
from ..layer.holding import mesh_of
from .float_matrices import FP8Matrix
from .matrix_format import FLOATS, WEIGHT, MatrixFormat
from .parameter_conversion import LoadedParameter, ParameterConversion, StoredTensors, naming_weight
from .shares import dense_shard


class TakeDense(ParameterConversion):
    """Make a linear layer's weight in its own dtype, of the tensors that store it in a matrix format."""

    def __init__(self, hf_quantizer, stored_format: MatrixFormat):
        super().__init__(hf_quantizer)
        self.stored_format = stored_format

    def make(self, target: LoadedParameter, stored: StoredTensors) -> torch.Tensor:
        """See ParameterConversion."""
        parameter, layer = target.dense, target.full_name
        needed, names = self.stored_format.names(WEIGHT), self.stored_format.all_names(WEIGHT)
        by_name = {name: tensors[0] for name in names if (tensors := stored.get(name))}
        weight, *others = by_name.values()
        if weight.is_meta:
            return torch.empty_like(parameter, device="meta")
        is_packed = weight.dtype not in FLOATS
        missing = [name for name in needed if name not in by_name] if is_packed else []
        if missing or (bool(others) and not is_packed):
            scales = len(by_name.keys() & {*needed[1:]})
            raise CheckpointError(
                f"{layer} is {weight.dtype} with {scales} of {len(needed) - 1} scales; the checkpoint is incomplete"
            )
        with naming_weight(layer):
            dense = self._dense(weight, others, parameter) if is_packed else weight
        if is_packed and not bool(torch.isfinite(dense).all()):
            raise CheckpointError(f"{layer} or its scales have NaN or infinite values")
        return dense.to(parameter.dtype)

    def _dense(self, weight: torch.Tensor, others: list[torch.Tensor], parameter) -> torch.Tensor:
        is_sharded = mesh_of(parameter) is not None
        if is_sharded and isinstance(self.stored_format, FP8Matrix):
            return dense_shard(self.stored_format, weight, others[0], parameter)
        if is_sharded and weight.dtype == torch.int32:
            raise CheckpointError(
                "ranks share a linear layer that the checkpoint packs in integers, which cannot be cut; leave out "
                "distributed_config, or load it once on one rank and save_pretrained it, which makes linear layers dense"
            )
        return self.stored_format.dense(weight, *others)
