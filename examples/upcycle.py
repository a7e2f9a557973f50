"""Make a mixture of experts of a dense checkpoint: every expert begins as a copy of the layer's MLP (sparse upcycling).

    python examples/upcycle.py --model HuggingFaceTB/SmolLM2-135M --output outputs/upcycled
    python examples/upcycle.py --model FOLDER --gguf-file NAME.gguf --output outputs/upcycled      # needs gguf
    python examples/upcycle.py --model Qwen/Qwen3-0.6B --num-experts 16 --top-k 4 --noise 0.01 --output outputs/upcycled
    python examples/upcycle.py --model BASE --experts BASE MATHS CODE LAW --output outputs/mixed

Llama and Mistral become Mixtral, and Qwen3 becomes Qwen3-MoE. Their routers' weights of a token sum to one, so the model
computes what the dense one does, whatever its routers choose; this is checked on a text before anything is written.
Routers are random, and training makes the experts differ. `--noise` makes them differ at once (Komatsuzaki et al., 2022,
start from equal ones), and `--experts` takes the MLPs of several fine-tuned copies of one model in turn, the rest being
their mean (Branch-Train-MiX, Sukhbaatar et al., 2024); then there is nothing to be equal to.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: its threads wait without spinning

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

SPARSE = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
TEXT = "The experts of a layer begin as copies of one MLP, so that every choice of the router computes the same. " * 4
EQUAL = 1e-3  # relative to the logits, in fp32: the weights of a token sum to one but for rounding


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", required=True, help="hub id or folder of a dense Llama, Mistral or Qwen3")
    parser.add_argument("--gguf-file", help="of the model's folder, in place of safetensors")
    parser.add_argument("--experts", nargs="+", default=(), help="fine-tuned copies of it, for its experts in turn")
    parser.add_argument("--num-experts", type=int, default=8, help="of each layer (default %(default)s)")
    parser.add_argument("--top-k", type=int, default=2, help="experts of each token")
    parser.add_argument(
        "--noise", type=float, default=0.0, help="of experts, relative to the deviation of their weights"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the weights that are written")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and the routers")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    return parser.parse_args(arguments)


def sparse_config(dense, num_experts: int, top_k: int):
    """Make the config of the sparse family that has the dense model's block.

    Raises:
        ValueError: no family has it.
    """
    kind = SPARSE.get(dense.model_type)
    if kind is None or getattr(dense, "attention_bias", False) or getattr(dense, "mlp_bias", False):
        raise ValueError(f"{dense.model_type} has no sparse family with its block; take one of {', '.join(SPARSE)}")
    settings = dense.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "quantization_config"):
        settings.pop(name, None)
    if kind == "qwen3_moe":
        settings |= {
            "num_experts": num_experts,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        settings["moe_intermediate_size"] = dense.intermediate_size
    else:
        settings |= {"num_local_experts": num_experts, "head_dim": dense.head_dim}
    return AutoConfig.for_model(kind, **settings, num_experts_per_tok=top_k)


@torch.no_grad()
def upcycled(dense: PreTrainedModel, mlps: list[PreTrainedModel], num_experts: int, top_k: int, noise: float = 0.0):
    """Make the sparse model of a dense one.

    Args:
        mlps: models whose MLPs become the experts in turn.
        noise: normal noise on experts, relative to the standard deviation of each weight.
    """
    sparse = AutoModelForCausalLM.from_config(sparse_config(dense.config, num_experts, top_k), dtype=dense.dtype)
    lacking, _ = sparse.load_state_dict(dense.state_dict(), strict=False)  # all but the MLPs
    assert all(".mlp." in name for name in lacking), lacking
    for index, layer in enumerate(sparse.model.layers):
        experts = layer.mlp.experts
        for expert in range(num_experts):
            mlp = mlps[expert % len(mlps)].model.layers[index].mlp
            experts.gate_up_proj[expert] = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            experts.down_proj[expert] = mlp.down_proj.weight
        for weight in (experts.gate_up_proj, experts.down_proj) if noise else ():
            weight += noise * weight.std() * torch.randn_like(weight)
        torch.nn.init.normal_(layer.mlp.gate.weight, std=dense.config.initializer_range)
    sparse.generation_config = dense.generation_config
    return sparse.eval()


@torch.no_grad()
def mean_of(models: list[PreTrainedModel]) -> PreTrainedModel:
    """Average the weights of models into the first, MLPs apart."""
    others = [dict(model.named_parameters()) for model in models[1:]]
    for name, weight in models[0].named_parameters():
        if ".mlp." not in name:
            weight.copy_(torch.stack([weight, *(other[name] for other in others)]).mean(0))
    return models[0]


@torch.no_grad()
def difference(sparse: PreTrainedModel, dense: PreTrainedModel, ids: torch.Tensor) -> float:
    """Compute how far the logits are from the dense model's, relative to these."""
    expected = dense(ids).logits
    return ((sparse(ids).logits - expected).norm() / expected.norm()).item()


def load(name: str, gguf_file: str | None = None) -> PreTrainedModel:
    """Load a dense model in fp32."""
    return AutoModelForCausalLM.from_pretrained(name, gguf_file=gguf_file, dtype=torch.float32).eval()


def main(argv: list[str] | None = None) -> PreTrainedModel:
    """Make the model, check and save it with the tokenizer; returns it.

    Raises:
        RuntimeError: it computes something else than the dense model.
    """
    arguments = parse_arguments(argv)
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, gguf_file=arguments.gguf_file)
    mlps = [load(name) for name in arguments.experts] or [load(arguments.model, arguments.gguf_file)]
    dense = mlps[0] if len(mlps) == 1 else mean_of(mlps)
    sparse = upcycled(dense, mlps, arguments.num_experts, arguments.top_k, arguments.noise)
    if len(mlps) == 1 and not arguments.noise:
        error = difference(sparse, dense, tokenizer(TEXT, return_tensors="pt").input_ids)
        if error > EQUAL:
            raise RuntimeError(f"the logits are {error:.1e} from the dense model's, which is more than rounding")
        print(f"logits equal the dense model's to {error:.1e}")
    sparse.to(getattr(torch, arguments.dtype)).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    billions = sparse.num_parameters() / 1e9
    print(f"{arguments.num_experts} experts a layer, {billions:.2f} billion parameters, in {arguments.output}")
    return sparse


if __name__ == "__main__":
    main()
