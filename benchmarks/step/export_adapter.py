"""What an adapter's export to an inference engine costs: bytes, seconds and peak memory, on random factors.

    python -m benchmarks.step.export_adapter [--rank 16] [--layers 48] [--layout vllm] [--folder /tmp/export]

The adapter is on the experts and the attention of Qwen3-30B-A3B, in bf16, in PEFT's form. No weights of the
model are made.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import sonicmoe_hf

SIZES = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
ATTENTION = {"q_proj": (4096, 2048), "k_proj": (512, 2048), "v_proj": (512, 2048), "o_proj": (2048, 4096)}


def make(folder: Path, layers: int, rank: int) -> None:
    """base/config.json and adapter/, as PEFT saves them."""
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": layers,
        **SIZES,
    }
    base, adapter = folder / "base", folder / "adapter"
    for path, name, content in (
        (base, "config.json", {**config, "vocab_size": 151936, "num_experts_per_tok": 8}),
        (
            adapter,
            "adapter_config.json",
            {
                "peft_type": "LORA",
                "r": rank,
                "lora_alpha": 32,
                "peft_version": "0.20.0",
                "target_modules": [*ATTENTION],
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
                "base_model_name_or_path": str(base),
            },
        ),
    ):
        path.mkdir(parents=True)
        (path / name).write_text(json.dumps(content))
    save_file(_factors(layers, rank), adapter / "adapter_model.safetensors")


def _factors(layers: int, rank: int) -> dict[str, torch.Tensor]:
    hidden, intermediate, experts = (SIZES[key] for key in ("hidden_size", "moe_intermediate_size", "num_experts"))
    shapes = {f"self_attn.{name}": (rank, *shape) for name, shape in ATTENTION.items()}
    shapes["mlp.experts.base_layer"] = (rank * experts, 2 * intermediate, hidden)
    shapes["mlp.experts"] = (rank * experts, hidden, intermediate)
    factors = {}
    for layer in range(layers):
        for module, (rows, size_out, size_in) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            factors[f"{name}.lora_A.weight"] = torch.randn(rows, size_in, dtype=torch.bfloat16)
            factors[f"{name}.lora_B.weight"] = torch.randn(size_out, rows, dtype=torch.bfloat16)
    return factors


def main() -> None:
    """Make an adapter, export it, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--layout", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/export"))
    arguments = parser.parse_args()
    for layers in (1, arguments.layers):  # the first imports what is needed
        shutil.rmtree(arguments.folder, ignore_errors=True)
        make(arguments.folder, layers, arguments.rank)
        start, busy = time.perf_counter(), time.process_time()
        done = sonicmoe_hf.convert_adapter(arguments.folder / "adapter", arguments.folder / "served", arguments.layout)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
    before, after = (
        (path / "adapter_model.safetensors").stat().st_size for path in (arguments.folder / "adapter", done)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{before / 1e9:.2f} GB -> {after / 1e9:.2f} GB in {seconds:.1f} s, {busy:.1f} s of them computing, "
        f"peak memory {peak / 1e9:.1f} GB"
    )
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
