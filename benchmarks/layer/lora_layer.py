"""LoRA on the experts of one MoE layer: time, memory and error of every contender, in one interleaved run.

    python -m benchmarks.layer.lora_layer [--shape T,H,I,E,K ...] [--rank R ...] [--contender NAME ...]
        [--upstream] [--axolotl] [--csv FILE]

Forward and backward; bf16, SwiGLU, the data of moe_layer.py, adapters in fp32 on both weights as PEFT makes them, so that
casts and reorders are part of every step. Ours with all weights trained ("full"), none ("frozen"), and LoRA of each rank;
the others at --peer-rank. Ratios are to our frozen layer of the same round. Writes lora_layer.csv.
--upstream adds PEFT over Transformers' sonicmoe, which tunes for about 100 s at each new shape; --axolotl Axolotl's
kernels, which autotune up to 108 configurations of two kernels at two sizes each. lora_contenders.py says where these and
Unsloth's come from. --device cpu checks the script on small shapes; its times mean nothing.
"""

from __future__ import annotations

import torch

from benchmarks.common.command import Command
from benchmarks.common.contenders import Unavailable
from benchmarks.common.measuring import LayerStep, measure_first_step, measure_memory, relative_errors
from benchmarks.common.shapes import SHAPES, problem
from benchmarks.common.table import Table
from benchmarks.common.timing import interleaved_times, make_replays, release
from benchmarks.layer.lora_contenders import AXOLOTL, PEERS, UPSTREAM, Experts, experts_module, through_peft
from sonicmoe_hf.layer import backends

OURS = "sonicmoe-hf"
FROZEN = (OURS, "frozen")


def step_of(layer: Experts, inputs) -> LayerStep:
    """Make one contender's forward and backward on one problem."""
    x, *_, expert, weight, dout = inputs
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    wanted = {"x": x, "weight": weight, **layer.adapters}
    return LayerStep(lambda: layer.call(x, expert, weight), wanted, dout, layer.adapters, layer.scale)


def layers_of(shape, inputs, ranks, peer_rank, peers):
    """Make (contender, mode) -> a function that makes its `Experts`."""
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


def run_first_steps(makers, inputs, add, on_gpu):
    """Run the first step of each contender. Returns (contender, mode) -> step of those that can run here; prints which
    cannot."""
    steps = {}
    for (contender, mode), make in makers.items():
        try:
            step = step_of(make(), inputs)
            if on_gpu:
                add((contender, mode), "eager", measure_first_step(step))
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
    """Measure the rows of one shape."""
    inputs, on_gpu = problem(shape, torch.bfloat16, options.device), options.device == "cuda"

    def add(name, launch, metrics):
        table.add(config, shape, *name, launch, metrics)

    makers = layers_of(shape, inputs, options.rank, options.peer_rank, options.contender)
    steps = run_first_steps(makers, inputs, add, on_gpu)
    for name, step in steps.items():
        errors = {f"error_{tensor}": error for tensor, error in relative_errors(step, inputs).items()}
        add(name, "eager", errors | (measure_memory(step) if on_gpu else {}))
    for launch, calls in (("eager", steps), ("graph", make_replays(steps) if on_gpu else {})):
        times = {name: on_device for name, (on_device, *_) in interleaved_times(calls, options.rounds).items()}
        for name, ms in times.items():
            ratios = [value / frozen for value, frozen in zip(ms, times.get(FROZEN, ()))]
            add(name, launch, {"ms": ms} | ({"ratio_to_frozen": ratios} if ratios else {}))


def main():
    parser = Command(__doc__, "lora_layer.csv", "--device cpu --shape 64,32,16,8,2", shapes=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", action="append", type=int, help="of ours; default 8, 16 and 64")
    parser.add_argument("--peer-rank", type=int, default=16)
    parser.add_argument("--contender", action="append", choices=list(PEERS), help="beside ours")
    parser.add_argument("--upstream", action="store_true", help="also PEFT over Transformers' sonicmoe")
    parser.add_argument("--axolotl", action="store_true", help="also Axolotl's ScatterMoE LoRA")
    options = parser.parse_args()
    options.rank = options.rank or [8, 16, 64]
    tuned = {UPSTREAM: options.upstream, AXOLOTL: options.axolotl}
    options.contender = options.contender or [name for name in PEERS if tuned.get(name, True)]
    backend = backends.choose(torch.device(options.device), torch.bfloat16)
    print(f"{OURS}: {backend.name} backend", flush=True)
    table = Table(options.csv)
    for config, shape in options.shapes.items():
        measure(table, config, shape, options)
        table.write()
        release()


if __name__ == "__main__":
    main()
