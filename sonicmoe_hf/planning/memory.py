"""How many bytes training takes on one GPU at its peak, and at which moment that is.

Letters: T tokens of a step on this GPU, H hidden size, I experts' inner size, E experts, K experts per token, V
vocabulary, r rank. All formulas count bytes; a token's are multiplied by T at the end. Experts that read a latent have
its size in place of H.

Where they come from:
- What a layer keeps for backward was counted by saved-tensor hooks over the modules of Transformers 5.23, with the op of
  `moe_experts` (layer/experts_op.py: x, h and the routing) and PEFT 0.21; norms are Transformers' in fp32, or Liger's.
- The loss is Transformers' ForCausalLMLoss in fp32: its backward holds the log-softmax, its gradient and that of the
  logits, 4 V each; Liger's fused loss keeps none of them.
- What backward of a layer's experts holds at once is dh, a' and dx of its rows (layer/experts_op.py).
- Adam: torch's fused AdamW, moments in the weights' dtype; torchao's AdamW8bit, one byte each and a scale for 256.
- FSDP2: torch's fully_shard, a unit a layer and the rest in the root's, which stays gathered; ZeRO-3: DeepSpeed's bf16
  optimizer, with its default buckets (stage3_max_live_parameters 1e9, reduce_bucket_size 5e8).
- Expert parallelism: expert_parallel/exchange.py, whose rows for two ranks have room for all tokens of both. Experts and
  their adapters are split, the attention's adapters whole on every rank, the rest is FSDP2's.
- Packed experts: the shapes of kernels/quantized.py; bitsandbytes' NF4 for linear layers.

Nothing here is fitted: tests/planning/test_measured_peaks.py compares the sums with every peak in benchmarks/results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..kernels.quantized import stored_shapes
from .activations import backward_bytes, cast_bytes, layer_bytes, norm_bytes, stream_bytes
from .sizes import ModelSizes
from .training import Training

GIB = 2**30
LIVE_PARAMETERS, REDUCE_BUCKET = 10**9, 5 * 10**8  # DeepSpeed's defaults
ADAM8_BLOCK = 256  # values that share a scale in torchao's AdamW8bit
ORDERS_OF_UP = {2: "concatenated"}  # rows of the up projection for each of I: how they lie; up and down take turns


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak, by part, and the moment of the peak."""

    moment: str
    experts: float
    rest: float
    gradients: float
    optimiser: float
    adapters: float
    activations: float
    logits: float
    communication: float

    @property
    def total(self) -> float:
        """All parts."""
        return sum(value for name, value in vars(self).items() if name != "moment")


def memory(sizes: ModelSizes, training: Training) -> Memory:
    """The peak: the largest of the loss, a layer's backward at either end of the model, and the optimiser's step."""
    tokens, fixed, gradients = training.tokens, _fixed(sizes, training), _gradients(sizes, training)
    layer = tokens * layer_bytes(sizes, training)
    stream = tokens * stream_bytes(sizes, training)
    kept = sizes.layers * (stream if training.checkpointing else layer) + cast_bytes(sizes, training)
    beside = (layer if training.checkpointing else 0.0) + _expanded(sizes, training)
    final = tokens * norm_bytes(sizes.hidden, training)
    head, root, gathered = _head_gradient(sizes, training), _root(sizes, training), _communication(sizes, training)
    before, after = (tokens * bytes_of_token for bytes_of_token in backward_bytes(sizes, training))
    own, in_flight = _layer_gradients(sizes, training)
    left = layer if not training.checkpointing else 0.0  # of the last layer, when only its backward is left
    earlier = max(gradients - own - head, 0.0) if training.optimizer == "adam" else 0.0
    last_head = head if training.optimizer == "adam" else 0.0
    candidates = [
        replace(fixed, moment="loss", activations=kept + final, logits=_loss(sizes, training), communication=root),
        *(
            replace(
                fixed,
                moment="first layer's backward",
                gradients=in_flight + whole,
                activations=kept + beside + workspace,
                logits=head,
                communication=gathered,
            )
            for workspace, whole in ((before, 0.0), (after, own))
        ),
        *(
            replace(
                fixed,
                moment="last layer's backward",
                gradients=earlier + in_flight + whole,
                activations=left + beside + stream + workspace,
                logits=last_head,
                communication=gathered,
            )
            for workspace, whole in ((before, 0.0), (after, own))
        ),
        replace(fixed, moment="optimiser's step", gradients=gradients, communication=root),
    ]
    return max(candidates, key=lambda candidate: candidate.total)


# what is there all the time


def adapter_parameters(sizes: ModelSizes, training: Training) -> tuple[int, int]:
    """Parameters of adapters on the experts and on the attention."""
    if training.full:
        return 0, 0
    on_experts = sum(
        num_experts * training.experts_r * (size_out + size_in)
        for num_experts, size_out, size_in in sizes.expert_weights
    )
    on_attention = sum(
        training.r * projection.num_layers * (projection.features_in + projection.features_out)
        for projection in training.adapted(sizes)
    )
    return on_experts, on_attention


def _held_adapters(sizes: ModelSizes, training: Training) -> float:
    """Parameters of adapters on one GPU."""
    on_experts, on_attention = adapter_parameters(sizes, training)
    if training.parallel == "expert parallelism":  # the attention's are whole on every rank
        return on_experts / training.gpus + on_attention
    return (on_experts + on_attention) / training.shards


def stored_bytes(sizes: ModelSizes, format: str) -> float:
    """Of the experts' weights and biases in a format.

    Raises:
        ValueError: the format does not take experts of this size.
    """
    if format == "bf16":
        return 2.0 * sizes.experts
    biases = sizes.experts - sum(math.prod(shape) for shape in sizes.expert_weights)
    total = 2.0 * biases
    order = ORDERS_OF_UP.get(sizes.up_rows, "whole")
    for place, shape in enumerate(sizes.expert_weights):
        stored = stored_shapes(format, shape, "whole" if place % 2 else order)
        width = 4 if format == "fp8" else 1  # of a scale
        total += math.prod(stored.codes) + width * math.prod(stored.scales) + 4 * math.prod(stored.state or (0,))
    return total


def _fixed(sizes: ModelSizes, training: Training) -> Memory:
    """Weights, the optimiser's state and adapters, whose gradients are apart."""
    shards = training.shards
    experts, rest = 2.0 * sizes.experts, 2.0 * sizes.rest
    optimiser = 0.0
    if training.full and training.parallel == "ZeRO-3":
        optimiser = 12.0 * sizes.total  # fp32 weights and two moments, beside the bf16 weights
    elif training.full and training.optimizer == "adam8bit":
        optimiser = 2 * (1 + 4 / ADAM8_BLOCK) * sizes.total
    elif training.full:
        width = 4 if training.weights == "fp32" else 2
        experts, rest, optimiser = width * sizes.experts, width * sizes.rest, 2.0 * width * sizes.total
    if training.method == "qlora":
        experts = stored_bytes(sizes, training.experts)
        if training.linear != "bf16":
            in_attention = sum(p.num_layers * p.features_in * p.features_out for p in sizes.projections)
            rest -= in_attention * (2 - 0.5 - 1 / 64)  # bitsandbytes: 4 bits, and 8 of a scale for 64, about
    return Memory(
        moment="", experts=experts / shards, rest=rest / shards, gradients=0.0, optimiser=optimiser / shards,
        adapters=12.0 * _held_adapters(sizes, training), activations=0.0, logits=0.0, communication=0.0,
    )  # fmt: skip


def _gradients(sizes: ModelSizes, training: Training) -> float:
    """All gradients, as they are at the end of backward."""
    shards = training.shards
    if not training.full:
        buckets = 2 if training.parallel == "DDP" else 1
        return 4.0 * buckets * _held_adapters(sizes, training)
    width = 4 if training.weights == "fp32" and training.parallel != "ZeRO-3" else 2
    if training.optimizer == "adam8bit":  # freed as soon as a weight is updated, from an fp32 copy of it
        return float(width * sizes.largest_weight)
    return float(width * sizes.total) / shards


def _layer_gradients(sizes: ModelSizes, training: Training) -> tuple[float, float]:
    """(gradients of the layer whose backward runs, those of the layer before that wait to be reduced)."""
    if not training.full:
        return 0.0, 0.0
    if (
        training.optimizer == "adam8bit"
    ):  # of the experts' two weights, then new moments of one, before they are stored
        return 2.0 * sizes.experts / sizes.moe_layers + 2.0 * sizes.largest_weight, 0.0
    if training.parallel == "ZeRO-3":
        return 2.0 * sizes.layer, 0.0  # the layer's before goes into the buckets
    if training.parallel == "FSDP2":
        return 2.0 * sizes.layer, 2.0 * sizes.layer
    width = 4.0 if training.weights == "fp32" else 2.0
    if training.parallel == "expert parallelism":
        own = sizes.experts / sizes.moe_layers / training.gpus
        return width * (own + sizes.layer - sizes.experts / sizes.moe_layers), 0.0
    return width * sizes.layer, 0.0


def _expanded(sizes: ModelSizes, training: Training) -> float:
    """The one packed weight that is expanded at a time."""
    if training.method != "qlora" or training.experts == "bf16":
        return 0.0
    return 2.0 * sizes.largest_weight / (training.gpus if training.parallel == "expert parallelism" else 1)


def _loss(sizes: ModelSizes, training: Training) -> float:
    if not training.liger:
        return 3 * 4.0 * sizes.vocabulary * training.tokens
    # Liger's FLCE: chunks of tokens, whose logits are as large as the hidden states
    per_chunk = math.ceil(training.tokens / math.ceil(sizes.vocabulary / sizes.hidden))
    chunk = 2 ** math.ceil(math.log2(max(per_chunk, 1)))
    return 6.0 * sizes.vocabulary * min(chunk, training.tokens) + _head_gradient(sizes, training)


def _head_gradient(sizes: ModelSizes, training: Training) -> float:
    """Of the head's weight, whole, from the loss on."""
    if not training.full:
        return 0.0
    return (4.0 if training.fp32_stream else 2.0) * sizes.vocabulary * sizes.hidden


# several GPUs


def _root(sizes: ModelSizes, training: Training) -> float:
    """What is gathered from the first layer's forward to the last one's backward: embeddings and head."""
    return 2.0 * sizes.embeddings if training.parallel in ("FSDP2", "expert parallelism") else 0.0


def _communication(sizes: ModelSizes, training: Training) -> float:
    """What is gathered, or waits to be sent, while a layer's backward runs."""
    if training.parallel == "FSDP2":
        in_flight = 1 if training.full else 2  # the next layer's weights come while this one's backward runs
        in_experts = sizes.experts // sizes.moe_layers
        gathered = 2.0 * (sizes.layer - in_experts) + stored_bytes(sizes, training.experts) / sizes.moe_layers
        return _root(sizes, training) + in_flight * gathered
    if training.parallel == "ZeRO-3":
        return 2.0 * min(LIVE_PARAMETERS, sizes.total) + 2 * 2.0 * REDUCE_BUCKET
    if training.parallel == "expert parallelism":
        return _root(sizes, training) + 2.0 * (sizes.layer - sizes.experts // sizes.moe_layers)
    return 0.0
