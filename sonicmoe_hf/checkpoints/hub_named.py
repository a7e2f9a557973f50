"""A packed checkpoint's weights under the names of the hub, dense, by Transformers' own conversions: what
`dequantize().save_pretrained` of the loaded model writes, an expert at a time."""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..formats.hub_names import HubNames
from .comparing import same_bytes
from .converters import NOT_INVERTED, Tensors, WeightGroup, weight_groups
from .output import Output, OutputTensors, in_range, shell
from .stored import StoredWeights, Weight

IN_MEMORY = "where memory allows, sonicmoe_hf.from_pretrained(SRC).dequantize().save_pretrained(DST) writes them"


class HubNamed(Output):
    """The weights of a checkpoint that has them under the model's names, under the hub's.

    Args:
        stored: the checkpoint. model: its model, on the meta device. dtype: to cast weights to; None keeps what is
            stored.
    Raises:
        CheckpointError: weights of the hub become several parameters of the model at once.
    """

    def __init__(self, stored: StoredWeights, model: PreTrainedModel, dtype: torch.dtype | None = None):
        super().__init__(stored, dtype)
        self._groups = _groups(model)
        for name in stored.weights:
            if (group := self._groups.get(name)) is not None and len(group.targets) > 1:
                raise CheckpointError(
                    f"{stored.folder}: {' and '.join(group.targets)} are one weight under the hub's names, which "
                    f"conversion does not join; {IN_MEMORY}"
                )

    def written_name(self, weight: Weight) -> str:
        """See Output."""
        group = self._groups.get(weight.name)
        return weight.name if group is None else next(iter(group.shapes))

    def tensors_of(self, weight: Weight) -> list[OutputTensors]:
        """See Output."""
        group = self._groups.get(weight.name)
        if group is None or not group.converts:
            return super().tensors_of(weight)
        experts = [None] if group.num_experts is None else range(group.num_experts)
        return [self._converted(weight, group, expert) for expert in experts]

    def _converted(self, weight: Weight, group: WeightGroup, expert: int | None) -> OutputTensors:
        """Describe what a weight becomes, or one expert of it."""
        like = torch.zeros(group.parameter_shape(weight.name, expert), dtype=weight.dtype, device="meta")
        shells = {
            name: shell(tuple(made.shape), self.wanted_dtype(name, weight.dtype))
            for name, made in self._weights(group, weight.name, like, expert).items()
        }
        return OutputTensors(shells, partial(self._fill, weight, group, expert, list(shells)))

    def _fill(
        self, weight: Weight, group: WeightGroup, expert: int | None, names: list[str], outs: list[torch.Tensor]
    ) -> None:
        values = weight.merged(expert)
        made = self._weights(group, weight.name, values, expert)
        if not expert and not same_bytes(group.parameters(made, expert)[weight.name], values):
            raise CheckpointError(f"{weight.name} does not come back from the hub's {names[0]}; {IN_MEMORY}")
        for name, out in zip(names, outs):
            out.copy_(made[name] if weight.delta else in_range(made[name], out.dtype, name))

    def _weights(self, group: WeightGroup, name: str, values: torch.Tensor, expert: int | None) -> Tensors:
        try:
            return group.weights({name: values}, expert)
        except NOT_INVERTED as error:
            raise CheckpointError(
                f"Transformers' conversion has no inverse for {name} ({type(error).__name__}: "
                f"{' '.join(str(error).split())}), which keeps a packed checkpoint's own name: --quantize keep"
            ) from error


def _groups(model: PreTrainedModel) -> dict[str, WeightGroup]:
    """Group the hub's weights of a model, by its parameters."""
    hub, shapes = HubNames(model), {}
    for name, tensor in model.state_dict().items():
        for weight in hub.weights(name) or [hub.parameter(name)]:
            experts = range(len(tensor)) if "{expert}" in weight else (0,)
            shapes |= {weight.replace("{expert}", str(expert)): tuple(tensor.shape) for expert in experts}
    return {target: group for group in weight_groups(model, shapes) for target in group.targets}
