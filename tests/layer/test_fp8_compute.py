"""moe_experts(compute="fp8"): forward in the arithmetic that FP8 checkpoints are served in, backward as without it."""

import pytest
import torch
import torch.nn.functional as F

from sonicmoe_hf import PackedWeight
from sonicmoe_hf.checkpoints.comparing import relative_error
from sonicmoe_hf.kernels.minifloat import from_e4m3, to_e4m3
from sonicmoe_hf.layer.moe_experts import LowRank, moe_experts

T, H, I, E, K, RANK = 30, 336, 144, 4, 2, 8  # neither H nor I is a multiple of a group's 128 columns


def problem(dtype=torch.bfloat16):
    """x, packed weights, (expert, routing weights), adapters."""
    gate_up, down = torch.randn(E, 2 * I, H) * H**-0.5, torch.randn(E, H, I) * I**-0.5
    gate_up[:, :I] *= 3  # another scale than up's
    packed = [
        PackedWeight.quantize(weight.to(dtype), "fp8", order=order)
        for weight, order in ((gate_up, "concatenated"), (down, "whole"))
    ]
    x = (torch.randn(T, H) * torch.logspace(-1, 1, H)).to(dtype).requires_grad_()
    expert = torch.rand(T, E).topk(K).indices
    weights = torch.rand(T, K, requires_grad=True)
    adapters = [
        LowRank(torch.randn(E, RANK, size_in) * size_in**-0.5, torch.randn(E, size_out, RANK) * 0.3, 0.5)
        for size_in, size_out in ((H, 2 * I), (I, H))
    ]
    return x, packed, (expert, weights), adapters


def step(x, packed, routing, adapters=(None, None), **options):
    """out, and the gradients of x and of the routing weights."""
    for adapter in filter(None, adapters):
        adapter.a.requires_grad_(), adapter.b.requires_grad_()
    out = moe_experts(
        x, *packed, routing, gate_up_adapter=adapters[0], down_adapter=adapters[1], backend="eager", **options
    )
    leaves = [x, routing[1], *(part for adapter in filter(None, adapters) for part in (adapter.a, adapter.b))]
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def quantized_row(row):
    """A row of 128 columns or fewer of a group, as its values in FP8, in plain words."""
    scale = max(row.abs().max().item(), 1e-10) / 448
    return from_e4m3(to_e4m3(row / scale)) * scale


def in_groups(row):
    return torch.cat([quantized_row(group) for group in row.split(128)])


def test_out_is_what_the_served_formula_gives_token_by_token():
    x, packed, (expert, weights), adapters = problem(torch.float32)
    with torch.no_grad():
        found = moe_experts(
            x,
            *packed,
            (expert, weights),
            gate_up_adapter=adapters[0],
            down_adapter=adapters[1],
            compute="fp8",
            backend="eager",
        )
        gate_up, down = (weight.dequantize() for weight in packed)
        first, second = ((adapter.scale * adapter.b @ adapter.a) for adapter in adapters)
        expected = torch.zeros_like(found)
        for t in range(T):
            for e, w in zip(expert[t].tolist(), weights[t].tolist()):
                gate, up = (gate_up[e] @ in_groups(x[t]) + first[e] @ x[t]).chunk(2)
                a = F.silu(gate) * up
                expected[t] += w * (down[e] @ in_groups(a) + second[e] @ a)
    # in fp32 only the order of sums differs, by which a code on an edge may go to the other side
    assert relative_error(found, expected) < 1e-3


def test_gradients_are_those_of_the_expanded_weights():
    """Up to what FP8 changes in h, 4% (see the error of out): the signs of gradients and their sizes stay."""
    x, packed, routing, adapters = problem()
    exact = step(x, packed, routing, adapters)
    found = step(x, packed, routing, adapters, compute="fp8")
    errors = [relative_error(*pair) for pair in zip(found, exact)]
    assert 0.01 < errors[0] < 0.08 and max(errors) < 0.08, errors


def test_saving_x_alone_gives_the_same_bits():
    """h is computed again in FP8."""
    for adapters in (None, None), problem()[3]:
        x, packed, routing, _ = problem()
        kept = step(x, packed, routing, adapters, compute="fp8")
        again = step(x, packed, routing, adapters, compute="fp8", save="input")
        assert all(torch.equal(*pair) for pair in zip(kept, again))


def test_what_fp8_does_not_take_is_an_error():
    x, packed, routing, _ = problem()
    dense = [weight.dequantize() for weight in packed]
    with pytest.raises(ValueError, match=r"takes experts packed as fp8 .*not torch.bfloat16"):
        moe_experts(x, *dense, routing, compute="fp8")
    with pytest.raises(ValueError, match="compute is 'fp4'"):
        moe_experts(x, *packed, routing, compute="fp4")
    with pytest.raises(ValueError, match="without biases"):
        moe_experts(x, *packed, routing, compute="fp8", down_bias=x.new_zeros(E, H))
    mixed = PackedWeight.quantize(dense[0], "fp8", order="interleaved")
    with pytest.raises(ValueError, match="gate_up packed in the order 'concatenated'"):
        moe_experts(x, mixed, packed[1], routing, compute="fp8")
    with pytest.raises(ValueError, match="not 'interleaved'"):
        moe_experts(x, *packed, routing, compute="fp8", layout="interleaved")
