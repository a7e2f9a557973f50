"""The ways of training a model that are planned: what each is called, its settings, and the command that runs it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import DoctorError
from ..kernels.quantized import FORMATS
from .measured import Speed, speed_of
from .memory import GIB, Memory, memory, stored_bytes
from .sizes import ModelSizes
from .training import METHODS, Training

SEQUENCE = 4096  # the longest that is planned for
TILE = 128  # of token rounding, which examples/expert_parallel.py has on
CONTEXT = 1.0  # GiB of CUDA's context and of NCCL's buffers
GAPS = 1.05  # of what the allocator reserves for what is allocated: 1.01 to 1.05 on one GPU in results/recipes.csv
ATTENTION_WITH_SINKS = "torch_sinks"  # what from_pretrained takes for bf16 weights on a GPU
LIGER = frozenset(  # model types with mixture-of-experts layers for which Liger 0.8 has kernels
    ("deepseek_v2", "deepseek_v3", "deepseek_v4", "gemma4", "gemma4_text", "glm4v_moe", "gpt_oss", "hunyuan_v1_moe",
     "mixtral", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_vl_moe_text")
)  # fmt: skip
KEPT = (  # what is kept for backward, the fastest first: words, checkpointing, save
    ("", False, "preactivation"),
    (' + save="input"', False, "input"),
    (" + checkpointing", True, "preactivation"),
)
Found = Iterator[tuple[str, Training, str]]


@dataclass(frozen=True)
class Way:
    """One way: its name, settings and command, what it takes, whether that fits, its speed where that was measured."""

    name: str
    training: Training
    command: str
    memory: Memory
    fits: bool
    speed: Speed | None

    @property
    def kind(self) -> str:
        """The name, without what is kept for backward."""
        return self.name.partition(" + ")[0]

    @property
    def needed(self) -> float:
        """GiB of a GPU, with the allocator's gaps and CUDA's context."""
        return GAPS * self.memory.total / GIB + CONTEXT


@dataclass(frozen=True)
class Batch:
    """A step's tokens on a GPU: so many sequences of so many tokens."""

    sequences: int
    length: int

    @classmethod
    def of(cls, tokens: int) -> Batch:
        """At least that many tokens, in equal sequences of SEQUENCE at most."""
        sequences = -(-tokens // SEQUENCE)
        return cls(sequences, -(-tokens // sequences))

    @property
    def tokens(self) -> int:
        """Of a step on a GPU."""
        return self.sequences * self.length

    @property
    def options(self) -> str:
        """The examples' options."""
        return f"--sequence-length {self.length} --batch-size {self.sequences}"


def ways_of(sizes: ModelSizes, *, gpus: int, gpu_memory: float, tokens: int, method: str | None = None) -> list[Way]:
    """Every way that is known, the fastest of each kind first.

    Args:
        gpus: how many; gpu_memory: GiB of each. tokens: of a step on each GPU. method: one of METHODS; None: all.
    Raises:
        DoctorError: no command of that method can load the checkpoint, as it is quantized.
    """
    planned, batch = [], Batch.of(tokens)
    for kind in METHODS if method is None else (method,):
        for name, training, command in _KINDS[kind](sizes, gpus, batch):
            if sizes.has_sinks and _is_loaded_in_bf16(training):
                training = replace(training, attention=ATTENTION_WITH_SINKS)
            peak = memory(sizes, training)
            way = Way(name, training, command, peak, False, speed_of(sizes, training))
            planned.append(replace(way, fits=way.needed <= gpu_memory))
    if not planned:
        raise DoctorError(f"{sizes.name}: {left_out(sizes) or f'there is no way of training it by {method}'}")
    return planned


def _is_loaded_in_bf16(training: Training) -> bool:
    """Whether the example loads the model by sonicmoe_hf.from_pretrained, in bf16."""
    return training.weights == "bf16" and training.optimizer != "adam8bit" and training.parallel != "ZeRO-3"


def left_out(sizes: ModelSizes) -> str | None:
    """Which ways the checkpoint's quantization leaves out, and what to do."""
    stored = sizes.quantization
    if stored is None or sizes.is_dequantized:
        return None
    if stored not in FORMATS:  # which no conversion reads
        return (
            f"its checkpoint is quantized ({stored}), so every way is left out; plan for the bf16 checkpoint that it was "
            "made from"
        )
    return (
        f"its checkpoint is quantized ({stored}), so all ways but QLoRA are left out; for these convert it to bf16, and "
        f"plan for the result: sonicmoe-hf convert {shlex.quote(sizes.name)} FOLDER --layout hub"
    )


def shown(ways: list[Way]) -> tuple[list[Way], list[Way]]:
    """(of each kind of way the first that fits; of each kind of which none fits, the smallest)."""
    kinds: dict[str, list[Way]] = {}
    for way in ways:
        kinds.setdefault(way.kind, []).append(way)
    fitting = [next((way for way in kind if way.fits), None) for kind in kinds.values()]
    too_large = [min(kind, key=lambda way: way.needed) for kind in kinds.values() if not any(w.fits for w in kind)]
    return [way for way in fitting if way is not None], too_large


def _launcher(training: Training) -> str:
    if training.parallel == "one GPU":
        return "python"
    if training.parallel == "FSDP2":
        return f"accelerate launch --config_file examples/fsdp2.yaml --num_processes {training.gpus}"
    return f"torchrun --nproc-per-node {training.gpus}"


def _finetune(sizes: ModelSizes, batch: Batch, training: Training, options: list[str]) -> str:
    """examples/finetune.py under the launcher of the training's kind."""
    parts = [_launcher(training), "examples/finetune.py --model", shlex.quote(sizes.name), batch.options, *options]
    if training.parallel == "ZeRO-3":
        parts.append("--deepspeed examples/zero3.json")
    if training.liger:
        parts.append("--liger")
    if training.save == "input":
        parts.append("--save input")
    if sizes.is_dequantized and training.method != "qlora":
        parts.append("--dequantize")
    return " ".join(parts)


def _variants(name: str, training: Training) -> Iterator[tuple[str, Training]]:
    """(name, settings) of what a way keeps for backward."""
    for words, checkpointing, save in KEPT:
        yield name + words, replace(training, checkpointing=checkpointing, save=save)


def _common(sizes: ModelSizes, batch: Batch, method: str) -> Training:
    return Training(method=method, tokens=batch.tokens, sequence=batch.length, liger=sizes.model_type in LIGER)


def _full(sizes: ModelSizes, gpus: int, batch: Batch) -> Found:
    if left_out(sizes) is not None:
        return
    common = _common(sizes, batch, "full")
    kinds = [("one GPU", "fp32"), ("one GPU", "bf16")]
    if gpus > 1:
        kinds = [("FSDP2", "fp32"), ("FSDP2", "bf16"), ("ZeRO-3", "fp32")]
    for parallel, weights in kinds:
        # ZeRO-3 computes with bf16 weights beside the fp32 ones that it updates
        kind = replace(common, parallel=parallel, gpus=gpus, weights="bf16" if parallel == "ZeRO-3" else weights)
        for name, training in _variants(f"full {weights}, {parallel}", kind):
            options = ["--bf16" if weights == "fp32" else "--dtype bfloat16"]
            options += ["--gradient-checkpointing"] * training.checkpointing
            yield name, training, _finetune(sizes, batch, training, options)
    yield from _full_by_examples_of_their_own(sizes, gpus, batch, common)


def _full_by_examples_of_their_own(sizes: ModelSizes, gpus: int, batch: Batch, common: Training) -> Found:
    if sizes.quantization is not None:
        return  # these load no quantized checkpoints
    options = f"--model {shlex.quote(sizes.name)} {batch.options}"
    one_of_several = "CUDA_VISIBLE_DEVICES=0 " if gpus > 1 else ""
    yield (
        "full bf16, 8-bit Adam, one GPU + checkpointing",
        replace(common, optimizer="adam8bit"),
        f"{one_of_several}python examples/full_finetune_one_gpu.py {options}",
    )
    if gpus > 1 and sizes.num_experts % gpus == 0:
        training = replace(
            common, parallel="expert parallelism", gpus=gpus, checkpointing=False, liger=False, extra_rows=TILE // 2
        )
        yield (
            f"full bf16, {training.parallel}",
            training,
            f"{_launcher(training)} examples/expert_parallel.py {options}",
        )


def _lora(sizes: ModelSizes, gpus: int, batch: Batch) -> Found:
    if left_out(sizes) is not None:
        return
    for parallel in ["one GPU"] if gpus == 1 else ["DDP", "FSDP2"]:
        kind = replace(_common(sizes, batch, "lora"), parallel=parallel, gpus=gpus)
        for name, training in _variants(f"LoRA, {parallel}", kind):
            options = ["--lora"] + ["--no-gradient-checkpointing"] * (not training.checkpointing)
            yield name, training, _finetune(sizes, batch, training, options)


def _qlora(sizes: ModelSizes, gpus: int, batch: Batch) -> Found:
    common, divides = _common(sizes, batch, "qlora"), sizes.num_experts % gpus == 0
    for format in _formats(sizes):
        way = f"QLoRA {format.upper()}"
        if gpus == 1:
            is_linear_packed = format == "nf4" and sizes.quantization is None  # by bitsandbytes
            linear = "nf4" if is_linear_packed else "bf16"
            training = replace(common, experts=format, linear=linear, r=8, experts_r=8)
            name = f"{way}{' linear too' if is_linear_packed else ''}, r=8, one GPU + checkpointing"
            yield name, training, _of_qlora(sizes, batch, training)
        if sizes.quantization in (None, format):
            for parallel in ["one GPU"] if gpus == 1 else ["DDP", "FSDP2"] if divides else ["DDP"]:
                kind = replace(common, experts=format, parallel=parallel, gpus=gpus)
                for name, training in _variants(f"{way}, {parallel}", kind):
                    options = [f"--lora --experts-quantization {format}"]
                    options += ["--no-gradient-checkpointing"] * (not training.checkpointing)
                    yield name, training, _finetune(sizes, batch, training, options)
        if gpus > 1 and divides:
            training = replace(common, experts=format, parallel="expert parallelism", gpus=gpus, r=8, experts_r=8)
            name = f"{way}, r=8, expert parallelism + checkpointing"
            yield name, training, _of_qlora(sizes, batch, training)


def _formats(sizes: ModelSizes) -> Iterator[str]:
    """Formats that the experts can have: the checkpoint's own, and NF4 of the hub's FP8; of plain ones all that their
    sizes take."""
    stored = sizes.quantization
    smaller = ["nf4"] if stored == "fp8" and not sizes.is_packed else []
    for format in FORMATS if stored is None else [stored, *smaller]:
        try:
            stored_bytes(sizes, format)
        except (KeyError, ValueError):  # no format of ours; not for experts of this size
            continue
        yield format


def _of_qlora(sizes: ModelSizes, batch: Batch, training: Training) -> str:
    """examples/qlora.py, which is told the format of experts that no conversion has packed."""
    parts = [_launcher(training), "examples/qlora.py --model", shlex.quote(sizes.name)]
    if not sizes.is_packed:
        parts.append(f"--experts-quantization {training.experts}")
    return " ".join([*parts, batch.options])


_KINDS = {"full": _full, "lora": _lora, "qlora": _qlora}
