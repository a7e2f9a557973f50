"""The ways of training a model that are planned: settings, names, and the command that runs each."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...attention.names import TORCH_PIECES, TORCH_SINKS
from ...errors import UnsupportedModelError
from ...kernels.packed import FORMATS
from .memory import GIB, Memory, expanded_bytes, experts_bytes, memory_of
from .sizes import ModelSizes
from .step import Step
from .training import METHODS, SHARDED, Training

SEQUENCE = 4096  # the longest, unless asked otherwise
TILE = 128  # of token rounding, which examples/expert_parallel.py has on
CONTEXT = 1.0  # GiB of CUDA's context and of NCCL's buffers
GAPS = (
    1.05  # bytes that the allocator reserves for one that is allocated: 1.01 to 1.05 on one GPU in results/recipes.csv
)
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
NEAREST = ("bf16", "fp8", "nf4", "nvfp4", "int4", "uint4", "mxfp4")  # formats by the error of rounding to them
USUAL = ("fp8", "nf4")  # of those that plain experts can be packed in: the nearest, and the smallest
PACKED_HERE = tuple(name for name in FORMATS if name != "uint4")  # which comes of checkpoints alone
KEPT_FOR_BACKWARD = (  # what is kept for backward, the fastest first
    {"checkpointing": False},
    {"checkpointing": False, "save": "input"},
    {"checkpointing": True},
)
SMALLER_RANKS = (4, 2)  # than examples/qlora.py's
OFFLOADING = {"checkpointing": True, "offloading": True}  # with adapters, of long sequences


@dataclass(frozen=True)
class Way:
    """One way: a step of it, which says what it takes and which command does it, and GiB of a GPU."""

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
        """The command of the example that does it."""
        return _command(self.step)

    @property
    def kind(self) -> str:
        """The name of what is trained, in which format, and over how many GPUs."""
        training = self.training
        what = {"full": f"full {training.weights}", "lora": "LoRA", "qlora": f"QLoRA {training.experts.upper()}"}
        linear = " linear too" if training.linear != "bf16" else ""
        optimizer = ", 8-bit Adam" if training.optimizer == "adam8bit" else ""
        rank = "" if training.full or training.r == Training.r else f", r={training.r}"
        host = (
            "" if training.experts_memory is None else f", {self.memory.host / GIB:.0f} GiB of experts in host memory"
        )
        return f"{what[training.method]}{linear}{optimizer}{rank}{host}, {training.parallel}"

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
        """Whole GiB that they take."""
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
    planned = []
    for training in _trainings(sizes, gpus, *in_sequences(tokens, sequence)):
        if method in (None, training.method):
            if sizes.attention.in_pieces:  # as from_pretrained chooses; of sinks with bf16 weights on a GPU
                training = replace(training, attention=TORCH_PIECES)
            elif sizes.attention.has_sinks and _is_loaded_in_bf16(training):
                training = replace(training, attention=TORCH_SINKS)
            planned.append(Way(Step(sizes, training), gpu_memory))
    packed = [way for way in planned if way.training.method == "qlora"]
    if not any(way.fits for way in packed):
        planned += [_from_host_memory(way) for way in packed if _is_of_qlora_example(way.training)]
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
    of_rank = [replace(least, r=rank, experts_r=rank) for rank in SMALLER_RANKS if is_small]
    for each in (training, smaller, least, *of_rank):
        alone = replace(way, step=Step(sizes, each))
        if alone.fits:
            left = int((way.gpu_memory - alone.needed) / GAPS)
            return replace(way, step=Step(sizes, replace(each, experts_memory=left * GIB)))
    return alone


def _is_of_qlora_example(training: Training) -> bool:
    """Tell whether examples/qlora.py is the example of this training; it has a rank of its own."""
    return training.method == "qlora" and training.r != Training.r


def _is_loaded_in_bf16(training: Training) -> bool:
    """Tell whether the example loads the model in bf16."""
    return training.weights == "bf16" and training.parallel != "ZeRO-3"


def why_left_out(sizes: ModelSizes) -> str | None:
    """Say which ways the checkpoint's quantization leaves out, and what to do."""
    quantization = sizes.quantization
    if quantization is None or sizes.is_dequantized:
        return None
    remedy = "plan for the bf16 checkpoint that it was made from"
    if sizes.is_convertible:
        convert = f"sonicmoe-hf convert {shlex.quote(sizes.name)} FOLDER --layout hub"
        remedy = f"for these convert it to bf16, and plan for the result: {convert}"
    ways = "all ways but QLoRA are" if quantization in FORMATS else "every way is"
    return f"its checkpoint is quantized ({quantization}), so {ways} left out; {remedy}"


def choose_usual(sizes: ModelSizes, ways: list[Way]) -> list[Way]:
    """Leave out ways that pack experts in another format than the checkpoint's, or in one of plain experts beside USUAL;
    but not where those alone fit."""
    formats = {"bf16", *(USUAL if sizes.quantization is None else [sizes.quantization])}
    kept = [way for way in ways if way.training.experts in formats]
    packed = [way for way in ways if way.training.experts != "bf16"]
    return kept if any(way.fits for way in packed if way in kept) or not any(way.fits for way in packed) else ways


def choose_shown(ways: list[Way]) -> tuple[list[Way], list[Way]]:
    """Choose the ways to show: (of each kind the first way that fits; of kinds of which none fits, the smallest way). The
    way to begin with comes first, the others from all weights in fp32 to experts rounded the most."""
    ways = sorted(ways, key=_distance)
    kinds: dict[str, list[Way]] = {}
    for way in ways:
        kinds.setdefault(way.kind, []).append(way)
    fitting = [fits[0] for kind in kinds.values() if (fits := [way for way in kind if way.fits])]
    too_large = [min(kind, key=lambda way: way.needed) for kind in kinds.values() if not any(w.fits for w in kind)]
    adapted = [way for way in fitting if not way.training.full]
    first = min(adapted or fitting, key=lambda way: way.memory.host, default=None)  # each step copies what is there
    return sorted(fitting, key=lambda way: way is not first), too_large


def _distance(way: Way) -> tuple:
    """Order ways by what they train, and by how near to bf16 what they hold is."""
    training = way.training
    is_small = training.optimizer != "adam", training.linear != "bf16", training.r < Training.r
    return METHODS.index(training.method), NEAREST.index(training.experts), training.weights != "fp32", is_small


def advice(fitting: list[Way]) -> str:
    """Say what the first of the ways that fit, as `choose_shown` orders them, trains, and what others do beside it."""
    training, host = fitting[0].training, fitting[0].memory.host
    what = "all weights train"
    if not training.full:
        held = "in bf16, nothing rounded" if training.experts == "bf16" else f"in {training.experts.upper()}"
        what = f"adapters of all experts, beside weights {held}"
    if host:
        what += f", {host / GIB:.0f} GiB of them in host memory, from where each step copies them"
        what += "; other ways copy more" * any(way.memory.host > host for way in fitting)
    rest = "; 2 trains all weights" if not training.full and any(way.training.full for way in fitting) else ""
    return f"To fine-tune, begin with 1: {what}{rest}."


def _trainings(sizes: ModelSizes, gpus: int, tokens: int, sequence: int) -> Iterator[Training]:
    """Yield all that the examples can do with this checkpoint."""
    liger = sizes.model_type in LIGER
    of_all: dict[str, Any] = {"tokens": tokens, "sequence": sequence, "liger": liger, "gpus": gpus}
    one, divides = gpus == 1, sizes.num_experts % gpus == 0
    if why_left_out(sizes) is None:
        full = Training(method="full", **of_all)
        for parallel in ["one GPU"] if one else ["FSDP2"]:
            yield from _with_each_kept(full, weights="fp32", parallel=parallel)
            yield from _with_each_kept(full, parallel=parallel)
        if not one:
            yield from _with_each_kept(full, weights="fp32", parallel="ZeRO-3")
        if sizes.quantization is None:  # these two examples load no quantized checkpoints
            yield replace(full, optimizer="adam8bit")
            if not one and divides:
                yield replace(
                    full, parallel="expert parallelism", checkpointing=False, liger=False, extra_rows=TILE // 2
                )
        for parallel in ["one GPU"] if one else ["DDP", "FSDP2"]:
            yield from _with_each_kept(Training(method="lora", **of_all), parallel=parallel)
    for format in _formats(sizes):
        packed = Training(method="qlora", experts=format, **of_all)
        if one:
            is_plain = format == "nf4" and sizes.quantization is None  # whose linear layers bitsandbytes can pack
            small = replace(packed, linear="nf4" if is_plain else "bf16", r=8, experts_r=8)
            yield from (replace(small, **kept) for kept in _kinds_kept(small) if kept["checkpointing"])
        if sizes.quantization in (None, format):
            for parallel in ["one GPU"] if one else ["DDP", "FSDP2"] if divides else ["DDP"]:
                yield from _with_each_kept(packed, parallel=parallel)
        if not one and divides:
            yield replace(packed, parallel="expert parallelism", r=8, experts_r=8)


def _with_each_kept(training: Training, **settings: Any) -> Iterator[Training]:
    for kept in _kinds_kept(training):
        yield replace(training, **settings, **kept)


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


def _command(step: Step) -> str:
    """Write the command of the example that does it, under its launcher, with the options that it takes."""
    sizes, training = step
    model, gpus = f"--model {shlex.quote(sizes.name)}", training.gpus
    launcher = "python" if training.parallel == "one GPU" else f"torchrun --nproc-per-node {gpus}"
    options = []
    if training.full and training.optimizer == "adam8bit":
        script = "full_finetune_one_gpu"
        launcher = f"CUDA_VISIBLE_DEVICES=0 {launcher}" if gpus > 1 else launcher
    elif training.full and training.splits_experts:
        script = "expert_parallel"
    elif _is_of_qlora_example(training):
        script = "qlora"
        model += f" --experts-quantization {training.experts}" if not sizes.is_packed else ""
        if training.experts_memory is not None:
            options = [f"--experts-memory {training.experts_memory // GIB}GiB"]
        options += ["--replicate"] * (training.parallel == "DDP")
        is_default = sizes.quantization is None and not training.splits_experts  # linear layers in NF4
        options += ["--linear-nf4"] * (training.linear == "nf4" and not is_default)
        options += ["--no-linear-nf4"] * (training.linear == "bf16" and is_default)
        options += ["--optim adamw_8bit"] * (training.optimizer == "adam8bit")
        options += [f"--rank {training.r}"] * (training.r in SMALLER_RANKS)
    else:
        script, options = "finetune", _of_finetune(step)
        if training.parallel == "FSDP2":
            launcher = f"accelerate launch --config_file examples/fsdp2.yaml --num_processes {gpus}"
    options += ["--activation-offloading"] * training.offloading
    batch = f"--sequence-length {training.sequence} --batch-size {training.tokens // training.sequence}"
    return " ".join([launcher, f"examples/{script}.py", model, batch, *options])


def _of_finetune(step: Step) -> list[str]:
    """Choose the options of examples/finetune.py. Full training checkpoints if told to, adapters' unless told not to."""
    sizes, training = step
    options: dict[str, bool] = {
        "--bf16": training.full and (training.weights == "fp32" or training.parallel == "ZeRO-3"),
        "--dtype bfloat16": training.full and training.weights == "bf16" and training.parallel != "ZeRO-3",
        "--gradient-checkpointing": training.full and training.checkpointing,
        "--lora": not training.full,
        f"--experts-quantization {training.experts}": training.method == "qlora",
        "--no-gradient-checkpointing": not training.full and not training.checkpointing,
        "--deepspeed examples/zero3.json": training.parallel == "ZeRO-3",
        "--liger": bool(training.liger),
        "--save input": training.save == "input",
        "--dequantize": sizes.is_dequantized and training.method != "qlora",
    }
    return [option for option, is_set in options.items() if is_set]
