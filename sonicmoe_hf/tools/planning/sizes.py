"""The sizes of a model that its training's memory follows from, read off its modules without weights."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...attention.models import PIECES_WITH_SINKS as FP32_SCORES  # their sinks stay in fp32, and so all scores are
from ...attention.models import has_sinks, takes_pieces
from ...checkpoints.reading.config_only import build_on_meta
from ...checkpoints.reading.stored import quantization_of
from ...errors import CheckpointError, UnsupportedModelError
from ...formats.declared import declared_quantization
from ...layer.experts_module import matrix_shape, weight_names
from ...patching.support import LayerSupport, check_accelerated, find_layers
from ...private.transformers import computes_loss

DEQUANTIZED = ("mxfp4", "fp8")  # examples/finetune.py --dequantize
MIXERS = (
    "Attention",
    "DeltaNet",
    "Mamba",
    "ShortConv",
    "Lightning",
)  # what mixes tokens, by words in names of classes
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")


class AttentionLinear(NamedTuple):
    """A linear layer of the attention: its name, its features, in how many layers it is."""

    name: str
    features_in: int
    features_out: int
    num_layers: int


MASKED_BY_HEAD = "minimax_m3_sparse"  # a kind of layers, whose mask is [B, heads, S, S]
# By model type, bytes of a query, a key and a head (kept, made): masks with a bias of each head; probabilities in fp32.
OF_HEADS = {
    "inkling_text": (2.0, 2.0),
    "inkling2_text": (6.0, 8.1),
    "flint": (6.0, 6.0),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), (8.8, 5.2)),
}
FP32_STREAMS = ("zaya",)  # model types whose hidden states between layers are in fp32
FLA, MAMBA = "flash-linear-attention", "mamba-ssm"
# By the text's model type: MiB of a token that a layer of its default config takes whose linear attention or Mamba runs
# without kernels, by tensors without memory, and the package that has these.
PLAIN_LINEAR = {
    "bailing_hybrid": (6.6, FLA),
    "glm5_next_text": (13.3, FLA),
    "granitemoehybrid": (1.8, MAMBA),
    "jamba": (3.95, MAMBA),
    "kimi_linear": (6.6, FLA),
    "nemotron_h": (1.17, MAMBA),
    "qwen3_5_moe_text": (0.43, FLA),
    "qwen3_next": (0.45, FLA),
    "qwen4_exp_text": (0.64, FLA),
}


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of one model; counts of parameters are exact.

    layers: decoder layers; moe_layers: those whose experts sonicmoe_hf computes. expert_weights: (E, out, in) of each
    weight of theirs. experts, embeddings, total: parameters; the embeddings' include the head's, which counts once where
    it is tied. hidden: the model's H; experts_hidden: of the experts' input, H unless they read a latent (nemotron_h).
    inner I, num_experts E, top_k K; up_rows: of the up projection for each of I, 2 with a gate.
    norms: of a layer's hidden states, more than two where what layers add is normalised too.
    heads: of the attention. mixer, mixer_output: features that the linear layers of attentions, linear attentions and
    Mamba layers make, and those that become hidden states again, averaged over the layers. head_norms: features of q and
    k where these have norms. attention_linears: the attentions' linear layers, which `lora_config` adapts.
    plain_inner: I of the dense and shared MLPs, summed over the layers; plain_copies: tensors of it that they keep.
    linear: parameters of all linear layers but the head. attention: "sdpa", or "eager" where a model has nothing
    else. streams: hidden states of a token between two layers (hyper-connections have several). kept_per_score,
    made_per_score: bytes that a layer's own attention keeps of a query and a key for backward, and makes beside that.
    gated_output: features of an attention's output that a sigmoid gates; gated_norms: of a layer's hidden states,
    with a sigmoid of their own in fp32. lightning: features of what lightning attention, plain PyTorch in fp32, makes,
    averaged over the layers. queries: features of all queries. index_heads: of the indexer that picks index_topk keys of
    a query, of which there is one for index_rate tokens. has_sinks: attention that from_pretrained replaces by
    "torch_sinks" on a GPU; in_pieces: by "torch_pieces". quantization: what its checkpoint declares, by the names of
    kernels/packed where it is of these; is_packed: by this package; is_dequantized: Transformers can load it in bf16;
    is_convertible: `sonicmoe-hf convert` makes bf16 of it. notes: what is estimated, in words.
    """

    name: str
    model_type: str
    layers: int
    moe_layers: int
    expert_weights: tuple[tuple[int, int, int], ...]
    experts: int
    embeddings: int
    total: int
    hidden: int
    experts_hidden: int
    inner: int
    num_experts: int
    top_k: int
    up_rows: int
    vocabulary: int
    heads: int
    mixer: int
    mixer_output: int
    attention_linears: list[AttentionLinear]
    head_norms: int
    plain_inner: int
    linear: int
    attention: str
    norms: float = 2.0
    streams: int = 1
    kept_per_score: float = 0.0
    made_per_score: float = 0.0
    plain_copies: int = 4
    gated_output: int = 0
    gated_norms: float = 0.0
    lightning: int = 0
    queries: int = 0
    index_heads: int = 0
    index_topk: int = 0
    index_rate: int = 1
    quantization: str | None = None
    is_packed: bool = False
    is_dequantized: bool = False
    is_convertible: bool = False
    has_sinks: bool = False
    in_pieces: bool = False
    notes: tuple[str, ...] = ()

    @property
    def rest(self) -> int:
        """Parameters that are no experts'."""
        return self.total - self.experts

    @property
    def largest_weight(self) -> int:
        """Parameters of the largest weight of the experts."""
        return max(num_experts * size_out * size_in for num_experts, size_out, size_in in self.expert_weights)

    @property
    def layer(self) -> int:
        """Parameters of a mixture-of-experts layer, with its share of the attention and the rest."""
        return self.experts // self.moe_layers + (self.rest - self.embeddings) // self.layers


def sizes_of_checkpoint(name: str) -> ModelSizes:
    """Read the sizes of a hub model or a local folder. Only its config.json is read.

    Raises:
        CheckpointError: no such folder, the hub cannot be reached, or config.json describes no model that can be built.
        UnsupportedModelError: as `sizes_of_model`.
    """
    return sizes_of_model(name, build_on_meta(name))


def sizes_of_model(name: str, model: PreTrainedModel) -> ModelSizes:
    """Read the sizes of a model on the meta device.

    Raises:
        UnsupportedModelError: it has no experts, some that sonicmoe_hf does not compute, or no loss, or its config lacks
            an entry. CheckpointError: its checkpoint is quantized in a way that is not known here.
    """
    config: Any = model.config.get_text_config()
    support, declared = check_accelerated(model), declared_quantization(model.config)
    quantization = None if declared is None else declared.format()
    if not computes_loss(model.config):
        raise UnsupportedModelError(
            f"{name}: Transformers loads {config.model_type} as a model without a loss, which no example of this package "
            "trains; plan for a checkpoint of its language model"
        )
    layers = list(find_layers(model))
    every_experts = [layer.experts for layer in layers]
    shapes = [matrix_shape(each, getattr(each, name)) for each in every_experts for name in weight_names(each)]
    num_experts, up, experts_hidden = shapes[0]
    inner = shapes[1][2]
    top_k = next((layer.router.top_k for layer in layers if layer.router is not None), None) or _entry(config, *TOP_K)
    decoder = model.get_decoder()  # without towers for images or sound
    mixers, names = _linear_layers(decoder, MIXERS), {name.rpartition(".")[2] for name, _ in decoder.named_modules()}
    outputs = [p for p in mixers if p.features_out == config.hidden_size and p.name.startswith("o")]
    widest = max((p.features_in for p in outputs), default=0)
    experts = {id(parameter) for each in every_experts for parameter in each.parameters()}
    parameters = list(model.parameters())
    ends = filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))
    embeddings = {id(parameter): parameter for module in ends for parameter in module.parameters()}
    score_bytes = _score_bytes(config, _entry(config, "num_attention_heads"))
    return ModelSizes(
        name=name,
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        moe_layers=min(len(layers), config.num_hidden_layers),  # of two kinds of experts in a layer both are its own
        expert_weights=tuple(shapes),
        experts=sum(parameter.numel() for parameter in parameters if id(parameter) in experts),
        embeddings=sum(parameter.numel() for parameter in embeddings.values()),
        total=sum(parameter.numel() for parameter in parameters),
        hidden=config.hidden_size,
        experts_hidden=experts_hidden,
        inner=inner,
        num_experts=num_experts,
        top_k=top_k,
        up_rows=up // inner,
        vocabulary=config.vocab_size,
        heads=_entry(config, "num_attention_heads"),
        mixer=_of_a_layer(config, ((p, p.features_out) for p in mixers if p not in outputs)),
        mixer_output=_of_a_layer(config, ((p, p.features_in) for p in outputs)),
        attention_linears=_linear_layers(model, ("Attention",)),
        head_norms=_of_a_layer(
            config,
            (
                (p, min(p.features_out, widest))  # a gate of the output may come from q_proj too
                for p in mixers
                if names & {f"{p.name[0]}_norm", f"{p.name[0]}_layernorm"} and p.name in ("q_proj", "k_proj")
            ),
        ),
        plain_inner=sum(
            module.in_features
            for module_name, module in decoder.named_modules()
            if isinstance(module, nn.Linear) and module_name.endswith("down_proj")
        ),
        plain_copies=7 if getattr(config, "swiglu_limit", None) else 4,
        linear=sum(
            module.weight.numel()
            for module in model.modules()
            if isinstance(module, nn.Linear) and module is not model.get_output_embeddings()
        ),
        attention=_attention(config),
        norms=max(2.0, _norms(decoder, config.hidden_size) / config.num_hidden_layers),
        streams=getattr(config, "hc_mult", 1),
        kept_per_score=score_bytes[0],
        gated_output=_of_a_layer(config, ((p, p.features_in) for p in outputs if _is_gated(mixers, p))),
        gated_norms=_norms(decoder, config.hidden_size, "GatedRMSNorm") / config.num_hidden_layers,
        lightning=_of_a_layer(
            config, ((p, p.features_in) for p in _linear_layers(decoder, ("Lightning",)) if p.name == "out_proj")
        ),
        queries=max((p.features_out for p in mixers if p.name.startswith("q")), default=0),
        index_heads=getattr(config, "index_n_heads", None) or 0,
        index_topk=getattr(config, "index_topk", None) or 0,
        index_rate=min((getattr(config, "compress_rates", None) or {"": 1}).values()),
        made_per_score=score_bytes[1],
        quantization=quantization,
        is_packed=declared is not None and declared.is_packed_here,
        is_dequantized=declared is not None and quantization == declared.method in DEQUANTIZED,
        is_convertible=_is_convertible(model.config),
        has_sinks=has_sinks(model),
        in_pieces=takes_pieces(model),
        notes=_notes(model, support),
    )


def _is_gated(mixers: list[AttentionLinear], output: AttentionLinear) -> bool:
    """Tell whether a sigmoid gates what an attention's last linear layer reads: the gate comes from q_proj, or from a
    layer of its own."""
    is_gate = {("q_proj", 2 * output.features_in), *((name, output.features_in) for name in ("gate_proj", "g_proj"))}
    return any((p.name, p.features_out) in is_gate for p in mixers)


def _norms(decoder: nn.Module, hidden: int, kind: str = "Norm") -> int:
    """Count the norms of hidden states in all layers, without those of all heads' q and k, which `head_norms` has.

    kind: a word in their classes' names. Of norms around others the inner ones' weights count."""
    weights = (
        getattr(getattr(module, "norm", module), "weight", None)
        for name, module in decoder.named_modules()
        if "layers." in name and kind in type(module).__name__ and not name.endswith(("q_norm", "k_norm"))
    )
    return sum(weight is not None and weight.shape == (hidden,) for weight in weights)


def _attention(config: Any) -> str:
    return "sdpa" if getattr(config, "_attn_implementation", None) == "sdpa" else "eager"


def _score_bytes(config: Any, heads: int) -> tuple[float, float]:
    """Count the bytes that a layer's attention keeps of a query and a key for backward, and those that it makes beside
    that, by what layers take at real sizes on tensors without memory."""
    if config.model_type in FP32_SCORES:  # and the compressed keys of DeepSeek-V4 beside the tokens'
        keys = 1.0 + 1.0 / min((getattr(config, "compress_rates", None) or {"": float("inf")}).values())
        return 4.0 * heads * keys, 8.5 * heads * keys
    if config.model_type in OF_HEADS:
        kept, made = OF_HEADS[config.model_type]
        return kept * heads, made * heads
    if _attention(config) == "eager":
        return of_eager(heads)
    if MASKED_BY_HEAD in (getattr(config, "layer_types", None) or ()):
        return 2.0 * heads, 5.2 * heads  # the mask in bf16; in bool, before it is joined
    return (2.0, 4.0) if getattr(config, "index_topk", None) else (0.0, 0.0)  # one mask for all heads


def of_eager(heads: int) -> tuple[float, float]:
    """Count as `_score_bytes` does the bytes of eager attention in bf16: probabilities; gradients of scores and
    probabilities."""
    return 2.0 * heads, 3 * 2.0 * heads


def _is_convertible(config: PreTrainedConfig) -> bool:
    try:
        declared = quantization_of(config.to_dict(), Path())
        return declared is not None and declared.stored_format() is not None
    except CheckpointError:
        return False


def _entry(config: Any, *names: str) -> int:
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


def _of_a_layer(config: Any, features: Iterable[tuple[AttentionLinear, int]]) -> int:
    """Count the features in a layer, on average."""
    return sum(linear.num_layers * count for linear, count in features) // config.num_hidden_layers


def _notes(model: PreTrainedModel, support: list[LayerSupport]) -> tuple[str, ...]:
    notes = []
    if any(layer.family is None for layer in support):
        notes.append("its router is not one that sonicmoe_hf knows: experts accelerated, sizes from the config")
    config: Any = model.config
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if any("linear" in kind or "mamba" in kind for kind in kinds):
        notes.append("what its linear attention or Mamba layers keep beside their projections' outputs is not counted")
    if (plain := PLAIN_LINEAR.get(config.get_text_config().model_type)) is not None:
        mebibytes, package = plain
        notes.append(
            f"without {package} (pip install {package}) one of its linear layers takes about {mebibytes} MiB a token, "
            "which is not counted"
        )
    if config.get_text_config() is not config:
        notes.append("parts for images or sound are counted as weights; their activations are not")
    return tuple(notes)
