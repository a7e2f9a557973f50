"""Times a step of Transformers' Trainer after `sonicmoe_hf.attach`, in milliseconds, with the switches that people set.

    python -m benchmarks.step.switches CASE [--settings 2048 field] [--layers 12] [--busy] [--profile]   # a process each
    python -m benchmarks.step.switches liger+torch_compile --device cpu --tiny --csv /tmp/switches.csv

Layers of Qwen3-30B-A3B with random weights, experts in NF4, adapters of rank 16, gradient checkpointing, bf16. A case
names what is set: `plain` nothing, `liger` use_liger_kernel=True, `loss` Liger's fused loss alone, `torch_compile` the
argument of that name, `layers` compile_layers before the Trainer is made, `captured` the mode reduce-overhead of either,
`packed` attach(packed_tokens=8192), `unpacked` attach(packed_tokens=False), without which `torch_compile` and `layers`
pack by themselves, `lengths` attach(few_lengths=True), `bf16` experts in bf16. Liger's patches of one case would meet the
next, hence the processes.
A setting is the tokens of a step, or `field`: four micro-batches of two padded rows, of 190 tokens in the mean, new at
every step.

`second` is no switch: it names the second start of the same run in the table, whose graphs torch's cache has.

ms: from the end of a step to the end of the next one; mean_ms: of the last half of the steps together, between which the
host waits for the GPU only where the Trainer does. graphs: what torch compiled, and cached: how much of it came from
its cache on disk. busy_ms, with `--busy`: in which the GPU computes, of each of two steps more. `--profile` trains six
more steps, whose Python is printed, and as many of a loop without Trainer.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import tempfile
import time

import torch
from peft import get_peft_model
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import Trainer, TrainerCallback, TrainingArguments

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Rows
from benchmarks.common.timing import synchronize
from benchmarks.step import models
from benchmarks.step.everyday import FIELD, MICRO_BATCHES, ROWS, kernels_of
from sonicmoe_hf.tools.random_models import random_packed_model

STEPS = 24  # of which the last half counts
BUSY, PROFILED = 2, 6  # further steps
CASES = (
    *("plain", "liger", "liger+torch_compile", "torch_compile", "layers", "liger+layers", "loss+layers"),
    *("plain+lengths", "liger+torch_compile+lengths", "layers+lengths", "layers+expanded"),
    *("layers+bf16", "liger+torch_compile+second", "liger+torch_compile+packed+second"),
    *("layers+captured", "liger+torch_compile+captured", "liger+torch_compile+captured+second"),
    *("liger+torch_compile+unpacked", "liger+torch_compile+unpacked+second"),
    *("plain+packed", "liger+torch_compile+packed", "layers+packed", "liger+torch_compile+packed+lengths"),
)
CAPTURED = "reduce-overhead"
UNFUSED = "aot_eager"  # compiles in seconds: a run on a CPU checks the script
LOSS_ALONE = {"swiglu": False, "rms_norm": False, "rope": False}


class StepIntervals(TrainerCallback):
    """Times each of a Trainer's first `steps` steps, in ms, the fetching of their batches included.

    It waits for the GPU after the first half of the steps and after the last.
    """

    def __init__(self, steps: int):
        self.steps, self.ms = steps, []

    def on_train_begin(self, args, state, control, **kwargs):
        self.last = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (1, self.steps // 2, self.steps):
            synchronize()
        now = time.perf_counter()
        self.ms.append(1e3 * (now - self.last))
        self.last = now


class Busy(TrainerCallback):
    """Traces the kernels of a Trainer's steps after `first_step`, and counts the ms in which the GPU computed in each."""

    def __init__(self, first_step: int):
        self.first_step, self.trace = first_step, profile(activities=[ProfilerActivity.CUDA])

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.first_step:
            synchronize()
            self.trace.start()

    def on_train_end(self, args, state, control, **kwargs):
        synchronize()
        self.trace.stop()
        self.busy_ms = kernels_of(self.trace).busy_ms / (state.global_step - self.first_step)


class Profile(TrainerCallback):
    """Profiles the Python of a Trainer's last steps. Backward runs in the thread of the step meanwhile."""

    def __init__(self, first_step: int):
        self.first_step, self.profiler = first_step, cProfile.Profile()
        self.threads = torch.autograd.set_multithreading_enabled(True)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.first_step:
            self.threads = torch.autograd.set_multithreading_enabled(False)
            self.profiler.enable()

    def on_train_end(self, args, state, control, **kwargs):
        self.profiler.disable()
        torch.autograd.set_multithreading_enabled(True)
        show(self.profiler, "the Trainer's steps")


def show(profiler: cProfile.Profile, name: str) -> None:
    """Print a profile: the costliest functions by their own time and by all that they call."""
    for order, count in (("tottime", 25), ("cumulative", 70)):
        print(f"\n{name}, by {order}", flush=True)
        pstats.Stats(profiler).sort_stats(order).print_stats(count)


def count_graphs() -> dict[str, int]:
    """Count the graphs that torch compiled in this process, and those of them that its cache on disk had."""
    return {"graphs": counters["stats"]["unique_graphs"], "cached": counters["inductor"]["fxgraph_cache_hit"]}


def rows_of(setting: str, steps: int, vocabulary: int, tiny: bool) -> tuple[list[dict], int, int]:
    """Draw the rows of all steps: (rows, how many a micro-batch has, micro-batches a step)."""
    generator = torch.Generator().manual_seed(1)
    if setting != FIELD:
        lengths, batch, accumulation = [int(setting) // (32 if tiny else 1)] * steps, 1, 1
    else:
        batch, accumulation = ROWS, MICRO_BATCHES
        drawn = torch.randn(steps * batch * accumulation, generator=generator, dtype=torch.float32, device="cpu")
        lengths = (drawn * 0.6 + 5.07).exp().round().clamp(24, 2048).int().tolist()
        lengths = [max(8, length // 16) for length in lengths] if tiny else lengths
    draw = {"generator": generator, "dtype": torch.int64, "device": "cpu"}
    return [{"input_ids": torch.randint(vocabulary, (length,), **draw)} for length in lengths], batch, accumulation


def collate_padded(rows: list[dict]) -> dict:
    """Collate rows; a batch without padding has no mask."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64, device="cpu")
    mask, labels = ids.clone(), ids - 100
    for number, row in enumerate(rows):
        own = row["input_ids"]
        ids[number, : len(own)] = labels[number, : len(own)] = own
        mask[number, : len(own)] = 1
    batch = {"input_ids": ids, "labels": labels}
    return batch if bool(mask.all()) else batch | {"attention_mask": mask}


def arguments_of(case: str, batch: int, accumulation: int, steps: int, on_gpu: bool, **settings) -> TrainingArguments:
    """Make the arguments that a user sets in this case."""
    switches = case.split("+")
    if "loss" in switches and on_gpu:
        settings |= {"use_liger_kernel": True, "liger_kernel_config": LOSS_ALONE}
    else:
        settings["use_liger_kernel"] = "liger" in switches and on_gpu
    return TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        bf16=True,
        optim="adamw_torch_fused",
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not on_gpu,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        torch_compile="torch_compile" in switches,
        torch_compile_backend=None if on_gpu or "torch_compile" not in switches else UNFUSED,
        torch_compile_mode=CAPTURED if on_gpu and {"torch_compile", "captured"} <= set(switches) else None,
        **{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, **settings},
    )


def train(trainer: Trainer, times: StepIntervals) -> dict[str, float]:
    """Train, and return the metrics: those in ms are of the last half of the timed steps."""
    before, began = count_graphs(), time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    ms = times.ms[times.steps // 2 : times.steps]
    on_gpu = trainer.args.device.type == "cuda"
    return {
        "ms": statistics.median(ms),
        "mean_ms": statistics.mean(ms),
        "least_ms": min(ms),
        "first_step_s": times.ms[0] / 1e3,
        "all_s": seconds,
        **{name: float(count - before[name]) for name, count in count_graphs().items()},
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan"),
    }


def attach(trainer: Trainer, case: str) -> None:
    """Attach the callbacks that this case names."""
    switches = case.split("+")
    sonicmoe_hf.attach(
        trainer,
        packed_tokens=False if "unpacked" in switches else 8192 if "packed" in switches else None,
        few_lengths="lengths" in switches or None,
        expanded_memory="60GiB" if "expanded" in switches else None,
    )


def measure(model, case: str, setting: str, options) -> dict[str, float]:
    """Train with one setting, and return its metrics."""
    on_gpu = options.device == "cuda"
    steps = STEPS if on_gpu else 2
    busy = [Busy(steps)] if options.busy and on_gpu else []
    extra = PROFILED if options.profile else BUSY * len(busy)
    rows, batch, accumulation = rows_of(setting, steps + extra, model.config.vocab_size, options.tiny)
    arguments = arguments_of(case, batch, accumulation, steps + BUSY * len(busy), on_gpu)
    times = StepIntervals(steps)
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collate_padded, callbacks=[times, *busy])
    attach(trainer, case)
    metrics = train(trainer, times)
    for each in busy:
        metrics["busy_ms"] = each.busy_ms
    if options.profile:
        arguments = arguments_of(case, batch, accumulation, steps + extra, on_gpu)
        trainer = Trainer(
            model, arguments, train_dataset=rows, data_collator=collate_padded, callbacks=[Profile(steps)]
        )
        attach(trainer, case)
        trainer.train()
        metrics["bare_ms"] = train_without_trainer(model, rows, batch, accumulation, steps, options.device)
    return metrics


def train_without_trainer(model, rows: list[dict], batch: int, accumulation: int, steps: int, device: str) -> float:
    """Train in a plain loop, and print its Python's profile; return ms of a step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    starts = range(0, len(rows), batch)
    micro_batches = [
        {name: value.to(device) for name, value in collate_padded(rows[start : start + batch]).items()}
        for start in starts
    ]

    def step(number: int) -> None:
        for each in micro_batches[number * accumulation : (number + 1) * accumulation]:
            with torch.autocast(device, torch.bfloat16):
                loss = model(**each, use_cache=False).loss / accumulation
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()

    ms = []
    for number in range(steps):
        began = time.perf_counter()
        step(number)
        ms.append(1e3 * (time.perf_counter() - began))
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for number in range(steps, len(micro_batches) // accumulation):
            step(number)
        profiler.disable()
    show(profiler, "a loop without Trainer")
    return statistics.median(ms[steps // 2 :])


def main() -> None:
    parser = Command(__doc__, "switches.csv", small="--device cpu --tiny")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--settings", nargs="+", default=["2048", "field"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--busy", action="store_true", help="trace two steps more for busy_ms, on a GPU")
    parser.add_argument("--profile", action="store_true", help="print what Python does in a step")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    config = models.config_of("Qwen3-30B-A3B", options.layers, options.tiny)
    torch.manual_seed(0)
    switches = options.case.split("+")
    experts = None if "bf16" in switches else "nf4"
    model = random_packed_model(
        config, experts=experts, linear=None, device=options.device, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = get_peft_model(model, sonicmoe_hf.lora_config(model, r=16))
    if "layers" in switches:
        on_gpu = {"mode": CAPTURED} if "captured" in switches else {}
        sonicmoe_hf.compile_layers(model, **(on_gpu if options.device == "cuda" else {"backend": UNFUSED}))
    table = Rows(options.csv, ("case", "setting", "metric"))
    for setting in options.settings:
        for metric, value in measure(model, options.case, setting, options).items():
            table.add(case=options.case, setting=setting, metric=metric, median=value)
    table.write()


if __name__ == "__main__":
    main()
