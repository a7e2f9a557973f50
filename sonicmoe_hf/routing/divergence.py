"""serving_divergence: how often a server's routing is not the one that the trained model chooses.

Letters: L layers with experts, T tokens of a call, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .padding import given_mask
from .recorded import RecordedRouting
from .replay import checked_calls, record_routing


def serving_divergence(model: nn.Module, recorded: RecordedRouting | torch.Tensor, **inputs: Any) -> dict[str, float]:
    """Compute the share of tokens, layer by layer, whose experts in `recorded` are not the set that this model chooses
    itself.

    It calls the model once, without gradients and without replay, so that a layer's difference includes what earlier
    layers' differences do to it. Padding, and tokens with an id below 0, do not count. In reinforcement learning this is
    how far the network that is trained is from the one that sampled.

    Args:
        model: patched, with top-k; in the mode that it is in.
        recorded: the experts of one call: of `RecordedRouting.from_server` or `record_routing`, or a tensor [L, T, K].
        inputs: what that call takes: input_ids, attention_mask and the like.
    Returns:
        {layer: share}, from 0.0 to 1.0, or nan where `recorded` names the experts of no token; of the layers that ran in
        that call, in their order.
    Raises:
        ValueError: `recorded` has several calls, or other layers, tokens or experts per token than
            the model. Others: as `record_routing`.
    Example:
        shares = sonicmoe_hf.serving_divergence(model, routing, input_ids=input_ids, attention_mask=attention_mask)
        print(f"{sum(shares.values()) / len(shares):.1%} of the tokens, {max(shares, key=shares.get)} most")
    """
    calls = checked_calls(model, recorded)
    if len(calls) != 1:
        raise ValueError(
            f"the routing has {len(calls)} calls, but serving_divergence compares one with its inputs; give it the "
            "tensor of one: recorded.tensors()[0]"
        )
    with torch.no_grad(), record_routing(model) as own:
        model(**inputs)
    mask = given_mask(inputs)
    shares = {}
    for layer, runs in calls[0].items():
        own_runs = own.calls[0].get(layer, [])
        if len(runs) != len(own_runs):
            raise ValueError(f"{layer} ran {len(own_runs)} times, but {len(runs)} times in the recorded call")
        if runs:
            shares[layer] = _differing_share(layer, runs, own_runs, mask)
    device = next(iter(shares.values())).device
    names, values = list(shares), torch.stack([share.to(device) for share in shares.values()]).tolist()
    return dict(zip(names, values))


def _differing_share(layer: str, runs: list[torch.Tensor], own_runs: list[torch.Tensor], mask: torch.Tensor | None):
    """Compute a layer's share, a scalar tensor; nan where no token is known."""
    counts = []
    for given_TK, own_TK in zip(runs, own_runs):
        if given_TK.shape != own_TK.shape:
            raise ValueError(
                f"the routing of {layer} is {list(given_TK.shape)}, but the model's is {list(own_TK.shape)}: [tokens, "
                "experts per token]"
            )
        given_TK = given_TK.to(own_TK)
        known_T = (given_TK >= 0).all(-1)
        if mask is not None and mask.dim() == 2 and mask.numel() == len(known_T):
            known_T &= mask.flatten().to(known_T)
        differs_T = (given_TK.sort(-1).values != own_TK.sort(-1).values).any(-1)
        counts.append(torch.stack([(differs_T & known_T).sum(), known_T.sum()]))
    differing, known = torch.stack(counts).sum(0)
    return differing.float() / known
