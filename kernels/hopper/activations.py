"""Gated activations and their slopes on fp32 scalars in registers; the formulas of kernels/eager.py."""

import math

import cutlass.cute as cute
from cutlass import Float32, const_expr

LOG2_E = math.log2(math.e)


def _sigmoid(x):
    return cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp2(x * -LOG2_E))


def _smaller(x, limit: float):
    return -cute.arch.fmax(-x, Float32(-limit))


def _gelu(x):
    """(gelu(x), its slope), erf."""
    cdf = 0.5 + 0.5 * cute.math.erf(x * math.sqrt(0.5))
    return x * cdf, cdf + x * cute.arch.exp2(x * x * (-0.5 * LOG2_E)) * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh(x):
    """(gelu(x), its slope), the tanh approximation: tanh(u) = 2 sigmoid(2u) - 1."""
    scale = math.sqrt(2 / math.pi)
    cdf = _sigmoid(2 * scale * (x + 0.044715 * x * x * x))
    return x * cdf, cdf + 2 * x * cdf * (1 - cdf) * scale * (1 + 3 * 0.044715 * x * x)


def activate(gate, up, name: str, alpha: float, limit: float):
    """(a, da/dgate, da/dup) of scalars; what is not used costs nothing."""
    if const_expr(name == "clamped_swiglu"):
        clamped_gate = _smaller(gate, limit)
        clamped_up = _smaller(cute.arch.fmax(up, Float32(-limit)), limit)
        sigmoid = _sigmoid(alpha * clamped_gate)
        glu = clamped_gate * sigmoid
        slope_gate = (clamped_up + 1) * (sigmoid + alpha * glu * (1 - sigmoid)) * Float32(gate <= limit)
        return (clamped_up + 1) * glu, slope_gate, glu * Float32(up <= limit) * Float32(up >= -limit)
    if const_expr(name == "swiglu"):
        sigmoid = _sigmoid(gate)
        value = gate * sigmoid
        slope = sigmoid + value * (1 - sigmoid)
    elif const_expr(name == "geglu"):
        value, slope = _gelu(gate)
    elif const_expr(name == "geglu_tanh"):
        value, slope = _gelu_tanh(gate)
    else:
        slope = Float32(gate > 0)
        value = gate * slope
    return value * up, slope * up, value
