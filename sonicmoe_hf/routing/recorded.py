"""Recorded routing of a model, and a router's output with experts that it is given.

Letters: L layers with experts, T tokens of a call, B sequences of S positions, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..kernels.rounding import chosen_weights
from ..model_patches import Family
from . import server_arrays

if TYPE_CHECKING:
    import numpy


class RecordedRouting:
    """Experts that every token used, for each model call that was recorded, in their order.

    num_experts: {layer: its number of experts}, None where a server recorded them. calls: for each call,
    {layer: [indices [T, K], int32, of each time that it ran]}, without layers that did not run; T counts all positions of
    the batch, sequence by sequence, padding included. An index of -1 stands for what is not known: there a replay leaves
    the router its own choice.
    """

    def __init__(self, num_experts: Mapping[str, int | None]):
        self.num_experts = dict(num_experts)
        self.calls: list[dict[str, list[torch.Tensor]]] = []

    @property
    def layers(self) -> tuple[str, ...]:
        """List the names of the layers, in the model's order."""
        return tuple(self.num_experts)

    @property
    def is_of_server(self) -> bool:
        """Tell whether a server recorded it, which names no layers of the model and no numbers of their experts."""
        return None in self.num_experts.values()

    @classmethod
    def from_server(
        cls,
        completions: Sequence[numpy.ndarray | torch.Tensor | str | Any],
        attention_mask: torch.Tensor | numpy.ndarray,
        *,
        prompt_start: int | Sequence[int] = 0,
        layers: Sequence[int] | None = None,
    ) -> RecordedRouting:
        """Take the routing that an inference server used for one batch, as one call of the model that is trained.

        A server computes every token but the last that it samples, so its array is one shorter than the sequence has
        tokens. That token, padding, and prompt tokens that the server left out get -1: the router's own choice.

        Args:
            completions: for each sequence of the batch, vLLM's `CompletionOutput`, or what is its `routed_experts`: an
                array of integers [tokens of the sequence - 1 - prompt_start, layers, experts per token], or over HTTP
                that as a .npy file in base64.
            attention_mask: [B, S], 0 for padding: of the call that is to use the routing. Padding may be on either side,
                or on both.
            prompt_start: vLLM's `routed_experts_prompt_start`, how many of the prompt's first tokens the arrays leave
                out; one number, or one for each sequence.
            layers: which of the arrays' layers have experts, counted from 0: `range(3, 61)` for DeepSeek-V3. vLLM and
                SGLang count decoder layers without experts too. Default: those in which some token has two experts that
                differ, since the others hold zeros.
        Returns:
            For `replay_routing` and `serving_divergence`, or as a tensor [L, B * S, K] by `.tensors()`.
        Raises:
            ValueError: a sequence without an array; arrays of another length than the mask says, or that differ in layers
                or experts per token; an id beyond int32; a token that has one expert twice, as where nothing was
                written.
        Example:
            outputs = llm.generate(prompts, SamplingParams(...))  # LLM(..., enable_return_routed_experts=True)
            routing = RecordedRouting.from_server([output.outputs[0] for output in outputs], attention_mask)
            with sonicmoe_hf.replay_routing(model, routing):
                logits = model(input_ids, attention_mask).logits
        """
        index_LTK = server_arrays.aligned_with_batch(completions, attention_mask, prompt_start, layers)
        recorded = cls({f"layer {number} of the server's": None for number in range(len(index_LTK))})
        recorded.calls.append({name: [index_TK] for name, index_TK in zip(recorded.layers, index_LTK)})
        return recorded

    def tensors(self) -> list[torch.Tensor]:
        """Stack the indices of each call to one tensor [L, T, K], int32, on the device of its first layer.

        Raises:
            ValueError: in a call a layer did not run once; RuntimeError: layers had other tokens. `calls` has what each
                used.
        """
        return [self._stack_layers(number, call) for number, call in enumerate(self.calls)]

    def _stack_layers(self, number: int, call: Mapping[str, Sequence[torch.Tensor]]) -> torch.Tensor:
        for name in self.layers:
            if len(call.get(name, ())) != 1:
                raise ValueError(
                    f"call {number} is no tensor [layers, tokens, experts per token]: {name} ran "
                    f"{len(call.get(name, ()))} times; hand the RecordedRouting to replay_routing, or take its .calls"
                )
        indices = [call[name][0] for name in self.layers]
        return torch.stack([index_TK.to(indices[0].device) for index_TK in indices])

    def __repr__(self):
        return f"RecordedRouting({len(self.layers)} layers, {len(self.calls)} calls)"


class ReplayedCall:
    """Call whose experts are given: runs, {layer: [indices [T, K] of each time that it runs]}."""

    def __init__(self, runs: Mapping[str, Sequence[torch.Tensor]]):
        self.runs = runs
        self.used = dict.fromkeys(runs, 0)

    def next_run(self, layer: str, recomputing: bool) -> torch.Tensor:
        """Take the experts of the layer's next run; of its only one, where gradient checkpointing computes that again.

        Raises:
            RuntimeError: there is none; or there are several, and checkpointing does not tell which it computes again.
        """
        runs = self.runs.get(layer, ())
        if recomputing and len(runs) > 1:
            raise RuntimeError(
                f"{layer} runs {len(runs)} times in one model call, and gradient checkpointing does not tell which of "
                "them it computes again; replay without gradient checkpointing"
            )
        number = 0 if recomputing else self.used.get(layer, 0)
        if number >= len(runs):
            raise RuntimeError(
                f"{layer} runs more often in this model call than in the recorded one, where it ran {len(runs)} times: "
                "the call must have the same kind of inputs (images only if the recorded one had some)"
            )
        if not recomputing:
            self.used[layer] = number + 1
        return runs[number]

    def check_used(self) -> None:
        """Raise RuntimeError where a layer ran, but less often than recorded."""
        for layer, used in self.used.items():
            if 0 < used < len(self.runs[layer]):
                raise RuntimeError(
                    f"{layer} ran {used} times in this model call, but {len(self.runs[layer])} times in the recorded one"
                )


def with_experts(family: Family, router: nn.Module, output: tuple, given_TK: torch.Tensor) -> tuple:
    """Make the router's output (logits, weights, indices) with the experts of `given_TK` and their weights by the
    family's formula from these logits. Tokens whose experts stay, and those with ids below 0, keep the router's own
    weights bit for bit.

    Raises:
        ValueError: `given_TK` is of another shape.
    """
    logits_TE, weights_TK, index_TK = output
    if given_TK.shape != index_TK.shape:
        raise ValueError(
            f"the replayed routing of a layer has shape {tuple(given_TK.shape)}, but this call's is "
            f"{tuple(index_TK.shape)}: [tokens, experts per token]"
        )
    given_TK = given_TK.to(index_TK)
    given_TK = torch.where((given_TK >= 0).all(-1, keepdim=True), given_TK, index_TK)
    scores_TK = family.scores(router, logits_TE)[0].gather(1, given_TK.long())
    chosen_TK = chosen_weights(scores_TK, *family.weighting(router)).to(weights_TK.dtype)
    same_T1 = (given_TK == index_TK).all(-1, keepdim=True)
    return logits_TE, torch.where(same_T1, weights_TK, chosen_TK), given_TK
