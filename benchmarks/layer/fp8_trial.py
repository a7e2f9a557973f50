"""A layer's forward and backward with FP8 products (kernels/hopper/gemm_fp8.py) beside the bf16 kernels, on a Hopper GPU.

    python -m benchmarks.layer.fp8_trial [--shape T,H,I,E,K ...] [--rounds 15] [--csv FILE]

Contenders take turns: one call at a time, and "hot", a tenth of a second of calls without a pause. What they compute is
compared in tests/kernels/test_fp8_gpu.py. Forward: FP8's time includes that of x's values and scales; those of a come
from `up` itself. Both store h and a, and bf16's weights are dense. Backward and layer: of frozen FP8 experts, which bf16
expands and FP8 transposes. Random data and routing. Writes fp8_trial.csv: milliseconds, TFLOP/s, and errors against the
unrounded product in fp32, those of "errors" with the packed weights' values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.common.command import Command
from benchmarks.common.shapes import LARGE, SHAPES, shape_of
from benchmarks.common.table import Table
from benchmarks.common.timing import Clock, graph_of, interleaved_times, release
from benchmarks.layer import fp8_backward as backward
from sonicmoe_hf.kernels import hopper
from sonicmoe_hf.kernels.interface import Activation, PackedOperand
from sonicmoe_hf.kernels.quantized import quantize

BF16 = torch.bfloat16
SWIGLU = Activation()
TIMED = (SHAPES["Qwen3-30B-A3B"], LARGE["DeepSeek-V3"])
HOT_SECONDS = 0.1
MAX_CAPTURED = 1e9  # weights of down: larger ones in the memory of several graphs would not fit


def weight_in_blocks(weight_ENK, order: str) -> PackedOperand:
    """A dense weight as `from_pretrained(experts_quantization="fp8")` packs it."""
    return PackedOperand(*quantize(weight_ENK, "fp8", order), "fp8")


def activated(h):
    gate, up = h.float().chunk(2, dim=-1)
    return F.silu(gate) * up


def problem(shape, seed=0, skipped=()):
    """x, gate_up, down and the rows on a GPU; experts in `skipped` have none. Large weights are filled expert by
    expert."""
    T, H, I, E, K = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(rows, columns):
        return torch.randn(rows, columns, generator=generator, device="cuda") * (columns**-0.5)

    gate_up, weight = (torch.empty(E, n, k, device="cuda", dtype=torch.bfloat16) for n, k in ((2 * I, H), (H, I)))
    for e in range(E):
        gate_up[e], weight[e] = normal(2 * I, H), normal(H, I)
    x = torch.randn(T, H, generator=generator, device="cuda", dtype=torch.bfloat16)
    scores = torch.rand(T, E, generator=generator, device="cuda")
    scores[:, list(skipped)] -= 1
    return x, gate_up, weight, hopper.dispatch(scores.topk(K).indices, None, T, E, False)


def gradients_of(shape):
    """dout, as small as gradients are, h and the pairs' routing weights."""
    generator = torch.Generator("cuda").manual_seed(1)
    dout = 1e-9 * torch.randn(shape.T, shape.H, generator=generator, device="cuda", dtype=BF16)
    h = torch.randn(shape.T * shape.K, 2 * shape.I, generator=generator, device="cuda", dtype=BF16)
    return dout, h, torch.rand(shape.T * shape.K, generator=generator, device="cuda")


def quantized(x, gate_up, weight):
    return hopper.scale_rows(x), weight_in_blocks(gate_up, "concatenated"), weight_in_blocks(weight, "whole")


def errors_of(shape, x, gate_up, weight, rows, results):
    """name -> error of h and y of some experts against fp32 products of the unrounded operands, by contender."""
    ends, errors = rows.offsets.tolist(), {}
    for name, (h, y) in results.items():
        wrong, whole = torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda")
        for e in range(0, shape.E, max(shape.E // 8, 1)):
            own = slice(ends[e], ends[e + 1])
            h_exact = x[rows.token[own].long()].float() @ gate_up[e].float().T
            y_exact = activated(h_exact) @ weight[e].float().T
            for i, (one, exact) in enumerate(((h[own], h_exact), (y[own], y_exact))):
                wrong[i] += (one.float() - exact).square().sum()
                whole[i] += exact.square().sum()
        errors[name] = dict(zip(("h", "y"), (wrong / whole).sqrt().tolist()))
    return errors


def hot_times(calls, rounds):
    """name -> milliseconds of a call among calls without a pause, in each round."""
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            clock = Clock(2)
            clock.note()
            call()
            clock.note()
            [once] = clock.milliseconds()
            half = max(int(1e3 * HOT_SECONDS / once), 4) // 2
            clock = Clock(2)
            for repeat in range(2 * half):
                if repeat == half:
                    clock.note()
                call()
            clock.note()
            times[name].append(clock.milliseconds()[0] / half)
    return times


def measure(table, config, shape, rounds):
    """The rows of one shape."""
    x, *dense, rows = problem(shape)
    x8, *packed = quantized(x, *dense)
    measure_forward(table, config, shape, rounds, rows, (x, *dense), (x8, *packed))
    del dense, x8
    dout, h, routed = gradients_of(shape)
    for (contender, tensor), error in backward.errors(shape, x, *packed, dout, routed, rows).items():
        table.add(config, shape, contender, "errors", "eager", {f"error_{tensor}": error})
    release()
    calls = backward.backward_calls(*packed, dout, h, routed, rows)
    add_times(table, config, shape, "backward", calls, rounds)
    del calls, h
    release()
    add_times(table, config, shape, "layer", backward.layer_calls(shape, x, *packed, dout), rounds)


def measure_forward(table, config, shape, rounds, rows, dense, packed):
    """dense, packed: x, gate_up and down."""
    (x, gate_up, weight), (x8, gate_up8, weight8) = dense, packed

    def up8(x8):
        h, _, a8 = hopper.scaled_up(x8, gate_up8, rows, SWIGLU, BF16, True, False, True)
        return h, a8

    def bf16():
        h, a = hopper.up(x, gate_up, None, rows, SWIGLU, False, True, True)
        return h, hopper.down(a, weight, None, rows)

    def fp8():
        h, a8 = up8(hopper.scale_rows(x))
        return h, hopper.scaled_down(a8, weight8, rows, BF16)

    _, a = hopper.up(x, gate_up, None, rows, SWIGLU, False, True, True)
    _, a8 = up8(x8)
    whole = {"bf16": bf16, "fp8": fp8}
    results = {name: call() for name, call in whole.items()}
    for name, errors in errors_of(shape, x, gate_up, weight, rows, results).items():
        table.add(config, shape, name, "forward", "eager", {f"error_{tensor}": e for tensor, e in errors.items()})
    parts = {
        "bf16 up": lambda: hopper.up(x, gate_up, None, rows, SWIGLU, False, True, True),
        "bf16 down": lambda: hopper.down(a, weight, None, rows),
        "fp8 quantise x": lambda: hopper.scale_rows(x),
        "fp8 up": lambda: up8(x8),
        "fp8 down": lambda: hopper.scaled_down(a8, weight8, rows, BF16),
    }
    add_times(table, config, shape, "forward", whole | parts, rounds)


def add_times(table, config, shape, mode, calls, rounds):
    """Rows of the calls' times: "contender", or "contender part"."""
    flop = {"up": 4 * shape.T * shape.K * shape.H * shape.I, "down": 2 * shape.T * shape.K * shape.H * shape.I}
    flop["whole"] = sum(flop.values()) * (2 if mode == "layer" else 1)
    flop |= {"down_backward": flop["down"], "dx": flop["up"]}
    alone = "graph" if mode == "forward" or shape.E * shape.I * shape.H < MAX_CAPTURED else "eager"
    if alone == "graph":
        calls = {name: graph_of(call) for name, call in calls.items()}
    one_at_a_time = {name: on_device for name, (on_device, _) in interleaved_times(calls, rounds).items()}
    for launch, times in (("hot", hot_times(calls, 3)), (alone, one_at_a_time)):
        for name, ms in times.items():
            contender, _, part = name.partition(" ")
            part = part or "whole"
            rates = {f"TFLOP/s {part}": [flop[part] / 1e9 / each for each in ms]} if part in flop else {}
            table.add(config, shape, contender, mode, launch, {f"ms {part}": ms} | rates)


def main():
    parser = Command(__doc__, "fp8_trial.csv")
    parser.add_argument("--shape", action="append", help="T,H,I,E,K; may be given several times")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    names = {str(shape): name for name, shape in (SHAPES | LARGE).items()}
    table = Table(options.csv)
    for shape in [shape_of(text) for text in options.shape or ()] or TIMED:
        measure(table, names.get(str(shape), str(shape)), shape, options.rounds)
        table.write()
        release()


if __name__ == "__main__":
    main()
