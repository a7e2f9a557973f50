"""Loss curves of LoRA over FP8 experts whose products are in bf16 and in FP8, from the same start with the same seeds.

    python -m benchmarks.quality.fp8_curves [--text FILE ...] [--start-steps 400] [--steps 400] [--seeds 3] [--csv FILE]

As qlora_curves.py, with layers wide enough that every product has several groups of 128 columns: the same base, batches,
experts' bytes and initial adapters. The CSV keeps the curves of other texts. Runs on a CPU
too (--start-steps 2 --steps 2 --seeds 1).
"""

from __future__ import annotations

import statistics

import sonicmoe_hf
from benchmarks.quality.qlora_curves import RANK, copy_with_adapters, curves_of, parser_of

PRODUCTS = ("bf16", "fp8")
SIZES = {"hidden_size": 512, "moe_intermediate_size": 256}


def build_adapted(base, products, seed):
    """Build the base with FP8 experts, the seed's adapters, and these products."""
    model = copy_with_adapters(base, seed, RANK, experts="fp8")
    sonicmoe_hf.patch_model(model, experts_compute="fp8" if products == "fp8" else None)
    return model, {}


def main():
    options = parser_of(__doc__, "fp8_curves.csv", start_steps=400, steps=400, seeds=3, held_out=128).parse_args()
    ends = {products: [] for products in PRODUCTS}
    for products, _, curve in curves_of(PRODUCTS, options, build_adapted, **SIZES):
        ends[products].append(list(curve.values())[-1])
    for products, losses in ends.items():
        spread = statistics.pstdev(losses)
        print(f"{products} products, {len(losses)} seeds: {statistics.mean(losses):.4f}, deviation {spread:.4f}")
    differences = [fp8 - bf16 for bf16, fp8 in zip(*ends.values())]
    print("FP8 less bf16, by seed: " + ", ".join(f"{difference:+.4f}" for difference in differences))


if __name__ == "__main__":
    main()
