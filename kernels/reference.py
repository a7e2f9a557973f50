"""The specification: what a mixture-of-experts layer computes, as loops in fp32 (fp64 for fp64 inputs).

Every test compares with this file. It is written to be read beside the paper's formulas (SonicMoE, arXiv 2512.14080,
section 2), not to be fast; gradients come from autograd through the loops.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .activation import is_gated


def gated_activation(gate, up, name="swiglu", alpha=1.702, limit=7.0):
    """Compute a = act(gate, up), elementwise; names as in `interface.Activation`."""
    if name == "swiglu":
        return F.silu(gate) * up
    if name == "geglu":
        return F.gelu(gate) * up
    if name == "geglu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if name == "reglu":
        return F.relu(gate) * up
    if name == "clamped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if name == "clamped_silu":
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if name == "silu_clamped":
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if name == "softcapped_swiglu":
        return alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * limit * torch.tanh(up / limit)
    raise ValueError(f"unknown activation {name!r}")


def ungated_activation(h, name):
    """Compute a = act(h), elementwise; names as in `interface.Activation`."""
    if name == "silu":
        return F.silu(h)
    if name == "gelu":
        return F.gelu(h)
    if name == "gelu_tanh":
        return F.gelu(h, approximate="tanh")
    if name == "relu":
        return F.relu(h)
    if name == "relu2":
        return F.relu(h).square()
    raise ValueError(f"unknown activation {name!r}")


def split_gate_up(h, interleaved) -> tuple[torch.Tensor, torch.Tensor]:
    """Split h [..., 2I] -> gate [..., I], up [..., I]."""
    return (h[..., 0::2], h[..., 1::2]) if interleaved else h.chunk(2, dim=-1)


def moe_experts(
    x_TH,
    gate_up_E2IH,
    down_EHI,
    expert_P,
    token_P,
    weight_P,
    *,
    gate_up_bias_E2I=None,
    down_bias_EH=None,
    interleaved=False,
    activation="swiglu",
    alpha=1.702,
    limit=7.0,
):
    """Compute out_t = sum_e w[t,e] * (act(x_t W1_e^T + b1_e) W2_e^T + b2_e); experts outside 0..E-1 contribute
    nothing.

    Without a gate in the activation, gate_up and its bias have I rows for 2I."""
    dtype = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
    x_TH, gate_up_E2IH, down_EHI, weight_P = (t.to(dtype) for t in (x_TH, gate_up_E2IH, down_EHI, weight_P))
    out = [torch.zeros_like(x_t) for x_t in x_TH]
    for expert, token, weight in zip(expert_P.tolist(), token_P.tolist(), weight_P):
        if not 0 <= expert < len(gate_up_E2IH):
            continue
        h_2I = gate_up_E2IH[expert] @ x_TH[token]
        if gate_up_bias_E2I is not None:
            h_2I = h_2I + gate_up_bias_E2I[expert].to(dtype)
        if is_gated(activation):
            a_I = gated_activation(*split_gate_up(h_2I, interleaved), activation, alpha, limit)
        else:
            a_I = ungated_activation(h_2I, activation)
        y_H = down_EHI[expert] @ a_I
        if down_bias_EH is not None:
            y_H = y_H + down_bias_EH[expert].to(dtype)
        out[token] = out[token] + weight * y_H
    return torch.stack(out) if out else x_TH.clone()
