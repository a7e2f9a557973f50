"""Loss curves of LoRA over bf16 experts and over experts in 4 bits, from the same start with the same seeds.

    python -m benchmarks.quality.qlora_curves [--text FILE ...] [--start-steps 600] [--steps 300] [--seeds 3] [--csv FILE]

The demo's small model is first trained in full on the even files of the standard library's sources; then adapters
(r = 8, experts and attention) are trained on the odd files, three times over: bf16, NF4 and MXFP4 experts. Every
contender has the same base, batches and initial adapters. Held-out files are evaluated as training goes. --text trains
on other files instead, cut into pieces. Runs on a CPU too (--start-steps 100 --steps 40). Writes qlora_curves.csv and
qlora_curves.png.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, set_seed

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Rows
from sonicmoe_hf.tools.demo.corpus import blocks, held_out_apart, standard_library, train_tokenizer
from sonicmoe_hf.tools.demo.model import VOCAB_SIZE, small_config

CONTENDERS = ("bf16", "nf4", "mxfp4")
PER_LAYER_LOSS = 0.01
LENGTH, BATCH, RANK, EVALUATIONS = 128, 16, 8, 12
PIECE = 1 << 14  # characters of a --text that are held out together


def train(
    model,
    rows,
    steps,
    learning_rate,
    seed,
    evaluate=None,
    dtype=torch.bfloat16,
    optimizer=None,
    max_norm=1.0,
    batch=BATCH,
):
    """Train with a warm-up and a linear decay; returns {step: held-out loss}.

    Args:
        batch: rows of a step.
        dtype: of the arithmetic, by autocast. optimizer: AdamW unless given. max_norm: of the clipped gradients.
    """
    device = model.device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    losses = {} if evaluate is None else {0: evaluate(model)}
    for step in range(steps):
        chosen = [rows[order[(step * batch + i) % len(rows)]]["input_ids"] for i in range(batch)]
        ids = torch.stack(chosen).to(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if evaluate is not None and (step + 1) % max(1, steps // EVALUATIONS) == 0:
            losses[step + 1] = evaluate(model)
    return losses


@contextlib.contextmanager
def patch_and_balance(model):
    """Patch our experts in, and add a balancing loss of every layer inside `with`."""
    sonicmoe_hf.patch_model(model)
    balancing = sonicmoe_hf.LoadBalancing(per_layer_loss=PER_LAYER_LOSS)
    balancing.start(model)
    yield
    balancing.stop(model)


@torch.no_grad()
def held_out_loss(model, rows, dtype=torch.bfloat16):
    """Compute the mean loss of the rows."""
    losses = []
    for first in range(0, len(rows), BATCH):
        ids = torch.stack([row["input_ids"] for row in rows[first : first + BATCH]]).to(model.device)
        with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
            losses.append(model.eval()(input_ids=ids, labels=ids).loss)
    return torch.stack(losses).mean().item()


def texts_of(files: list[Path] | None) -> tuple[list[str], list[str], str]:
    """Gather texts to train on, held-out ones, and what they are: files' pieces, or the standard library."""
    if not files:
        return *standard_library(), "standard library"
    whole = "".join(file.read_text(encoding="utf-8") for file in files)
    pieces = [whole[first : first + PIECE] for first in range(0, len(whole), PIECE)]
    name = f"{', '.join(file.name for file in files)} ({hashlib.sha256(whole.encode()).hexdigest()[:12]})"
    return *held_out_apart(pieces), name


def train_base(options, dtype=torch.bfloat16, **sizes):
    """Train a model in full, of other sizes where given. Returns it in that dtype; the rows for adapters; held-out
    rows; of which text."""
    texts, held_out, name = texts_of(options.text)
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    set_seed(0)
    config = small_config(tokenizer)
    config.update(sizes)
    model = AutoModelForCausalLM.from_config(config).to(options.device)
    with patch_and_balance(model):
        train(model, blocks(texts[0::2], tokenizer, LENGTH), options.start_steps, 3e-3, 0, dtype=dtype)
    rows = blocks(held_out, tokenizer, LENGTH)
    held_out = rows[:: max(1, len(rows) // options.held_out)]
    return model.to(dtype), blocks(texts[1::2], tokenizer, LENGTH), held_out, name


def copy_with_adapters(base, seed, rank, experts="bf16", **options):
    """Copy the base, with its experts in this format and the seed's adapters in fp32; options: of lora_config."""
    model = copy.deepcopy(base).requires_grad_(False)
    if experts != "bf16":
        sonicmoe_hf.quantize_experts(model, experts)
    set_seed(seed)
    model = get_peft_model(model, sonicmoe_hf.lora_config(model, rank, **options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.to(base.device)


def parser_of(description: str | None, csv: str, start_steps: int, steps: int, seeds: int, held_out: int) -> Command:
    """Make the parser of the command line, with these defaults."""
    parser = Command(description, csv, needs_gpu=False)
    parser.add_argument("--text", type=Path, nargs="+", help="UTF-8 files; default: the standard library's sources")
    parser.add_argument("--start-steps", type=int, default=start_steps, help="of full training, of the base")
    parser.add_argument("--steps", type=int, default=steps, help="of the adapters")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--held-out", type=int, default=held_out, help="rows of 128 tokens, about")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the adapters")
    return parser


def curves_of(contenders, options, build_adapted: Callable, dtype=torch.bfloat16, **sizes) -> Iterator[tuple]:
    """Yield (contender, seed, {step: held-out loss}) of each run; the CSV has them all. build_adapted: (base, contender,
    seed) -> the model to train, and its further columns."""
    base, rows, held_out, text = train_base(options, dtype, **sizes)
    table = Rows(options.csv, ("text",))
    for seed in range(1, 1 + options.seeds):
        for contender in contenders:
            model, further = build_adapted(base, contender, seed)
            evaluate = lambda model: held_out_loss(model, held_out, dtype)  # noqa: E731
            curve = train(model, rows, options.steps, options.learning_rate, seed, evaluate, dtype)
            del model
            for step, loss in curve.items():
                table.add(text=text, contender=contender, seed=seed, step=step, held_out_loss=f"{loss:.5f}", **further)
            yield contender, seed, curve
        table.write()


def draw(curves, path):
    """Draw a chart: the mean of the seeds, and every seed's curve behind it."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.6))
    for index, contender in enumerate(CONTENDERS):
        every = [curve for (name, _), curve in curves.items() if name == contender]
        for curve in every:
            axis.plot(list(curve), list(curve.values()), color=f"C{index}", alpha=0.25, linewidth=0.8)
        means = {step: sum(curve[step] for curve in every) / len(every) for step in every[0]}
        label = "LoRA over bf16 experts" if contender == "bf16" else f"over {contender.upper()} experts"
        axis.plot(list(means), list(means.values()), color=f"C{index}", label=label)
    axis.set_xlabel("step")
    axis.set_ylabel("held-out loss")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main():
    options = parser_of(__doc__, "qlora_curves.csv", start_steps=600, steps=300, seeds=3, held_out=128).parse_args()

    def build_adapted(base, contender, seed):
        return copy_with_adapters(base, seed, RANK, experts=contender), {}

    runs = curves_of(CONTENDERS, options, build_adapted)
    curves = {(contender, seed): curve for contender, seed, curve in runs}
    draw(curves, options.csv.with_suffix(".png"))
    for contender in CONTENDERS:
        every = [curve for (name, _), curve in curves.items() if name == contender]
        first, last = (sum(list(curve.values())[at] for curve in every) / len(every) for at in (0, -1))
        print(f"{contender:6s} mean of {len(every)} seeds: {first:.4f} -> {last:.4f}")


if __name__ == "__main__":
    main()
