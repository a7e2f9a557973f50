"""A layer's forward and backward with FP8 products (kernels/hopper/gemm_fp8.py) beside the bf16 kernels, on a Hopper GPU.

    python -m benchmarks.layer.fp8_trial [--shape T,H,I,E,K ...] [--rounds 15] [--csv FILE]

Contenders take turns: one call at a time, and "hot", without a pause. What they compute is compared in
tests/kernels/test_fp8_gpu.py. Forward: the products alone, in bf16 those of dense weights; the time of FP8 has that of
x's values and scales in it, and those of a come from `up` itself. Layer: forward and backward with adapters over frozen
FP8 experts, which bf16 expands and FP8 transposes. Random data and routing. Writes fp8_trial.csv: milliseconds, TFLOP/s,
and errors of h and y against the unrounded product in fp32.
"""

from __future__ import annotations

import torch

from benchmarks.common.command import Command
from benchmarks.common.shapes import activated, shape_of  # noqa: F401 - shape_of for its tests
from benchmarks.common.table import Table
from benchmarks.common.timing import hot_times, interleaved_times, make_replay, release
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.kernels import hopper
from sonicmoe_hf.kernels.interface import Activation, PackedOperand
from sonicmoe_hf.kernels.packed import FORMATS, Quantized
from sonicmoe_hf.layer.moe_experts import LowRank, moe_experts

BF16 = torch.bfloat16
SWIGLU = Activation()
RANK = 16
HOT_ROUNDS = 32  # and as many before that only heat the GPU
MAX_CAPTURED = 1e9  # weights of down: larger ones in the memory of several graphs would not fit


def weight_in_blocks(weight_ENK, order: str) -> PackedOperand:
    """Pack a dense weight as `from_pretrained(experts_quantization="fp8")` packs it."""
    return PackedOperand(*FORMATS["fp8"].quantize(weight_ENK, order), "fp8")


def problem(shape, seed=0, skipped=()):
    """Make x, gate_up, down and the rows on a GPU; experts in `skipped` have none. Large weights are filled expert
    by expert."""
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


def quantized(x, gate_up, weight):
    return hopper.scale_rows(x), weight_in_blocks(gate_up, "concatenated"), weight_in_blocks(weight, "whole")


def errors_of(shape, x, gate_up, weight, rows, results):
    """Measure name -> error of h and y of some experts against fp32 products of the unrounded operands, by
    contender."""
    ends, errors = rows.offsets.tolist(), {}
    for name, (h, y) in results.items():
        wrong, whole = torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda")
        for e in range(0, shape.E, max(shape.E // 8, 1)):
            own = slice(ends[e], ends[e + 1])
            h_exact = x[rows.token[own].long()].float() @ gate_up[e].float().T
            y_exact = activated(h_exact, "swiglu") @ weight[e].float().T
            for i, (one, exact) in enumerate(((h[own], h_exact), (y[own], y_exact))):
                wrong[i] += (one.float() - exact).square().sum()
                whole[i] += exact.square().sum()
        errors[name] = dict(zip(("h", "y"), (wrong / whole).sqrt().tolist()))
    return errors


def forward_calls(x, dense, packed, rows):
    """Make contender -> a function that computes h and y of gate_up and down, dense or packed."""

    def bf16():
        h, a = hopper.up(x, dense[0], None, rows, SWIGLU, False, True, True)
        return h, hopper.down(a, dense[1], None, rows)

    def fp8():
        h, _, a8 = hopper.scaled_up(hopper.scale_rows(x), packed[0], rows, SWIGLU, BF16, True, False, True)
        return h, hopper.scaled_down(a8, packed[1], rows, BF16)

    return {"bf16": bf16, "fp8": fp8}


def layer_calls(shape, x, packed):
    """Make contender -> forward and backward of a layer with adapters, to x, the routing weights and the
    adapters."""
    weights = [PackedWeight.of(Quantized(*operand[:3]), "fp8", BF16) for operand in packed]
    x, dout = x.detach().requires_grad_(), torch.randn_like(x)
    expert = torch.rand(shape.T, shape.E, device="cuda").topk(shape.K).indices
    routed = torch.full((shape.T, shape.K), 1 / shape.K, device="cuda", requires_grad=True)
    leaves, adapters = [x, routed], {}
    for name, size_in, size_out in (("gate_up_adapter", shape.H, 2 * shape.I), ("down_adapter", shape.I, shape.H)):
        a = torch.randn(shape.E, RANK, size_in, device="cuda", dtype=BF16) * size_in**-0.5
        b = torch.randn(shape.E, size_out, RANK, device="cuda", dtype=BF16) * 0.01
        adapters[name] = LowRank(a.requires_grad_(), b.requires_grad_(), 2.0)
        leaves += [a, b]

    def step(compute):
        out = moe_experts(x, *weights, (expert, routed), compute=compute, backend="hopper", **adapters)
        return torch.autograd.grad(out, leaves, dout)

    return {"bf16": lambda: step(None), "fp8": lambda: step("fp8")}


def measure(table, config, shape, rounds):
    """Measure the rows of one shape."""
    x, *dense, rows = problem(shape)
    _, *packed = quantized(x, *dense)
    calls = forward_calls(x, dense, packed, rows)
    results = {name: call() for name, call in calls.items()}
    for name, errors in errors_of(shape, x, *dense, rows, results).items():
        table.add(config, shape, name, "forward", "eager", {f"error_{tensor}": e for tensor, e in errors.items()})
    add_times(table, config, shape, "forward", calls, rounds)
    del dense, calls, results
    release()
    add_times(table, config, shape, "layer", layer_calls(shape, x, packed), rounds)


def add_times(table, config, shape, mode, calls, rounds):
    """Add rows of the calls' times."""
    flop = 6 * shape.T * shape.K * shape.H * shape.I * (2 if mode == "layer" else 1)
    alone = "graph" if mode == "forward" or shape.E * shape.I * shape.H < MAX_CAPTURED else "eager"
    if alone == "graph":
        calls = {name: make_replay(call) for name, call in calls.items()}
    one_at_a_time = {name: on_device for name, (on_device, *_) in interleaved_times(calls, rounds).items()}
    for launch, times in (("hot", hot_times(calls, HOT_ROUNDS, HOT_ROUNDS)), (alone, one_at_a_time)):
        for name, ms in times.items():
            rates = [flop / 1e9 / each for each in ms]
            table.add(config, shape, name, mode, launch, {"ms whole": ms, "TFLOP/s whole": rates})


def main():
    parser = Command(__doc__, "fp8_trial.csv", shapes=("Qwen3-30B-A3B", "DeepSeek-V3"))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    table = Table(options.csv)
    for config, shape in options.shapes.items():
        measure(table, config, shape, options.rounds)
        table.write()
        release()


if __name__ == "__main__":
    main()
