"""What token rounding gains and costs on a GPU, routing included: top-k against every rounding, in one interleaved run.

    python -m benchmarks.layer.token_rounding [--shape T,H,I,E,K ...] [--sweep] [--upstream] [--backend triton]

bf16, SwiGLU, a Qwen3 router on random data. "routing included" is everything from the layer's input on: the router's
product, softmax and top-k, the rounding or top-k's dispatch, and the gradients back to the router and the input;
"routing" is that without the experts, forward; "routing excluded" starts from sorted rows and weights, as the paper's
timings do. Writes results/token_rounding.csv. --upstream adds Transformers' sonicmoe with top-k at the first
shape, where it tunes for minutes; it sorts its rows itself in either case. --sweep adds the first shape with more tokens.
"""

from __future__ import annotations

import argparse
import csv
import gc
import random
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from benchmarks.common.contenders import CONTENDERS, Unavailable
from benchmarks.common.measuring import captured
from benchmarks.common.paths import RESULTS
from benchmarks.common.shapes import Shape
from benchmarks.common.table import Table
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
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            marks[0].record()
            out = step.forward()
            marks[1].record()
            step.backward(out)
            marks[2].record()
            marks[2].synchronize()
            del out
            for part, start, end in zip(PARTS, (0, 1, 0), (1, 2, 2)):
                times.setdefault((name, part, "eager"), []).append(marks[start].elapsed_time(marks[end]))
        for (name, part), replay in order.sample(list(graphs.items()), len(graphs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.setdefault((name, part, "graph"), []).append(start.elapsed_time(end))
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


def measure(table, text, names, rounds, backend):
    shape = Shape(*map(int, text.split(",")))
    layer = Layer(shape, backend)
    for name, facts in row_counts(layer).items():
        for metric, value in facts.items():
            table.add("rows", shape, name, "", "", metric, [value])
    for routing in ("routing included", "routing excluded"):
        steps = {}
        for name in names:
            try:
                steps[name] = Step(layer, name, routing == "routing included")
                steps[name]()
            except Unavailable as reason:
                steps.pop(name, None)
                print(f"  {name} is left out: {reason}", flush=True)
        graphs = {}
        for name, step in steps.items():
            graphs[name, "forward+backward"] = captured(step)
            graphs[name, "forward"] = captured(step.forward)
            if step.peer is None and routing == "routing included":
                graphs[name, "routing"] = captured(lambda name=name: layer.sort(name))
        graphs = {key: replay for key, replay in graphs.items() if replay}
        for (name, part, launch), values in interleaved_times(steps, graphs, rounds).items():
            table.add(routing, shape, name, part, launch, "ms", values)
        del steps, graphs
        gc.collect()
        torch.cuda.empty_cache()
    show(table, shape, names)


def gain(table, shape, name, routing, part="forward+backward", launch="graph", over=TOP_K):
    """How many times faster than `over` a contender is."""
    at = {"config": routing, "shape": str(shape), "mode": part, "launch": launch, "metric": "ms"}
    return table.get(**at, contender=over) / table.get(**at, contender=name)


def show(table, shape, names):
    factor = table.get(config="rows", shape=str(shape), contender=TOP_K, metric="padded_row_factor")
    rows = shape.T * shape.K / shape.E
    print(f"{shape}   {rows:.0f} rows per expert; top-k's rows, padded, are x{factor:.3f}", flush=True)
    graphs = {"config": "routing included", "shape": str(shape), "launch": "graph", "metric": "ms"}
    of_top_k = {mode: table.get(**graphs, contender=TOP_K, mode=mode) for mode in ("routing", "forward")}
    for name in names:
        line = f"  {name:24s}"
        for routing in ("routing included", "routing excluded"):
            at = {"config": routing, "shape": str(shape), "contender": name, "metric": "ms"}
            times = [table.get(**at, mode=part, launch="eager") for part in PARTS]
            graph = table.get(**at, mode="forward+backward", launch="graph")
            gains = [gain(table, shape, name, routing, launch=launch) for launch in ("eager", "graph")]
            line += f" {' '.join(f'{ms:6.3f}' for ms in times)} graph {graph:6.3f} x{gains[0]:.3f} x{gains[1]:.3f} |"
        added = table.get(**graphs, contender=name, mode="routing") - of_top_k["routing"]
        print(f"{line} adds {1e3 * added:.0f} us, {added / of_top_k['forward']:.1%} of forward", flush=True)


def rows_of_other_shapes(path, texts):
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["shape"] not in texts]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="T,H,I,E,K; may be given several times")
    parser.add_argument("--sweep", action="store_true", help="also the first shape with more rows per expert")
    parser.add_argument("--upstream", action="store_true", help="also Transformers' sonicmoe, at the first shape")
    parser.add_argument("--backend", choices=("hopper", "triton"), help="ours; the best that fits unless given")
    parser.add_argument("--add", action="store_true", help="keep the CSV's rows of other shapes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    backend = options.backend or backends.choose(torch.device("cuda"), torch.bfloat16).name
    texts = [*(options.shape or SHAPES), *(SWEEP if options.sweep else ())]
    table = Table()
    if options.add:
        table.rows = rows_of_other_shapes(options.out / "token_rounding.csv", texts)
    for number, text in enumerate(texts):
        names = [TOP_K, "nearest"] if text in SWEEP else [TOP_K, *ROUNDINGS]
        names += [UPSTREAM] if options.upstream and number == 0 else []
        measure(table, text, names, options.rounds, backend)
        table.write(options.out / "token_rounding.csv")


if __name__ == "__main__":
    main()
