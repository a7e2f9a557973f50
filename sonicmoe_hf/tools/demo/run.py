"""The demo's steps, in order: train, evaluate, save and reload, convert, draw, report. Each is a function."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from ...checkpoints.convert import convert_checkpoint
from ...checkpoints.reading.files import same_bytes
from ...layer.config import TokenRounding
from ...models.patch import patch_model
from ...private.versions import versions
from ...routing.patched_model import set_routing
from ...trainer.attach import attach
from ...trainer.balancing import LoadBalancing
from ...trainer.load_callback import ExpertLoadCallback
from ...trainer.load_reports import load_by_layer
from ...trainer.rounding_callback import TokenRoundingCallback
from ..comparing import relative_error
from . import corpus, plots
from .model import NUM_EXPERTS, PER_LAYER_LOSS, TOP_K, VOCAB_SIZE, small_config

SEQUENCE_LENGTH = 128
BATCH_SIZE = 16  # 2048 tokens a step
HELD_OUT_BLOCKS = 64
LEARNING_RATE = 5e-3
EVALUATIONS = 8
BALANCED_AFTER = 200  # steps: a randomly initialised router sends most tokens to a few experts
LOGIT_TOLERANCE = 1e-5  # fp32: eager and ours sum in another order


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The settings of `sonicmoe-hf demo`: optimiser steps, the output folder, token rounding's policy and tile, the seed.

    Raises:
        ValueError: with this tile every step would fall back to top-k.
    """

    steps: int = 400
    output: Path = Path("outputs/demo")
    rounding: str = "nearest"
    tile: int = 64
    seed: int = 0

    def __post_init__(self):
        tokens = BATCH_SIZE * SEQUENCE_LENGTH
        if self.policy is not None and not self.policy.applies(tokens, TOP_K, NUM_EXPERTS):
            load = tokens * TOP_K // NUM_EXPERTS
            raise ValueError(
                f"tile is {self.tile}, but the demo's experts get {load} pairs on average and rounding needs "
                f"{self.policy.min_tiles_per_expert:g} tiles; choose a tile of at most "
                f"{int(load / self.policy.min_tiles_per_expert)}"
            )

    @property
    def policy(self) -> TokenRounding | None:
        """The TokenRounding to train with, or None for top-k."""
        if self.rounding == "top_k":
            return None
        return TokenRounding(rounding=self.rounding, tile=self.tile)


@dataclass
class Demo:
    """The state of the demo: what the steps share, and what they found."""

    settings: DemoSettings
    console: Console
    tokenizer: PreTrainedTokenizerFast
    train_blocks: list
    held_out_blocks: list
    model: PreTrainedModel
    log: list[dict] = field(default_factory=list)
    checks: list[dict] = field(default_factory=list)  # of what the demo promises
    seconds: float = 0.0

    def __post_init__(self):
        self.load = ExpertLoadCallback(plot=self.settings.output / "expert_load.png")

    def check(self, name: str, passed: bool, detail: str) -> None:
        """Keep a check's outcome."""
        self.checks.append({"name": name, "passed": bool(passed), "detail": detail})

    def logged(self, key: str) -> plots.Curve:
        """List the values that the Trainer logged under `key`."""
        entries = [entry for entry in self.log if key in entry]
        return plots.Curve([entry["step"] for entry in entries], [entry[key] for entry in entries])

    def loads(self) -> np.ndarray:
        """List the load of every expert of every layer, at every log: [layers, logs, experts]."""
        return np.stack(list(load_by_layer(self.load.history).values()))


class _PrintProgress(TrainerCallback):
    """A callback that prints one line per log, which works in a terminal, in CI and in a file."""

    def __init__(self, console: Console):
        self.console = console

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "eval_loss" in logs:
            self.console.print(
                f"  step {state.global_step:>4}  [bold]held-out loss {logs['eval_loss']:.3f}[/] (top-k)"
            )
        elif "loss" in logs:
            self.console.print(f"  step {state.global_step:>4}/{state.max_steps}  loss {float(logs['loss']):.3f}")


def run(settings: DemoSettings) -> int:
    """Run the demo; 0 if all its checks passed, 1 otherwise."""
    limit_threads()
    demo = prepare(settings)
    for step in (train, reload_and_compare, convert_and_compare, draw, write_metrics):
        step(demo)
    print_summary(demo)
    return 0 if all(check["passed"] for check in demo.checks) else 1


def limit_threads() -> None:
    """Leave half of the cores to others, unless OMP_NUM_THREADS says how many threads there are.

    Steps of this size gain little from more threads, and lose where those wait for busy cores. On two that others used
    too the median step took 0.77 to 0.87 s with one thread, and 0.93 to 1.22 s with two, which waited without spinning.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))


def prepare(settings: DemoSettings) -> Demo:
    """Read the text, train the tokenizer, build the model with random weights."""
    console = Console(highlight=False)
    console.rule("[bold]sonicmoe-hf demo", align="left")
    set_seed(settings.seed)
    logging.disable_progress_bar()
    train_texts, held_out_texts = corpus.standard_library()
    tokenizer = corpus.train_tokenizer(train_texts, VOCAB_SIZE)
    train_blocks = corpus.blocks(train_texts, tokenizer, SEQUENCE_LENGTH)
    held_out_blocks = _spread(corpus.blocks(held_out_texts, tokenizer, SEQUENCE_LENGTH), HELD_OUT_BLOCKS)
    config = small_config(tokenizer)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="sonicmoe_hf")
    console.print(
        f"text: {len(train_texts)} files of Python's standard library to train on "
        f"({len(train_blocks) * SEQUENCE_LENGTH:,} tokens), {len(held_out_texts)} held out\n"
        f"model: Qwen3-MoE architecture, {model.num_parameters() / 1e6:.1f} M parameters, random start; "
        f"{config.num_hidden_layers} layers, {config.num_experts} experts, {config.num_experts_per_tok} per token"
    )
    return Demo(settings, console, tokenizer, train_blocks, held_out_blocks, model)


def _spread(blocks: list, count: int) -> list:
    """Choose `count` blocks, evenly spaced over all of them."""
    return blocks[:: max(1, len(blocks) // count)][:count]


def train(demo: Demo) -> None:
    """Train with the Trainer: token rounding while training, top-k whenever it evaluates."""
    settings, policy = demo.settings, demo.settings.policy
    routing = "top-k" if policy is None else f"token rounding ({policy.rounding}, tiles of {policy.tile_rows} rows)"
    demo.console.print(f"training: {settings.steps} steps of {BATCH_SIZE * SEQUENCE_LENGTH} tokens, {routing}")
    patch_model(demo.model)
    balancing = LoadBalancing(per_layer_loss=PER_LAYER_LOSS)
    callbacks = [balancing, demo.load, _PrintProgress(demo.console)]
    if policy is not None:
        callbacks.insert(0, TokenRoundingCallback(rounding=policy.rounding, tile=policy.tile))
    trainer = Trainer(
        model=demo.model,
        args=_training_arguments(settings),
        train_dataset=demo.train_blocks,
        eval_dataset=demo.held_out_blocks,
        processing_class=demo.tokenizer,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    attach(trainer)
    start = time.perf_counter()
    trainer.train()
    demo.seconds = time.perf_counter() - start
    demo.log = trainer.state.log_history
    _check_training(demo)


def _training_arguments(settings: DemoSettings) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(settings.output / "trainer"),
        max_steps=settings.steps,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, settings.steps // 20),
        weight_decay=0.1,
        logging_steps=max(1, settings.steps // 40),
        logging_first_step=True,
        eval_strategy="steps",
        eval_steps=max(1, settings.steps // EVALUATIONS),
        eval_on_start=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings.seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # a demo needs one device; DataParallel copies the model at every step
    return arguments


def _check_training(demo: Demo) -> None:
    losses, held_out = demo.logged("loss").values, demo.logged("eval_loss").values
    last = float(np.mean(losses[-3:]))
    demo.check("the training loss falls", last < losses[0], f"{losses[0]:.2f} -> {last:.2f}")
    demo.check("the held-out loss falls", held_out[-1] < held_out[0], f"{held_out[0]:.2f} -> {held_out[-1]:.2f}")
    if demo.settings.steps >= BALANCED_AFTER:
        dead = demo.load.history[-1]["moe/dead_experts"]
        demo.check("every expert has pairs at the end", dead == 0, f"{dead} without")
    if demo.settings.policy is not None:
        tile, fallbacks = demo.settings.tile, sum(demo.logged("moe/top_k_fallbacks").values)
        changed = sum(sum(demo.logged(f"moe/rows_{name}").values) for name in ("added", "dropped"))
        whole = not (demo.loads() % tile).any()
        demo.check("token rounding was at work", changed > 0 and fallbacks == 0, f"{fallbacks:.0f} fallbacks to top-k")
        demo.check("every expert got whole tiles", whole, f"{len(demo.load.history)} logs, tiles of {tile} rows")


def reload_and_compare(demo: Demo) -> None:
    """Save with save_pretrained, load through Transformers with both implementations, compare logits."""
    folder = demo.settings.output / "model"
    demo.model.save_pretrained(folder)
    demo.tokenizer.save_pretrained(folder)
    set_routing(demo.model, demo.settings.policy)  # token rounding is on, and must not act here
    logits = {"train() without gradients": held_out_logits(demo, demo.model.train())}
    logits["eval()"] = held_out_logits(demo, demo.model.eval())
    for implementation in ("eager", "sonicmoe_hf"):
        expected = reloaded_logits(demo, folder, experts_implementation=implementation)
        for mode, actual in logits.items():
            name = f'{mode}: logits equal those of the reloaded model, "{implementation}"'
            _check_logits(demo, name, actual, expected)


def reloaded_logits(demo: Demo, folder: Path, **options) -> torch.Tensor:
    """Compute the logits of a checkpoint, loaded through Transformers."""
    reloaded: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    return held_out_logits(demo, reloaded.to(demo.model.device).eval())


def _check_logits(demo: Demo, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = relative_error(actual, expected)
    demo.check(name, error <= LOGIT_TOLERANCE, f"relative error {error:.1e}")


def convert_and_compare(demo: Demo) -> None:
    """Convert the saved model to the native layout, load it through Transformers, convert it back, compare bytes."""
    hub, native, back = (demo.settings.output / name for name in ("model", "model-native", "model-back"))
    for folder in (native, back):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    convert_checkpoint(hub, native, layout="native", verify=True)
    actual, expected = reloaded_logits(demo, native), held_out_logits(demo, demo.model.eval())
    _check_logits(demo, "native layout: logits equal the model's", actual, expected)
    convert_checkpoint(native, back, layout="hub")
    first, second = (load_file(folder / "model.safetensors") for folder in (hub, back))
    same = first.keys() == second.keys() and all(same_bytes(first[name], second[name]) for name in first)
    demo.check("converted back, every byte is the same", same, f"{len(first)} tensors")
    shutil.rmtree(back)


@torch.no_grad()
def held_out_logits(demo: Demo, model: PreTrainedModel) -> torch.Tensor:
    """Compute the logits of the first held-out batch."""
    return model(input_ids=_batch(demo.held_out_blocks).to(model.device)).logits.float().cpu()


def _batch(blocks: list) -> torch.Tensor:
    return torch.stack([block["input_ids"] for block in blocks[:BATCH_SIZE]])


def draw(demo: Demo) -> None:
    """Draw the loss curve."""
    policy = demo.settings.policy
    routing = "top-k routing" if policy is None else f"token rounding, {policy.rounding}, tiles of {policy.tile_rows}"
    plots.draw_loss(
        demo.settings.output / "loss_curve.png",
        demo.logged("loss"),
        demo.logged("eval_loss"),
        math.log(len(demo.tokenizer)),
        routing,
        BATCH_SIZE * SEQUENCE_LENGTH,
    )


def write_metrics(demo: Demo) -> None:
    """Write everything found, as metrics.json in the output folder."""
    settings = {**asdict(demo.settings), "output": str(demo.settings.output)}
    facts = {
        "settings": settings,
        "versions": versions(),
        "training_seconds": round(demo.seconds, 1),
        "checks": demo.checks,
        "log": demo.log,
        "expert_load": demo.load.history,
    }
    (demo.settings.output / "metrics.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def print_summary(demo: Demo) -> None:
    """Print the run's numbers, the checks, and where the results are."""
    numbers = Table(title="Training", title_justify="left", show_header=False)
    for name, value in _numbers(demo):
        numbers.add_row(name, value)
    checks = Table("", "check", "measured", title="Checks", title_justify="left")
    for check in demo.checks:
        checks.add_row("[green]ok[/]" if check["passed"] else "[red]FAILED[/]", check["name"], check["detail"])
    demo.console.print(numbers, checks)
    demo.console.print("results:")
    for name in ("loss_curve.png", "expert_load.png", "metrics.json", "model", "model-native"):
        demo.console.print(f"  {demo.settings.output / name}")


def _numbers(demo: Demo) -> list[tuple[str, str]]:
    last, pairs = demo.load.history[-1], int(demo.loads().sum())
    added, dropped, avoided = (
        f"{total:,} ({total / pairs:.1%})"
        for name in ("rows_added", "rows_dropped", "padded_rows_avoided")
        for total in [sum(entry.get(f"moe/{name}", 0) for entry in demo.load.history)]
    )
    tokens, held_out = demo.settings.steps * BATCH_SIZE * SEQUENCE_LENGTH, demo.logged("eval_loss").values
    speed = f"{tokens:,} in {demo.seconds:.0f} s ({tokens / demo.seconds:,.0f} a second, evaluations included)"
    return [
        ("tokens", speed),
        ("held-out loss (top-k)", f"{held_out[0]:.3f} -> {held_out[-1]:.3f} nats per token"),
        ("pairs computed by experts", f"{pairs:,}"),
        ("added, dropped by rounding", f"{added}, {dropped}"),
        ("padded rows avoided", avoided),
        ("busiest expert / mean", f"{last['moe/load_max_over_mean']:.1f} at the end"),
        ("experts without pairs", f"{last['moe/dead_experts']} at the end"),
    ]
