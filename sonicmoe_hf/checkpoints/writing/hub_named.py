"""A packed checkpoint's weights under the names of the hub, dense, by Transformers' own conversions: what
`dequantize().save_pretrained` of the loaded model writes, an expert at a time."""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedModel

from ...formats.hub_names import HubNames
from ..reading.converters import WeightGroup, weight_groups
from ..reading.stored import StoredWeights
from ..reading.weight import Weight
from .output import Output, OutputTensors, cast_in_range, shell

IN_MEMORY = "; where memory allows, sonicmoe_hf.from_pretrained(SRC).dequantize().save_pretrained(DST) writes them"


class HubNamed(Output):
    """The weights of a checkpoint that was packed here, and names them as the model does, under the hub's names.

    Args:
        stored: the checkpoint. model: its model, on the meta device. dtype: to cast weights to; None keeps what is
            stored.
    """

    def __init__(self, stored: StoredWeights, model: PreTrainedModel, dtype: torch.dtype | None = None):
        super().__init__(stored, dtype)
        self._groups = _groups(model)

    def written_name(self, weight: Weight) -> str:
        """See Output."""
        group = self._groups.get(weight.name)
        return weight.name if group is None else next(iter(group.shapes))

    def tensors_of(self, weight: Weight) -> list[OutputTensors]:
        """See Output."""
        group = self._groups.get(weight.name)
        if group is None or not group.converts:
            return super().tensors_of(weight)
        if weight.name != group.parameter_names[0]:  # the first stands for all
            return []
        is_whole = group.num_experts is None or None in group.owners.values()
        return [
            self._describe_group(group, expert) for expert in ([None] if is_whole else range(group.num_experts or 0))
        ]

    def _describe_group(self, group: WeightGroup, expert: int | None) -> OutputTensors:
        """Describe what the parameters of a group become, or one expert of them."""
        weights = [self.stored.weights[name] for name in group.parameter_names]
        likes = {
            each.name: torch.zeros(group.parameter_shape(each.name, expert), dtype=each.dtype, device="meta")
            for each in weights
        }
        shells = {
            name: shell(tuple(made.shape), self.wanted_dtype(name, made.dtype))
            for name, made in group.weights(likes, expert, IN_MEMORY).items()
        }
        return OutputTensors(shells, partial(self._fill, group, weights, expert, list(shells)))

    def _fill(
        self,
        group: WeightGroup,
        weights: list[Weight],
        expert: int | None,
        names: list[str],
        outs: list[torch.Tensor],
    ) -> None:
        values = {each.name: each.read_changed(expert) for each in weights}
        made = group.weights(values, expert, IN_MEMORY)
        for name, out in zip(names, outs):
            out.copy_(cast_in_range(made[name], out.dtype, name))


def _groups(model: PreTrainedModel) -> dict[str, WeightGroup]:
    """Group the hub's weights of a model, by its parameters."""
    hub_names = HubNames(model)
    # Each weight has its parameter's shape: a placeholder where several become one. Inverses look up no shape but that of
    # a weight which is a whole parameter, and `WeightGroup.weights` tries the way back.
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        for weight in hub_names.weights(name) or [hub_names.parameter(name)]:
            experts = range(len(tensor)) if "{expert}" in weight else (0,)
            shapes |= {weight.replace("{expert}", str(expert)): tuple(tensor.shape) for expert in experts}
    return weight_groups(model, shapes)
