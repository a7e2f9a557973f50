"""A layer's forward and backward with FP8 products (kernels/hopper/gemm_fp8.py) beside the bf16 kernels, on a Hopper GPU.

    python -m benchmarks.layer.fp8_trial [--shape T,H,I,E,K ...] [--rounds 15] [--csv FILE]

First the kernels on small shapes beside the same arithmetic in PyTorch; then times, contenders taking turns: one call at
a time, and "hot", a tenth of a second of calls without a pause. Forward: FP8's time includes that of x's values and
scales; those of a come from `up` itself. Both store h and a, and bf16's weights are dense. Backward and layer: of frozen
FP8 experts, which bf16 expands and FP8 transposes. Random data and routing. Writes fp8_trial.csv: milliseconds, TFLOP/s,
and errors against the unrounded product in fp32, those of "errors" with the packed weights' values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.common.command import Command
from benchmarks.common.shapes import LARGE, SHAPES, shape_of
from benchmarks.common.table import Table
from benchmarks.common.timing import Clock, graph_of, interleaved_times, release
from benchmarks.layer import fp8_backward as backward
from sonicmoe_hf.checkpoints.comparing import relative_error
from sonicmoe_hf.kernels import eager, hopper
from sonicmoe_hf.kernels.interface import Activation, PackedOperand
from sonicmoe_hf.kernels.quantized import quantize
from sonicmoe_hf.kernels.scaled import SMALLEST_GRADIENT, ScaledRows, ScaledWeight, scale_halves, transposed

BF16 = torch.bfloat16
SWIGLU = Activation()
CHECKED = (
    "67,336,144,7,2",
    "300,1024,768,4,3",
    "2000,2048,384,8,4",
    "5000,784,1040,33,3",
)  # few rows and many, odd sizes
CHECKED_BACKWARD = CHECKED[1], CHECKED[3]
TIMED = (SHAPES["Qwen3-30B-A3B"], LARGE["DeepSeek-V3"])
HOT_SECONDS = 0.1
MAX_CAPTURED = 1e9  # weights of down: larger ones in the memory of several graphs would not fit


def weight_in_blocks(weight_ENK, order: str) -> PackedOperand:
    """A dense weight as `from_pretrained(experts_quantization="fp8")` packs it."""
    return PackedOperand(*quantize(weight_ENK, "fp8", order), "fp8")


def activated(h):
    gate, up = h.float().chunk(2, dim=-1)
    return F.silu(gate) * up


def check(
    x: ScaledRows, gate_up: PackedOperand, down: PackedOperand, rows, adapters=(None, None), kernels=hopper
) -> dict[str, float]:
    """The errors of up and down beside the same arithmetic in PyTorch; raises where they are more than roundings are.

    h and y are rounded to bf16, and the tensor cores add the values of a group with fewer bits than fp32: half as much
    again. a: what e4m3 loses, and h's rounding, which e4m3 hides.
    """
    h, whole_a, a = kernels.scaled_up(x, gate_up, rows, SWIGLU, BF16, True, True, True, adapters[0])
    y = kernels.scaled_down(a, down, rows, BF16, adapters[1])
    alone, *nothing = kernels.scaled_up(x, gate_up, rows, SWIGLU, BF16, True, False, False, adapters[0])
    num_rows = int(rows.offsets[-1])
    h_exact, *_ = eager.scaled_up(x, gate_up, rows, SWIGLU, torch.float32, True, False, False, adapters[0])
    y_exact = eager.scaled_down(a, down, rows, torch.float32, adapters[1])[:num_rows]
    h, whole_a, y, alone, h_exact = (tensor[:num_rows] for tensor in (h, whole_a, y, alone, h_exact))
    a, a_exact = ScaledRows(*(part[:num_rows] for part in a)), activated(h)
    assert torch.equal(alone, h) and nothing == [None, None]
    found = {"h": (h, h_exact), "whole a": (whole_a, a_exact), "a": (a.values(), a_exact), "y": (y, y_exact)}
    errors = {name: relative_error(*pair) for name, pair in found.items()}
    for name, (_, exact) in found.items():
        rounded = eager.scale_rows(exact).values() if name == "a" else exact.bfloat16()
        bound = (1.02 if name == "a" else 1.5) * relative_error(rounded, exact)
        if not errors[name] <= bound:
            raise SystemExit(f"{name} is off by {errors[name]:.3g}, more than {bound:.3g}")
    return errors


def check_backward(
    dout: ScaledRows, gate_up: ScaledWeight, down: ScaledWeight, h, routed, rows, adapters=(None, None), kernels=hopper
):
    """`check` of the products of backward, of transposed weights; adapters: of down, of gate_up.

    da' is rounded to bf16 beside what is stored, which makes twice its rounding at most. dh in FP8 is dh in bf16 scaled,
    up to a division that rounds otherwise: of bf16's few values many lie on the edge between two codes.
    """
    dh, a, dw, dh8 = kernels.scaled_down_backward(
        dout, down, h, routed, rows, SWIGLU, True, True, True, True, adapters[0]
    )
    dx = kernels.scaled_down(dh8, gate_up, rows, BF16, adapters[1])
    *nothing, alone_dw, alone = kernels.scaled_down_backward(
        dout, down, h, routed, rows, SWIGLU, False, False, True, True, adapters[0]
    )
    num_rows, kept = int(rows.offsets[-1]), rows.pair[: int(rows.offsets[-1])].long()
    exact = eager.scaled_down_backward(
        dout, down, h.float(), routed, rows, SWIGLU, True, True, True, False, adapters[0]
    )
    dx_exact = eager.scaled_down(dh8, gate_up, rows, torch.float32, adapters[1])
    dh, a, dh8, alone, dx = (
        ScaledRows(*(part[:num_rows] for part in one)) if isinstance(one, ScaledRows) else one[:num_rows]
        for one in (dh, a, dh8, alone, dx)
    )
    assert nothing == [None, None]
    # another kernel, in which ptxas may contract other multiplications and additions
    assert relative_error(alone.values(), dh8.values()) < 5e-3 and relative_error(alone_dw, dw) < 1e-5
    assert dw.count_nonzero() <= num_rows, "a dropped pair has a gradient"
    found = {"dh": (dh, exact[0]), "a'": (a, exact[1]), "dx": (dx, dx_exact), "dw": (dw[kept], exact[2][kept])}
    found = {name: (one, whole if name == "dw" else whole[:num_rows]) for name, (one, whole) in found.items()}
    errors = {name: relative_error(*pair) for name, pair in found.items()}
    errors["dh in FP8"] = relative_error(dh8.values(), scale_halves(dh).values())
    for name, error in errors.items():
        bound = 5e-3 if name == "dh in FP8" else 2 * relative_error(found[name][1].bfloat16(), found[name][1])
        if not error <= bound:
            raise SystemExit(f"{name} is off by {error:.3g}, more than {bound:.3g}")
    return errors


def problem(shape, seed=0):
    """x, gate_up, down and the rows on a GPU; every third expert of small problems has no rows. Large weights are filled
    expert by expert."""
    T, H, I, E, K = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(rows, columns):
        return torch.randn(rows, columns, generator=generator, device="cuda") * (columns**-0.5)

    gate_up, weight = (torch.empty(E, n, k, device="cuda", dtype=torch.bfloat16) for n, k in ((2 * I, H), (H, I)))
    for e in range(E):
        gate_up[e], weight[e] = normal(2 * I, H), normal(H, I)
    x = torch.randn(T, H, generator=generator, device="cuda", dtype=torch.bfloat16)
    scores = torch.rand(T, E, generator=generator, device="cuda")
    if str(shape) in CHECKED and E - len(range(0, E, 3)) >= K:
        scores[:, ::3] -= 1
    return x, gate_up, weight, hopper.dispatch(scores.topk(K).indices, None, T, E, False)


def check_gradients(shape, gate_up, down, rows, adapters=(None, None), kernels=hopper):
    """`check_backward`, repeated, and what comes before it."""
    dout, h, routed = gradients_of(shape)
    weights = [transposed(*packed[:2]) for packed in (gate_up, down)]
    for packed, expected in zip((gate_up, down), weights):
        backward.check_transposed(packed, expected)
    scaled_dout = hopper.scale_rows(dout, SMALLEST_GRADIENT)
    difference = relative_error(scaled_dout.values(), eager.scale_rows(dout, SMALLEST_GRADIENT).values())
    if difference > 2e-3:
        raise SystemExit(f"scale_rows of a gradient is off by {difference:.3g}")
    errors = check_backward(scaled_dout, *weights, h, routed, rows, adapters, kernels)
    for _ in range(3):
        again = check_backward(scaled_dout, *weights, h, routed, rows, adapters, kernels)
        assert again == errors, "another result the second time"
    return errors


def gradients_of(shape):
    """dout, as small as gradients are, h and the pairs' routing weights."""
    generator = torch.Generator("cuda").manual_seed(1)
    dout = 1e-9 * torch.randn(shape.T, shape.H, generator=generator, device="cuda", dtype=BF16)
    h = torch.randn(shape.T * shape.K, 2 * shape.I, generator=generator, device="cuda", dtype=BF16)
    return dout, h, torch.rand(shape.T * shape.K, generator=generator, device="cuda")


def quantized(x, gate_up, weight):
    return hopper.scale_rows(x), weight_in_blocks(gate_up, "concatenated"), weight_in_blocks(weight, "whole")


def check_small():
    for text in CHECKED:
        x, gate_up, weight, rows = problem(shape_of(text))
        scaled = quantized(x, gate_up, weight)
        difference = relative_error(scaled[0].values(), eager.scale_rows(x).values())
        if difference > 2e-3:  # a division may round otherwise
            raise SystemExit(f"scale_rows is off by {difference:.3g}")
        errors = check(*scaled, rows)
        for _ in range(3):
            assert errors == check(*scaled, rows), "another result the second time"
        if text in CHECKED_BACKWARD:
            errors |= check_gradients(shape_of(text), *scaled[1:], rows)
        print(f"{text}: " + ", ".join(f"{name} {error:.2e}" for name, error in errors.items()), flush=True)


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
    check_small()
    names = {str(shape): name for name, shape in (SHAPES | LARGE).items()}
    table = Table(options.csv)
    for shape in [shape_of(text) for text in options.shape or ()] or TIMED:
        measure(table, names.get(str(shape), str(shape)), shape, options.rounds)
        table.write()
        release()


if __name__ == "__main__":
    main()
