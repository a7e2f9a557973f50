"""Training steps of a whole model: what is trained, one step, its time and memory, and their rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from peft import get_peft_model

import sonicmoe_hf
from benchmarks.common.contenders import Unavailable
from benchmarks.common.table import Table
from benchmarks.common.timing import Clock, release
from sonicmoe_hf.expert_parallel.gradients import by_mesh

RANK, SEQUENCE, WARMUP = 16, 4096, 2
ATTENTION = ("q_proj", "v_proj")
WHOLE_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LEARNING_RATE = 1e-4
GIB = 2**30


class StepMeasurements(NamedTuple):
    """Milliseconds and tokens of each step after the warm-up, seconds of the very first one, GiB at the peak (what the
    first step compiles is left out, the optimiser's state is in), and the loss of the last step."""

    milliseconds: list[float]
    tokens: list[int]
    first_step_s: float
    peak_GiB: float
    loss: float


def adapt(model, mode: str, rank: int = RANK, targets: Sequence[str] | None = ATTENTION):
    """Set up the weights that a mode trains. "full": all. "LoRA", or "QLoRA" of packed experts: adapters on the
    experts and on `targets` (None: the whole attention), in fp32. "frozen": on the targets alone."""
    if mode == "full":
        return model.requires_grad_(True)
    chosen = {"target_parameters": []} if mode == "frozen" else {}
    if targets is not None:
        chosen["target_modules"] = list(targets)
    adapters = sonicmoe_hf.lora_config(model, rank, **chosen)
    with torch.device(next(model.parameters()).device):  # PEFT initialises them where new tensors are made
        return get_peft_model(model, adapters)


def sequences(num_tokens: int, vocabulary: int, device: str, seed: int = 1, length: int = SEQUENCE) -> torch.Tensor:
    """Draw random tokens in full sequences of at most `length`, as packing makes them: no padding."""
    generator = torch.Generator(device).manual_seed(seed)
    length = min(length, num_tokens)
    return torch.randint(vocabulary, (num_tokens // length, length), generator=generator, device=device)


def vary_lengths(tokens: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Cut the sequences to another length for every step: the first has all, later ones between three quarters and
    all."""
    length = tokens.shape[1]
    lengths = [length, *(length - 1 - number * 61 % (length // 4) for number in range(steps - 1))]
    return [tokens[:, :length] for length in lengths]


def optimizer_of(model) -> torch.optim.Optimizer:
    """Make a fused AdamW of what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(by_mesh(trained), lr=LEARNING_RATE, fused=True)


def one_step(model, optimizer, tokens, autocast: bool = True):
    """Run forward, backward, optimiser, zero_grad. Returns the loss, on the device."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    with torch.autograd.profiler.record_function("part:optimiser"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def check_learning(losses: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Check that the loss of steps on one batch fell, and return the first and the last.

    Raises:
        SystemExit: it did not.
    """
    first, *_, last = torch.stack(list(losses)).tolist()
    if not last < first:
        raise SystemExit(f"the loss on one batch went from {first} to {last}: it does not train")
    return first, last


def record(table: Table, columns: Sequence, measure: Callable[[], dict]) -> None:
    """Add the rows of what `measure` returns, metric -> values: running out of memory is a result, and a contender that
    is not installed has none."""
    try:
        table.add(*columns, measure())
    except Unavailable as reason:
        print(*columns, f"left out: {reason}", sep="  ", flush=True)
    except torch.OutOfMemoryError:
        table.add(*columns, {"out_of_memory": 1})
    release()


def time_steps(model, batches: Sequence[torch.Tensor], autocast: bool = True) -> StepMeasurements:
    """Train one step a batch, and time those after the first WARMUP. As in training, the host does not wait between
    them."""
    return time_in_turn([model], batches, autocast)[0]


def time_in_turn(models: Sequence, batches: Sequence[torch.Tensor], autocast: bool = True) -> list[StepMeasurements]:
    """Time the steps of several models as `time_steps` does, a step of each in turn, so that what slows the host down
    slows all of them. The others' adapters and optimisers are no part of a model's peak."""
    on_gpu = batches[0].device.type == "cuda"
    optimizers, clock = [optimizer_of(model) for model in models], Clock(1 + len(models) * len(batches))
    losses, first_step_s = [torch.tensor(float("nan"))] * len(models), [float("nan")] * len(models)
    peaks = [0 if on_gpu else float("nan")] * len(models)
    for number, tokens in enumerate(batches):
        if number == WARMUP:
            clock.note()
        for index, (model, optimizer) in enumerate(zip(models, optimizers)):
            began = time.perf_counter()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            losses[index] = one_step(model, optimizer, tokens, autocast)
            if number >= WARMUP:
                clock.note()
            elif on_gpu:
                torch.cuda.synchronize()
            if number == 0:
                first_step_s[index] = time.perf_counter() - began
            elif on_gpu:  # the allocator's count, for which nobody waits
                peaks[index] = max(torch.cuda.max_memory_allocated(), peaks[index])
    milliseconds, held = clock.milliseconds(), [_count_held_bytes(optimizer) for optimizer in optimizers]
    return [
        StepMeasurements(
            milliseconds[index :: len(models)],
            [tokens.numel() for tokens in batches[WARMUP:]],
            first_step_s[index],
            (peaks[index] - (sum(held) - held[index])) / GIB,
            losses[index].item(),
        )
        for index in range(len(models))
    ]


def _count_held_bytes(optimizer) -> int:
    """Count the bytes of an optimiser's parameters and of its state."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [tensor for parameter in trained for tensor in optimizer.state[parameter].values()]
    return sum(tensor.nbytes for tensor in trained + states)
