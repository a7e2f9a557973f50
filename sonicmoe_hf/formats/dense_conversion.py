"""The conversion of linear layers beside packed experts, which the checkpoint stores in a matrix format too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..layer.holding import mesh_of
from .float_matrices import FP8Matrix
from .matrix_format import FLOATS, WEIGHT, MatrixFormat
from .parameter_conversion import LoadedParameter, ParameterConversion, StoredTensors, naming_weight


class TakeDense(ParameterConversion):
    """Make a linear layer's weight in its own dtype, of the tensors that store it in a matrix format."""

    def __init__(self, hf_quantizer, stored_format: MatrixFormat):
        super().__init__(hf_quantizer)
        self.stored_format = stored_format

    def make(self, target: LoadedParameter, stored: StoredTensors) -> torch.Tensor:
        """See ParameterConversion."""
        parameter, layer = target.meta_parameter, target.full_name
        needed, names = self.stored_format.names(WEIGHT), self.stored_format.all_names(WEIGHT)
        by_name = {name: tensors[0] for name in names if (tensors := stored.get(name))}
        weight, *others = by_name.values()
        if weight.is_meta:
            return torch.empty_like(parameter, device="meta")
        is_quantized = weight.dtype not in FLOATS
        missing = [name for name in needed if name not in by_name] if is_quantized else []
        if missing or (bool(others) and not is_quantized):
            scales = len(by_name.keys() & {*needed[1:]})
            raise CheckpointError(
                f"{layer} is {weight.dtype} with {scales} of {len(needed) - 1} scales; the checkpoint is incomplete"
            )
        with naming_weight(layer):
            dense = self._dense(weight, others, parameter) if is_quantized else weight
        if is_quantized and not bool(torch.isfinite(dense).all()):
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


def dense_shard(format: FP8Matrix, weight: torch.Tensor, scales: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Compute a rank's rows of a sharded weight. Transformers cuts the scales into as many stretches as the weight,
    but blocks need not end where these do."""
    _, ((num_blocks, _), _) = format.specs("", parameter.shape).values()
    whole, first = gather_rows(scales, num_blocks, parameter)
    return format.dense_rows(weight, whole, parameter.shape[0], first)


def gather_rows(stretch: torch.Tensor, rows: int, parameter: Any) -> tuple[torch.Tensor, int]:
    """Gather the tensors that a checkpoint stores for a sharded parameter, with `rows` rows in all: (all rows, from the
    ranks' stretches; the first of the parameter's own rows that is this rank's). All ranks call it.

    Raises:
        CheckpointError: the parameter is sharded otherwise than by its rows over one group of ranks.
    """
    mesh, sharded = mesh_of(parameter), []
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate() and mesh.size(dim) > 1:
            sharded.append((dim, placement))
    if not sharded:
        return stretch, 0
    if len(sharded) > 1 or not sharded[0][1].is_shard(0):
        raise CheckpointError(
            f"a linear layer is sharded as {parameter.placements}, which the checkpoint's blocks do not take; shard by "
            "fsdp_size alone"
        )
    dim = sharded[0][0]
    count, rank = mesh.size(dim), mesh.get_local_rank(dim)
    max_rows = -(-rows // count)
    sent = stretch.contiguous().view(torch.uint8)
    sent = torch.nn.functional.pad(sent, (0, 0, 0, max_rows - len(sent)))
    received = sent.new_empty(count * max_rows, sent.shape[1])
    dist.all_gather_into_tensor(received, sent, group=mesh.get_group(dim))
    return received[:rows].view(stretch.dtype), rank * -(-parameter.shape[0] // count)
