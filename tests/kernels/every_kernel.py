"""Every GPU kernel on a layer or two of sizes that no tile divides, as often as its tiles differ; for compute-sanitizer,
under which test_memcheck_gpu.py starts it. python every_kernel.py hopper|triton"""

import sys
from importlib import import_module
from types import SimpleNamespace

import torch
from moe_problems import AdaptedLayer, layer, routing_ids, run

from sonicmoe_hf.kernels.hopper.config import MIN_WIDE_DEPTH
from sonicmoe_hf.layer.config import TokenRounding
from sonicmoe_hf.layer.routing import rounded_routing
from sonicmoe_hf.model_patches import FAMILIES

H, I, E, K = 256, MIN_WIDE_DEPTH + 8, 8, 2  # down takes wide tiles of many rows, as up_backward_input does
FEW, TALL, SHORT, MANY = 100, 509, 1101, 1805  # tokens: 25, 128, 276 and 452 rows per expert


def keep_tensors_apart():
    """Make an allocation for each tensor also where moe_experts has several in one."""
    op = import_module("sonicmoe_hf.layer.products")
    prepare = op.prepare_adapters

    def own(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )

    def prepare_apart(*arguments):
        prepared = prepare(*arguments)
        return [one._replace(a=own(one.a), b=own(one.b)) if one.a is not None else one for one in prepared]

    op.prepare_adapters = prepare_apart


def main(backend):
    for tokens, layout, kind, dtype in (
        (1, "concatenated", "top_k", torch.bfloat16),
        (FEW, "concatenated", "sentinels", torch.bfloat16),
        (TALL, "concatenated", "top_k", torch.bfloat16),
        (SHORT, "transposed_interleaved", "list", torch.float16),
        (MANY, "concatenated", "top_k", torch.bfloat16),
    ):
        ids = routing_ids(tokens, E, K, kind, "cuda", empty=(0,))
        tensors, dout = layer(tokens, H, I, E, ids[0].numel(), dtype, "cuda")
        for save in ("preactivation", "input"):
            found = run(tensors, dout, ids, layout, "swiglu", backend, save=save)
            assert all(t.isfinite().all() for t in found.values())
    for tokens in (FEW, TALL, MANY):
        for layout, rank in (("concatenated", 5), ("transposed_interleaved", 100)):
            found = AdaptedLayer(rank, layout, tokens, H, I, E, K, empty=(0,), bias=False).step(backend)
            assert all(t.isfinite().all() for t in found.values())
    logits = torch.randn(999, 60, device="cuda", requires_grad=True)
    index = logits.detach().topk(4).indices
    family, router = FAMILIES["qwen3_moe"], SimpleNamespace(norm_topk_prob=True)
    for rounding in ("nearest", "nearest_score", "stochastic"):
        policy = TokenRounding(rounding=rounding, tile=16, min_tiles_per_expert=0)
        routing, _ = rounded_routing(family, router, logits, index, policy)
        routing.weights.sum().backward()
    torch.cuda.synchronize()
    print(f"{backend}: every kernel has run")


if __name__ == "__main__":
    torch.manual_seed(0)
    keep_tensors_apart()
    main(sys.argv[1])
