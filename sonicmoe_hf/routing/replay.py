"""record_routing and replay_routing: have a later call of a model use the experts that an earlier one used.

Letters: L layers with experts, T tokens of a call, K experts per token.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..patching.moe_layers import find_layers
from .contexts import Replay, in_this_thread
from .patched_model import check_and_hook_routers, find_state, router_hooks, routing_state
from .recorded import RecordedRouting, ReplayedCall

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # of given indices


def _hook_and_list_experts(model: nn.Module) -> dict[str, int]:
    """Undo Liger's change of a patched model's experts, hook its routers, and list {layer: its number of experts}, in the
    order of its layers.

    Raises:
        UnsupportedModelError: a layer's router is not known. ValueError: as `check_and_hook_routers`.
    """
    check_and_hook_routers(model)
    for layer in find_layers(model):
        if layer.router is None:
            raise UnsupportedModelError(
                f"{layer.name}: recording and replaying do not know its router; docs/models.md lists the models they know"
            )
    return {hook.layer_name: layer.router.num_experts for hook, layer in zip(router_hooks(model), find_layers(model))}


def _move(index_LTK: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Move the indices to the device. From the host's memory to a GPU they go over pinned memory: otherwise the host
    waits until the GPU has done all that was asked of it before."""
    if device is not None and device.type == "cuda" and index_LTK.device.type == "cpu":
        pinned_LTK = torch.empty(index_LTK.shape, dtype=torch.int32, device="cpu", pin_memory=True)
        # int32 would make an expert of some numbers below its own
        return pinned_LTK.copy_(index_LTK.long().clamp(min=-1)).to(device, non_blocking=True)
    return index_LTK.to(device=device)


def checked_calls(model: nn.Module, recorded: RecordedRouting | torch.Tensor | Sequence[torch.Tensor]):
    """Check recorded experts, after the model's routers are hooked as by `record_routing`, and make {layer: [indices
    [T, K], int32 or as given]} of each call, moved to where the model's first router computes.

    Raises:
        UnsupportedModelError, ValueError: as `replay_routing`.
    """
    layers = _hook_and_list_experts(model)
    weight = next(find_layers(model)).router.weight
    device = None if weight.is_meta else weight.device  # of an offloaded router only its call tells
    if isinstance(recorded, RecordedRouting) and recorded.is_of_server:
        recorded = recorded.tensors()
    if isinstance(recorded, RecordedRouting):
        if recorded.num_experts != layers:
            raise ValueError(
                f"the routing is of layers with experts {recorded.num_experts}, but the model has {layers}"
            )
        return recorded.calls
    calls = []
    for index_LTK in [recorded] if isinstance(recorded, torch.Tensor) else recorded:
        if index_LTK.dim() != 3 or len(index_LTK) != len(layers) or index_LTK.dtype not in INTEGERS:
            raise ValueError(
                f"the routing is {index_LTK.dtype} {list(index_LTK.shape)}, but it must be integer [layers, tokens, "
                f"experts per token], of {len(layers)} layers; a server's arrays with layers that have no experts: "
                "RecordedRouting.from_server(..., layers=...)"
            )
        highest_L = index_LTK.flatten(1).amax(1).tolist() if index_LTK.numel() else []
        for (name, num_experts), highest in zip(layers.items(), highest_L):
            if highest >= num_experts:
                raise ValueError(f"{name} has {num_experts} experts, but its routing names expert {highest}")
        calls.append({name: [index_TK] for name, index_TK in zip(layers, _move(index_LTK, device))})
    return calls


@contextlib.contextmanager
def _in_context(model: nn.Module, recording_or_replay: RecordedRouting | Replay) -> Iterator[None]:
    """Make this thread's calls of the model note their experts in a recording, or take them from a replay.

    Raises:
        RuntimeError: at the end, the model has other hooks than at the beginning.
    """
    state = routing_state(model)
    with in_this_thread(state, recording_or_replay):
        yield
    if find_state(model) is not state:
        raise RuntimeError(
            "the model was unpatched inside record_routing or replay_routing, which its later calls did not follow; call "
            "unpatch_model after the `with`"
        )


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[RecordedRouting]:
    """Record which experts each token uses, in every call that this thread makes of this patched model inside the `with`.

    In training and evaluation, with top-k; layers that gradient checkpointing computes again are recorded once.

    Yields:
        A RecordedRouting, for `replay_routing`.
    Raises:
        UnsupportedModelError: a layer's router is not known (docs/models.md). ValueError: the model is not patched.
        RuntimeError: the model was unpatched inside the `with`; from the model: it is compiled, or rounds tokens.
    Example:
        with torch.no_grad(), sonicmoe_hf.record_routing(model) as routing:
            old = model(**batch).logits
        with sonicmoe_hf.replay_routing(model, routing):
            new = model(**batch).logits
    """
    recording = RecordedRouting(_hook_and_list_experts(model))
    with _in_context(model, recording):
        yield recording


@contextlib.contextmanager
def replay_routing(
    model: nn.Module, routing: RecordedRouting | torch.Tensor | Sequence[torch.Tensor]
) -> Iterator[None]:
    """Make every call of this patched model by this thread inside the `with` use the recorded experts.

    The weights follow from the call's own logits and are differentiable. Where a token's recorded experts are those that
    the router chooses anyway, its weights are the router's own, bit for bit. Backward may run after the `with`.

    Args:
        routing: what `record_routing` gave: the first call of the model replays the first recorded one, and so on. Or
            what `RecordedRouting.from_server` made of an inference server's arrays. Or the experts of one call, an
            integer tensor [layers, tokens, experts per token], or a sequence of such tensors, one a call. Tokens count
            sequence by sequence, padding included; a token with an id below 0 keeps the router's choice.
    Raises:
        UnsupportedModelError: a layer's router is not known (docs/models.md).
        ValueError: the model is not patched; another number of layers, or an expert that does not exist; from the model,
            another number of tokens or of experts per token.
        RuntimeError: the model was unpatched inside the `with`; from the model: more calls than were recorded, or a layer
            that runs more or less often in a call; a layer that runs several times under gradient checkpointing; it is
            compiled, or rounds tokens.
    """
    calls = map(ReplayedCall, checked_calls(model, routing))
    with _in_context(model, deque(calls)):
        yield
