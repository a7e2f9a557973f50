"""The bytes that training takes on one GPU at its peak, and the moment of the peak.

Letters: T tokens of a step on this GPU, H hidden size, I experts' inner size, E experts, K experts per token, V
vocabulary, r rank. All formulas count bytes. Experts that read a latent have its size in place of H.

Where they come from:
- What a layer keeps for backward was counted by saved-tensor hooks over Transformers' modules, with the op of
  `moe_experts` (layer/experts_op.py: x, h and the routing) and PEFT's adapters; norms are Transformers', or Liger's.
- The loss is Transformers', in fp32: backward holds log-softmax, its gradient and the logits', 4 V each; Liger's none.
- What backward of a layer's experts holds at once is dh, a' and dx of its rows (layer/products.py), and packed weights
  expanded to bf16. FP8 products have codes transposed instead, and dh and dout in FP8, which is not more.
- Adam: torch's fused AdamW, moments in the weights' dtype; torchao's AdamW8bit, one byte each and a scale for 256.
- FSDP2: torch's fully_shard, a unit a layer and the rest in the root's, which stays gathered; ZeRO-3: DeepSpeed's bf16
  optimizer, with its default buckets.
- Expert parallelism: expert_parallel/exchange.py, whose rows have room for all ranks' pairs where it gathers few
  tokens. Experts and their adapters are split, the attention's adapters whole on every rank, the rest is FSDP2's.

Nothing here is fitted: tests/planning/test_measured_peaks.py compares the sums with every peak in benchmarks/results.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from .run_time import MAX_ROWS, gathers_tokens, is_in_pieces, makes_room_for_all_ranks, packed_nbytes
from .sizes import ModelSizes, Projection, of_eager

GIB = 2**30
METHODS = ("full", "lora", "qlora")
SHARDED = ("FSDP2", "ZeRO-3", "expert parallelism")
LIVE_PARAMETERS, REDUCE_BUCKET = 10**9, 5 * 10**8  # DeepSpeed's stage3_max_live_parameters and reduce_bucket_size
OFFLOADED = 2  # hidden states between layers that are on the GPU while the others are in host memory
ADAM8 = 2 * (1 + 4 / 256)  # bytes of two moments in torchao's and bitsandbytes' AdamW8bit: 256 share a scale


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training of a model.

    method: of METHODS. parallel: "one GPU", "DDP" or one of SHARDED, over `gpus`. tokens: of a step on each GPU, in
    sequences of `sequence`. weights: "bf16" or "fp32", of what is trained in full; fp32 weights compute in bf16 by
    autocast. optimizer: "adam", or "adam8bit", which steps in backward. experts, linear: format of frozen experts and
    of the attention's linear layers, "bf16" or a packed one. r, experts_r: ranks; 0: no adapters there. targets: the
    attention's adapted linear layers; None: all. checkpointing; save: what a layer keeps; offloading: whether what is
    kept between checkpointed layers goes to host memory. liger: whether Liger's kernels compute the rest; "loss": its
    loss alone. extra_rows: of token rounding, for each expert. attention: its implementation; None: the model's own.
    keeps_expanded: whether backward keeps both expanded weights of a layer, as it does where there is room.
    experts_memory: bytes of experts that stay on the GPU while the others are in host memory; None: all are on the GPU.
    """

    method: str
    tokens: int
    sequence: int = 4096
    parallel: str = "one GPU"
    gpus: int = 1
    weights: str = "bf16"
    optimizer: str = "adam"
    experts: str = "bf16"
    linear: str = "bf16"
    r: int = 16
    experts_r: int = 16
    targets: tuple[str, ...] | None = None
    checkpointing: bool = True
    offloading: bool = False
    liger: bool | str = True
    save: str = "preactivation"
    extra_rows: int = 0
    attention: str | None = None
    keeps_expanded: bool = False
    experts_memory: int | None = None

    @property
    def full(self) -> bool:
        """Tell whether all weights are trained."""
        return self.method == "full"

    @property
    def fp32_stream(self) -> bool:
        """Tell whether hidden states between the layers are in fp32."""
        return self.full and self.weights == "fp32" and self.parallel == "one GPU"

    @property
    def splits_experts(self) -> bool:
        """Tell whether ranks have experts of their own."""
        return self.parallel == "expert parallelism"

    @property
    def shards(self) -> int:
        """Over how many GPUs weights are sharded."""
        return self.gpus if self.parallel in SHARDED else 1

    @property
    def width(self) -> int:
        """Bytes of a trained weight where it is kept."""
        return 4 if self.weights == "fp32" and self.parallel != "ZeRO-3" else 2

    def adapted(self, sizes: ModelSizes) -> list[Projection]:
        """Return the attention's linear layers that have adapters."""
        return [p for p in sizes.projections if (self.targets is None or p.name in self.targets) and self.r]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU at the peak, by part, and the moment of the peak; host: of experts in host memory beside them."""

    moment: str
    experts: float = 0.0
    rest: float = 0.0
    gradients: float = 0.0
    optimiser: float = 0.0
    adapters: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    communication: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """All parts on the GPU."""
        return sum(value for name, value in vars(self).items() if name not in ("moment", "host"))


def memory(sizes: ModelSizes, training: Training) -> Memory:
    """Compute the peak: the largest of the loss, a layer's backward at either end of the model, the optimiser's step."""
    fixed, tokens, checkpointing = _fixed(sizes, training), training.tokens, training.checkpointing
    layer, stream = tokens * layer_bytes(sizes, training), tokens * stream_bytes(sizes, training)
    between = OFFLOADED if training.offloading else sizes.layers
    kept = (between * stream if checkpointing else sizes.layers * layer) + _casts(sizes, training)
    kept_by_last = (0.0 if checkpointing else layer) + stream  # when only the last layer's backward is left
    weights = sizes.experts / sizes.moe_layers if training.keeps_expanded else sizes.largest_weight
    expanded = 0.0 if training.experts == "bf16" else 2.0 * weights
    recomputed = (layer if checkpointing else 0.0) + expanded / (training.gpus if training.splits_experts else 1)
    root, gathered = _root(sizes, training), _communication(sizes, training)
    gradients, head = _gradients(sizes, training), _head(sizes, training)
    own, waiting = _layer_gradients(sizes, training)
    adam = training.optimizer == "adam" or not training.full
    earlier = max(gradients - own - head, 0.0) if adam else 0.0
    buckets = gradients if training.parallel == "DDP" else 0.0  # which are there all the time
    in_loss = kept + tokens * norm_bytes(sizes.hidden, training)
    moments = [
        replace(
            fixed,
            moment="loss",
            gradients=buckets,
            activations=in_loss,
            logits=_loss(sizes, training),
            communication=root,
        ),
        replace(fixed, moment="optimiser's step", gradients=gradients, communication=root),
    ]
    before, after = backward_bytes(sizes, training)
    for workspace, of_layer in ((before, waiting), (after, waiting + own)):
        working, backward = recomputed + tokens * workspace, replace(fixed, communication=gathered)
        first = {"activations": kept + working, "gradients": buckets + of_layer, "logits": head}
        last = {
            "activations": kept_by_last + working,
            "gradients": earlier + of_layer,
            "logits": head if adam else 0.0,
        }
        moments.append(replace(backward, moment="first layer's backward", **first))
        moments.append(replace(backward, moment="last layer's backward", **last))
    return max(moments, key=lambda moment: moment.total)


# weights, optimiser, gradients


def adapter_parameters(sizes: ModelSizes, training: Training) -> tuple[int, int]:
    """Count the parameters of adapters on the experts and on the attention."""
    if training.full:
        return 0, 0
    on_experts = sum(count * training.experts_r * (out + in_) for count, out, in_ in sizes.expert_weights)
    on_attention = sum(training.r * p.num_layers * (p.features_in + p.features_out) for p in training.adapted(sizes))
    return on_experts, on_attention


def stored_bytes(sizes: ModelSizes, format: str) -> float:
    """Count the bytes of the experts' weights and biases in a format.

    Raises:
        ValueError: the format does not take experts of this size.
    """
    if format == "bf16":
        return 2.0 * sizes.experts
    biases = sizes.experts - sum(math.prod(shape) for shape in sizes.expert_weights)
    orders = itertools.cycle(("concatenated" if sizes.up_rows == 2 else "whole", "whole"))  # up and down take turns
    return 2.0 * biases + sum(
        packed_nbytes(format, shape, order) for shape, order in zip(sizes.expert_weights, orders)
    )


def _held_adapters(sizes: ModelSizes, training: Training) -> float:
    on_experts, on_attention = adapter_parameters(sizes, training)
    if training.splits_experts:  # the attention's are whole on every rank
        return on_experts / training.gpus + on_attention
    return (on_experts + on_attention) / training.shards


def _fixed(sizes: ModelSizes, training: Training) -> Memory:
    """Compute the memory that is taken all the time: weights, the optimiser's state and adapters."""
    width = training.width if training.full else 2
    experts, rest, optimiser = float(width * sizes.experts), float(width * sizes.rest), 0.0
    if training.full:
        adam = {"adam": 2.0 * width, "adam8bit": ADAM8}[training.optimizer]
        optimiser = sizes.total * (12.0 if training.parallel == "ZeRO-3" else adam)  # fp32 weights and two moments
    if training.method == "qlora":
        experts = stored_bytes(sizes, training.experts)
        if training.linear != "bf16":
            rest -= sizes.linear * (2 - 0.5 - 1 / 64)  # bitsandbytes: 4 bits, and 8 of a scale for 64, about
    host = 0.0
    if training.experts_memory is not None:  # whole layers, and two buffers for the others
        layer = experts / sizes.moe_layers
        kept = min(sizes.moe_layers, training.experts_memory // layer)
        host, experts = experts - kept * layer, layer * min(sizes.moe_layers, kept + 2)
    shards = training.shards
    adapters = (4.0 + (ADAM8 if training.optimizer == "adam8bit" else 8.0)) * _held_adapters(sizes, training)
    return Memory(
        moment="",
        experts=experts / shards,
        rest=rest / shards,
        optimiser=optimiser / shards,
        adapters=adapters,
        host=host,
    )


def _gradients(sizes: ModelSizes, training: Training) -> float:
    """Count all gradients, as they are at the end of backward."""
    if not training.full:
        return 4.0 * _held_adapters(sizes, training)  # the examples have DDP's buckets be the gradients
    if training.optimizer == "adam8bit":  # freed as soon as a weight is updated, from an fp32 copy of it
        return float(training.width * sizes.largest_weight)
    return float(training.width * sizes.total) / training.shards


def _layer_gradients(sizes: ModelSizes, training: Training) -> tuple[float, float]:
    """Count (gradients of the layer whose backward runs, those of the layer before that wait to be reduced)."""
    in_experts = sizes.experts / sizes.moe_layers
    if not training.full:
        return 0.0, 0.0
    if _is_in_pieces(sizes, training):  # which are summed in fp32
        own, waiting = _layer_gradients(sizes, replace(training, tokens=1))
        return own + 4.0 * in_experts, waiting
    if training.optimizer == "adam8bit":  # of the experts' two weights, then new moments of one
        return 2.0 * in_experts + 2.0 * sizes.largest_weight, 0.0
    if training.splits_experts:
        return training.width * (sizes.layer - in_experts + in_experts / training.gpus), 0.0
    if training.parallel == "FSDP2":
        return 2.0 * sizes.layer, 2.0 * sizes.layer
    return float(training.width * sizes.layer), 0.0


def _head(sizes: ModelSizes, training: Training) -> float:
    """Count the gradient of the head's weight, whole, from the loss on."""
    return (4.0 if training.fp32_stream else 2.0) * sizes.vocabulary * sizes.hidden if training.full else 0.0


# activations, for each token

STREAM_COPIES = 5.5  # of the streams in fp32, that a layer's two hyper-connections keep, by tensors without memory


def stream_bytes(sizes: ModelSizes, training: Training) -> float:
    """Count a token's hidden states between two layers."""
    return (4.0 if training.fp32_stream else 2.0) * sizes.hidden * sizes.streams


def norm_bytes(features: int, training: Training) -> float:
    """Count what an RMSNorm keeps: its input with Liger, else an fp32 copy, and the normalised values where its weight is
    trained."""
    if training.fp32_stream:
        return (4.0 if training.liger is True else 8.0) * features
    return (2.0 if training.liger is True else 6.0 if training.full else 4.0) * features


def layer_bytes(sizes: ModelSizes, training: Training) -> float:
    """Count what a layer keeps of a token for backward: norms, inputs of linear layers, attention, h, adapters' rows."""
    hidden, full, adapted = sizes.hidden, training.full, training.adapted(sizes)
    inputs = 5 if training.fp32_stream else 2  # q, k and v share one, but for casts of autocast
    if not full:  # each adapter has a copy of its own
        inputs = sum(p.features_in == hidden and p.name != "o_proj" for p in adapted)
    kept = 2 * norm_bytes(hidden, training) + 2.0 * hidden * inputs
    kept += 2.0 * sizes.experts_hidden if training.experts_r and not full else 0.0
    if full and sizes.experts_hidden != hidden:  # latents: what the experts read, and what becomes hidden states again
        kept += 2 * 2.0 * sizes.experts_hidden
    kept += 2.0 * (sizes.mixer + sizes.mixer_output) + norm_bytes(sizes.head_norms, replace(training, weights="bf16"))
    if full or any(p.name == "o_proj" for p in adapted):
        kept += 2.0 * sizes.mixer_output  # the contiguous copy that o_proj reads
    read = sizes.projections if full else adapted
    kept += sum(2.0 * p.features_in for p in read if p.features_in != hidden and p.name != "o_proj")  # latents
    kept += _of_pair(sizes, training)[0] * training.sequence
    if sizes.streams > 1:
        kept += STREAM_COPIES * 4.0 * sizes.hidden * sizes.streams
    rows = _rows(sizes, training)
    kept += 2.0 * sizes.up_rows * sizes.inner * rows if _keeps_h(sizes, training) else 0.0
    kept += 2 * 2.0 * max(training.experts_r, 16) * rows if training.experts_r and not full else 0.0
    kept += 4.0 * sizes.num_experts + 28.0 * sizes.top_k  # the router's scores; weights, ids, and where rows stand
    kept += (
        4 * 2.0 * sizes.plain_inner / sizes.layers
    )  # dense and shared MLPs: gate, its activation, up, their product
    return kept + (0.0 if _gathers_tokens(sizes, training) else _exchanged(sizes, training))


def _of_pair(sizes: ModelSizes, training: Training) -> tuple[float, float]:
    """Count the bytes of a pair of tokens in a layer's attention, (kept for backward, made beside that)."""
    if training.attention in (None, sizes.attention):
        return sizes.kept_of_pair, sizes.made_of_pair
    return of_eager(sizes.heads) if training.attention == "eager" else (0.0, 0.0)


def backward_bytes(sizes: ModelSizes, training: Training) -> tuple[float, float]:
    """Count what a layer's backward holds beside what was kept, (before, after) the gradients of the experts' weights.

    Its op makes dh and a' and frees h, then makes dx, then the gradients, and frees dh (layer/products.py). Adapters
    need a' only before dx.
    """
    rows = 2.0 * (MAX_ROWS / training.tokens if _is_in_pieces(sizes, training) else _rows(sizes, training))
    dh, a, dx = rows * sizes.up_rows * sizes.inner, rows * sizes.inner, rows * sizes.experts_hidden
    h = dh if _keeps_h(sizes, training) else 0.0
    around = 3 * stream_bytes(sizes, training)
    if training.splits_experts:  # the output's gradient from all ranks, and x's for them
        around += 2 * (2.0 * sizes.experts_hidden + _exchanged(sizes, training))
    before = max(dh + a + dh - h, dh + dx - h + (a if training.full else 0.0)) + around
    if _is_in_pieces(sizes, training):  # attention's: dq in fp32 too, dk and dv of every query head, and dout
        before = max(before, 12.0 * sizes.mixer_output)
    before = max(before, _of_pair(sizes, training)[1] * training.sequence)
    return before, (a - h + around) if training.full else 0.0


def _is_in_pieces(sizes: ModelSizes, training: Training) -> bool:
    """Tell whether experts are computed in pieces of the tokens."""
    is_top_k = not training.extra_rows and not training.splits_experts
    return is_top_k and is_in_pieces(training.tokens, training.tokens * sizes.top_k)


def _keeps_h(sizes: ModelSizes, training: Training) -> bool:
    return training.save == "preactivation" and not _is_in_pieces(sizes, training)


def _rows(sizes: ModelSizes, training: Training) -> float:
    """Count the routed rows that there is memory for."""
    rows = sizes.top_k + sizes.num_experts * training.extra_rows / training.tokens
    has_room_for_all = _gathers_tokens(sizes, training) and makes_room_for_all_ranks(_gathered_bytes(sizes, training))
    return rows * (training.gpus if has_room_for_all else 1)


def _gathered_bytes(sizes: ModelSizes, training: Training) -> int:
    return 2 * sizes.experts_hidden * training.tokens * training.gpus


def _gathers_tokens(sizes: ModelSizes, training: Training) -> bool:
    """Tell whether expert parallelism gathers the tokens of all ranks."""
    return training.splits_experts and gathers_tokens(training.gpus, _gathered_bytes(sizes, training))


def _exchanged(sizes: ModelSizes, training: Training) -> float:
    """Count the hidden states that came from other ranks, of all their tokens where these are gathered."""
    if not training.splits_experts:
        return 0.0
    copies = training.gpus if _gathers_tokens(sizes, training) else min(sizes.top_k, training.gpus)
    return 2.0 * sizes.experts_hidden * (copies - 1)


def _casts(sizes: ModelSizes, training: Training) -> float:
    """Count the fp32 weights in bf16, which autocast keeps for backward."""
    if not training.fp32_stream or training.checkpointing:
        return 0.0
    return 2.0 * (sizes.total - sizes.embeddings + (0 if training.liger else sizes.vocabulary * sizes.hidden))


def _loss(sizes: ModelSizes, training: Training) -> float:
    """Count the logits and what becomes of them."""
    if not training.liger:
        return 3 * 4.0 * sizes.vocabulary * training.tokens
    # Liger's FLCE: chunks of tokens, whose logits are as large as the hidden states
    per_chunk = math.ceil(training.tokens / math.ceil(sizes.vocabulary / sizes.hidden))
    chunk = 2 ** math.ceil(math.log2(max(per_chunk, 1)))
    return 6.0 * sizes.vocabulary * min(chunk, training.tokens) + _head(sizes, training)


# several GPUs


def _root(sizes: ModelSizes, training: Training) -> float:
    """Count what stays gathered: embeddings and head, or in Transformers' expert parallelism the head alone."""
    head = sizes.vocabulary * sizes.hidden if training.splits_experts else 0
    return 2.0 * (sizes.embeddings if training.parallel == "FSDP2" else head)


def _communication(sizes: ModelSizes, training: Training) -> float:
    """Count what is gathered, or waits to be sent, while a layer's backward runs."""
    outside_experts = 2.0 * (sizes.layer - sizes.experts // sizes.moe_layers)
    if training.parallel == "FSDP2":
        in_flight = 1 if training.full else 2  # the next layer's weights come while this one's backward runs
        gathered = outside_experts + stored_bytes(sizes, training.experts) / sizes.moe_layers
        return _root(sizes, training) + in_flight * gathered
    if training.parallel == "ZeRO-3":
        return 2.0 * min(LIVE_PARAMETERS, sizes.total) + 2 * 2.0 * REDUCE_BUCKET
    return _root(sizes, training) + outside_experts if training.splits_experts else 0.0
