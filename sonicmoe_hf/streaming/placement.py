"""Placement: the layers whose experts live in host memory, as experts_memory says, of a loaded or a loading model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedExpertsError
from ..kernels.packed import Quantized
from ..layer.experts_module import is_transposed, matrix_shape, packable, row_order, weight_names
from ..layer.holding import Holder, holding_of
from ..layer.packed_weight import PackedWeight, as_parameter
from ..private import attributes
from ..private.transformers import mark_initialized
from .copies import HOLD_FEWER
from .host_memory import HostMemory, digest_of
from .memory import AUTO, EXPERTS_MEMORY, bytes_for_auto, choose_resident, free_on_host, packed_nbytes
from .stream import ExpertsStream, HostLayer, room_for
from .units import parse_bytes
from .weight import HostWeight, tensors_of

PROJECTIONS = ("gate_up", "down")


def expert_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List (name, module) of every layer's experts, in the order of the model."""
    return [(name, module) for name, module in model.named_modules() if packable(module)]


def _weights(experts: nn.Module) -> list[Any]:
    return [experts._parameters[name] for name in weight_names(experts)]


def _check_streamable(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise UnsupportedExpertsError where experts are shared or sharded by ranks."""
    for name, experts in layers:
        holder = holding_of(experts).by
        kinds = {type(weight) for weight in _weights(experts)} - {nn.Parameter, torch.Tensor, PackedWeight, HostWeight}
        if holder is not Holder.ONE_DEVICE or kinds:
            by = holder.value if holder is not Holder.ONE_DEVICE else kinds.pop().__name__
            raise UnsupportedExpertsError(
                f"{name} is shared or sharded by ranks ({by}), which keeps experts on the GPUs; leave out "
                "experts_memory, or let each rank hold all experts (DDP)"
            )


def _device_of(layers: Iterable[tuple[str, nn.Module]]) -> torch.device:
    """Find the device that holds these layers' experts."""
    devices = {weight.device for _, experts in layers for weight in _weights(experts)}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise UnsupportedExpertsError(
            f"experts_memory takes a model whose experts are on one device, not on {sorted(map(str, devices)) or 'none'}"
        )
    return devices.pop()


class Placement:
    """The layers of a model whose experts are to live in host memory, and those whose experts stay on its device.

    Args:
        format: the one that they are about to be packed in. device: the device of a model that is being loaded. like: a
            weight that its checkpoint has packed, as the others are.
    Raises:
        UnsupportedExpertsError: they are shared or sharded by ranks, or on several devices.
        ValueError: experts_memory; or ranks of this host, which are to share host memory, have other weights.
        MemoryError: the host's free memory does not hold them, or the driver does not pin it; on all ranks that share it.
    All errors come before anything is changed. Where ranks share host memory, each of them makes a Placement, holds the
    same weights, and calls `finish`.
    """

    def __init__(
        self,
        model: nn.Module,
        experts_memory: Any,
        format: str | None = None,
        device: Any = None,
        like: Quantized | None = None,
    ):
        layers, is_loading = expert_layers(model), device is not None
        _check_streamable(layers)
        self.device = _with_index(torch.device(device) if is_loading else _device_of(layers))
        self.memory = HostMemory()
        self._names = {experts: name for name, experts in layers}
        self._digests: dict[str, str] = {}
        sizes = {experts: bytes_of(experts, format, like) for experts in self._names}
        held = [weight for experts in sizes for weight in _weights(experts)]
        budget = _budget(model, experts_memory, self.device, held, max(sizes.values(), default=0))
        budget, free = self._agree_on_bytes(budget)
        stays = dict(zip(sizes, choose_resident(list(sizes.values()), budget)))
        # of each experts module; None: its weights stay on the device
        self.layers = {experts: None if stays[experts] else _layer_of(experts) for experts in sizes}
        new = [experts for experts in sizes if not stays[experts] and self.layers[experts] is None]
        weights = {self._name(experts, name): (experts, name) for experts in new for name in weight_names(experts)}
        # layers that the checkpoint has in floats may take more than `like`: only memory of one process can grow then
        likes = (like,) if len(self.memory.ranks) == 1 else (like, None)
        rooms = {
            name: room_for(max(_bytes_of_weight(*weight, format, each) for each in likes))
            for name, weight in weights.items()
        }
        stream = _stream_of(held, self.device)
        self._open_memory(rooms, None if is_loading else weights)
        nbytes = self.memory.num_copies * sum(rooms.values())
        if free is not None and nbytes > free:
            raise MemoryError(
                f"experts_memory={experts_memory!r} puts {nbytes / 2**30:.1f} GiB of experts in host memory, where "
                f"{free / 2**30:.1f} GiB are free; {HOLD_FEWER}"
            )
        self.layers |= zip(new, _reserve(stream, len(new), self.memory, [*rooms.values()]))

    def _agree_on_bytes(self, budget: int) -> tuple[int, int | None]:
        """Find (the bytes of experts that stay on the device, the free bytes of the host or None) for all of its ranks,
        so that they decide alike. budget: the bytes that stay on this rank's."""
        of_ranks = self.memory.gather_from_ranks("bytes that stay, and are free", [budget, free_on_host()])
        free = min((free for _, free in of_ranks if free is not None), default=None)
        return min(stay for stay, _ in of_ranks), free

    def _open_memory(self, rooms: dict[str, int], weights: dict[str, tuple[nn.Module, str]] | None) -> None:
        """Open memory of these sizes on the host, whose ranks compare them, and their weights where they hold them."""
        self.memory.agree("sizes", {name: str(room) for name, room in rooms.items()})
        if self.memory.num_copies > 1 and weights is not None:
            self.memory.agree("weights", {name: _digest(*weight) for name, weight in weights.items()})
        self.memory.open([*rooms.values()])

    def finish(self) -> None:
        """Wait until the ranks that share host memory have filled it. Raises ValueError where they had other weights."""
        self.memory.agree("weights that are held", self._digests)

    def _name(self, experts: nn.Module, name: str) -> str:
        return f"{self._names[experts]}.{name}"

    def hold_all(self, module: nn.Module) -> None:
        """Move the weights of a layer's experts to where they are to live; do nothing to another module."""
        if module in self.layers:
            for name in weight_names(module):
                setattr(module, name, self.hold(module, name, module._parameters[name]))

    @torch.inference_mode(False)  # else torch takes the weight for no call with gradients
    def hold(self, experts: nn.Module, name: str, weight: Any) -> nn.Parameter:
        """Make a weight of the layer, packed or dense, a frozen parameter where it is to live."""
        layer = self.layers[experts]
        if layer is None:
            return _frozen(weight.resident() if _is_host(weight) else weight)
        if _is_host(weight) and weight.layer is layer:
            return weight
        keep_dense_in_state_dicts(experts)
        projection = PROJECTIONS[weight_names(experts).index(name)]
        if layer.has_one_copy:
            self._digests[self._name(experts, name)] = digest_of(tensors_of(weight))
        return as_parameter(HostWeight.from_weight(layer, projection, weight, is_transposed(experts)))


def _is_host(weight: Any) -> bool:
    return isinstance(weight, HostWeight)


def _budget(model: nn.Module, experts_memory: Any, device: torch.device, held: list[Any], largest: int) -> int:
    """Count the bytes of experts that stay on the device. held: the experts' weights. largest: bytes of a layer."""
    if experts_memory != AUTO:
        return parse_bytes(experts_memory, EXPERTS_MEMORY)
    to_come = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
    return bytes_for_auto(device, to_come - sum(weight.nbytes for weight in held if not _is_host(weight)), largest)


def _with_index(device: torch.device) -> torch.device:
    """Name the GPU that "cuda" stands for."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _stream_of(held: list[Any], device: torch.device) -> ExpertsStream:
    """Find the stream of the weights that live in host memory already, or make one to the device."""
    streams = [weight.layer.stream for weight in held if _is_host(weight)]
    return streams[0] if streams and streams[0].device == device else ExpertsStream(device)


def _reserve(stream: ExpertsStream, count: int, memory: HostMemory, sizes: list[int]) -> list[HostLayer]:
    """Make so many layers, and pin host memory of their weights' sizes, of all or of none."""
    layers = [HostLayer(stream, memory.fills(2 * number), memory.has_one_copy) for number in range(count)]

    def pin(number: int, host: torch.Tensor) -> None:
        layer, projection = divmod(number, len(PROJECTIONS))
        layers[layer].reserve(PROJECTIONS[projection], host)

    try:
        memory.allocate(sizes, pin)
    except MemoryError:
        for made in layers:
            made.release()  # the traceback keeps the layers
        raise
    return layers


def _layer_of(experts: nn.Module) -> HostLayer | None:
    """Find the layer in host memory whose weights this module holds, both of them."""
    first, second = _weights(experts)
    layer = first.layer if _is_host(first) and _is_host(second) else None
    return layer if layer is not None and layer.holds(first.codes, second.codes) else None


def _frozen(weight: Any) -> nn.Parameter:
    if not isinstance(weight, nn.Parameter):
        return nn.Parameter(weight, requires_grad=False)
    weight.requires_grad_(False)
    return weight


def _digest(experts: nn.Module, name: str) -> str:
    return digest_of(tensors_of(experts._parameters[name]))  # type: ignore[arg-type]


def _bytes_of_weight(experts: nn.Module, name: str, format: str | None, like: Quantized | None) -> int:
    weight: Any = experts._parameters[name]
    if format is None or isinstance(weight, PackedWeight):
        return weight.nbytes
    return packed_nbytes(format, matrix_shape(experts, weight), row_order(experts, name), like)


def bytes_of(experts: nn.Module, format: str | None, like: Quantized | None = None) -> int:
    """Count the bytes of a layer's experts as they are, or packed in a format, as `like` is; also of those on the meta
    device."""
    return sum(_bytes_of_weight(experts, name, format, like) for name in weight_names(experts))


def place_experts(model: nn.Module, experts_memory: Any) -> None:
    """Move the experts of a loaded model between its device and host memory, weight by weight, and freeze them. Raises as
    `Placement`; nothing is changed then."""
    placement = Placement(model, experts_memory)
    for _, experts in expert_layers(model):
        placement.hold_all(experts)
    placement.finish()


class LoadingPlacement:
    """The placement of a model that is loading: each experts' weight is moved as soon as it has been loaded.

    Raises:
        UnsupportedExpertsError, MemoryError: at the first weight, as `Placement`; or experts are on several devices.
        ValueError: experts_memory.
    """

    def __init__(self, experts_memory: Any):
        if experts_memory != AUTO:
            parse_bytes(experts_memory, EXPERTS_MEMORY)
        self.experts_memory = experts_memory
        self.placement: Placement | None = None

    def place(self, model: nn.Module, full_name: str) -> None:
        """Place the parameter of this name, which has been loaded; one that is not there yet is left for `finish`."""
        module, _, name = full_name.rpartition(".")
        experts: Any = model.get_submodule(module)
        if name not in packable(experts):
            return
        weight: Any = experts._parameters[name]
        if weight.is_meta:  # a checkpoint's of another shape, which Transformers reports at the end
            return
        if self.placement is None:
            format, like = (weight.format, weight.packed) if isinstance(weight, PackedWeight) else (None, None)
            self.placement = Placement(model, self.experts_memory, format, weight.device, like)
        if weight.device != self.placement.device:
            raise UnsupportedExpertsError(
                f"{full_name} is on {weight.device} and others on {self.placement.device}; experts_memory takes a model "
                "on one device"
            )
        weight = self.placement.hold(experts, name, weight)
        mark_initialized(weight)
        setattr(experts, name, weight)

    def finish(self, model: nn.Module) -> None:
        """Place the weights that the checkpoint did not have, and wait for ranks that load too."""
        for module, experts in expert_layers(model):
            for name in weight_names(experts):
                self.place(model, f"{module}.{name}")
        if self.placement is not None:
            self.placement.finish()


def keep_dense_in_state_dicts(experts: nn.Module) -> None:
    """Make state dicts hold dense weights that live in host memory as the tensors that they are."""
    if not hasattr(experts, attributes.HAS_HOST_HOOK):
        setattr(experts, attributes.HAS_HOST_HOOK, True)
        experts.register_state_dict_post_hook(_write_dense)


def _write_dense(experts, state_dict, prefix, local_metadata):
    for name, weight in experts._parameters.items():
        if isinstance(weight, HostWeight) and not weight.format and prefix + name in state_dict:
            state_dict[prefix + name] = weight.codes
