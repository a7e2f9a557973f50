"""Backward through frozen FP8 experts: parts, errors and whole layers with adapters, for fp8_trial.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sonicmoe_hf import PackedWeight
from sonicmoe_hf.kernels import hopper
from sonicmoe_hf.kernels.interface import Activation, PackedOperand
from sonicmoe_hf.kernels.quantized import FP8_BLOCK, Quantized, dequantize_expert, scales_in_fp32
from sonicmoe_hf.kernels.scaled import SMALLEST_GRADIENT
from sonicmoe_hf.layer.moe_experts import LowRank, moe_experts

BF16 = torch.bfloat16
SWIGLU = Activation()
RANK = 16
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def of(packed: PackedOperand) -> Quantized:
    return Quantized(*packed[:3])


def backward_calls(gate_up: PackedOperand, down: PackedOperand, dout, h, routed, rows):
    """part -> call: backward to dx of every row, in bf16 from expanded weights, in FP8 from transposed ones. The name's
    first word is the contender."""

    def expanded(packed):
        return hopper.dequantize(*packed, BF16, rows)

    def down_bf16(weight):
        return hopper.down_backward(dout, weight, None, h, routed, rows, SWIGLU, False, True, False, True)[0]

    def down_fp8(scaled_dout, weight):
        return hopper.scaled_down_backward(
            scaled_dout, weight, h, routed, rows, SWIGLU, False, False, True, want_scaled=True
        )[3]

    def quantised():
        return hopper.scale_rows(dout, SMALLEST_GRADIENT)

    def transposed(packed):
        return hopper.transposed(packed.codes, packed.scales)

    w1, w2, down_t, gate_up_t, scaled_dout = (
        expanded(gate_up), expanded(down), transposed(down), transposed(gate_up), quantised(),
    )  # fmt: skip
    dh, dh8 = down_bf16(w2), down_fp8(scaled_dout, down_t)
    return {
        "bf16 whole": lambda: hopper.up_backward_input(down_bf16(expanded(down)), expanded(gate_up), rows),
        "fp8 whole": lambda: hopper.scaled_down(
            down_fp8(quantised(), transposed(down)), transposed(gate_up), rows, BF16
        ),
        "bf16 weights": lambda: (expanded(down), expanded(gate_up)),
        "fp8 weights": lambda: (transposed(down), transposed(gate_up)),
        "fp8 quantise dout": quantised,
        "bf16 down_backward": lambda: down_bf16(w2),
        "fp8 down_backward": lambda: down_fp8(scaled_dout, down_t),
        "bf16 dx": lambda: hopper.up_backward_input(dh, w1, rows),
        "fp8 dx": lambda: hopper.scaled_down(dh8, gate_up_t, rows, BF16),
    }


def layer_calls(shape, x, gate_up: PackedOperand, down: PackedOperand, dout):
    """contender -> forward and backward of a layer of packed FP8 experts with adapters of rank 16, to x, the routing
    weights and the adapters."""
    weights = [PackedWeight.of(of(packed), "fp8", BF16) for packed in (gate_up, down)]
    x = x.detach().requires_grad_()
    expert = torch.rand(shape.T, shape.E, device="cuda").topk(shape.K).indices
    routed = torch.full((shape.T, shape.K), 1 / shape.K, device="cuda", requires_grad=True)
    leaves, adapters = [x, routed], {}
    for name, size_in, size_out in (("gate_up_adapter", shape.H, 2 * shape.I), ("down_adapter", shape.I, shape.H)):
        a = torch.randn(shape.E, RANK, size_in, device="cuda", dtype=BF16) * size_in**-0.5
        b = torch.randn(shape.E, size_out, RANK, device="cuda", dtype=BF16) * 0.01
        adapters[name] = LowRank(a.requires_grad_(), b.requires_grad_(), 2.0)
        leaves += [a, b]

    def step(compute, save):
        out = moe_experts(x, *weights, (expert, routed), compute=compute, save=save, backend="hopper", **adapters)
        return torch.autograd.grad(out, leaves, dout)

    return {
        f"{name} {what}": lambda compute=compute, save=save: step(compute, save)
        for name, compute in (("bf16", None), ("fp8", "fp8"))
        for what, save in (("whole", "preactivation"), ("h computed again", "input"))
    }


def grouped(values, dtype=torch.float8_e4m3fn, smallest=1e-10):
    """(codes, scales) of rows [M, K] as vLLM's reference formula quantizes them, 128 columns a group."""
    groups = F.pad(values.float(), (0, -values.shape[1] % FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK))
    scales = groups.abs().amax(2, keepdim=True).clamp(min=smallest) / LARGEST[dtype]
    return (groups / scales).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scales


def served_product(values, codes_NK, block_scales):
    """vLLM's reference formula (native_w8a8_block_matmul): products of a block in fp32, times both scales; in bf16. The
    rows of `block_scales` [blocks of N, groups] are blocks of 128 rows of the weight."""
    codes, scales = grouped(values)
    weight = codes_NK.view(torch.float8_e4m3fn).float()
    out = torch.zeros(len(values), len(weight), device=values.device)
    for n, rows in enumerate(weight.split(FP8_BLOCK)):
        for g, block in enumerate(rows.split(FP8_BLOCK, 1)):
            product = codes[:, g, : block.shape[1]].float() @ block.T
            out[:, n * FP8_BLOCK : n * FP8_BLOCK + len(rows)] += product * (scales[:, g] * block_scales[n, g])
    return out.to(BF16)


def rounded_halves(gradients, parts=2):
    """The values of gradients' codes in E5M2; of dh the groups of gates and of ups are counted apart."""
    values = []
    for part in gradients.chunk(parts, 1):
        codes, scales = grouped(part, torch.float8_e5m2, SMALLEST_GRADIENT)
        values.append((codes.float() * scales).flatten(1)[:, : part.shape[1]])
    return torch.cat(values, 1)


def errors(shape, x, gate_up: PackedOperand, down: PackedOperand, dout, routed, rows):
    """(contender, tensor) -> error against fp32 with the checkpoint's weights, over every eighth of the experts.

    served: vLLM's formula, forward alone; "fp8 beside served": the kernels' tensors against its. e5m2: dout and dh
    rounded to E5M2, from the kernels' h, all else in fp32.
    """
    results = {}
    packed = gate_up, down
    dense = [hopper.dequantize(*weight, BF16, rows) for weight in packed]
    h, a = hopper.up(x, dense[0], None, rows, SWIGLU, False, True, True)
    y = hopper.down(a, dense[1], None, rows)
    dh, _, dw = hopper.down_backward(dout, dense[1], None, h, routed, rows, SWIGLU, False, True, False, True)
    results["bf16"] = {"h": h, "y": y, "dh": dh, "dx": hopper.up_backward_input(dh, dense[0], rows), "dw": dw}
    del dense, a
    h, _, a8 = hopper.scaled_up(hopper.scale_rows(x), gate_up, rows, SWIGLU, BF16, True, False, True)
    y = hopper.scaled_down(a8, down, rows, BF16)
    down_t, gate_up_t = (hopper.transposed(weight.codes, weight.scales) for weight in (down, gate_up))
    dh, _, dw, dh8 = hopper.scaled_down_backward(
        hopper.scale_rows(dout, SMALLEST_GRADIENT), down_t, h, routed, rows, SWIGLU, True, False, True, True
    )
    dx = hopper.scaled_down(dh8, gate_up_t, rows, BF16)
    results["fp8"] = {"h": h, "y": y, "dh": dh, "dx": dx, "dw": dw}
    ends, sums = rows.offsets.tolist(), {}

    def add(contender, tensor, found, exact):
        wrong, whole = sums.get((contender, tensor), (0.0, 0.0))
        difference = (found.float() - exact.float()).double()
        sums[contender, tensor] = wrong + difference.square().sum(), whole + exact.double().square().sum()

    for e in range(0, shape.E, max(shape.E // 8, 1)):
        own = slice(ends[e], ends[e + 1])
        token, pair = rows.token[own].long(), rows.pair[own].long()
        w1, w2 = (dequantize_expert(of(weight), "fp8", torch.float32, e) for weight in packed)
        scale = routed[pair, None]

        def backward(h, dout, of_dh=lambda dh: dh, w1=w1, w2=w2, scale=scale):
            with torch.enable_grad():
                h = h.float().requires_grad_()
                gate, up = h.chunk(2, -1)
                a = F.silu(gate) * up
            da = dout.float() @ w2
            (dh,) = torch.autograd.grad(a, h, scale * da)
            return {"dh": dh, "dx": of_dh(dh) @ w1, "dw": (da * a.detach()).sum(1)}

        h_exact = x[token].float() @ w1.T
        gate, up = h_exact.chunk(2, -1)
        exact = {"h": h_exact, "y": (F.silu(gate) * up) @ w2.T} | backward(h_exact, dout[token])
        for contender, tensors in results.items():
            for name, tensor in tensors.items():
                add(contender, name, tensor[pair] if name == "dw" else tensor[own], exact[name])
        for name, tensor in backward(results["fp8"]["h"][own], rounded_halves(dout[token], 1), rounded_halves).items():
            add("e5m2", name, tensor, exact[name])
        scales = [scales_in_fp32(weight.scales[e]).flatten(0, 2) for weight in packed]
        by_half = zip(gate_up.codes[e].split(shape.I), scales[0].chunk(2))
        h_served = torch.cat([served_product(x[token], codes, part) for codes, part in by_half], 1)
        gate, up = h_served.float().chunk(2, -1)
        y_served = served_product((F.silu(gate) * up).to(BF16), down.codes[e], scales[1])
        for name, tensor in (("h", h_served), ("y", y_served)):
            add("served", name, tensor, exact[name])
            add("fp8 beside served", name, results["fp8"][name][own], tensor)
    return {key: float((wrong / whole).sqrt()) for key, (wrong, whole) in sums.items()}
