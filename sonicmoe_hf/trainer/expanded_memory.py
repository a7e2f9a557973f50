"""expanded_memory of attach: room on a GPU in which packed experts also lie expanded while a Trainer trains."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UnsupportedExpertsError
from ..layer.experts_module import weight_names
from ..layer.packed_weight import PackedWeight
from ..private import attributes
from ..streaming.placement import expert_layers
from ..streaming.units import parse_bytes
from .methods import WhileTraining, find_callback

EXPANDED_MEMORY = 'expanded_memory is {}; give bytes of the GPU for experts that lie expanded, such as "20GiB"'


class ExpandedMemory(WhileTraining):
    """Keeps experts expanded from the beginning of training to its end. `attach` adds it to a Trainer."""

    def __init__(self, expanded_memory: str | int) -> None:
        self.expanded_memory = expanded_memory
        self.expanded: ExpandedWeights | None = None

    def begin(self, args: Any, model: Any) -> None:
        """Expand as many layers' experts as the memory holds."""
        if model is not None:
            self.expanded = ExpandedWeights(model, self.expanded_memory)

    def end(self) -> None:
        """Free the memory."""
        if self.expanded is not None:
            self.expanded.release()
        self.expanded = None


def add_expanded_memory(trainer, expanded_memory: str | int) -> None:
    """Add ExpandedMemory to a Trainer, or change the bytes of the one that it has. Raises as `ExpandedWeights` does."""
    check_expanded_memory(trainer.model, expanded_memory)
    if (callback := find_callback(trainer, ExpandedMemory)) is None:
        trainer.add_callback(ExpandedMemory(expanded_memory))
    else:
        callback.expanded_memory = expanded_memory


class ExpandedWeights:
    """The dense weights of a model's packed experts, of as many layers from the first on as a number of bytes holds.

    Each of their products takes the dense weight, which equals what it would expand, in forward and in backward. The
    packed weights stay as they are, and are what is saved, merged and copied. Layers in host memory, sharded by FSDP2, or
    with FP8 products have none.

    Args:
        expanded_memory: bytes, such as "20GiB".
    Raises:
        ValueError: expanded_memory. UnsupportedExpertsError: no layer's experts are packed on this device.
    """

    def __init__(self, model: nn.Module, expanded_memory: str | int):
        self.weights: list[PackedWeight] = []
        layers, left = check_expanded_memory(model, expanded_memory)
        for weights in layers:
            left -= sum(map(expanded_nbytes, weights))
            if left < 0:
                break
            for weight in weights:
                weight.expanded = weight.dequantize()
            self.weights += weights

    def release(self) -> None:
        """Free the memory."""
        for weight in self.weights:
            weight.expanded = None
        self.weights.clear()


def check_expanded_memory(model: nn.Module, expanded_memory: str | int) -> tuple[list[list[PackedWeight]], int]:
    """Find (the packed weights of each layer, the bytes for them). Raises as `ExpandedWeights` does."""
    nbytes = parse_bytes(expanded_memory, EXPANDED_MEMORY)
    layers = [weights for _, experts in expert_layers(model) if (weights := _packed_weights(experts))]
    if not layers:
        raise UnsupportedExpertsError(
            "expanded_memory is for packed experts on the GPU, and this model has none: load it with "
            'experts_quantization="nf4" and without experts_memory, or leave out expanded_memory'
        )
    return layers, nbytes


def _packed_weights(experts: nn.Module) -> list[PackedWeight]:
    """List the packed weights that products expand."""
    if vars(experts).get(attributes.COMPUTE):  # FP8 products, which expand nothing
        return []
    weights: list[Any] = [experts._parameters.get(name) for name in weight_names(experts)]
    return [weight for weight in weights if type(weight) is PackedWeight]


def expanded_nbytes(weight: PackedWeight) -> int:
    """Count the bytes that a packed weight takes once it is expanded."""
    return weight.numel() * weight.dtype.itemsize
