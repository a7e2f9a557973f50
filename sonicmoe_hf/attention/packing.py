"""Batches as packed sequences: every token of one sequence after the other [N, ...], as flash kernels take them.

Of a padded batch the real tokens come first, sequence by sequence, and the padding after them: so shapes stay the
batch's, and nobody asks the device how many tokens are real. Kernels stop where the last sequence ends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..layer.torch_op import Op

CAPTURED = (
    "torch_sinks reads where packed sequences begin on the CPU, which a CUDA graph cannot hold; give the model an "
    "attention_mask, or packed sequences as cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k, to capture steps"
)
KEY, QUERY = 1, 2  # flags of a position among the keys: its token is real; it is one of this call's queries


class Side(NamedTuple):
    """The queries or the keys of a batch [B, T], packed.

    starts: int32 [sequences + 1], where packed sequences begin and end. position [B * T]: of each token of a padded batch
    among the packed ones; token [B * T]: the inverse. Both are None where tokens stay in their order.
    """

    shape: tuple[int, int]
    starts: torch.Tensor
    position: torch.Tensor | None = None
    token: torch.Tensor | None = None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Flatten x [B, T, ...] to [B * T, ...]."""
        x = x.flatten(0, 1)
        return x if self.token is None else x.index_select(0, self.token)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Restore [B, T, ...] from packed [B * T, ...]."""
        return (packed if self.position is None else packed.index_select(0, self.position)).unflatten(0, self.shape)

    def clear_(self, packed: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Fill `packed` with zeros for tokens that belong to no sequence: kernels leave anything there."""
        size = packed.shape[dim]
        outside = torch.arange(size, dtype=torch.int64, device=packed.device) >= self.starts[-1]
        shape = [1] * packed.dim()
        shape[dim] = size
        return packed.masked_fill_(outside.view(shape), 0)


def side_of(is_real: torch.Tensor) -> Side:
    """Make a side of a padded batch's bool tensor [B, T]."""
    flat = is_real.flatten()
    before = flat.cumsum(0)
    index = torch.arange(flat.shape[0], dtype=torch.int64, device=flat.device)
    position = torch.where(flat, before - 1, before[-1] + index - before)
    token = torch.empty_like(position).scatter_(0, position, index)
    starts = torch.nn.functional.pad(is_real.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return Side((is_real.shape[0], is_real.shape[1]), starts, position, token)


def sides_of(flags: torch.Tensor, num_queries: int) -> tuple[Side, Side]:
    """Make the queries and the keys of uint8 flags [B, S] (KEY, QUERY), in whose rows the same `num_queries` positions,
    one after the other, have QUERY."""
    is_key = (flags & KEY).bool()
    keys = side_of(is_key)
    if num_queries == flags.shape[1]:
        return keys, keys
    first = (flags[0] & QUERY).argmax()
    positions = first + torch.arange(num_queries, dtype=torch.int64, device=flags.device)
    return side_of(is_key.index_select(1, positions)), keys


def sequence_starts(begins: torch.Tensor) -> torch.Tensor | None:
    """Turn a bool tensor [B, T] of the tokens that begin packed sequences into starts: int32 [B * T + 1] on the CPU,
    where the lengths of sequences are needed: the positions of these tokens, row after row, and then the number of all
    tokens, repeated to the end. None where only rows begin sequences, unless torch.compile traces."""
    starts = _sequence_starts_op(False, begins)[0]
    if torch.compiler.is_compiling():
        return starts
    starts = ending_once(starts)
    return None if starts.shape[0] == begins.shape[0] + 1 else starts


def ending_once(starts: torch.Tensor) -> torch.Tensor:
    """Cut off what repeats the number of all tokens, at the end of starts on the CPU."""
    return starts[: int((starts < starts[-1]).sum()) + 1]


def check_not_captured(tensor: torch.Tensor) -> None:
    """Raise RuntimeError where this tensor would be read while a CUDA graph is captured."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(CAPTURED)


def _sequence_starts(begins: torch.Tensor) -> list[torch.Tensor]:
    check_not_captured(begins)
    starts = torch.full((begins.numel() + 1,), begins.numel(), dtype=torch.int32, device="cpu")
    positions = begins.flatten().cpu().nonzero().flatten()
    starts[: positions.shape[0]] = positions.to(torch.int32)
    return [starts]


def _fake_starts(begins):
    return [torch.empty(begins.numel() + 1, dtype=torch.int32, device="cpu")]


_sequence_starts_op = Op(_sequence_starts, _fake_starts, "attention with sinks")
