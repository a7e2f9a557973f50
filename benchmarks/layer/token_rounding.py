"""What token rounding gains and costs on a GPU, routing included: top-k against every rounding, in one interleaved run.

    python -m benchmarks.layer.token_rounding [--shape T,H,I,E,K ...] [--sweep] [--upstream] [--backend triton]

bf16, SwiGLU, a Qwen3 router on random data. "routing included" is everything from the layer's input on: the router's
product, softmax and top-k, the rounding or top-k's dispatch, and the gradients back to the router and the input;
"routing" is that without the experts, forward; "routing excluded" starts from sorted rows and weights, as the paper's
timings do. Writes results/token_rounding.csv. --upstream adds Transformers' sonicmoe with top-k at the first
shape, where it tunes for minutes; it sorts its rows itself in either case. --sweep adds the first shape with more tokens.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from benchmarks.common.command import Command
from benchmarks.common.contenders import CONTENDERS, Unavailable
from benchmarks.common.shapes import Shape, shape_of
from benchmarks.common.table import Table
from benchmarks.common.timing import Clock, captured, release
from sonicmoe_hf.layer import backends
from sonicmoe_hf.layer.config import DEFAULT_TILE, ROUNDINGS, TokenRounding
from sonicmoe_hf.layer.dispatch import dispatch
from sonicmoe_hf.layer.moe_experts import moe_experts
from sonicmoe_hf.layer.routing import Routing, rounded_routing
from sonicmoe_hf.model_patches import FAMILIES

SHAPES = ("16384,4096,1024,256,4", "16384,1536,1024,128,2", "16384,1536,256,512,8", "16384,4096,512,256,8",
          "16384,2048,512,512,10", "16384,2048,768,128,8", "24576,1536,256,128,8")  # fmt: skip
SWEEP = tuple(f"{tokens},4096,1024,256,4" for tokens in (32768, 65536))
UPSTREAM = "sonicmoe (Transformers)"
TOP_K = "top_k"
FAMILY, ROUTER = FAMILIES["qwen3_moe"], SimpleNamespace(norm_topk_prob=True)
PARTS = ("forward", "backward", "forward+backward")


class Layer:
    """The tensors of one layer and its router, and a step of it for every contender."""

    def __init__(self, shape: Shape, backend: str):
        T, H, I, E, _ = self.shape = shape
        self.backend = backend
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*size, std=1.0):
            tensor = torch.randn(size, generator=generator, device="cuda").mul_(std)
            return tensor.to(torch.bfloat16).requires_grad_()

        self.x, self.dout = normal(T, H), normal(T, H).detach()
        self.router = normal(E, H, std=H**-0.5)
        self.gate_up, self.down = normal(E, 2 * I, H, std=H**-0.5), normal(E, H, I, std=I**-0.5)

    def top_k(self):
        """The router as Qwen3's: logits, weights and indices."""
        logits_TE = F.linear(self.x, self.router)
        weights_TK, index_TK = logits_TE.softmax(-1, dtype=torch.float32).topk(self.shape.K, dim=-1)
        return logits_TE, (weights_TK / weights_TK.sum(-1, keepdim=True)).to(logits_TE.dtype), index_TK

    def decide(self, contender: str) -> Routing:
        """Router, its top-k, and rounding; top-k's pairs are sorted by the experts' function."""
        logits_TE, weights_TK, index_TK = self.top_k()
        if contender == TOP_K:
            return Routing(index_TK, weights_TK)
        policy = TokenRounding(rounding=contender, min_tiles_per_expert=0)
        return rounded_routing(FAMILY, ROUTER, logits_TE, index_TK, policy)[0]

    def sort(self, contender: str) -> Routing:
        """The same decision with its rows sorted."""
        routing = self.decide(contender)
        if routing.rows is None:
            routing.rows = dispatch(routing.expert_index, self.shape.T, self.shape.E, backend=self.backend)
            routing.rows_backend = self.backend
        return routing

    def decided(self, contender: str) -> Routing:
        """The same as constants but for the weights."""
        with torch.no_grad():
            routing = self.sort(contender)
        routing.weights = routing.weights.detach().requires_grad_()
        return routing

    def experts(self, routing: Routing):
        """The experts' output."""
        return moe_experts(self.x, self.gate_up, self.down, routing, backend=self.backend)


class Step:
    """One contender's forward and backward: `__call__` runs both, `forward` the first."""

    def __init__(self, layer: Layer, contender: str, with_routing: bool):
        self.layer, self.contender = layer, contender
        self.wanted = [layer.x, layer.gate_up, layer.down]
        self.peer = CONTENDERS[UPSTREAM](layer.shape) if contender == UPSTREAM else None
        if with_routing:
            self.wanted.append(layer.router)
            self.decide = layer.top_k if self.peer else lambda: layer.decide(contender)
        elif self.peer:
            with torch.no_grad():
                logits_TE, weights_TK, index_TK = layer.top_k()
            decision = logits_TE, weights_TK.requires_grad_(), index_TK
            self.wanted.append(weights_TK)
            self.decide = lambda: decision
        else:
            routing = layer.decided(contender)
            self.wanted.append(routing.weights)
            self.decide = lambda: routing

    def forward(self):
        """The layer's output, ready for backward."""
        if self.peer is None:
            return self.layer.experts(self.decide())
        _, weights_TK, index_TK = self.decide()
        return self.peer(self.layer.x, self.layer.gate_up, self.layer.down, index_TK, weights_TK)

    def backward(self, out):
        """Gradients of everything that has one."""
        return torch.autograd.grad(out, self.wanted, self.layer.dout)

    def __call__(self):
        return self.backward(self.forward())


def interleaved_times(steps, graphs, rounds):
    """(contender, part, launch) -> milliseconds of every round; a round runs each once, in an order of its own, because
    what ran just before decides how warm the GPU is."""
    times, order = {}, random.Random(0)
    for _ in range(rounds):
        for name, step in order.sample(list(steps.items()), len(steps)):
            torch.cuda.synchronize()
            clock = Clock(3)
            clock.note()
            out = step.forward()
            clock.note()
            step.backward(out)
            clock.note()
            forward, backward = clock.milliseconds()
            del out
            for part, ms in zip(PARTS, (forward, backward, forward + backward)):
                times.setdefault((name, part, "eager"), []).append(ms)
        for (name, part), replay in order.sample(list(graphs.items()), len(graphs)):
            clock = Clock(2)
            clock.note()
            replay()
            clock.note()
            times.setdefault((name, part, "graph"), []).extend(clock.milliseconds())
    return times


def row_counts(layer: Layer):
    """contender -> facts of its decision: rows, rows of padding to full tiles, rows added and dropped."""
    f_E = layer.decided(TOP_K).rows.offsets.diff()
    facts = {}
    for name in (TOP_K, *ROUNDINGS):
        n_E = f_E if name == TOP_K else layer.decided(name).rows.offsets.diff()
        padding = (-n_E) % DEFAULT_TILE
        change = n_E - f_E
        facts[name] = {
            "rows": n_E.sum().item(),
            "rows_padding": padding.sum().item(),
            "padded_row_factor": (n_E + padding).sum().item() / n_E.sum().item(),
            "rows_added": change.clamp(min=0).sum().item(),
            "rows_dropped": (-change).clamp(min=0).sum().item(),
        }
    return facts


def measure(table: Table, text: str, names, rounds: int, backend: str) -> None:
    """The rows of one shape."""
    shape = shape_of(text)
    layer = Layer(shape, backend)
    for name, facts in row_counts(layer).items():
        table.add("rows", shape, name, "", "", facts)
    for routing in ("routing included", "routing excluded"):
        steps = {}
        for name in names:
            try:
                steps[name] = Step(layer, name, routing == "routing included")
                steps[name]()
            except Unavailable as reason:
                steps.pop(name, None)
                print(f"  {name} is left out: {reason}", flush=True)
        calls = {}
        for name, step in steps.items():
            calls |= {(name, "forward+backward"): step, (name, "forward"): step.forward}
            if step.peer is None and routing == "routing included":
                calls[name, "routing"] = lambda name=name: layer.sort(name)
        for (name, part, launch), values in interleaved_times(steps, captured(calls), rounds).items():
            table.add(routing, shape, name, part, launch, {"ms": values})
        del steps, step, calls
        release()


def main():
    parser = Command(__doc__, "token_rounding.csv")
    parser.add_argument("--shape", action="append", help="T,H,I,E,K; may be given several times")
    parser.add_argument("--sweep", action="store_true", help="also the first shape with more rows per expert")
    parser.add_argument("--upstream", action="store_true", help="also Transformers' sonicmoe, at the first shape")
    parser.add_argument("--backend", choices=("hopper", "triton"), help="ours; the best that fits unless given")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    backend = options.backend or backends.choose(torch.device("cuda"), torch.bfloat16).name
    texts = [*(options.shape or SHAPES), *(SWEEP if options.sweep else ())]
    table = Table(options.csv)
    for number, text in enumerate(texts):
        names = [TOP_K, "nearest"] if text in SWEEP else [TOP_K, *ROUNDINGS]
        names += [UPSTREAM] if options.upstream and number == 0 else []
        measure(table, text, names, options.rounds, backend)
        table.write()


if __name__ == "__main__":
    main()
