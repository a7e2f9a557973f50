"""Held-out loss of LoRA whose experts have the attention's rank r, or r / experts per token.

    python -m benchmarks.quality.lora_rank [--start-steps 150] [--steps 72] [--seeds 2] [--out benchmarks/results]

The demo's small model (32 experts, 4 per token) is trained in full on half of the standard library's sources, then
adapters on the other half, as qlora_curves.py does: every contender has the same base and batches. Runs on a
CPU too, in fp32, which is fastest there. Writes lora_rank.csv.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from peft import get_peft_model
from transformers import set_seed

import sonicmoe_hf
from benchmarks.common import provenance
from benchmarks.common.paths import RESULTS
from benchmarks.quality.qlora_curves import held_out_loss, start, train
from sonicmoe_hf.demo.model import TOP_K

RANK = 16
CONTENDERS: dict[str, dict] = {
    "r": {},
    "r / K": {"experts_r": RANK // TOP_K},
    "attention alone": {"target_parameters": []},
}
FIELDS = ("contender", "seed", "step", "held_out_loss", "adapter_parameters", "gpu", "commit", "versions", "date")


def adapted(base, contender: str, seed: int):
    """A copy of the base with the contender's adapters, in fp32."""
    model = copy.deepcopy(base).requires_grad_(False)
    set_seed(seed)
    model = get_peft_model(model, sonicmoe_hf.lora_config(model, RANK, **CONTENDERS[contender]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.to(base.device)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start-steps", type=int, default=150, help="of full training, of the base")
    parser.add_argument("--steps", type=int, default=72, help="of the adapters")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=32, help="rows of 128 tokens, about")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the adapters")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    dtype = torch.float32 if torch.device(options.device).type == "cpu" else torch.bfloat16
    base, rows, held_out = start(options, dtype)
    gpu = torch.cuda.get_device_name() if base.device.type == "cuda" else "none"
    origin = {"gpu": gpu, **provenance.columns()}
    table = []
    for seed in range(1, 1 + options.seeds):
        for contender in CONTENDERS:
            model = adapted(base, contender, seed)
            parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
            curve = train(
                model,
                rows,
                options.steps,
                options.learning_rate,
                seed,
                lambda model: held_out_loss(model, held_out, dtype),
                dtype,
            )
            table += [
                dict(zip(FIELDS, (contender, seed, step, f"{loss:.5f}", parameters))) | origin
                for step, loss in curve.items()
            ]
            first, *_, last = curve.values()
            print(f"{contender:15s} seed {seed}: {first:.4f} -> {last:.4f}, {parameters:,} parameters", flush=True)
        provenance.write_rows(options.out / "lora_rank.csv", FIELDS, table)


if __name__ == "__main__":
    main()
