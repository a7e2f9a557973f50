"""Token rounding's gain and cost on a GPU, routing included: top-k against every rounding, in one interleaved run.

    python -m benchmarks.layer.token_rounding [--shape T,H,I,E,K ...] [--backend triton] [--csv FILE]

bf16, SwiGLU, a Qwen3 router on random data. Everything from the layer's input on is timed: the router's product, softmax
and top-k, the rounding or top-k's dispatch, the experts, and the gradients back to the router and the input; "routing" is
that without the experts, forward. Writes token_rounding.csv.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from benchmarks.common.command import Command
from benchmarks.common.measuring import LayerStep
from benchmarks.common.shapes import Shape
from benchmarks.common.table import Table
from benchmarks.common.timing import interleaved_times, make_replays, release
from sonicmoe_hf.layer import backends
from sonicmoe_hf.layer.config import ROUNDINGS, TokenRounding
from sonicmoe_hf.layer.dispatch import dispatch
from sonicmoe_hf.layer.moe_experts import moe_experts
from sonicmoe_hf.layer.routing import Routing, rounded_routing
from sonicmoe_hf.model_patches import FAMILIES

SHAPES = ("16384,4096,1024,256,4", "16384,1536,1024,128,2", "16384,1536,256,512,8", "16384,4096,512,256,8",
          "16384,2048,512,512,10", "16384,2048,768,128,8", "24576,1536,256,128,8")  # fmt: skip
TOP_K = "top_k"
FAMILY, ROUTER = FAMILIES["qwen3_moe"], SimpleNamespace(norm_topk_prob=True)


class Layer:
    """The tensors of one layer and its router."""

    def __init__(self, shape: Shape, backend: str):
        T, H, I, E, _ = self.shape = shape
        self.backend = backend
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*size, std=1.0):
            tensor = torch.randn(size, generator=generator, device="cuda").mul_(std)
            return tensor.to(torch.bfloat16).requires_grad_()

        self.dout = normal(T, H).detach()
        self.leaves = {
            "x": normal(T, H),
            "router": normal(E, H, std=H**-0.5),
            "gate_up": normal(E, 2 * I, H, std=H**-0.5),
            "down": normal(E, H, I, std=I**-0.5),
        }

    def decide(self, contender: str) -> Routing:
        """Route the tokens: the router's product, top-k as Qwen3's, and rounding. Top-k's pairs are sorted by the
        experts' function."""
        logits_TE = F.linear(self.leaves["x"], self.leaves["router"])
        weights_TK, index_TK = logits_TE.softmax(-1, dtype=torch.float32).topk(self.shape.K, dim=-1)
        if contender == TOP_K:
            return Routing(index_TK, (weights_TK / weights_TK.sum(-1, keepdim=True)).to(logits_TE.dtype))
        policy = TokenRounding(rounding=contender, min_tiles_per_expert=0)
        return rounded_routing(FAMILY, ROUTER, logits_TE, index_TK, policy)[0]

    def sort(self, contender: str):
        """Route the tokens as `decide` does, and sort the rows."""
        routing = self.decide(contender)
        rows = routing.rows or dispatch(routing.expert_index, self.shape.T, self.shape.E, backend=self.backend)
        return routing, rows

    def step(self, contender: str) -> LayerStep:
        """Run forward and backward, from the router on."""
        x, gate_up, down = (self.leaves[name] for name in ("x", "gate_up", "down"))
        forward = lambda: moe_experts(x, gate_up, down, self.decide(contender), backend=self.backend)  # noqa: E731
        return LayerStep(forward, self.leaves, self.dout)


def measure(table: Table, shape: Shape, rounds: int, backend: str) -> None:
    """Measure the rows of one shape."""
    layer, calls = Layer(shape, backend), {}
    for name in (TOP_K, *ROUNDINGS):
        step = layer.step(name)
        calls |= {
            (name, "forward"): step.forward,
            (name, "forward+backward"): step.results,  # which lets go of the gradients
            (name, "routing"): lambda name=name: layer.sort(name),
        }
    for launch, launched in (("eager", calls), ("graph", make_replays(calls))):
        for (name, part), times in interleaved_times(launched, rounds).items():
            table.add("routing included", shape, name, part, launch, {"ms": times.on_device})
    release()


def main():
    parser = Command(__doc__, "token_rounding.csv", shapes=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", choices=("hopper", "triton"), help="ours; the best that fits unless given")
    options = parser.parse_args()
    backend = options.backend or backends.choose(torch.device("cuda"), torch.bfloat16).name
    table = Table(options.csv)
    for shape in options.shapes.values():
        measure(table, shape, options.rounds, backend)
        table.write()


if __name__ == "__main__":
    main()
