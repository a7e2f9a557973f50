"""Activations and their slopes on fp32 tiles; the formulas of kernels/eager.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _curve(x, NAME: tl.constexpr):
    """Compute the activation NAME of a value, without a gate, and its slope."""
    if NAME == "silu":
        sigmoid = tl.sigmoid(x)
        value = x * sigmoid
        slope = sigmoid + value * (1 - sigmoid)
    elif NAME == "gelu":
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value = x * cdf
        slope = cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:  # gelu_tanh
        square = x * x
        cdf = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * square))  # 0.5 * (1 + tanh(z)) = sigmoid(2 z)
        value = x * cdf
        slope = cdf + value * (1 - cdf) * 1.5957691216057308 * (1 + 0.134145 * square)
    return value, slope


@triton.jit
def _tanh(x):
    """Compute tanh. Near 0, where the difference of two numbers near 1 would lose fp32's last bits, it is a series:
    its next term is 5e-8."""
    square = x * x
    near_zero = x * (1 + square * (0.13333333333333333 * square - 0.3333333333333333))
    return tl.where(tl.abs(x) < 0.1, near_zero, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def activate(gate, up, da, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Compute a and, from its gradient `da`, the gradients of gate and up, in fp32; names and formulas as in
    interface.Activation. Where a clamp or relu is flat they are 0 whatever `da` is. NaN goes through all of them."""
    if NAME == "clamped_swiglu" or NAME == "clamped_silu":
        alpha: tl.constexpr = ALPHA if NAME == "clamped_swiglu" else 1.0
        shift: tl.constexpr = 1.0 if NAME == "clamped_swiglu" else 0.0
        gate_clamped = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up_clamped = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up_clamped = tl.minimum(up_clamped, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        sigmoid = tl.sigmoid(alpha * gate_clamped)
        glu = gate_clamped * sigmoid
        slope = (up_clamped + shift) * (sigmoid + alpha * glu * (1 - sigmoid))
        dgate = tl.where(gate <= LIMIT, da * slope, 0.0)
        return (up_clamped + shift) * glu, dgate, tl.where(tl.abs(up) <= LIMIT, da * glu, 0.0)
    if NAME == "silu_clamped":
        value, slope = _curve(gate, "silu")
        glu = tl.minimum(value, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up_clamped = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up_clamped = tl.minimum(up_clamped, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        dgate = tl.where(value <= LIMIT, da * up_clamped, 0.0) * slope
        return up_clamped * glu, dgate, tl.where(tl.abs(up) <= LIMIT, da * glu, 0.0)
    if NAME == "reglu":
        value = tl.where(gate <= 0, 0.0, gate)
        return value * up, tl.where(gate <= 0, 0.0, da * up), da * value
    if NAME == "softcapped_swiglu":
        tanh_gate, tanh_up = _tanh(gate * (1 / ALPHA)), _tanh(up * (1 / LIMIT))
        sigmoid, up_capped = tl.sigmoid(gate), LIMIT * tanh_up
        glu = ALPHA * tanh_gate * sigmoid
        slope = (1 - tanh_gate * tanh_gate) * sigmoid + glu * (1 - sigmoid)
        return up_capped * glu, da * slope * up_capped, da * glu * (1 - tanh_up * tanh_up)
    if NAME == "swiglu":
        value, slope = _curve(gate, "silu")
    elif NAME == "geglu":
        value, slope = _curve(gate, "gelu")
    else:
        value, slope = _curve(gate, "gelu_tanh")
    return value * up, da * slope * up, da * value


@triton.jit
def activate_ungated(h, da, NAME: tl.constexpr):
    """Compute as `activate` for an activation without a gate: a and, from its gradient `da`, that of h."""
    if NAME == "relu":
        return tl.where(h <= 0, 0.0, h), tl.where(h <= 0, 0.0, da)
    if NAME == "relu2":
        value = tl.where(h <= 0, 0.0, h)
        return value * value, tl.where(h <= 0, 0.0, da * 2 * value)
    value, slope = _curve(h, NAME)
    return value, da * slope
