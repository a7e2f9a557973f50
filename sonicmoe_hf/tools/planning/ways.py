"""The ways of training a model that are planned, with their names and what each takes of a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...attention.names import TORCH_PIECES, TORCH_SINKS
from ...errors import UnsupportedModelError
from ...kernels.packed import FORMATS
from .commands import QLORA_RANK, command_of
from .memory import GIB, Memory, expanded_bytes, experts_bytes, memory_of
from .sizes import ModelSizes
from .step import Step
from .training import RANK, SHARDED, Training

SEQUENCE = 4096  # the longest, unless asked otherwise
TILE = 128  # of token rounding, which examples/expert_parallel.py has on
CONTEXT = 1.0  # GiB of CUDA's context and of NCCL's buffers
GAPS = 1.05  # bytes reserved for one that is allocated: 1.01 to 1.05 on one GPU in results/recipes.csv
LIGER = frozenset(  # model types with mixture-of-experts layers for which Liger 0.8 has kernels
    (
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v4",
        "gemma4",
        "gemma4_text",
        "glm4v_moe",
        "gpt_oss",
        "hunyuan_v1_moe",
        "mixtral",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
    )
)
PACKED_HERE = tuple(name for name in FORMATS if name != "uint4")  # which comes of checkpoints alone
KEPT_FOR_BACKWARD = (  # what is kept for backward, the fastest first
    {"checkpointing": False},
    {"checkpointing": False, "save": "input"},
    {"checkpointing": True},
)
SMALLER_RANKS = (4, 2)  # than QLORA_RANK
OFFLOADING = {"checkpointing": True, "offloading": True}  # with adapters, of long sequences


@dataclass(frozen=True)
class Way:
    """One way: the name of the file in examples/ that does it, a step of it, which says what it takes, and GiB of a
    GPU."""

    example: str
    step: Step
    gpu_memory: float

    @property
    def training(self) -> Training:
        """Settings of the step."""
        return self.step.training

    @cached_property
    def memory(self) -> Memory:
        """Memory of the step at its peak."""
        return memory_of(self.step)

    @property
    def command(self) -> str:
        """The command of the example."""
        return command_of(self.example, self.step)

    @property
    def kind(self) -> str:
        """The name of what is trained, in which format, and over how many GPUs."""
        training = self.training
        methods = {"full": f"full {training.weights}", "lora": "LoRA", "qlora": f"QLoRA {training.experts.upper()}"}
        linear = " linear too" if training.linear != "bf16" else ""
        optimizer = ", 8-bit Adam" if training.optimizer == "adam8bit" else ""
        rank = "" if training.full or training.r == RANK else f", r={training.r}"
        host = (
            "" if training.experts_memory is None else f", {self.memory.host / GIB:.0f} GiB of experts in host memory"
        )
        return f"{methods[training.method]}{linear}{optimizer}{rank}{host}, {training.parallel}"

    @property
    def name(self) -> str:
        """The kind, and what is kept for backward."""
        if self.training.checkpointing:
            return f"{self.kind} + checkpointing" + " + offloading" * self.training.offloading
        return self.kind + (' + save="input"' if self.training.save == "input" else "")

    @property
    def needed(self) -> float:
        """GiB of a GPU, with the allocator's gaps and CUDA's context."""
        return GAPS * self.memory.total / GIB + CONTEXT

    @property
    def fits(self) -> bool:
        """Tell whether a GPU has as much."""
        return self.needed <= self.gpu_memory

    @property
    def expanded_layers(self) -> int:
        """Count the layers whose packed experts can also lie expanded in what is left (`attach`'s expanded_memory)."""
        sizes, training = self.step
        if training.experts == "bf16" or training.experts_memory is not None or training.parallel in SHARDED:
            return 0
        left = (self.gpu_memory - self.needed) / GAPS * GIB
        return max(0, min(sizes.moe_layers, int(left // expanded_bytes(sizes, 1))))

    @property
    def expanded_memory(self) -> int:
        """Whole GiB that these expanded layers take."""
        return -int(-expanded_bytes(self.step.sizes, self.expanded_layers) // GIB)


def in_sequences(tokens: int, longest: int = SEQUENCE) -> tuple[int, int]:
    """Round tokens up to equal sequences of this length at most; returns (tokens, a sequence's length)."""
    sequences = -(-tokens // longest)
    length = -(-tokens // sequences)
    return sequences * length, length


def ways_of(
    sizes: ModelSizes,
    *,
    gpus: int,
    gpu_memory: float,
    tokens: int,
    sequence: int = SEQUENCE,
    method: str | None = None,
) -> list[Way]:
    """List every way that is known, the fastest of each kind first.

    Args:
        gpus: how many; gpu_memory: GiB of each. tokens: of a step on each GPU; sequence: the longest.
            method: one of METHODS; None: all.
    Raises:
        UnsupportedModelError: no command of that method can load the checkpoint, as it is quantized.
    """
    planned = [
        Way(example, Step(sizes, _with_attention(training, sizes)), gpu_memory)
        for example, training in _trainings(sizes, gpus, *in_sequences(tokens, sequence))
        if method in (None, training.method)
    ]
    packed = [way for way in planned if way.training.method == "qlora"]
    if not any(way.fits for way in packed):
        planned += [_from_host_memory(way) for way in packed if way.example == "qlora"]
    if not planned:
        raise UnsupportedModelError(
            f"{sizes.name}: {why_left_out(sizes) or f'there is no way of training it by {method}'}"
        )
    return planned


def _from_host_memory(way: Way) -> Way:
    """Plan the way with as many GiB of experts on the GPU as fit there, and the others in host memory, of which several
    ranks share one copy. What takes less comes where the way does not fit without: 8-bit Adam, and beside experts in 4
    bits packed linear layers before it and a smaller rank after it."""
    sizes, training = way.step
    training = replace(training, parallel="one GPU" if training.gpus == 1 else "DDP", experts_memory=0)
    is_small = FORMATS[training.experts].element_size < 1
    smaller = replace(training, linear="nf4" if is_small and not sizes.is_packed else training.linear)
    least = replace(smaller, optimizer="adam8bit")
    of_smaller_ranks = [replace(least, r=rank, experts_r=rank) for rank in SMALLER_RANKS if is_small]
    tried = [replace(way, step=Step(sizes, each)) for each in (training, smaller, least, *of_smaller_ranks)]
    fitting = next((each for each in tried if each.fits), None)
    if fitting is None:
        return tried[-1]
    left = int((way.gpu_memory - fitting.needed) / GAPS)
    return replace(way, step=Step(sizes, replace(fitting.training, experts_memory=left * GIB)))


def _with_attention(training: Training, sizes: ModelSizes) -> Training:
    """Choose the attention's implementation as from_pretrained does: of sinks for weights that are loaded in bf16."""
    if sizes.attention.in_pieces:
        return replace(training, attention=TORCH_PIECES)
    is_loaded_in_bf16 = training.weights == "bf16" and training.parallel != "ZeRO-3"
    return replace(training, attention=TORCH_SINKS) if sizes.attention.has_sinks and is_loaded_in_bf16 else training


def why_left_out(sizes: ModelSizes) -> str | None:
    """Say which ways the checkpoint's quantization leaves out, and what to do."""
    quantization = sizes.quantization
    if quantization is None or sizes.can_dequantize:
        return None
    remedy = "plan for the bf16 checkpoint that it was made from"
    if sizes.is_convertible:
        convert = f"sonicmoe-hf convert {shlex.quote(sizes.name)} FOLDER --layout hub"
        remedy = f"for these convert it to bf16, and plan for the result: {convert}"
    ways = "all ways but QLoRA are" if quantization in FORMATS else "every way is"
    return f"its checkpoint is quantized ({quantization}), so {ways} left out; {remedy}"


def _trainings(sizes: ModelSizes, gpus: int, tokens: int, sequence: int) -> Iterator[tuple[str, Training]]:
    """Yield each example and what it can do with this checkpoint."""
    of_all: dict[str, Any] = {"tokens": tokens, "sequence": sequence, "gpus": gpus}
    of_all["liger"] = sizes.model_type in LIGER
    one, divides = gpus == 1, sizes.num_experts % gpus == 0
    if why_left_out(sizes) is None:
        full = Training(method="full", **of_all)
        sharded = "one GPU" if one else "FSDP2"
        yield from _of_finetune(full, weights="fp32", parallel=sharded)
        yield from _of_finetune(full, parallel=sharded)
        if not one:
            yield from _of_finetune(full, weights="fp32", parallel="ZeRO-3")
        if sizes.quantization is None:  # these two examples load no quantized checkpoints
            yield "full_finetune_one_gpu", replace(full, optimizer="adam8bit")
            if not one and divides:
                split = replace(full, parallel="expert parallelism", checkpointing=False, liger=False)
                yield "expert_parallel", replace(split, extra_rows=TILE // 2)
        for parallel in ["one GPU"] if one else ["DDP", "FSDP2"]:
            yield from _of_finetune(Training(method="lora", **of_all), parallel=parallel)
    for format in _formats(sizes):
        packed = Training(method="qlora", experts=format, **of_all)
        small = replace(packed, r=QLORA_RANK, experts_r=QLORA_RANK)
        if one:
            is_plain = format == "nf4" and sizes.quantization is None  # whose linear layers bitsandbytes can pack
            for kept in _kinds_kept(small):
                if kept["checkpointing"]:
                    yield "qlora", replace(small, linear="nf4" if is_plain else "bf16", **kept)
        if sizes.quantization in (None, format):
            # FSDP2 cuts packed weights between experts, into equal shards; those in bf16 may differ
            for parallel in ["one GPU"] if one else ["DDP", "FSDP2"] if divides else ["DDP"]:
                yield from _of_finetune(packed, parallel=parallel)
        if not one and divides:
            yield "qlora", replace(small, parallel="expert parallelism")


def _of_finetune(training: Training, **settings: Any) -> Iterator[tuple[str, Training]]:
    """Yield the trainings by examples/finetune.py with these settings, one for each choice of what backward keeps."""
    for kept in _kinds_kept(training):
        yield "finetune", replace(training, **settings, **kept)


def _kinds_kept(training: Training) -> tuple[dict[str, Any], ...]:
    return KEPT_FOR_BACKWARD if training.full or training.sequence <= SEQUENCE else (*KEPT_FOR_BACKWARD, OFFLOADING)


def _formats(sizes: ModelSizes) -> Iterator[str]:
    """Yield the formats that the experts can have: the checkpoint's own, and NF4 of the hub's FP8; of plain ones all that
    their sizes take."""
    quantization = sizes.quantization
    smaller = ["nf4"] if quantization == "fp8" and not sizes.is_packed else []
    for format in PACKED_HERE if quantization is None else [quantization, *smaller]:
        try:
            experts_bytes(sizes, format)
        except (KeyError, ValueError):  # no format of ours; not for experts of this size
            continue
        yield format
