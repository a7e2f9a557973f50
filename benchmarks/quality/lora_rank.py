"""Held-out loss of LoRA whose experts have the attention's rank r, or r / experts per token.

    python -m benchmarks.quality.lora_rank [--start-steps 150] [--steps 72] [--seeds 2] [--csv FILE]

The demo's small model (32 experts, 4 per token) is trained in full on half of the standard library's sources, then
adapters on the other half, as qlora_curves.py does: every contender has the same base and batches. Runs on a
CPU too, in fp32, which is fastest there. Writes lora_rank.csv.
"""

from __future__ import annotations

import torch

from benchmarks.quality.qlora_curves import copy_with_adapters, curves_of, parser_of
from sonicmoe_hf.tools.demo.model import TOP_K

RANK = 16
CONTENDERS: dict[str, dict] = {
    "r": {},
    "r / K": {"experts_r": RANK // TOP_K},
    "attention alone": {"target_parameters": []},
}


def build_adapted(base, contender: str, seed: int):
    model = copy_with_adapters(base, seed, RANK, **CONTENDERS[contender])
    return model, {"adapter_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad)}


def main():
    options = parser_of(__doc__, "lora_rank.csv", start_steps=150, steps=72, seeds=2, held_out=32).parse_args()
    dtype = torch.float32 if torch.device(options.device).type == "cpu" else torch.bfloat16
    for _ in curves_of(CONTENDERS, options, build_adapted, dtype):
        pass


if __name__ == "__main__":
    main()
