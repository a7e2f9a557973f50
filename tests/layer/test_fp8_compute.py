"""moe_experts(compute="fp8"): forward in the arithmetic that FP8 checkpoints are served in, and gradients in it too."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from sonicmoe_hf import PackedWeight
from sonicmoe_hf.kernels.minifloat import from_e4m3, to_e4m3
from sonicmoe_hf.layer.moe_experts import LowRank, moe_experts
from sonicmoe_hf.tools.comparing import relative_error

T, H, I, E, K, RANK = 30, 336, 144, 4, 2, 8  # neither H nor I is a multiple of a group's 128 columns


def problem(dtype=torch.bfloat16):
    """Make x, packed weights, (expert, routing weights), adapters."""
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


def step(x, packed, routing, adapters=(None, None), dout=None, checkpointed=False, **options):
    """Compute out, and the gradients of x, of the routing weights and of the adapters."""
    for adapter in filter(None, adapters):
        adapter.a.requires_grad_(), adapter.b.requires_grad_()
    layer = functools.partial(
        moe_experts, gate_up_adapter=adapters[0], down_adapter=adapters[1], backend="eager", **options
    )
    if checkpointed:
        layer = functools.partial(checkpoint, layer, use_reentrant=False)
    out = layer(x, *packed, routing)
    leaves = [x, routing[1], *(part for adapter in filter(None, adapters) for part in (adapter.a, adapter.b))]
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout)]


def quantized_row(row):
    """Quantize a row of at most 128 columns, a group, and return its values in FP8, in the plainest way."""
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


def test_gradients_are_what_the_formula_gives_token_by_token():
    """Products take dout quantized, and dh quantized with the groups of gate and up counted apart; adapters' take
    neither."""
    x, packed, (expert, weights), adapters = problem(torch.float32)
    dout = torch.randn(T, H)
    _, *found = step(x, packed, (expert, weights), adapters, dout, compute="fp8")
    expected = [torch.zeros_like(gradient) for gradient in found]
    dx, dweights, da1, db1, da2, db2 = expected
    first, second = ((adapter.a.detach(), adapter.b.detach()) for adapter in adapters)
    gate_up, down = (weight.dequantize() for weight in packed)
    x, weights, scale = x.detach(), weights.detach(), adapters[0].scale
    for t in range(T):
        for k, (e, w) in enumerate(zip(expert[t].tolist(), weights[t])):
            (a1, b1), (a2, b2) = ((a[e], b[e]) for a, b in (first, second))
            h = (gate_up[e] @ in_groups(x[t]) + scale * b1 @ (a1 @ x[t])).requires_grad_()
            gate, up = h.chunk(2)
            a = F.silu(gate) * up
            da = down[e].T @ in_groups(dout[t]) + scale * a2.T @ (b2.T @ dout[t])
            (dh,) = torch.autograd.grad(a, h, w * da)
            a = a.detach()
            scaled_dh = torch.cat([in_groups(half) for half in dh.chunk(2)])
            dx[t] += gate_up[e].T @ scaled_dh + scale * a1.T @ (b1.T @ dh)
            dweights[t, k] = da @ a
            da1[e] += scale * torch.outer(b1.T @ dh, x[t])
            db1[e] += scale * torch.outer(dh, a1 @ x[t])
            da2[e] += scale * w * torch.outer(b2.T @ dout[t], a)
            db2[e] += scale * w * torch.outer(dout[t], a2 @ a)
    # as above; a code of dh that goes to the other side moves dx by 1/16 of one of 144 values
    errors = [relative_error(*pair) for pair in zip(found, expected)]
    assert max(errors) < 2e-3, errors


def test_small_gradients_are_as_exact_as_large_ones():
    """Codes do not depend on a power of two, by which everything else is exact."""
    x, packed, routing, adapters = problem(torch.float32)
    dout = torch.randn(T, H)
    _, *large = step(x, packed, routing, adapters, dout, compute="fp8")
    _, *small = step(x, packed, routing, adapters, dout * 2.0**-60, compute="fp8")
    assert all(torch.equal(one * 2.0**-60, other) for one, other in zip(large, small))


def test_gradients_are_near_those_of_the_expanded_weights():
    """Up to what FP8 changes in h, dout and dh, 4% each: the signs of gradients and their sizes stay."""
    x, packed, routing, adapters = problem()
    exact = step(x, packed, routing, adapters)
    found = step(x, packed, routing, adapters, compute="fp8")
    errors = [relative_error(*pair) for pair in zip(found, exact)]
    assert 0.01 < errors[0] < 0.08 and max(errors) < 0.08, errors


def test_what_is_computed_again_has_the_same_bits():
    """h is computed again in FP8."""
    for adapters in (None, None), problem()[3]:
        x, packed, routing, _ = problem()
        kept = step(x, packed, routing, adapters, compute="fp8")
        for options in ({"save": "input"}, {"checkpointed": True}):
            again = step(x, packed, routing, adapters, compute="fp8", **options)
            assert all(torch.equal(*pair) for pair in zip(kept, again))


def test_what_fp8_does_not_take_is_an_error():
    x, packed, routing, _ = problem()
    dense = [weight.dequantize() for weight in packed]
    mixed = PackedWeight.quantize(dense[0], "fp8", order="interleaved"), packed[1]
    for weights, options, words in (
        (dense, {}, "takes experts packed as fp8 .*not torch.bfloat16"),
        (packed, {"compute": "fp4"}, "compute is 'fp4'"),
        (packed, {"down_bias": x.new_zeros(E, H)}, "without biases"),
        (mixed, {}, "gate_up packed in the order 'concatenated'"),
        (packed, {"layout": "interleaved"}, "not 'interleaved'"),
    ):
        with pytest.raises(ValueError, match=words):
            moe_experts(x, *weights, routing, **{"compute": "fp8", **options})
