"""Activations and their slopes on fp32 scalars in registers; the formulas of kernels/eager.py."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

LOG2_E = math.log2(math.e)


def _sigmoid(x):
    return cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp2(x * -LOG2_E))


def _tanh(x):
    """Compute tanh, off by 2e-7 at most, which bf16 and fp16 outputs do not show."""
    return 2 * _sigmoid(2 * x) - 1


def _within(up, limit: float):
    """Tell whether a value is within both of its limits."""
    return Boolean(up <= limit) & Boolean(up >= -limit)


def _clamp(x, high: float, low: float | None = None):
    """Clamp a value; NaN stays NaN."""
    x = cute.arch.fmin(x, Float32(high), nan=True)
    return x if low is None else cute.arch.fmax(x, Float32(low), nan=True)


def _silu(x):
    """Compute (silu(x), its slope)."""
    sigmoid = _sigmoid(x)
    value = x * sigmoid
    return value, sigmoid + value * (1 - sigmoid)


def _gelu(x):
    """Compute (gelu(x), its slope), erf."""
    cdf = 0.5 + 0.5 * cute.math.erf(x * math.sqrt(0.5))
    return x * cdf, cdf + x * cute.arch.exp2(x * x * (-0.5 * LOG2_E)) * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh(x):
    """Compute (gelu(x), its slope), the tanh approximation: tanh(u) = 2 sigmoid(2u) - 1."""
    scale = math.sqrt(2 / math.pi)
    cdf = _sigmoid(2 * scale * (x + 0.044715 * x * x * x))
    return x * cdf, cdf + 2 * x * cdf * (1 - cdf) * scale * (1 + 3 * 0.044715 * x * x)


_CURVES = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}


def _where(condition, x):
    """Select x where the condition holds, else 0."""
    return Float32(cutlass.select_(condition, x, Float32(0.0)))


def activate(gate, up, name: str, alpha: float, limit: float, da=1.0):
    """Compute a of scalars and, from its gradient `da`, the gradients of gate and up; what is not used costs nothing.
    Where a clamp or relu is flat they are 0 whatever `da` is."""
    if const_expr(name in ("clamped_swiglu", "clamped_silu")):
        alpha, shift = (alpha, 1.0) if const_expr(name == "clamped_swiglu") else (1.0, 0.0)
        clamped_gate = _clamp(gate, limit)
        clamped_up = _clamp(up, limit, -limit)
        sigmoid = _sigmoid(alpha * clamped_gate)
        glu = clamped_gate * sigmoid
        slope = (clamped_up + shift) * (sigmoid + alpha * glu * (1 - sigmoid))
        inside = _within(up, limit)
        return (clamped_up + shift) * glu, _where(gate <= limit, da * slope), _where(inside, da * glu)
    if const_expr(name == "silu_clamped"):
        value, slope = _silu(gate)
        glu, clamped_up = _clamp(value, limit), _clamp(up, limit, -limit)
        inside = _within(up, limit)
        return clamped_up * glu, _where(value <= limit, da * clamped_up) * slope, _where(inside, da * glu)
    if const_expr(name == "reglu"):
        above = (gate > 0.0) | (gate != gate)
        value = _where(above, gate)
        return value * up, _where(above, da * up), da * value
    if const_expr(name == "softcapped_swiglu"):
        tanh_gate, tanh_up = _tanh(gate * (1 / alpha)), _tanh(up * (1 / limit))
        sigmoid, up_capped = _sigmoid(gate), limit * tanh_up
        glu = alpha * tanh_gate * sigmoid
        slope = (1 - tanh_gate * tanh_gate) * sigmoid + glu * (1 - sigmoid)
        return up_capped * glu, da * slope * up_capped, da * glu * (1 - tanh_up * tanh_up)
    value, slope = _CURVES[{"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}[name]](gate)
    return value * up, da * slope * up, da * value


def activate_ungated(h, name: str, da=1.0):
    """Compute as `activate` for an activation without a gate: a and, from its gradient `da`, that of h."""
    if const_expr(name in ("relu", "relu2")):
        above = (h > 0.0) | (h != h)
        value = _where(above, h)
        if const_expr(name == "relu"):
            return value, _where(above, da)
        return value * value, _where(above, da * 2 * value)
    value, slope = _CURVES[name](h)
    return value, da * slope
