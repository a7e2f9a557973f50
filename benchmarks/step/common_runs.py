"""Eight common runs, compiled and not: what the first step and each later one take, and the whole run.

    python -m benchmarks.step.common_runs RUN [--compile]      # one run a process
    python -m benchmarks.step.common_runs dpo --compile --device cpu --tiny --csv /tmp/common_runs.csv

Twelve layers of Qwen3-30B-A3B with random weights in Transformers' Trainer after `sonicmoe_hf.attach`, 24 steps, with
Liger's kernels. Unless said otherwise adapters of rank 16 train on experts in NF4, with gradient checkpointing, by steps
of 2,048 tokens:

    nf4         as just said                        packing     sequences of a row by position_ids, 4,096 tokens
    bf16        experts in bf16                     dpo         pairs of 512 tokens, whose reference is the model without
    full        all weights of two layers, without              adapters
                checkpointing, 4,096 tokens         evaluation  every eight steps, of two other lengths
    field       four micro-batches of two rows,     generation  of 16 tokens every eight steps
                190 tokens in the mean

The metrics are those of benchmarks.step.switches; all_s is the run without loading the model.
"""

from __future__ import annotations

import torch
from peft import get_peft_model
from torch.nn.functional import logsigmoid
from transformers import Trainer, TrainerCallback

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Rows
from benchmarks.step import models
from benchmarks.step.switches import STEPS, StepIntervals, arguments_of, collate_padded, rows_of, train
from sonicmoe_hf.tools.random_models import random_packed_model

RUNS = ("nf4", "bf16", "full", "field", "packing", "dpo", "evaluation", "generation")
EVERY = 8  # steps


def collate_packed(rows: list[dict]) -> dict:
    """Collate rows as one sequence after another."""
    ids = torch.cat([row["input_ids"] for row in rows])
    firsts = torch.cat([torch.arange(len(row["input_ids"]), device="cpu") == 0 for row in rows])
    positions = torch.cat([torch.arange(len(row["input_ids"]), dtype=torch.int64, device="cpu") for row in rows])
    return {
        "input_ids": ids[None],
        "labels": ids.masked_fill(firsts, -100)[None],
        "position_ids": positions[None],
        "use_cache": False,
    }


class PreferenceTrainer(Trainer):
    """Computes DPO's loss: the first half of a batch is chosen, the second rejected."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Compute the loss of the pairs, by the model with and without its adapters."""
        with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
            reference = self._log_probabilities(model, inputs)
        chosen, rejected = (self._log_probabilities(model, inputs) - reference).chunk(2)
        return -logsigmoid(0.1 * (chosen - rejected)).mean()

    @staticmethod
    def _log_probabilities(model, inputs):
        labels = inputs["labels"][:, 1:]
        logits = model(**{**inputs, "labels": None}, use_cache=False).logits[:, :-1]
        chosen = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0].float() - logits.logsumexp(2).float()
        return chosen.masked_fill(labels < 0, 0.0).sum(1)


class Generation(TrainerCallback):
    """Generates a few tokens between training steps."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % EVERY == 0:
            model.eval()
            ids = torch.arange(1, 33, dtype=torch.int64, device=args.device)[None]
            with torch.autocast(args.device.type, torch.bfloat16):
                model.generate(input_ids=ids, max_new_tokens=16, do_sample=False)
            model.train()


def build(run: str, options):
    """Build the model of a run, with its adapters."""
    layers = 2 if run == "full" or options.tiny else options.layers
    config = models.config_of("Qwen3-30B-A3B", layers, options.tiny)
    torch.manual_seed(0)
    experts = None if run in ("bf16", "full") else "nf4"
    dtype = torch.float32 if run == "full" else torch.bfloat16
    model = random_packed_model(
        config, experts=experts, linear=None, device=options.device, dtype=dtype, attn_implementation="sdpa"
    )
    return model if run == "full" else get_peft_model(model, sonicmoe_hf.lora_config(model, r=16))


def measure(model, run: str, options) -> dict[str, float]:
    """Train one run, and return its metrics."""
    on_gpu = options.device == "cuda"
    steps = STEPS if on_gpu else EVERY
    vocabulary, case = model.config.vocab_size, "liger+torch_compile" if options.compile else "liger"
    settings: dict = {"eval_strategy": "steps", "eval_steps": EVERY} if run == "evaluation" else {}
    if run == "full":
        settings["gradient_checkpointing"] = False
    setting = {"full": "4096", "field": "field", "packing": "512", "dpo": "512"}.get(run, "2048")
    count = {"packing": 8, "dpo": 4}.get(run, 1)  # sequences of a micro-batch
    rows, batch, accumulation = rows_of(setting, steps * count, vocabulary, options.tiny)
    others = [row for length in ("1024", "1536") for row in rows_of(length, 2, vocabulary, options.tiny)[0]]
    times, trainer_class = StepIntervals(steps), PreferenceTrainer if run == "dpo" else Trainer
    trainer = trainer_class(
        model,
        arguments_of(case, batch * count, accumulation, steps, on_gpu, **settings),
        train_dataset=rows,
        eval_dataset=others if run == "evaluation" else None,
        data_collator=collate_packed if run == "packing" else collate_padded,
        callbacks=[times, *([Generation()] if run == "generation" else [])],
    )
    sonicmoe_hf.attach(trainer)
    return train(trainer, times)


def main() -> None:
    parser = Command(__doc__, "common_runs.csv", small="--device cpu --tiny")
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--compile", action="store_true", help="torch_compile=True")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    model = build(options.run, options)
    table = Rows(options.csv, ("run", "compiled", "metric"))
    for metric, value in measure(model, options.run, options).items():
        table.add(run=options.run, compiled="yes" if options.compile else "no", metric=metric, median=value)
    table.write()


if __name__ == "__main__":
    main()
