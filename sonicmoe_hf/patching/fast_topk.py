"""A router's own top-k, faster: while it runs, torch.topk of a GPU's tensors is answered by kernels/triton/topk.py.

The router computes everything else as before, so a family needs no facts for it. torch.topk leaves open which of equal
scores it takes; here it is the expert with the lower number.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..layer import backends, torch_op
from ..private.torch import current_function_mode

MOST_EXPERTS, MOST_TAKEN = 1024, 32
FEWEST_ROWS = 8192  # with fewer a layer waits for the host, and torch.topk costs the host less
TOP_K_FUNCTIONS = frozenset((torch.topk, torch.Tensor.topk))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def top_k(input, k, dim=-1, largest=True, sorted=True, *, out=None):
    """What torch.topk(...) of these arguments gives, or None where that is left to PyTorch."""
    if out is not None or not largest or torch_op.traced(input) or input.dtype not in DTYPES or input.dim() < 2:
        return None
    num_rows, num_experts = input.numel() // max(input.shape[-1], 1), input.shape[-1]
    if dim not in (-1, input.dim() - 1) or not 1 <= k <= min(num_experts, MOST_TAKEN):
        return None
    if num_experts > MOST_EXPERTS or num_rows < FEWEST_ROWS:
        return None
    if backends.choose(input.device, torch.bfloat16).name == "eager":
        return None
    scores = input.detach()
    index = backends.load("triton").top_k(scores if scores.dim() == 2 else scores.flatten(0, -2), k)
    if input.dim() != 2:
        index = index.view(*input.shape[:-1], k)
    # differentiated by gather, whose node is not Python's: that would cost the host more than the kernel takes
    return torch.return_types.topk((input.gather(-1, index), index))


class FastTopK(TorchFunctionMode):
    """While it is on, torch.topk is `top_k` where that has an answer."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in TOP_K_FUNCTIONS:
            found = top_k(*args, **(kwargs or {}))
            if found is not None:
                return found
        return function(*args, **kwargs) if kwargs else function(*args)  # every operation of a router passes here


def _worthwhile(hidden_states: torch.Tensor) -> bool:
    """Whether `top_k` may answer what a router of these hidden states [..., H] asks."""
    num_rows = hidden_states.numel() // max(hidden_states.shape[-1], 1) if hidden_states.dim() else 0
    return num_rows >= FEWEST_ROWS and backends.choose(hidden_states.device, torch.bfloat16).name != "eager"


def _is_on() -> bool:
    return isinstance(current_function_mode(), FastTopK)


class FastTopKEntry:
    """Forward pre-hook of a router: its top-k is ours until FastTopKExit. The stack of modes is each thread's own.

    Neither is called after errors: Dynamo would compile every layer on its own (it guards that hook's number). What an
    error leaves on, the model's exit hook or the next router takes off.
    """

    def __call__(self, router: nn.Module, args):
        if not torch.compiler.is_compiling() and args and _worthwhile(args[0]) and not _is_on():
            FastTopK().__enter__()


class FastTopKExit:
    """Forward hook of a router."""

    def __call__(self, router: nn.Module, args, output):
        take_off()


def take_off() -> None:
    """End our top-k in this thread, where it is on."""
    if not torch.compiler.is_compiling() and _is_on():
        current_function_mode().__exit__(None, None, None)
