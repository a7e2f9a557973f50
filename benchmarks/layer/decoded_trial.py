"""A layer with adapters over INT4 experts, decoded where the tile is loaded (kernels/hopper/decode.py) beside expanded to
memory first, on a Hopper GPU.

    python -m benchmarks.layer.decoded_trial [--tokens N ...] [--rounds 15] [--csv FILE]

Forward and backward of Qwen3-30B-A3B's layer, rank 16, by CUDA graph; contenders take turns. Errors of outputs and of
every gradient are checked first. Prints a table and the verdict: the trial asks for 8% at each number of tokens. Writes
decoded_trial.csv.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

from benchmarks.common.command import Command
from benchmarks.common.measuring import Step, relative_errors
from benchmarks.common.shapes import SHAPES, problem
from benchmarks.common.table import Table, quantile
from benchmarks.common.timing import captured, interleaved_times, release
from benchmarks.layer.lora_contenders import through_peft
from benchmarks.layer.lora_layer import step_of
from benchmarks.layer.quantized_layer import packed_pair
from sonicmoe_hf.kernels import hopper
from sonicmoe_hf.kernels.hopper.config import Tile, tile
from sonicmoe_hf.kernels.interface import PackedOperand
from sonicmoe_hf.layer import experts_op, products

FORMAT, SHAPE = "int4", "Qwen3-30B-A3B"
TOKENS = (2048, 4096, 16384)
RANK = 16
WANTED = 1.08  # times as fast
DOWN = Tile(256, 3)
DOWN_BACKWARD = Tile(192, 4)


def codes_of(packed):
    """View a packed weight's codes as words of eight; return them and the scales."""
    return packed.codes.view(torch.int32), packed.scales


def launch(kernel, source, packed, lora, rows, *others):
    """Launch a compiled kernel on its source, the packed weight, the adapter and what else it takes before the rows."""
    arguments = *codes_of(packed), *hopper._operands(lora), *others, rows.token, *hopper._schedule(rows, source)
    hopper._run_on_its_device(kernel, source, *arguments)


def up(x_TH, gate_up, bias, rows, activation, interleaved, want_h, want_a, lora=None, chosen: Tile | None = None):
    """Compute hopper.up of a packed gate_up, [E, 2I, H], whose halves are gate and up."""
    assert bias is None and not interleaved
    (_, width, half_hidden), num_pairs = gate_up.codes.shape, rows.token.numel()
    inner = activation.inner(width)
    h_R2I = x_TH.new_empty(num_pairs, width) if want_h else None
    a_RI = x_TH.new_empty(num_pairs, inner) if want_a else None
    kernel = hopper._compiled().gemm_decoded_up(
        2 * half_hidden, inner, want_h, want_a, activation, hopper._rank(lora), chosen or tile("gemm_up", width)
    )
    launch(kernel, x_TH, gate_up, lora, rows, h_R2I, a_RI)
    return h_R2I, a_RI


def product(source_RK, packed, across, rows, lora, chosen):
    """Compute source[r] @ weight[e]^T of a packed weight, or read across of its transpose."""
    _, size_out, half_in = packed.codes.shape
    columns, depth = (2 * half_in, size_out) if across else (size_out, 2 * half_in)
    out_RN = source_RK.new_empty(len(source_RK), columns)
    kernel = hopper._compiled().gemm_decoded_down(columns, depth, across, hopper._rank(lora), chosen)
    launch(kernel, source_RK, packed, lora, rows, out_RN)
    return out_RN


def down(a_RI, weight, bias, rows, lora=None, chosen: Tile = DOWN):
    """Compute hopper.down of a packed weight."""
    assert bias is None
    return product(a_RI, weight, False, rows, lora, chosen)


def up_backward_input(dh_R2I, gate_up, rows, lora=None, chosen: Tile = DOWN):
    """Compute hopper.up_backward_input of a packed gate_up."""
    return product(dh_R2I, gate_up, True, rows, lora, chosen)


def down_backward(
    dout_TH,
    weight,
    bias,
    h_R2I,
    weight_P,
    rows,
    activation,
    interleaved,
    want_dh,
    want_a,
    want_dw,
    lora=None,
    chosen: Tile = DOWN_BACKWARD,
):
    """Compute hopper.down_backward of a packed down."""
    assert bias is None and not interleaved
    (_, hidden, half_inner), num_pairs = weight.codes.shape, rows.token.numel()
    inner = 2 * half_inner
    dh_R2I = torch.empty_like(h_R2I) if want_dh else None
    a_RI = h_R2I.new_empty(num_pairs, inner) if want_a else None
    partials = weight_P.new_empty(-(-inner // chosen.columns), num_pairs) if want_dw else None
    kernel = hopper._compiled().gemm_decoded_down_backward(
        hidden, inner, want_dh, want_a, want_dw, activation, hopper._rank(lora), chosen
    )
    launch(kernel, dout_TH, weight, lora, rows, h_R2I, weight_P, dh_R2I, a_RI, partials, rows.pair)
    return dh_R2I, a_RI, hopper.triton.routing_gradient(partials, dout_TH, None, rows) if want_dw else None


DECODED = {function.__name__: function for function in (up, down, down_backward, up_backward_input)}


@contextlib.contextmanager
def in_the_tile(kernels=hopper, functions=DECODED):
    """Let layers give packed experts as they are to all four products, which `functions` compute; nothing is replayed
    that was recorded before."""

    def weight(layer, projection):
        if not projection.format:
            return expanded(layer, projection)
        stored = projection.stored()
        return PackedOperand(stored.codes, stored.scales, stored.state, projection.format)

    expanded = products.Layer.weight
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(products.Layer, "weight", weight))
        patches.enter_context(mock.patch.object(experts_op, "_FORWARD_TAPES", products.forward))
        patches.enter_context(mock.patch.object(experts_op, "_BACKWARD_TAPES", products.backward))
        for name, function in functions.items():
            patches.enter_context(mock.patch.object(kernels, name, function))
        yield


class DecodedStep(Step):
    """A step whose packed experts are decoded in the tile."""

    kernels, functions = hopper, DECODED

    def __call__(self):
        with in_the_tile(self.kernels, self.functions):
            return super().__call__()


def steps_of(shape, inputs):
    """Return name -> forward and backward of the layer, and the packed weights expanded."""
    packed = packed_pair(inputs[1:3], FORMAT)
    weights = {"bf16": inputs[1:3], "expanded": packed, "decoded": packed}
    steps = {name: step_of(through_peft(shape, *pair, RANK, "sonicmoe_hf"), inputs) for name, pair in weights.items()}
    steps["decoded"].__class__ = DecodedStep
    return steps, [weight.dequantize() for weight in packed]


def errors_of(steps, inputs, dense):
    """Return name -> the errors of outputs and gradients over packed weights.

    Raises:
        AssertionError: those of what is decoded exceed those of what is expanded.
    """
    exact = inputs[0], *dense, *inputs[3:]
    expanded, decoded = (relative_errors(steps[name], exact) for name in ("expanded", "decoded"))
    for tensor, error in decoded.items():
        # both round each result once, in sums of another order
        assert error < 1.05 * expanded[tensor] + 2**-12, (tensor, error, expanded[tensor])
    return {"expanded": expanded, "decoded": decoded}


def measure(table, tokens, rounds):
    """Measure the rows of one number of tokens, print their times, and return by how much decoding is faster."""
    shape = SHAPES[SHAPE]._replace(T=tokens)
    inputs, mode = problem(shape), f"LoRA, {tokens} tokens"
    steps, dense = steps_of(shape, inputs)
    for name, errors in errors_of(steps, inputs, dense).items():
        table.add(SHAPE, shape, f"{FORMAT} {name}", mode, "eager", {f"error_{key}": e for key, e in errors.items()})
    del dense
    times = {name: on_device for name, (on_device, *_) in interleaved_times(captured(steps), rounds).items()}
    for name, ms in times.items():
        label = name if name == "bf16" else f"{FORMAT} {name}"
        table.add(SHAPE, shape, label, mode, "graph", {"us": [1e3 * each for each in ms]})
    faster = [expanded / decoded for expanded, decoded in zip(times["expanded"], times["decoded"])]
    medians = "  ".join(f"{name} {1e3 * quantile(ms):.0f} us" for name, ms in times.items())
    print(f"{tokens:6} tokens: {medians}; decoded {quantile(faster):.3f} times as fast as expanded", flush=True)
    return quantile(faster)


def main():
    parser = Command(__doc__, "decoded_trial.csv")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", action="append", type=int, help=f"default {TOKENS}")
    options = parser.parse_args()
    table, gains = Table(options.csv), []
    for tokens in options.tokens or TOKENS:
        gains.append(measure(table, tokens, options.rounds))
        table.write()
        release()
    verdict = "worth it" if min(gains) >= WANTED else "not worth it"
    print(f"{FORMAT}: {verdict}: {min(gains):.3f} times as fast at least, {WANTED} wanted at every number of tokens")


if __name__ == "__main__":
    main()
