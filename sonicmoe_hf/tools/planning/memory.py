"""The bytes that training takes on one GPU at its peak, and the moment of the peak.

All formulas count bytes, with the letters of step.py, which counts what tokens take. Where the others come from:
- The loss is Transformers', in fp32: backward holds log-softmax, its gradient and the logits', 4 bytes each for the
  whole vocabulary; Liger's none.
- Backward of a layer expands packed weights to bf16, one at a time, as all GPUs do but Hopper's with few rows.
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
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .run_time import packed_nbytes
from .sizes import ModelSizes
from .step import Step

GIB = 2**30
LIVE_PARAMETERS, REDUCE_BUCKET = 10**9, 5 * 10**8  # DeepSpeed's stage3_max_live_parameters and reduce_bucket_size
RESIDENT_STATES = 2  # hidden states between layers that are on the GPU while the others are in host memory
ADAM8 = 2 * (1 + 4 / 256)  # bytes of two moments in torchao's and bitsandbytes' AdamW8bit: 256 share a scale


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


def memory_of(step: Step) -> Memory:
    """Compute the peak: the largest of the loss, a layer's backward at either end of the model, the optimiser's step."""
    fixed = _fixed_memory(step)
    at_moments = [_in_loss(step, fixed), _in_optimiser_step(step, fixed), *_in_backward(step, fixed)]
    return max(at_moments, key=lambda memory: memory.total)


def _in_loss(step: Step, fixed: Memory) -> Memory:
    sizes, training = step
    last_norm = training.tokens * step.norm_bytes(sizes.hidden, training.fp32_stream)
    return replace(
        fixed,
        moment="loss",
        gradients=_bucket_bytes(step),
        activations=_kept_bytes(step) + last_norm,
        logits=_logits_bytes(step),
        communication=_root_bytes(step),
    )


def _in_optimiser_step(step: Step, fixed: Memory) -> Memory:
    return replace(fixed, moment="optimiser's step", gradients=_gradients(step), communication=_root_bytes(step))


def _in_backward(step: Step, fixed: Memory) -> Iterator[Memory]:
    """Yield the memory in backward of its first layer, when all layers still keep what they need, and of its last: before
    the gradients of the experts' weights, and after them."""
    training = step.training
    backward = replace(fixed, communication=_communication(step))
    layer, stream = training.tokens * step.layer_bytes, training.tokens * step.stream_bytes
    recomputed = (layer if training.checkpointing else 0.0) + _bytes_expanded_in_backward(step)
    kept_by_last = (0.0 if training.checkpointing else layer) + stream
    own, waiting = _layer_gradients(step)
    head = _head_gradient(step)
    collects_gradients = training.optimizer == "adam" or not training.full  # until the optimiser's step
    earlier = max(_gradients(step) - own - head, 0.0) if collects_gradients else 0.0
    for workspace, of_layer in zip(step.backward_bytes, (waiting, waiting + own)):
        working = recomputed + training.tokens * workspace
        yield replace(
            backward,
            moment="first layer's backward",
            activations=_kept_bytes(step) + working,
            gradients=_bucket_bytes(step) + of_layer,
            logits=head,
        )
        yield replace(
            backward,
            moment="last layer's backward",
            activations=kept_by_last + working,
            gradients=earlier + of_layer,
            logits=head if collects_gradients else 0.0,
        )


# activations


def _kept_bytes(step: Step) -> float:
    """Count the activations that all layers keep for backward, and the casts of weights by autocast."""
    sizes, training = step
    if not training.checkpointing:
        return sizes.layers * (training.tokens * step.layer_bytes) + _cast_bytes(step)
    between_layers = RESIDENT_STATES if training.offloading else sizes.layers
    return between_layers * (training.tokens * step.stream_bytes) + _cast_bytes(step)


def _cast_bytes(step: Step) -> float:
    """Count the fp32 weights in bf16, which autocast keeps for backward."""
    sizes, training = step
    if not training.fp32_stream or training.checkpointing:
        return 0.0
    return 2.0 * (sizes.total - sizes.embeddings + (0 if training.liger else sizes.vocabulary * sizes.hidden))


def _bytes_expanded_in_backward(step: Step) -> float:
    """Count the packed weights of a layer that its backward has expanded to bf16 at a time."""
    sizes, training = step
    if training.experts == "bf16":
        return 0.0
    of_experts = sizes.experts / sizes.moe_layers
    parameters = {0: 0.0, 1: sizes.largest_weight, 2: of_experts}[training.expanded]
    return 2.0 * parameters / (training.gpus if training.splits_experts else 1)


def _logits_bytes(step: Step) -> float:
    """Count the logits and what becomes of them."""
    sizes, training = step
    if not training.liger:
        return 3 * 4.0 * sizes.vocabulary * training.tokens
    # Liger's FLCE: chunks of tokens, whose logits are as large as the hidden states
    per_chunk = math.ceil(training.tokens / math.ceil(sizes.vocabulary / sizes.hidden))
    chunk = 2 ** math.ceil(math.log2(max(per_chunk, 1)))
    return 6.0 * sizes.vocabulary * min(chunk, training.tokens) + _head_gradient(step)


# weights, optimiser, gradients


def experts_bytes(sizes: ModelSizes, format: str) -> float:
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


def expanded_bytes(sizes: ModelSizes, layers: int) -> float:
    """Count the bytes of the experts of so many layers, expanded to bf16."""
    return 2.0 * sizes.experts / sizes.moe_layers * layers


def _fixed_memory(step: Step) -> Memory:
    """Compute the memory that is taken all the time: weights, the optimiser's state and adapters."""
    sizes, training = step
    width = training.width if training.full else 2
    experts, rest, optimiser = float(width * sizes.experts), float(width * sizes.rest), 0.0
    if training.full:
        adam = {"adam": 2.0 * width, "adam8bit": ADAM8}[training.optimizer]
        optimiser = sizes.total * (12.0 if training.parallel == "ZeRO-3" else adam)  # fp32 weights and two moments
    if training.method == "qlora":
        experts = experts_bytes(sizes, training.experts)
        if training.linear != "bf16":
            rest -= sizes.linear * (2 - 0.5 - 1 / 64)  # bitsandbytes: 4 bits, and 8 of a scale for 64, about
    host = 0.0
    if training.experts_memory is not None:  # whole layers, and two buffers for the others
        of_layer = experts / sizes.moe_layers
        resident_layers = min(sizes.moe_layers, training.experts_memory // of_layer)
        host = experts - resident_layers * of_layer
        experts = of_layer * min(sizes.moe_layers, resident_layers + 2)
    shards = training.shards
    of_adapter = 4.0 + (ADAM8 if training.optimizer == "adam8bit" else 8.0)
    return Memory(
        moment="",
        experts=experts / shards,
        rest=rest / shards,
        optimiser=optimiser / shards,
        adapters=of_adapter * step.adapter_parameters_of_rank,
        host=host,
    )


def _gradients(step: Step) -> float:
    """Count all gradients, as they are at the end of backward."""
    sizes, training = step
    if not training.full:
        return 4.0 * step.adapter_parameters_of_rank  # the examples have DDP's buckets be the gradients
    if training.optimizer == "adam8bit":  # freed as soon as a weight is updated, from an fp32 copy of it
        return float(training.width * sizes.largest_weight)
    return float(training.width * sizes.total) / training.shards


def _bucket_bytes(step: Step) -> float:
    """Count DDP's buckets of gradients, which are there all the time."""
    return _gradients(step) if step.training.parallel == "DDP" else 0.0


def _layer_gradients(step: Step) -> tuple[float, float]:
    """Count (gradients of the layer whose backward runs, those of the layer before that wait to be reduced)."""
    sizes, training = step
    in_experts = sizes.experts / sizes.moe_layers
    if not training.full:
        return 0.0, 0.0
    own, waiting = float(training.width * sizes.layer_parameters), 0.0
    if training.optimizer == "adam8bit":  # of the experts' two weights, then new moments of one
        own = 2.0 * in_experts + 2.0 * sizes.largest_weight
    elif training.splits_experts:
        own = training.width * (sizes.layer_parameters - in_experts + in_experts / training.gpus)
    elif training.parallel == "FSDP2":
        own = waiting = 2.0 * sizes.layer_parameters
    return own + (4.0 * in_experts if step.is_in_pieces else 0.0), waiting  # pieces are summed in fp32


def _head_gradient(step: Step) -> float:
    """Count the gradient of the head's weight, whole, from the loss on."""
    sizes, training = step
    return (4.0 if training.fp32_stream else 2.0) * sizes.vocabulary * sizes.hidden if training.full else 0.0


# several GPUs


def _root_bytes(step: Step) -> float:
    """Count the bytes that stay gathered: embeddings and head, or in Transformers' expert parallelism the head alone."""
    sizes, training = step
    head = sizes.vocabulary * sizes.hidden if training.splits_experts else 0
    return 2.0 * (sizes.embeddings if training.parallel == "FSDP2" else head)


def _communication(step: Step) -> float:
    """Count the bytes that are gathered, or wait to be sent, while a layer's backward runs."""
    sizes, training = step
    outside_experts = 2.0 * (sizes.layer_parameters - sizes.experts // sizes.moe_layers)
    if training.parallel == "FSDP2":
        in_flight = 1 if training.full else 2  # the next layer's weights come while this one's backward runs
        gathered = outside_experts + experts_bytes(sizes, training.experts) / sizes.moe_layers
        return _root_bytes(step) + in_flight * gathered
    if training.parallel == "ZeRO-3":
        return 2.0 * min(LIVE_PARAMETERS, sizes.total) + 2 * 2.0 * REDUCE_BUCKET
    return _root_bytes(step) + outside_experts if training.splits_experts else 0.0
