"""round_checkpoint: a dense checkpoint whose experts have the values that they have when packed, for engines, which do
not read every format that experts are trained in.

Letters: E experts, N output and K input features.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from torch import nn

from ..errors import CheckpointError
from ..formats.declared import check_format
from ..kernels.packed import FORMATS, Format, Quantized
from ..layer.experts_module import is_transposed, matrix_shape, packable, row_order
from ..model_patches import NATIVE_PREFIX
from .reading.config_only import build_from_config
from .reading.converters import ALTERNATING, Tensors, WeightGroup
from .reading.files import CONFIG_FILE, local_folder
from .reading.stored import StoredWeights
from .reading.weight import Change, GroupChange
from .writing.atomic_folder import new_folder
from .writing.model_card import origin_of
from .writing.targets import Target, own_target
from .writing.write import Conversion, write_checkpoint


def round_checkpoint(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    format: str,
    *,
    max_shard_size: int | str = "5GB",
    verify: bool = False,
    revision: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Write a checkpoint of the hub with its experts at the values that they have packed in a format, in its own dtypes.

    One file of `src` and one packed weight of all experts bound the memory. Arguments and errors are those of
    `convert_checkpoint`; format: a name of `quantize_experts`.
    """
    check_format("round", format)
    dst = new_folder(dst)
    target = rounded_target(StoredWeights(local_folder(src, revision)), format)
    return write_checkpoint(target, dst, origin_of("convert --round", src), max_shard_size, verify, on_progress)


def rounded_target(stored: StoredWeights, format: str) -> Target:
    """Describe a checkpoint under its own names and in its own dtypes, with its experts rounded as `from_pretrained(...,
    experts_quantization=format)` rounds them.

    Raises:
        CheckpointError: it is in the native layout, quantized already, has no experts, or experts of a size that the
            format does not take.
    """
    family = str(stored.config.get("model_type"))
    if family.startswith(NATIVE_PREFIX):
        raise CheckpointError(
            f"{stored.folder} is in the native layout, whose rows stand in another order; round the checkpoint of the "
            "hub that is trained"
        )
    if stored.quantization is not None:
        raise CheckpointError(
            f"{stored.folder} is {stored.quantization} already, and engines read it so; serve it as it is"
        )
    model = build_from_config(stored.config, stored.folder / CONFIG_FILE)
    groups = stored.groups(model)
    rounded = lru_cache(ALTERNATING)(
        lambda parameter: _RoundedParameter(stored, groups[parameter], model, parameter, format)
    )
    parameters = [f"{name}.{own}" for name, module in model.named_modules() for own in packable(module)]
    if not parameters:
        raise CheckpointError(f"{stored.folder} has no experts to round")
    for parameter in parameters:
        module, _, own = parameter.rpartition(".")
        experts = model.get_submodule(module)
        try:
            FORMATS[format].shapes(matrix_shape(experts, getattr(experts, own)), row_order(experts, own))
        except ValueError as error:
            raise CheckpointError(f"{parameter}: {error}") from error
        for name in groups[parameter].owners:
            stored.weights[name].change = Change.of(name, groups[parameter], partial(rounded, parameter))
    notice = f"the experts have the values of {format}; serve this where experts_quantization={format!r} trains"
    done = own_target(stored, (family, "hub", "hub"), keeps_format=False)
    return done._replace(notices=[notice, *done.notices])


class _RoundedParameter(GroupChange):
    """A parameter of experts, packed, whose values the weights in the files get."""

    def __init__(self, stored: StoredWeights, group: WeightGroup, model: nn.Module, parameter: str, format: str):
        super().__init__(stored.weights, group)
        module, _, own = parameter.rpartition(".")
        experts = model.get_submodule(module)
        self._parameter, self._is_transposed = parameter, is_transposed(experts)
        self._format: Format = FORMATS[format]
        shape = matrix_shape(experts, getattr(experts, own))
        try:
            self._packed: Quantized = self._format.pack(self._matrices(shape[0]), shape, row_order(experts, own))
        except ValueError as error:
            raise CheckpointError(f"{parameter}: {error}; nothing is written") from error

    def _matrices(self, num_experts: int) -> Iterator[torch.Tensor]:
        """Yield the experts' matrices [N, K]."""
        whole = None if self.group.num_experts else self.old_parameters(None)[self._parameter]
        for expert in range(num_experts):
            matrix = self.old_parameters(expert)[self._parameter][0] if whole is None else whole[expert]
            yield matrix.T if self._is_transposed else matrix

    def new_parameters(self, dtype: torch.dtype, expert: int | None) -> Tensors:
        """See GroupChange."""
        if expert is None:
            rounded = self._format.dequantize(self._packed, dtype)
        else:
            rounded = self._format.dequantize_expert(self._packed, dtype, expert)[None]
        return {self._parameter: rounded.transpose(1, 2).contiguous() if self._is_transposed else rounded}
