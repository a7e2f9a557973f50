"""A layer with adapters over packed experts, decoded where the tile is loaded (kernels/hopper/decode.py) beside expanded
to memory first, on a Hopper GPU.

    python -m benchmarks.layer.decoded_trial [--format NAME ...] [--tokens N ...] [--rounds 15] [--csv FILE]

Forward and backward of Qwen3-30B-A3B's layer, rank 16, by CUDA graph; contenders take turns. Errors of outputs and of
every gradient are checked first. The limits of kernels/hopper/config.py, MAX_DECODED_ROWS, come from here. Writes
decoded_trial.csv.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

from benchmarks.common.command import Command
from benchmarks.common.measuring import LayerStep, relative_errors
from benchmarks.common.shapes import SHAPES, problem
from benchmarks.common.table import Table, quantile
from benchmarks.common.timing import interleaved_times, make_replays, release
from benchmarks.layer.lora_contenders import through_peft
from benchmarks.layer.lora_layer import step_of
from benchmarks.layer.quantized_layer import packed_pair
from sonicmoe_hf.kernels.hopper.config import MAX_DECODED_ROWS
from sonicmoe_hf.layer import experts_op, products

SHAPE = "Qwen3-30B-A3B"
TOKENS = (2048, 4096, 8192, 16384)
RANK = 16


@contextlib.contextmanager
def decoded_up_to(rows_per_expert: int):
    """Decode packed experts in the tile up to so many rows; nothing is replayed that was recorded before."""
    with contextlib.ExitStack() as patches:
        limits = dict.fromkeys(MAX_DECODED_ROWS, rows_per_expert)
        patches.enter_context(mock.patch("sonicmoe_hf.kernels.hopper.config.MAX_DECODED_ROWS", limits))
        patches.enter_context(mock.patch.object(experts_op, "_FORWARD_TAPES", products.forward))
        patches.enter_context(mock.patch.object(experts_op, "_BACKWARD_TAPES", products.backward))
        yield


class LimitedStep(LayerStep):
    """A step whose packed experts are decoded in the tile up to `limit` rows an expert."""

    limit = 0

    def __call__(self):
        with decoded_up_to(self.limit):
            return super().__call__()


class DecodedStep(LimitedStep):
    """A step whose packed experts are decoded in the tile at any number of rows."""

    limit = 1 << 20


def steps_of(shape, inputs, format):
    """Make name -> forward and backward of the layer, and the packed weights expanded."""
    packed = packed_pair(inputs[1:3], format)
    weights = {"bf16": inputs[1:3], "expanded": packed, "decoded": packed}
    steps = {name: step_of(through_peft(shape, *pair, RANK, "sonicmoe_hf"), inputs) for name, pair in weights.items()}
    steps["expanded"].__class__, steps["decoded"].__class__ = LimitedStep, DecodedStep
    return steps, [weight.dequantize() for weight in packed]


def errors_of(steps, inputs, dense):
    """Measure name -> the errors of outputs and gradients over packed weights.

    Raises:
        AssertionError: those of what is decoded exceed those of what is expanded.
    """
    exact = inputs[0], *dense, *inputs[3:]
    expanded, decoded = (relative_errors(steps[name], exact) for name in ("expanded", "decoded"))
    for tensor, error in decoded.items():
        # both round each result once, in sums of another order
        assert error < 1.05 * expanded[tensor] + 2**-12, (tensor, error, expanded[tensor])
    return {"expanded": expanded, "decoded": decoded}


def measure(table, format, tokens, rounds):
    """Measure the rows of one format and number of tokens, and print their times."""
    shape = SHAPES[SHAPE]._replace(T=tokens)
    inputs, mode = problem(shape), f"LoRA, {tokens} tokens"
    steps, dense = steps_of(shape, inputs, format)
    decoded, expected = (steps[name].results() for name in ("decoded", "expanded"))
    other = [name for name in expected if not torch.equal(decoded[name], expected[name])]
    print(f"{format} {tokens:6} tokens: other bits than expanded in {', '.join(other) or 'nothing'}", flush=True)
    del decoded, expected
    for name, errors in errors_of(steps, inputs, dense).items():
        table.add(SHAPE, shape, f"{format} {name}", mode, "eager", {f"error_{key}": e for key, e in errors.items()})
    del dense
    times = {name: on_device for name, (on_device, *_) in interleaved_times(make_replays(steps), rounds).items()}
    for name, ms in times.items():
        label = name if name == "bf16" else f"{format} {name}"
        table.add(SHAPE, shape, label, mode, "graph", {"us": [1e3 * each for each in ms]})
    faster = [expanded / decoded for expanded, decoded in zip(times["expanded"], times["decoded"])]
    medians = "  ".join(f"{name} {1e3 * quantile(ms):.0f} us" for name, ms in times.items())
    print(
        f"{format} {tokens:6} tokens, {tokens * shape.K // shape.E} rows an expert: {medians}; decoded "
        f"{quantile(faster):.3f} times as fast as expanded",
        flush=True,
    )


def main():
    parser = Command(__doc__, "decoded_trial.csv")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", action="append", type=int, help=f"default {TOKENS}")
    parser.add_argument("--format", action="append", choices=MAX_DECODED_ROWS, help="default: all")
    options = parser.parse_args()
    table = Table(options.csv)
    for format in options.format or MAX_DECODED_ROWS:
        for tokens in options.tokens or TOKENS:
            measure(table, format, tokens, options.rounds)
            table.write()
            release()


if __name__ == "__main__":
    main()
