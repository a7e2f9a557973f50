"""The sizes of a model that its training's memory follows from, read off its modules without weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...checkpoints.reading.config_only import build_on_meta
from ...checkpoints.reading.stored import quantization_of
from ...errors import CheckpointError, UnsupportedModelError
from ...formats.declared import declared_quantization
from ...layer.experts_module import matrix_shape, weight_names
from ...patching.moe_layers import find_layers
from ...patching.support import LayerSupport, check_accelerated
from ...private.transformers import computes_loss
from .attention_sizes import AttentionSizes, attention_sizes_of, entry_of

DEQUANTIZED = ("mxfp4", "fp8")  # examples/finetune.py --dequantize
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")


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
    plain_inner: I of the dense and shared MLPs, summed over the layers; plain_copies: tensors of it that they keep.
    linear: parameters of all linear layers but the head. streams: hidden states of a token between two layers
    (hyper-connections have several). gated_norms: of a layer's hidden states, with a sigmoid of their own in fp32.
    quantization: what its checkpoint declares, by the names of kernels/packed where it is of these; is_packed: by this
    package; can_dequantize: Transformers can load it in bf16; is_convertible: `sonicmoe-hf convert` makes bf16 of it.
    notes: what is estimated, in words.
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
    plain_inner: int
    linear: int
    attention: AttentionSizes
    norms: float = 2.0
    streams: int = 1
    plain_copies: int = 4
    gated_norms: float = 0.0
    quantization: str | None = None
    is_packed: bool = False
    can_dequantize: bool = False
    is_convertible: bool = False
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
    def layer_parameters(self) -> int:
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
    quantization = None if declared is None else declared.format_name()
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
    top_k = next((layer.router.top_k for layer in layers if layer.router is not None), None)
    decoder = model.get_decoder()  # without towers for images or sound
    experts = {id(parameter) for each in every_experts for parameter in each.parameters()}
    parameters = list(model.parameters())
    ends = filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))
    embeddings = {id(parameter): parameter for module in ends for parameter in module.parameters()}
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
        top_k=top_k or entry_of(config, *TOP_K),
        up_rows=up // inner,
        vocabulary=config.vocab_size,
        plain_inner=_plain_inner(decoder),
        plain_copies=7 if getattr(config, "swiglu_limit", None) else 4,
        linear=_linear_parameters(model),
        attention=attention_sizes_of(model),
        norms=max(2.0, _norms(decoder, config.hidden_size) / config.num_hidden_layers),
        streams=getattr(config, "hc_mult", 1),
        gated_norms=_norms(decoder, config.hidden_size, "GatedRMSNorm") / config.num_hidden_layers,
        quantization=quantization,
        is_packed=declared is not None and declared.is_packed_here,
        can_dequantize=declared is not None and declared.method in DEQUANTIZED and quantization == declared.method,
        is_convertible=_is_convertible(model.config),
        notes=_notes(model, support),
    )


def _plain_inner(decoder: nn.Module) -> int:
    """Sum I of the dense and shared MLPs."""
    linears = ((name, module) for name, module in decoder.named_modules() if isinstance(module, nn.Linear))
    return sum(linear.in_features for name, linear in linears if name.endswith("down_proj"))


def _linear_parameters(model: PreTrainedModel) -> int:
    """Count the parameters of all linear layers but the head."""
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    return sum(linear.weight.numel() for linear in linears if linear is not model.get_output_embeddings())


def _norms(decoder: nn.Module, hidden: int, kind: str = "Norm") -> int:
    """Count the norms of hidden states in all layers, without those of all heads' q and k, which `head_norms` has.

    kind: a word in their classes' names. Of norms around others the inner ones' weights count."""
    weights = (
        getattr(getattr(module, "norm", module), "weight", None)
        for name, module in decoder.named_modules()
        if "layers." in name and kind in type(module).__name__ and not name.endswith(("q_norm", "k_norm"))
    )
    return sum(weight is not None and weight.shape == (hidden,) for weight in weights)


def _is_convertible(config: PreTrainedConfig) -> bool:
    try:
        declared = quantization_of(config.to_dict(), Path())
        return declared is not None and declared.stored_format() is not None
    except CheckpointError:
        return False


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
