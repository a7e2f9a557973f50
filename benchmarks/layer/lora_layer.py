"""LoRA on the experts of one MoE layer: time, memory and error of every contender, in one interleaved run.

    python -m benchmarks.layer.lora_layer [--shape T,H,I,E,K ...] [--rank R ...] [--contender NAME ...]
        [--upstream] [--axolotl]

Forward and backward; bf16, SwiGLU, the data of moe_layer.py, adapters in fp32 on both weights as PEFT makes them, so that
casts and reorders are part of every step. Ours with all weights trained ("full"), none ("frozen"), and LoRA of each rank;
the others at --peer-rank. Ratios are to our frozen layer of the same round. Writes lora_layer.csv.
--upstream adds PEFT over Transformers' sonicmoe, which tunes for about 100 s at each new shape; --axolotl Axolotl's
kernels, which autotune up to 108 configurations of two kernels at two sizes each. lora_contenders.py says where these and
Unsloth's come from. --device cpu checks the script on small shapes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch

from benchmarks.common.contenders import Unavailable
from benchmarks.common.measuring import captured, relative_errors
from benchmarks.common.paths import RESULTS
from benchmarks.common.shapes import add_shapes, chosen_shapes, problem
from benchmarks.common.table import Table
from benchmarks.layer.lora_contenders import AXOLOTL, PEERS, UPSTREAM, Experts, experts_module, through_peft
from benchmarks.layer.moe_layer import first_step, interleaved_times, memory
from sonicmoe_hf.layer import backends

OURS = "sonicmoe-hf"
FROZEN = (OURS, "frozen")


class Step:
    """One contender on one problem: a call is one forward and backward."""

    def __init__(self, layer: Experts, inputs):
        x, *_, self.expert, weight, self.dout = inputs
        self.x, self.weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        self.layer, self.adapters, self.scale = layer, layer.adapters, layer.scale
        self.wanted = {"x": self.x, "weight": self.weight, **layer.adapters}
        self.gradients = ()

    def forward(self):
        return self.layer.call(self.x, self.expert, self.weight)

    def __call__(self):
        out = self.forward()
        self.gradients = torch.autograd.grad(out, list(self.wanted.values()), self.dout)
        return out

    def results(self):
        """out, and every gradient under the name of what it belongs to with a d before it."""
        found = {"out": self().detach()}
        found.update({f"d{name}": gradient for name, gradient in zip(self.wanted, self.gradients)})
        self.gradients = ()
        return found


def layers_of(shape, inputs, ranks, peer_rank, peers):
    """(contender, mode) -> what makes its `Experts`."""
    gate_up, down = inputs[1], inputs[2]

    def ours(trained):
        module = experts_module(shape, gate_up, down, "sonicmoe_hf", trained)
        weights = {"gate_up": module.gate_up_proj, "down": module.down_proj} if trained else {}
        return Experts(module, weights, 0.0)

    makers = {(OURS, "full"): lambda: ours(True), FROZEN: lambda: ours(False)}
    for rank in ranks:
        makers[OURS, f"LoRA r={rank}"] = lambda rank=rank: through_peft(shape, gate_up, down, rank, "sonicmoe_hf")
    for name in peers:
        makers[name, f"LoRA r={peer_rank}"] = lambda name=name: PEERS[name](shape, gate_up, down, peer_rank)
    return makers


def started(makers, inputs, add, device):
    """(contender, mode) -> Step of those that can run here; says which cannot."""
    steps = {}
    for (contender, mode), make in makers.items():
        try:
            step = Step(make(), inputs)
            if device == "cuda":
                for metric, value in first_step(step).items():
                    add(contender, mode, "eager", metric, [value])
            step()
            step.gradients = ()
        except Unavailable as reason:
            print(f"  {contender} is left out: {reason}", flush=True)
        except Exception as error:  # whatever a peer's sources raise here: the others' figures are worth having
            if contender == OURS:
                raise
            print(f"  {contender} is left out: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        else:
            steps[contender, mode] = step
    return steps


def measure(table, config, shape, options):
    dtype = torch.bfloat16
    inputs = problem(shape, dtype, options.device)

    def add(contender, mode, launch, metric, values):
        table.add(config, shape, contender, mode, launch, metric, values)

    makers = layers_of(shape, inputs, options.rank, options.peer_rank, options.contender)
    steps = started(makers, inputs, add, options.device)
    for (contender, mode), step in steps.items():
        for tensor, error in relative_errors(step, inputs).items():
            add(contender, mode, "eager", f"error_{tensor}", [error])
        if options.device == "cuda":
            for metric, value in memory(step).items():
                add(contender, mode, "eager", metric, [value])
    runs = {"eager": steps}
    if options.device == "cuda":
        graphs = {name: captured(step) for name, step in steps.items()}
        runs["graph"] = {name: graph for name, graph in graphs.items() if graph}
    for launch, calls in runs.items():
        found = {name: on_device for name, (on_device, _) in interleaved_times(calls, options.rounds).items()}
        for (contender, mode), values in found.items():
            add(contender, mode, launch, "ms", values)
            if FROZEN in found:
                ratios = [value / frozen for value, frozen in zip(values, found[FROZEN])]
                add(contender, mode, launch, "ratio_to_frozen", ratios)
    show(table, config, shape, steps)
    del steps, runs, calls, step
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def show(table, config, shape, steps):
    """One line a contender."""
    print(f"{config} {shape}   ms, ratio to frozen: eager, graph; memory in MB; errors against fp32", flush=True)
    for contender, mode in steps:
        at = {"config": config, "contender": contender, "mode": mode}
        eager, graph = ({**at, "launch": launch} for launch in ("eager", "graph"))
        figures = "  ".join(
            f"{table.get(**where, metric='ms'):8.3f} x{table.get(**where, metric='ratio_to_frozen'):.3f}"
            for where in (eager, graph)
        )
        errors = " ".join(
            f"{row['metric'].removeprefix('error_')} {float(row['median']):.4f}"
            for row in table.rows
            if row["metric"].startswith("error_") and all(row[key] == value for key, value in at.items())
        )
        held, peak, first = (table.get(**eager, metric=metric) for metric in ("held_MB", "peak_MB", "first_step_s"))
        print(
            f"  {contender:34s} {mode:10s} {figures}  held {held:.0f} peak {peak:.0f}  first {first:.1f} s  {errors}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shapes(parser)
    parser.add_argument("--rank", action="append", type=int, help="of ours; default 8, 16 and 64")
    parser.add_argument("--peer-rank", type=int, default=16)
    parser.add_argument("--contender", action="append", choices=list(PEERS), help="beside ours")
    parser.add_argument("--upstream", action="store_true", help="also PEFT over Transformers' sonicmoe")
    parser.add_argument("--axolotl", action="store_true", help="also Axolotl's ScatterMoE LoRA")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; --device cpu --shape 64,32,16,8,2 checks the script")
    options.rank = options.rank or [8, 16, 64]
    tuned = {UPSTREAM: options.upstream, AXOLOTL: options.axolotl}
    options.contender = options.contender or [name for name in PEERS if tuned.get(name, True)]
    backend = backends.choose(torch.device(options.device), torch.bfloat16)
    print(f"{OURS}: {backend.name} backend", flush=True)
    table = Table()
    for config, shape in chosen_shapes(options).items():
        measure(table, config, shape, options)
        table.write(options.out / "lora_layer.csv")


if __name__ == "__main__":
    main()
