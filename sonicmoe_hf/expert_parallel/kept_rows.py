"""The rows that autograd keeps of experts with gathered tokens, cut to those that there are.

Where ranks gather tokens, experts have room for all pairs of all ranks, N times as many rows as they compute on average,
because the host does not know how many there are. What backward needs of them would stay in that room. So the number is
copied to the host beside the computation, and read when the second layer after begins: the device is still busy with the
layer between, so that it never waits for the host.

Letters: N ranks, P rows that there is room for.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..layer.routing import Routing
from ..private.torch import hooks_of_saved_tensors

MIN_BYTES = 2**26  # of the gathered tokens of a layer: with few, the host's time for this counts more than the memory
NUM_WHOLE = 2  # calls of experts whose rows are kept with all their room
MIN_FILLED = 0.25  # of the card: before, nothing is cut, since cutting and giving the room back are two copies


class Count:
    """A number of a device on its way to the host."""

    def __init__(self, number: torch.Tensor):
        self.event = None
        self.number = number
        if number.device.type == "cuda":
            self.number = torch.empty(number.shape, dtype=number.dtype, device="cpu", pin_memory=True)
            self.number.copy_(number, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def get(self) -> int:
        """Wait until it is there."""
        if self.event is not None:
            self.event.synchronize()
        return int(self.number)


class Kept:
    """A tensor [P, ...] that autograd keeps, of which the first rows count."""

    def __init__(self, tensor: torch.Tensor, num_rows: Count):
        self.tensor, self.room, self.num_rows = tensor, len(tensor), num_rows

    def cut(self) -> None:
        """Keep the rows that count alone."""
        self.tensor = self.tensor[: self.num_rows.get()].clone()

    def whole(self) -> torch.Tensor:
        """Give it its room again; nobody reads what is in the rest."""
        if len(self.tensor) == self.room:
            return self.tensor
        whole = self.tensor.new_empty(self.room, *self.tensor.shape[1:])
        whole[: len(self.tensor)] = self.tensor
        return whole


_whole: collections.deque[list[weakref.ref[Kept]]] = collections.deque()  # by call, the oldest first


def _is_filling(device: torch.device) -> bool:
    """Tell whether tensors take so much of a GPU's memory that it is worth cutting some; on a CPU always."""
    if device.type != "cuda":
        return True
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.memory_allocated(device) > MIN_FILLED * total


@contextlib.contextmanager
def cut_kept_rows(x: torch.Tensor, routing: Routing) -> Iterator[None]:
    """Cut the rows that autograd keeps of experts' call with x and a sorted routing inside `with`, when two further calls
    have begun and the card fills. Nothing is done where others take what autograd saves: checkpointing, offloading."""
    room = routing.expert_index.numel()
    is_traced = torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    is_kept = torch.is_grad_enabled() and not is_traced and hooks_of_saved_tensors(False) is None
    if not is_kept or x.nbytes < MIN_BYTES or room == len(x):  # of one expert a token, x would be cut too
        yield
        return
    while len(_whole) >= NUM_WHOLE:
        oldest = [kept for reference in _whole[0] if (kept := reference()) is not None]
        if oldest and not _is_filling(x.device):
            break
        _whole.popleft()
        for kept in oldest:
            kept.cut()
    count = Count(routing.rows.offsets[-1:])
    of_this_call: list[weakref.ref[Kept]] = []
    _whole.append(of_this_call)

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.dim() != 2 or len(tensor) != room or not tensor.is_floating_point():
            return tensor
        kept = Kept(tensor, count)
        of_this_call.append(weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.whole() if type(kept) is Kept else kept):
        yield
