"""up and down of one layer with FP8 products (kernels/hopper/gemm_fp8.py) beside the bf16 kernels, on a Hopper GPU.

    python -m benchmarks.layer.fp8_trial [--shape T,H,I,E,K ...] [--rounds 15] [--out benchmarks/results]

First the kernels on small shapes beside the same arithmetic in PyTorch; then times, contenders taking turns: one call at
a time, and "hot", a tenth of a second of calls without a pause. FP8's time includes that of x's values and scales; those
of a come from `up` itself. Both store h and a. Random data and routing. Writes fp8_trial.csv: milliseconds, TFLOP/s, and
errors against the unrounded product in fp32.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from benchmarks.common.measuring import graph_of
from benchmarks.common.paths import RESULTS
from benchmarks.common.shapes import LARGE, SHAPES, shape_of
from benchmarks.common.table import Table
from benchmarks.layer.moe_layer import interleaved_times
from sonicmoe_hf.checkpoints.comparing import relative_error
from sonicmoe_hf.kernels import hopper
from sonicmoe_hf.kernels.interface import Activation
from sonicmoe_hf.kernels.minifloat import E4M3_MAX, from_e4m3, to_e4m3
from sonicmoe_hf.kernels.quantized import FP8_BLOCK, quantize

GROUP = FP8_BLOCK
SMALLEST = 1e-10  # of what the largest value of a group is taken to be, as in gemm_fp8.py
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


class Scaled(NamedTuple):
    """codes uint8 [..., K], the bytes of e4m3 values; scales fp32: of rows [M, K / 128], of a weight [E, blocks of 128
    rows, K / 128]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def pairs(self):
        """As the kernels take the codes."""
        return self.codes.view(torch.bfloat16)

    def values(self):
        """Of rows, in fp32."""
        return from_e4m3(self.codes) * self.scales.repeat_interleave(GROUP, -1)[..., : self.codes.shape[-1]]


@triton.jit
def quantize_rows_kernel(x, codes, scales, columns, groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    row, first = tl.program_id(0), tl.program_id(1) * GROUPS
    group = first + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    place = row.to(tl.int64) * columns + column
    values = tl.load(x + place, mask=column < columns, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-10)
    scaled = values * (448.0 / largest)[:, None]
    tl.store(codes + place, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=column < columns)
    tl.store(scales + row * groups + group, largest / 448.0, mask=group < groups)


def quantize_rows(x) -> Scaled:
    """Rows [M, K] on a GPU, by groups of 128 columns."""
    rows, columns = x.shape
    groups = triton.cdiv(columns, GROUP)
    codes, scales = x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(rows, groups, dtype=torch.float32)
    grid = rows, triton.cdiv(groups, 16)
    quantize_rows_kernel[grid](x, codes, scales, columns, groups, GROUPS=16, GROUP=GROUP, num_warps=4)
    return Scaled(codes, scales)


def rows_in_groups(x) -> Scaled:
    """`quantize_rows` in PyTorch."""
    columns = x.shape[1]
    groups = F.pad(x.float(), (0, -columns % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(2).clamp(min=SMALLEST)
    codes = to_e4m3(groups * (E4M3_MAX / largest)[:, :, None]).flatten(1)[:, :columns].contiguous()
    return Scaled(codes, largest / E4M3_MAX)


def weight_in_blocks(weight_ENK, order: str) -> Scaled:
    codes, scales, _ = quantize(weight_ENK, "fp8", order)
    return Scaled(codes, scales.flatten(1, 3))


def expert_scales(weight: Scaled, expert: int, halves: int):
    """[N, K / 128]: the scales of every row of an expert's weight."""
    rows = weight.codes.shape[1] // halves
    by_row = weight.scales[expert].unflatten(0, (halves, -1)).repeat_interleave(GROUP, 1)[:, :rows]
    return by_row.flatten(0, 1)


def product(source: Scaled, weight: Scaled, rows, halves: int, gather: bool):
    """[R, N] in fp32: groups of 128 columns summed apart, then added up times both scales."""
    ends, num_rows = rows.offsets.tolist(), int(rows.offsets[-1])
    token = rows.token[:num_rows].long() if gather else torch.arange(num_rows, device=source.codes.device)
    out = torch.zeros(num_rows, weight.codes.shape[1], device=source.codes.device)
    for e, (first, end) in enumerate(itertools.pairwise(ends)):
        a, w = from_e4m3(source.codes[token[first:end]]), from_e4m3(weight.codes[e])
        a_scales, w_scales = source.scales[token[first:end]], expert_scales(weight, e, halves)
        for g in range(a_scales.shape[1]):
            columns = slice(g * GROUP, (g + 1) * GROUP)
            out[first:end] += a[:, columns] @ w[:, columns].T * a_scales[:, g, None] * w_scales[:, g]
    return out


def activated(h):
    gate, up = h.float().chunk(2, dim=-1)
    return F.silu(gate) * up


def up(kernels, x: Scaled, gate_up: Scaled, rows, blocks: int, **options):
    """h [P, 2I] in bf16, and a [P, I]; options: of compile_up."""
    num_pairs, (_, width, hidden) = rows.token.numel(), gate_up.codes.shape
    inner = width // 2
    h = x.codes.new_empty(num_pairs, width, dtype=torch.bfloat16)
    a = Scaled(x.codes.new_empty(num_pairs, inner), x.scales.new_empty(num_pairs, -(-inner // GROUP)))
    kernel = kernels.compile_up(hidden, inner, True, SWIGLU, **options)
    kernel(x.pairs, gate_up.pairs, x.scales, gate_up.scales, h, a.pairs, a.scales, rows.token, *schedule(rows, blocks))
    return h, a


def down(kernels, a: Scaled, weight: Scaled, rows, blocks: int, **options):
    """y [P, H] in bf16; options: of compile_down."""
    _, hidden, inner = weight.codes.shape
    y = a.codes.new_empty(len(a.codes), hidden, dtype=torch.bfloat16)
    kernel = kernels.compile_down(hidden, inner, **options)
    kernel(a.pairs, weight.pairs, a.scales, weight.scales, y, rows.token, *schedule(rows, blocks))
    return y


def schedule(rows, blocks: int):
    return rows.tiles, len(rows.tiles) - 1, blocks


def check(kernels, x: Scaled, gate_up: Scaled, weight: Scaled, rows, blocks: int) -> dict[str, float]:
    """The errors of up and down beside the same arithmetic in PyTorch; raises where they are more than roundings are.

    h and y are rounded to bf16, and the tensor cores add the values of a group with fewer bits than fp32: half as much
    again. a: what e4m3 loses, and h's rounding, which e4m3 hides.
    """
    h, a = up(kernels, x, gate_up, rows, blocks)
    y = down(kernels, a, weight, rows, blocks)
    num_rows = int(rows.offsets[-1])
    h, y, a = h[:num_rows], y[:num_rows], Scaled(*(part[:num_rows] for part in a))
    h_exact, y_exact = product(x, gate_up, rows, 2, True), product(a, weight, rows, 1, False)
    a_exact = activated(h)
    errors = {
        "h": relative_error(h, h_exact),
        "a": relative_error(a.values(), a_exact),
        "y": relative_error(y, y_exact),
    }
    bounds = {
        "h": 1.5 * relative_error(h_exact.bfloat16(), h_exact),
        "a": 1.02 * relative_error(rows_in_groups(a_exact).values(), a_exact),
        "y": 1.5 * relative_error(y_exact.bfloat16(), y_exact),
    }
    for name, bound in bounds.items():
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
    return quantize_rows(x), weight_in_blocks(gate_up, "concatenated"), weight_in_blocks(weight, "whole")


def check_small(kernels, blocks):
    for text in CHECKED:
        x, gate_up, weight, rows = problem(shape_of(text))
        scaled = quantized(x, gate_up, weight)
        expected = rows_in_groups(x)
        difference = relative_error(scaled[0].values(), expected.values())
        if difference > 2e-3:  # a division may round otherwise
            raise SystemExit(f"quantize_rows is off by {difference:.3g}")
        errors = check(kernels, *scaled, rows, blocks)
        for _ in range(3):
            assert errors == check(kernels, *scaled, rows, blocks), "another result the second time"
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


def measure(table, config, shape, kernels, blocks, rounds):
    x, gate_up, weight, rows = problem(shape)
    x8, gate_up8, weight8 = quantized(x, gate_up, weight)
    _, a = hopper.up(x, gate_up, None, rows, SWIGLU, False, True, True)
    _, a8 = up(kernels, x8, gate_up8, rows, blocks)

    def bf16():
        h, a = hopper.up(x, gate_up, None, rows, SWIGLU, False, True, True)
        return h, hopper.down(a, weight, None, rows)

    def fp8():
        h, a = up(kernels, quantize_rows(x), gate_up8, rows, blocks)
        return h, down(kernels, a, weight8, rows, blocks)

    whole = {"bf16": bf16, "fp8": fp8}
    for name, errors in errors_of(
        shape, x, gate_up, weight, rows, {name: call() for name, call in whole.items()}
    ).items():
        for tensor, error in errors.items():
            table.add(config, shape, name, "forward", "eager", f"error_{tensor}", [error])
    parts = {
        "bf16 up": lambda: hopper.up(x, gate_up, None, rows, SWIGLU, False, True, True),
        "bf16 down": lambda: hopper.down(a, weight, None, rows),
        "fp8 quantise x": lambda: quantize_rows(x),
        "fp8 up": lambda: up(kernels, x8, gate_up8, rows, blocks),
        "fp8 down": lambda: down(kernels, a8, weight8, rows, blocks),
    }
    for group in (2, 8):
        for in_turns in (False, True):
            options = {"in_turns": in_turns, "group": group}
            name = f"{'in turns' if in_turns else 'free'}, {group}"
            parts[f"fp8 up, {name}"] = lambda options=options: up(kernels, x8, gate_up8, rows, blocks, **options)
            parts[f"fp8 down, {name}"] = lambda options=options: down(kernels, a8, weight8, rows, blocks, **options)
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
            of = part.partition(",")[0] or "whole"
            if of in flop:
                rates = [flop[of] / 1e9 / ms for ms in values]
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
    for row in table.rows:
        if row["config"] == config and "," in row["metric"] and row["metric"].startswith("ms"):
            print(f"    {row['launch']:6s} {row['metric']:24s} {row['median']}")
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
    from sonicmoe_hf.kernels.hopper import gemm_fp8

    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    check_small(gemm_fp8, blocks)
    names = {str(shape): name for name, shape in (SHAPES | LARGE).items()}
    table, timed = Table(), [shape_of(text) for text in options.shape or ()] or TIMED
    for shape in timed:
        measure(table, names.get(str(shape), str(shape)), shape, gemm_fp8, blocks, options.rounds)
        table.write(options.out / "fp8_trial.csv")
        torch.cuda.empty_cache()
    for shape in timed:
        show(table, names.get(str(shape), str(shape)), shape)


if __name__ == "__main__":
    main()
