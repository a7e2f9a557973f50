"""What the switches that people set give in Transformers' Trainer after `sonicmoe_hf.attach`: milliseconds of a step.

    python -m benchmarks.step.switches CASE [--settings 2048 field] [--layers 12]      # one case a process
    python -m benchmarks.step.switches liger+torch_compile --device cpu --tiny --csv /tmp/switches.csv

Layers of Qwen3-30B-A3B with random weights, experts in NF4, adapters of rank 16, gradient checkpointing, bf16. A case
names what is set: `plain` nothing, `liger` use_liger_kernel=True, `torch_compile` the argument of that name, `layers`
compile_layers before the Trainer is made. Liger's patches of one case would meet the next, hence the processes. A setting
is the tokens of a step, or `field`: four micro-batches of two padded rows, of 190 tokens in the mean, new at every step.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
from peft import get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Rows
from benchmarks.common.timing import synchronize
from benchmarks.step import models
from benchmarks.step.everyday import FIELD, MICRO_BATCHES, ROWS
from sonicmoe_hf.tools.random_models import random_packed_model

STEPS = 24  # of which the last half counts
CASES = ("plain", "liger", "liger+torch_compile", "torch_compile", "layers", "liger+layers")


class Times(TrainerCallback):
    """Times each step of a Trainer, in ms."""

    def __init__(self):
        self.ms: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        synchronize()
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        synchronize()
        self.ms.append(1e3 * (time.perf_counter() - self.began))


def rows_of(setting: str, steps: int, vocabulary: int, tiny: bool) -> tuple[list[dict], int, int]:
    """Return the rows of all steps, how many a micro-batch has, and micro-batches a step."""
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


def padded(rows: list[dict]) -> dict:
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


def measure(model, case: str, setting: str, options) -> dict[str, float]:
    """Train one setting; return its metrics."""
    on_gpu = options.device == "cuda"
    steps = STEPS if on_gpu else 2
    rows, batch, accumulation = rows_of(setting, steps, model.config.vocab_size, options.tiny)
    arguments = TrainingArguments(
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
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_cpu=not on_gpu,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        torch_compile="torch_compile" in case,
        use_liger_kernel="liger" in case and on_gpu,
    )
    times = Times()
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=padded, callbacks=[times])
    sonicmoe_hf.attach(trainer)
    trainer.train()
    counted = times.ms[steps // 2 :]
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
    return {
        "ms": statistics.median(counted),
        "least_ms": min(counted),
        "first_step_s": times.ms[0] / 1e3,
        "peak_GiB": peak,
    }


def main() -> None:
    parser = Command(__doc__, "switches.csv", small="--device cpu --tiny")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--settings", nargs="+", default=["2048", "field"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    config = models.config_of("Qwen3-30B-A3B", options.layers, options.tiny)
    torch.manual_seed(0)
    model = random_packed_model(
        config, experts="nf4", linear=None, device=options.device, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = get_peft_model(model, sonicmoe_hf.lora_config(model, r=16))
    if "layers" in options.case:
        sonicmoe_hf.compile_layers(model)
    table = Rows(options.csv, ("case", "setting", "metric"))
    for setting in options.settings:
        for metric, value in measure(model, options.case, setting, options).items():
            table.add(case=options.case, setting=setting, metric=metric, median=value)
    table.write()


if __name__ == "__main__":
    main()
