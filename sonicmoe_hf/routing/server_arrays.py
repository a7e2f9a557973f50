"""The arrays of routed experts that inference servers return, laid over a padded batch.

Letters: L layers with experts, B sequences of S positions, K experts per token.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch


def aligned_with_batch(
    completions: Sequence[Any],
    attention_mask: torch.Tensor | numpy.ndarray,
    prompt_start: int | Sequence[int],
    layers: Sequence[int] | None,
) -> torch.Tensor:
    """Lay out the experts of every position, int32 [L, B * S, K], -1 where the server names none. Arguments and errors
    are those of RecordedRouting.from_server."""
    mask_BS = torch.as_tensor(attention_mask, dtype=torch.bool, device="cpu")
    if mask_BS.dim() != 2 or len(mask_BS) != len(completions):
        raise ValueError(
            f"there are {len(completions)} completions, but attention_mask is {list(mask_BS.shape)}: it must be "
            "[sequences, positions], with one sequence for each completion"
        )
    starts = list(prompt_start) if isinstance(prompt_start, Iterable) else [prompt_start] * len(completions)
    if len(starts) != len(completions) or min(starts) < 0:
        raise ValueError(
            f"prompt_start is {prompt_start}; it must be one number of tokens, or one for each of the "
            f"{len(completions)} completions"
        )
    arrays = [experts_array(completion, number) for number, completion in enumerate(completions)]
    index_BSLK = torch.full((*mask_BS.shape, *arrays[0].shape[1:]), -1, dtype=torch.int32, device="cpu")
    for number, (array, mask_S, start) in enumerate(zip(arrays, mask_BS, starts)):
        positions = mask_S.nonzero().flatten()[start:-1]
        if len(array) != len(positions):
            raise ValueError(
                f"the routing of sequence {number} has {len(array)} tokens, but there must be {len(positions)}: its "
                f"{int(mask_S.sum())} of the attention mask without the last, which no server computes, and without the "
                f"first {start} (prompt_start)"
            )
        index_BSLK[number, positions] = array
    numbers = _layers_with_experts(index_BSLK) if layers is None else list(layers)
    index_BSLK = index_BSLK[:, :, numbers]
    _check_distinct(index_BSLK, numbers)
    return index_BSLK.permute(2, 0, 1, 3).flatten(1, 2)


def experts_array(completion: Any, number: int = 0) -> torch.Tensor:
    """Read the routing of one sequence, int32 [tokens, layers, K], of whatever integers it came in, also as vLLM sends it
    over HTTP: a .npy file in base64."""
    array = getattr(completion, "routed_experts", completion)
    if isinstance(array, str):
        file = io.BytesIO(base64.b64decode(array, validate=True))
        array = numpy.lib.format.read_array(file, allow_pickle=False)
    values = numpy.asarray(array.detach().cpu() if isinstance(array, torch.Tensor) else array)
    if values.ndim != 3 or values.dtype.kind not in "iu":
        raise ValueError(
            f"the routing of sequence {number} is {values.dtype} {list(values.shape)}, but it must be integer [tokens, "
            "layers, experts per token], as vLLM returns it with enable_return_routed_experts=True"
        )
    if values.size and values.max() > numpy.iinfo(numpy.int32).max:
        raise ValueError(f"the routing of sequence {number} names expert {values.max()}; no model has so many")
    index = values.astype(numpy.int32)
    index[values < 0] = -1  # whatever int32 makes of them
    return torch.from_numpy(index)


def _layers_with_experts(index_BSLK: torch.Tensor) -> list[int]:
    """List the layers of which something was recorded; all, if nothing was. Servers count decoder layers without
    experts too, whose entries are the zeros that they were made with. A layer of the model's that is left out here is
    missed there."""
    is_known_BSL = (index_BSLK >= 0).all(-1)
    is_constant_BSL = (index_BSLK == index_BSLK[..., :1]).all(-1)
    is_empty_L = is_known_BSL.any(1).any(0) & (is_constant_BSL | ~is_known_BSL).all(1).all(0)
    if index_BSLK.shape[-1] == 1 or is_empty_L.all():
        return list(range(index_BSLK.shape[2]))
    return (~is_empty_L).nonzero().flatten().tolist()


def _check_distinct(index_BSLK: torch.Tensor, layers: list[int]) -> None:
    """Raise ValueError where a token has an expert twice: no router chooses so, but zeros that were never written do."""
    sorted_BSLK = index_BSLK.sort(-1).values
    twice_BSLK = (sorted_BSLK.diff(dim=-1) == 0) & (sorted_BSLK[..., 1:] >= 0)
    if twice_BSLK.any():
        sequence, position, layer, k = twice_BSLK.nonzero()[0].tolist()
        raise ValueError(
            f"the routing of sequence {sequence} names expert {int(sorted_BSLK[sequence, position, layer, k])} twice for "
            f"position {position} in layer {layers[layer]}: the server recorded nothing there. Name the "
            "layers with experts in layers=...; where a token's row is missing, set its ids to -1"
        )
