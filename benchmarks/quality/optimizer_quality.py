"""The loss of full_finetune_one_gpu.py's optimiser beside plain AdamW's, on a small model on a CPU.

    python -m benchmarks.quality.optimizer_quality [--seeds N] [--steps N] [--csv FILE]

Each seed trains a small Qwen3-MoE model from scratch with every method, from the same weights on the same batches, then
trains plain AdamW's result further with every method at a low learning rate. Loss on files that training never saw,
in nats per token. The methods:
- plain: fp32 weights, bf16 autocast, torch's AdamW, one step for all weights after backward;
- one GPU: what the example does: bf16 weights, torchao's AdamW8bit with stochastic rounding, stepped in backward;
- nearest: bf16 weights and torch's AdamW, which rounds each update to the nearest bf16.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable

import torch
from torchao.optim import AdamW8bit
from transformers import AutoModelForCausalLM, set_seed

import sonicmoe_hf
from benchmarks.common.command import ROOT, Command
from benchmarks.common.table import Rows
from benchmarks.quality.qlora_curves import LENGTH, held_out_loss, patch_and_balance, train
from sonicmoe_hf.tools.demo.corpus import blocks, standard_library, train_tokenizer
from sonicmoe_hf.tools.demo.model import VOCAB_SIZE, small_config

sys.path.insert(0, str(ROOT / "examples"))
from full_finetune_one_gpu import step_in_backward

HELD_OUT_WINDOWS = 256
PHASES = {"from scratch": 2e-3, "trained further": 1e-4}  # their learning rates


def as_plain(model, learning_rate: float):
    return model, torch.optim.AdamW(model.parameters(), learning_rate)


def as_one_gpu(model, learning_rate: float):
    model = model.bfloat16()
    optimizer = AdamW8bit(model.parameters(), learning_rate, bf16_stochastic_round=True)
    step_in_backward(model, optimizer)
    return model, optimizer


def as_nearest(model, learning_rate: float):
    model = model.bfloat16()
    return model, torch.optim.AdamW(model.parameters(), learning_rate)


METHODS: dict[str, Callable] = {"plain": as_plain, "one GPU": as_one_gpu, "nearest": as_nearest}


def train_copy(base, method: str, learning_rate: float, rows, steps: int, seed: int):
    """Train a copy of `base` by `method`, on batches that depend on the seed alone; in fp32."""
    model, optimizer = METHODS[method](copy.deepcopy(base), learning_rate)
    dtype = torch.bfloat16 if method == "plain" else torch.float32  # of autocast, which the others do without
    with patch_and_balance(model):
        train(model, rows, steps, learning_rate, seed, dtype=dtype, optimizer=optimizer, max_norm=math.inf)
    sonicmoe_hf.unpatch_model(model)
    return model.float()


def main():
    parser = Command(__doc__, "optimizer_quality.csv", needs_gpu=False)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of each phase")
    options = parser.parse_args()
    torch.compiler.set_stance("force_eager")
    texts, held_out_texts = standard_library()
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    rows, held_out = (blocks(files, tokenizer, LENGTH) for files in (texts, held_out_texts))
    table = Rows(options.csv, gpu=False)
    for seed in range(options.seeds):
        set_seed(seed)
        config = small_config(tokenizer)
        config.num_hidden_layers, config.num_experts = 2, 16
        base = AutoModelForCausalLM.from_config(config)
        for phase, learning_rate in PHASES.items():
            models = {}
            for method in METHODS:
                set_seed(seed)
                batches = 2 * seed + (phase != "from scratch")
                models[method] = train_copy(base, method, learning_rate, rows, options.steps, batches)
                loss = held_out_loss(models[method], held_out[:HELD_OUT_WINDOWS], torch.float32)
                run = {"phase": phase, "seed": seed, "method": method, "steps": options.steps}
                table.add(**run, held_out_loss=f"{loss:.5f}")
            base = models["plain"]
    table.write()
    for phase in PHASES:
        loss = {
            (row["seed"], row["method"]): float(row["held_out_loss"]) for row in table.rows if row["phase"] == phase
        }
        scatter = torch.tensor([value for (_, method), value in loss.items() if method == "plain"]).std()
        print(f"{phase:16s} plain, standard deviation over seeds: {scatter:.4f}")
        for method in ("one GPU", "nearest"):
            differences = torch.tensor([loss[f"{s}", method] - loss[f"{s}", "plain"] for s in range(options.seeds)])
            error = differences.std() / len(differences) ** 0.5
            print(f"{phase:16s} {method:8s} minus plain: {differences.mean():+.4f} ± {error:.4f}")


if __name__ == "__main__":
    main()
