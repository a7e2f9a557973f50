"""up and down of one layer with FP8 products (kernels/hopper/gemm_fp8.py) beside the bf16 kernels, on a Hopper GPU.

    python -m benchmarks.layer.fp8_trial [--shape T,H,I,E,K ...] [--rounds 15] [--out benchmarks/results]

First the kernels on small shapes beside the same arithmetic in PyTorch; then times, contenders taking turns: one call at
a time, and "hot", a tenth of a second of calls without a pause. FP8's time includes that of x's values and scales; those
of a come from `up` itself. Both store h and a. Random data and routing. Writes fp8_trial.csv: milliseconds, TFLOP/s, and
errors against the unrounded product in fp32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.common.measuring import graph_of
from benchmarks.common.paths import RESULTS
from benchmarks.common.shapes import LARGE, SHAPES, shape_of
from benchmarks.common.table import Table
from benchmarks.layer.moe_layer import interleaved_times
from sonicmoe_hf.checkpoints.comparing import relative_error
from sonicmoe_hf.kernels import eager, hopper
from sonicmoe_hf.kernels.interface import Activation, PackedOperand
from sonicmoe_hf.kernels.quantized import quantize
from sonicmoe_hf.kernels.scaled import ScaledRows

BF16 = torch.bfloat16
SWIGLU = Activation()
CHECKED = (
    "67,336,144,7,2",
    "300,1024,768,4,3",
    "2000,2048,384,8,4",
    "5000,784,1040,33,3",
)  # few rows and many, odd sizes
TIMED = (SHAPES["Qwen3-30B-A3B"], LARGE["DeepSeek-V3"])
NEEDED = 1.35  # times as fast as bf16
HOT_SECONDS = 0.1


def weight_in_blocks(weight_ENK, order: str) -> PackedOperand:
    """A dense weight as `from_pretrained(experts_quantization="fp8")` packs it."""
    return PackedOperand(*quantize(weight_ENK, "fp8", order), "fp8")


def activated(h):
    gate, up = h.float().chunk(2, dim=-1)
    return F.silu(gate) * up


def check(x: ScaledRows, gate_up: PackedOperand, down: PackedOperand, rows, adapters=(None, None)) -> dict[str, float]:
    """The errors of up and down beside the same arithmetic in PyTorch; raises where they are more than roundings are.

    h and y are rounded to bf16, and the tensor cores add the values of a group with fewer bits than fp32: half as much
    again. a: what e4m3 loses, and h's rounding, which e4m3 hides.
    """
    h, whole_a, a = hopper.scaled_up(x, gate_up, rows, SWIGLU, BF16, True, True, True, adapters[0])
    y = hopper.scaled_down(a, down, rows, BF16, adapters[1])
    alone, *nothing = hopper.scaled_up(x, gate_up, rows, SWIGLU, BF16, True, False, False, adapters[0])
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
            start, warm, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            start.record()
            call()
            end.record()
            end.synchronize()
            repeats = max(int(1e3 * HOT_SECONDS / start.elapsed_time(end)), 4)
            for repeat in range(repeats):
                if repeat == repeats // 2:
                    warm.record()
                call()
            end.record()
            end.synchronize()
            times[name].append(warm.elapsed_time(end) / (repeats - repeats // 2))
    return times


def measure(table, config, shape, rounds):
    x, gate_up, weight, rows = problem(shape)
    x8, gate_up8, weight8 = quantized(x, gate_up, weight)

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
    for name, errors in errors_of(
        shape, x, gate_up, weight, rows, {name: call() for name, call in whole.items()}
    ).items():
        for tensor, error in errors.items():
            table.add(config, shape, name, "forward", "eager", f"error_{tensor}", [error])
    parts = {
        "bf16 up": lambda: hopper.up(x, gate_up, None, rows, SWIGLU, False, True, True),
        "bf16 down": lambda: hopper.down(a, weight, None, rows),
        "fp8 quantise x": lambda: hopper.scale_rows(x),
        "fp8 up": lambda: up8(x8),
        "fp8 down": lambda: hopper.scaled_down(a8, weight8, rows, BF16),
    }
    flop = {"up": 4 * shape.T * shape.K * shape.H * shape.I, "down": 2 * shape.T * shape.K * shape.H * shape.I}
    flop["whole"] = sum(flop.values())
    calls = {name: graph_of(call) for name, call in (whole | parts).items()}
    for launch, times in (
        ("hot", hot_times(calls, 3)),
        ("graph", {n: t for n, (t, _) in interleaved_times(calls, rounds).items()}),
    ):
        for name, values in times.items():
            contender, _, part = name.partition(" ")
            table.add(config, shape, contender, "forward", launch, f"ms {part or 'whole'}", values)
            if (part or "whole") in flop:
                rates = [flop[part or "whole"] / 1e9 / ms for ms in values]
                table.add(config, shape, contender, "forward", launch, f"TFLOP/s {part or 'whole'}", rates)


def show(table, config, shape):
    print(f"\n{config} {shape}")
    get = lambda contender, launch, metric: table.get(config=config, contender=contender, launch=launch, metric=metric)  # noqa: E731
    for launch in ("graph", "hot"):
        for part in ("up", "down", "quantise x", "whole"):
            bf16, fp8 = (get(contender, launch, f"ms {part}") for contender in ("bf16", "fp8"))
            rates = [get(contender, launch, f"TFLOP/s {part}") for contender in ("bf16", "fp8")]
            print(
                f"  {launch:6s} {part:11s} bf16 {bf16:8.3f} ms {rates[0]:6.0f} TFLOP/s   "
                f"fp8 {fp8:8.3f} ms {rates[1]:6.0f} TFLOP/s   {bf16 / fp8:.3f} times",
                flush=True,
            )
    ratios = [get("bf16", launch, "ms whole") / get("fp8", launch, "ms whole") for launch in ("graph", "hot")]
    errors = {c: [get(c, "eager", f"error_{tensor}") for tensor in "hy"] for c in ("bf16", "fp8")}
    print("  errors of h and y against fp32: " + ", ".join(f"{c} {h:.2e} {y:.2e}" for c, (h, y) in errors.items()))
    print(f"  {NEEDED} times bf16 {'is' if min(ratios) >= NEEDED else 'is NOT'} reached", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="T,H,I,E,K; may be given several times")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    check_small()
    names = {str(shape): name for name, shape in (SHAPES | LARGE).items()}
    table, timed = Table(), [shape_of(text) for text in options.shape or ()] or TIMED
    for shape in timed:
        measure(table, names.get(str(shape), str(shape)), shape, options.rounds)
        table.write(options.out / "fp8_trial.csv")
        torch.cuda.empty_cache()
    for shape in timed:
        show(table, names.get(str(shape), str(shape)), shape)


if __name__ == "__main__":
    main()
