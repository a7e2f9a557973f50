"""Packed experts, FP8 products, merging and token rounding from pretrained weights.

    python examples/upcycle.py --model FOLDER --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf --output outputs/upcycled
    python -m benchmarks.quality.pretrained outputs/upcycled [--steps 200] [--seeds 2] [--only packed adapters rounding]

The model is a dense one whose MLP is every expert (examples/upcycle.py): its activations have a pretrained model's
outliers, and its loss on real text is one. The text is the standard library's sources. Losses are those of held-out
files, in nats per token:

- packed: of the model with its experts in each format, and of FP8's with FP8 products.
- adapters: trained (r = 8) over bf16 and NF4 experts, then merged in bf16, and packed in NF4 again.
- rounding: of all weights trained with top-k and with token rounding, in batches of four and of two tiles an expert.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, set_seed

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Rows
from benchmarks.quality.qlora_curves import copy_with_adapters, held_out_loss, patch_and_balance, train
from sonicmoe_hf.tools.demo.corpus import blocks, standard_library

FORMATS = ("bf16", "nf4", "mxfp4", "nvfp4", "fp8")
LENGTH, RANK = 128, 8


class Trial:
    """A model's folder, rows to train on and to evaluate, and the table."""

    def __init__(self, options):
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        texts, held_out = standard_library()
        self.options, self.rows = options, blocks(texts, tokenizer, LENGTH)
        rows = blocks(held_out, tokenizer, LENGTH)
        self.held_out = rows[:: max(1, len(rows) // options.held_out)]
        self.table = Rows(options.csv, ("part", "contender", "seed"))

    def load(self, dtype=torch.bfloat16):
        set_seed(0)
        return sonicmoe_hf.from_pretrained(self.options.model, dtype=dtype).to(self.options.device)

    def add(self, part: str, contender: str, seed: int, model) -> None:
        loss = held_out_loss(model, self.held_out)
        self.table.add(part=part, contender=contender, seed=seed, held_out_loss=f"{loss:.4f}")
        self.table.write()


def measure_packing(trial: Trial) -> None:
    for name in FORMATS:
        model = trial.load()
        if name != "bf16":
            sonicmoe_hf.quantize_experts(model, name)
        trial.add("packed", name, 0, model)
    sonicmoe_hf.patch_model(model, experts_compute="fp8")  # the last one's
    trial.add("packed", "fp8, FP8 products", 0, model)


def measure_adapters(trial: Trial) -> None:
    base = trial.load()
    for seed in range(1, 1 + trial.options.seeds):
        for experts in ("bf16", "nf4"):
            model = copy_with_adapters(base, seed, RANK, experts=experts)
            train(model, trial.rows, trial.options.steps, 3e-4, seed, batch=trial.options.batch)
            trial.add("adapters", experts, seed, model)
            whole = copy_with_adapters(base, seed, RANK)
            whole.load_state_dict({n: p for n, p in model.named_parameters() if p.requires_grad}, strict=False)
            merged = whole.merge_and_unload()
            trial.add("adapters", f"{experts}, merged in bf16", seed, merged)
            sonicmoe_hf.quantize_experts(merged, "nf4")
            trial.add("adapters", f"{experts}, merged, packed in NF4", seed, merged)


def measure_rounding(trial: Trial) -> None:
    tile = trial.options.tile
    for tiles in (4, 2):
        for seed in range(1, 1 + trial.options.seeds):
            rounded = sonicmoe_hf.TokenRounding(tile=tile, min_tiles_per_expert=tiles)
            for name, policy in ("top-k", None), (f"rounded to {tile} rows", rounded):
                model = trial.load(torch.float32)
                config = model.config
                tokens = tiles * tile * config.num_local_experts // config.num_experts_per_tok
                with patch_and_balance(model):
                    sonicmoe_hf.set_routing(model, policy)
                    train(model, trial.rows, trial.options.steps, 5e-5, seed, batch=tokens // LENGTH)
                trial.add("rounding", f"{name}, {tiles} tiles an expert", seed, model)


PARTS = {"packed": measure_packing, "adapters": measure_adapters, "rounding": measure_rounding}


def main() -> None:
    parser = Command(__doc__, "pretrained.csv", needs_gpu=False)
    parser.add_argument("model", type=Path, help="folder that examples/upcycle.py wrote")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="rows of 128 tokens, of the adapters' steps")
    parser.add_argument("--tile", type=int, default=128, help="rows, of token rounding")
    parser.add_argument("--held-out", type=int, default=256, help="rows of 128 tokens, about")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    trial = Trial(options)
    for part in options.only:
        PARTS[part](trial)


if __name__ == "__main__":
    main()
