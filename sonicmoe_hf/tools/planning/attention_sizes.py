"""The sizes of what mixes a model's tokens, its attentions, linear attentions and Mamba layers, read off its modules."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ...attention.models import PIECES_WITH_SINKS as FP32_SCORES  # their sinks stay in fp32, and so all scores are
from ...attention.models import has_sinks, takes_pieces
from ...errors import UnsupportedModelError

MIXERS = ("Attention", "DeltaNet", "Mamba", "ShortConv", "Lightning")  # what mixes tokens, by words in classes' names


class AttentionLinear(NamedTuple):
    """A linear layer of the attention: its name, its features, in how many layers it is."""

    name: str
    features_in: int
    features_out: int
    num_layers: int


MASKED_BY_HEAD = "minimax_m3_sparse"  # a kind of layers, whose mask is [B, heads, S, S]
# By model type, bytes of a query, a key and a head (kept, made): masks with a bias of each head; probabilities in fp32.
SCORE_BYTES = {
    "inkling_text": (2.0, 2.0),
    "inkling2_text": (6.0, 8.1),
    "flint": (6.0, 6.0),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), (8.8, 5.2)),
}


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """The sizes of what mixes tokens; features are averaged over the layers.

    kind: "sdpa", or "eager" where a model has nothing else. heads: of the attention. linears: the attentions' linear
    layers, which `lora_config` adapts. features, output: those that the linear layers of attentions, linear attentions
    and Mamba layers make, and those that become hidden states again. head_norms: features of q and k where these have
    norms. gated_output: features of an attention's output that a sigmoid gates. queries: features of all queries.
    lightning: features of what lightning attention, plain PyTorch in fp32, makes. kept_per_score, made_per_score: bytes
    that a layer's own attention keeps of a query and a key for backward, and makes beside that. index_heads: of the
    indexer that picks index_topk keys of a query, of which there is one for index_rate tokens. has_sinks: attention that
    from_pretrained replaces by "torch_sinks" on a GPU; in_pieces: by "torch_pieces".
    """

    kind: str
    heads: int
    linears: list[AttentionLinear]
    features: int
    output: int
    head_norms: int
    gated_output: int
    queries: int
    lightning: int
    kept_per_score: float
    made_per_score: float
    index_heads: int
    index_topk: int
    index_rate: int
    has_sinks: bool
    in_pieces: bool


def attention_sizes_of(model: PreTrainedModel) -> AttentionSizes:
    """Read the sizes of a model on the meta device. Raises UnsupportedModelError where its config lacks an entry."""
    config: Any = model.config.get_text_config()
    decoder = model.get_decoder()  # without towers for images or sound
    mixers, names = _linear_layers(decoder, MIXERS), {name.rpartition(".")[2] for name, _ in decoder.named_modules()}
    outputs = [each for each in mixers if each.features_out == config.hidden_size and each.name.startswith("o")]
    widest = max((each.features_in for each in outputs), default=0)
    normed = [
        each
        for each in mixers
        if each.name in ("q_proj", "k_proj") and names & {f"{each.name[0]}_norm", f"{each.name[0]}_layernorm"}
    ]
    lightning = [each for each in _linear_layers(decoder, ("Lightning",)) if each.name == "out_proj"]
    heads = entry_of(config, "num_attention_heads")
    kept_per_score, made_per_score = _score_bytes(config, heads)
    return AttentionSizes(
        kind=_kind(config),
        heads=heads,
        linears=_linear_layers(model, ("Attention",)),
        features=_mean_features(config, ((each, each.features_out) for each in mixers if each not in outputs)),
        output=_mean_features(config, ((each, each.features_in) for each in outputs)),
        # a gate of the output may come from q_proj too
        head_norms=_mean_features(config, ((each, min(each.features_out, widest)) for each in normed)),
        gated_output=_mean_features(config, ((each, each.features_in) for each in outputs if _is_gated(mixers, each))),
        queries=max((each.features_out for each in mixers if each.name.startswith("q")), default=0),
        lightning=_mean_features(config, ((each, each.features_in) for each in lightning)),
        kept_per_score=kept_per_score,
        made_per_score=made_per_score,
        index_heads=getattr(config, "index_n_heads", None) or 0,
        index_topk=getattr(config, "index_topk", None) or 0,
        index_rate=min((getattr(config, "compress_rates", None) or {"": 1}).values()),
        has_sinks=has_sinks(model),
        in_pieces=takes_pieces(model),
    )


def _is_gated(mixers: list[AttentionLinear], output: AttentionLinear) -> bool:
    """Tell whether a sigmoid gates what an attention's last linear layer reads: the gate comes from q_proj, or from a
    layer of its own."""
    gates = {("q_proj", 2 * output.features_in), *((name, output.features_in) for name in ("gate_proj", "g_proj"))}
    return any((each.name, each.features_out) in gates for each in mixers)


def _kind(config: Any) -> str:
    return "sdpa" if getattr(config, "_attn_implementation", None) == "sdpa" else "eager"


def _score_bytes(config: Any, heads: int) -> tuple[float, float]:
    """Count the bytes that a layer's attention keeps of a query and a key for backward, and those that it makes beside
    that, by what layers take at real sizes on tensors without memory."""
    if config.model_type in FP32_SCORES:  # and the compressed keys of DeepSeek-V4 beside the tokens'
        keys = 1.0 + 1.0 / min((getattr(config, "compress_rates", None) or {"": float("inf")}).values())
        return 4.0 * heads * keys, 8.5 * heads * keys
    if config.model_type in SCORE_BYTES:
        kept, made = SCORE_BYTES[config.model_type]
        return kept * heads, made * heads
    if _kind(config) == "eager":
        return eager_score_bytes(heads)
    if MASKED_BY_HEAD in (getattr(config, "layer_types", None) or ()):
        return 2.0 * heads, 5.2 * heads  # the mask in bf16; in bool, before it is joined
    return (2.0, 4.0) if getattr(config, "index_topk", None) else (0.0, 0.0)  # one mask for all heads


def eager_score_bytes(heads: int) -> tuple[float, float]:
    """Count as `_score_bytes` does the bytes of eager attention in bf16: probabilities; gradients of scores and
    probabilities."""
    return 2.0 * heads, 3 * 2.0 * heads


def entry_of(config: Any, *names: str) -> int:
    """Read an entry of a config, which has one of these names, the largest where layers have their own."""
    of_layers = getattr(config, "per_layer_config", None) or [config]
    for name in names:
        values = [getattr(layer, name, None) for layer in of_layers]
        if any(isinstance(value, int) for value in values):
            return max(value for value in values if isinstance(value, int))
    raise UnsupportedModelError(
        f"the config of {config.model_type} has none of {', '.join(names)}, without which nothing can be planned"
    )


def _linear_layers(model: nn.Module, kinds: tuple[str, ...]) -> list[AttentionLinear]:
    """Count the linear layers of modules whose classes have one of these words in their names."""
    counts: collections.Counter[tuple[str, int, int]] = collections.Counter()
    for module in model.modules():
        if any(kind in type(module).__name__ for kind in kinds):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    counts[name, child.in_features, child.out_features] += 1
    return [AttentionLinear(*key, count) for key, count in counts.items()]


def _mean_features(config: Any, features: Iterable[tuple[AttentionLinear, int]]) -> int:
    """Count the features in a layer, on average over all."""
    return sum(linear.num_layers * count for linear, count in features) // config.num_hidden_layers
