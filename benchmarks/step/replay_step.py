"""The cost of record_routing and replay_routing in a training step of Qwen3-30B-A3B: GPU and wall time, in one process.

    python -m benchmarks.step.replay_step
    python -m benchmarks.step.replay_step --device cpu --tiny --tokens 64 --rounds 2 --steps 1     # checks the script

Steps as in train_step.py: all weights in bf16, Liger, rows per expert as in a balanced model. The cases take turns, some
steps each in every round, and every round compares them with its own plain steps:

    plain             top-k
    recording         the step inside record_routing
    replaying         the step inside replay_routing, with what was recorded of the model before the first round
    a host's tensor   the same from an int64 tensor [layers, tokens, K] in the host's memory, as a server's answer is

The CSV has milliseconds a step (GPU: between events around a round's steps; wall: by the host's clock around them, which
it waits for), and their ratio to plain's of the same round.
"""

from __future__ import annotations

import contextlib
import functools

import torch

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import RANGE, Table
from benchmarks.common.timing import interleaved_times
from benchmarks.step.run import Run, build_base, prepare
from benchmarks.step.training import one_step, optimizer_of, sequences
from sonicmoe_hf.patching.moe_layers import find_layers

MODEL = "Qwen3-30B-A3B"


def record_call(model, tokens: torch.Tensor, **options):
    """Record the routing of one call without gradients, and its last logits."""
    with torch.no_grad(), sonicmoe_hf.record_routing(model) as routing:
        logits = model(input_ids=tokens, logits_to_keep=8, **options).logits
    return routing, logits


def check(model, tokens: torch.Tensor) -> None:
    """Check that the same model gives the same bits, and that a changed one uses the recorded experts.

    Raises:
        SystemExit: it does not.
    """
    routing, logits = record_call(model, tokens)
    indices = routing.tensors()[0].long().cpu()
    for source in (routing, indices):
        with torch.no_grad(), sonicmoe_hf.replay_routing(model, source):
            again = model(input_ids=tokens, logits_to_keep=8).logits
        if not torch.equal(again, logits):
            raise SystemExit("replay: the same model does not give the same bits")
    other = indices.roll(1, dims=1)  # each token with its neighbour's experts
    with torch.no_grad(), sonicmoe_hf.replay_routing(model, other), sonicmoe_hf.record_routing(model) as used:
        changed = model(input_ids=tokens, logits_to_keep=8).logits
    if not torch.equal(used.tensors()[0].cpu().long(), other) or torch.equal(changed, logits):
        raise SystemExit("replay: another choice of experts was not used")
    print("replay: the same bits from the same model, and all experts as given", flush=True)


def measure(model, tokens: torch.Tensor, rounds: int, steps: int) -> dict[str, tuple[list[float], list[float]]]:
    """Measure each case: (GPU, wall) milliseconds a step of each round."""
    optimizer = optimizer_of(model)
    routing, _ = record_call(model, tokens)
    indices = routing.tensors()[0].long().cpu()
    contexts = {
        "plain": contextlib.nullcontext,
        "recording": lambda: sonicmoe_hf.record_routing(model),
        "replaying": lambda: sonicmoe_hf.replay_routing(model, routing),
        "a host's tensor": lambda: sonicmoe_hf.replay_routing(model, indices),
    }

    def take_steps(context):
        for _ in range(steps):
            with context():
                one_step(model, optimizer, tokens, autocast=False)

    calls = {case: functools.partial(take_steps, context) for case, context in contexts.items()}
    times = interleaved_times(calls, rounds)
    return {
        case: tuple([ms / steps for ms in each] for each in (of.on_device, of.waited)) for case, of in times.items()
    }


def main(arguments=None) -> None:
    parser = Command(__doc__, "replay_step.csv", "--device cpu --tiny --tokens 64 --rounds 2 --steps 1")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="of each case in a round")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    options = parser.parse_args(arguments)
    options.liger, options.spread_load = not options.tiny, True
    run = Run(MODEL, options.layers, options.tokens, "full")
    model = build_base(run, options)
    for layer in find_layers(model) if options.tiny else ():
        layer.router.top_k = 2  # the tiny models' tokens take all experts, which leaves no other choice
    model = prepare(model, run)
    tokens = sequences(options.tokens, model.config.vocab_size, options.device)
    check(model, tokens)
    times = measure(model, tokens, options.rounds, options.steps)
    table = Table(options.csv, ("shape", "case", "metric"), RANGE | {"rounds": len})
    shape = f"{len(list(find_layers(model)))} layers, {options.tokens} tokens"
    for case, rounds in times.items():
        metrics = {}
        for clock, values, plain in zip(("GPU", "wall"), rounds, times["plain"]):
            ratios = [value / base for value, base in zip(values, plain)]
            metrics |= {f"{clock} ms": values, f"{clock}, over plain": ratios}
        table.add(shape, case, metrics)
    table.write()


if __name__ == "__main__":
    main()
