"""The backend in plain PyTorch: any device, any float dtype. A loop over experts; the signatures are in interface.py.

On a GPU the loop reads the offsets on the host, so it is the one backend that synchronises: a last resort there.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F

from .interface import Activation, LoraTerm, PackedOperand, RoundedRows, Rows, accumulation_dtype
from .low_rank import a_by_expert, b_by_expert
from .packed import FORMATS, Quantized
from .rounding import pairs_of_mask, rounded_mask, set_weights, set_weights_gradient, top_k_mask
from .scaled import ScaledRows, scale_halves, scaled_product
from .scaled import scale_rows as scale_rows
from .scaled import transposed as transposed


def tile_table_length(num_pairs, num_experts):
    return 0


def dispatch(expert_P, token_P, num_tokens, num_experts, sentinels):
    num_pairs, device = expert_P.numel(), expert_P.device
    expert_P = expert_P.reshape(-1).long()
    missing_P = (expert_P < 0) | (expert_P >= num_experts)
    if not sentinels and missing_P.any():
        raise ValueError(
            f"the routing names expert {expert_P[missing_P][0].item()}, but there are {num_experts} experts "
            f"(0 to {num_experts - 1}); ids outside that range are allowed only under expert parallelism "
            "(Routing(..., sentinels=True))"
        )
    key_P = torch.where(missing_P, num_experts, expert_P)
    if token_P is None:  # top-k: pair p belongs to token p // K
        token_P = torch.arange(num_pairs, dtype=torch.int64, device=device) // max(num_pairs // max(num_tokens, 1), 1)
    else:
        token_P = torch.where(missing_P, num_tokens, token_P.reshape(-1).long())
        unknown_P = ~missing_P & ((token_P < 0) | (token_P >= num_tokens))
        if unknown_P.any():
            raise ValueError(
                f"the routing names token {token_P[unknown_P][0].item()}, but there are {num_tokens} tokens "
                f"(0 to {num_tokens - 1}); only a pair whose expert id is outside 0 to {num_experts - 1} may name another"
            )

    pair_R = torch.argsort(key_P, stable=True)
    count_E1 = torch.zeros(num_experts + 1, dtype=torch.long, device=device).scatter_add_(
        0, key_P, torch.ones_like(key_P)
    )
    offsets = F.pad(count_E1[:num_experts].cumsum(0), (1, 0))
    is_row = torch.arange(num_pairs, dtype=torch.int64, device=device) < offsets[-1]

    row_P = torch.empty_like(pair_R).scatter_(0, pair_R, torch.arange(num_pairs, dtype=torch.int64, device=device))
    count_T1 = torch.zeros(num_tokens + 1, dtype=torch.long, device=device).scatter_add_(
        0, token_P, torch.ones_like(token_P)
    )
    rows = Rows(
        offsets=offsets,
        token=torch.where(is_row, token_P[pair_R], num_tokens),
        pair=torch.where(is_row, pair_R, num_pairs),
        token_offsets=F.pad(count_T1[:num_tokens].cumsum(0), (1, 0)),
        token_rows=row_P[torch.argsort(token_P, stable=True)],
        tiles=offsets.new_empty(0, 3),
    )
    return Rows(*(t.to(torch.int32) for t in rows))


def round_rows(
    scores_TE, ranking_TE, top_k_index_TK, valid_T, uniform_E, rounding, tile, min_pairs, num_pairs, weighting, dtype
):
    num_tokens, num_experts = scores_TE.shape
    top_k_TE = top_k_mask(scores_TE, top_k_index_TK)
    mask_TE = rounded_mask(ranking_TE, top_k_TE, valid_T, uniform_E, rounding, tile)
    fell_back = None
    if valid_T is not None:
        fell_back = valid_T.sum() * top_k_index_TK.shape[1] < min_pairs
        mask_TE = torch.where(fell_back, top_k_TE, mask_TE)
    expert_P, token_P = pairs_of_mask(mask_TE, num_pairs)
    weights_TE = set_weights(scores_TE, mask_TE, *weighting).to(dtype)
    # a sentinel, expert E of token T, reads the zeros past the end
    weight_P = F.pad(weights_TE, (0, 1, 0, 1))[token_P, expert_P]
    rows = dispatch(expert_P, token_P, num_tokens, num_experts, True)
    return RoundedRows(weight_P, expert_P.to(torch.int32), rows, fell_back)


def round_rows_backward(dweight_P, scores_TE, expert_P, rows, weighting):
    num_tokens, num_experts = scores_TE.shape
    pairs = rows.token.long(), expert_P.long()
    gradient = scores_TE.new_zeros(num_tokens + 1, num_experts + 1)
    gradient[pairs] = dweight_P.to(scores_TE.dtype)
    mask = torch.zeros_like(gradient, dtype=torch.bool)
    mask[pairs] = True
    gradient_TE, mask_TE = gradient[:num_tokens, :num_experts], mask[:num_tokens, :num_experts]
    return set_weights_gradient(gradient_TE, scores_TE, mask_TE, *weighting)


def _spans(rows: Rows):
    """List (expert, slice of its rows) for every expert that has rows."""
    offsets = rows.offsets.tolist()
    return [(e, slice(s, t)) for e, (s, t) in enumerate(itertools.pairwise(offsets)) if t > s]


def dequantize(codes, scales, state, name, dtype, rows):
    return FORMATS[name].dequantize(Quantized(codes, scales, state), dtype, [expert for expert, _ in _spans(rows)])


def reads_packed(format, dtype, rows, is_expanded=False):
    return False


def decodes(weight, dtype, rows, is_expanded=False):
    return False


def _split(h, interleaved):
    return (h[..., 0::2], h[..., 1::2]) if interleaved else h.chunk(2, dim=-1)


def _join(parts, interleaved):
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)


def _curve(x, name):
    """Compute the activation `name` of a value, without a gate, and its slope."""
    if name == "silu":
        sigmoid = torch.sigmoid(x)
        value = x * sigmoid
        return value, sigmoid + value * (1 - sigmoid)
    if name == "gelu":
        cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * cdf, cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    scale = math.sqrt(2 / math.pi)  # gelu_tanh
    tanh = torch.tanh(scale * (x + 0.044715 * x**3))
    slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * scale * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1 + tanh), slope


def _activate(gate, up, activation: Activation, da=1.0):
    """Compute a and, from its gradient `da`, the gradients of gate and up; all in the accumulation dtype.

    Where a clamp or relu is flat they are 0 whatever `da` is, NaN included, as autograd has it.
    """
    name = activation.name
    if name in ("clamped_swiglu", "clamped_silu"):
        limit = activation.limit
        alpha, shift = (activation.alpha, 1.0) if name == "clamped_swiglu" else (1.0, 0.0)
        gate_clamped, up_clamped = gate.clamp(max=limit), up.clamp(-limit, limit)
        sigmoid = torch.sigmoid(alpha * gate_clamped)
        glu = gate_clamped * sigmoid
        slope = (up_clamped + shift) * (sigmoid + alpha * glu * (1 - sigmoid))
        dgate = torch.where(gate <= limit, da * slope, 0.0)
        return (up_clamped + shift) * glu, dgate, torch.where(up.abs() <= limit, da * glu, 0.0)
    if name == "silu_clamped":
        limit, (value, slope) = activation.limit, _curve(gate, "silu")
        glu, up_clamped = value.clamp(max=limit), up.clamp(-limit, limit)
        dgate = torch.where(value <= limit, da * up_clamped, 0.0) * slope
        return up_clamped * glu, dgate, torch.where(up.abs() <= limit, da * glu, 0.0)
    if name == "reglu":
        value = torch.relu(gate)
        return value * up, torch.where(gate <= 0, 0.0, da * up), da * value
    if name == "softcapped_swiglu":
        tanh_gate, tanh_up = torch.tanh(gate / activation.alpha), torch.tanh(up / activation.limit)
        sigmoid, up_capped = torch.sigmoid(gate), activation.limit * tanh_up
        glu = activation.alpha * tanh_gate * sigmoid
        slope = (1 - tanh_gate * tanh_gate) * sigmoid + glu * (1 - sigmoid)
        return up_capped * glu, da * slope * up_capped, da * glu * (1 - tanh_up * tanh_up)
    value, slope = _curve(gate, {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}[name])
    return value * up, da * slope * up, da * value


def _activate_ungated(h, activation: Activation, da=1.0):
    """Compute as `_activate` for an activation without a gate: a, and the gradient of h."""
    if activation.name in ("relu", "relu2"):
        value = torch.relu(h)
        if activation.name == "relu":
            return value, torch.where(h <= 0, 0.0, da)
        return value * value, torch.where(h <= 0, 0.0, da * 2 * value)
    value, slope = _curve(h, activation.name)
    return value, da * slope


def _activate_h(h, interleaved, activation: Activation, da=1.0):
    """Compute a and, from its gradient `da`, the gradients of gate and up, or that of h, as `_join` takes them."""
    if activation.is_gated:
        gate, up = _split(h, interleaved)
        a, *gradients = _activate(gate, up, activation, da)
    else:
        a, *gradients = _activate_ungated(h, activation, da)
    return a, gradients


def _add_lora(product, lora: LoraTerm | None, expert, span):
    return product if lora is None else product + lora.shrunk_PJ[span] @ lora.factor_ENJ[expert].T


def up(x_TH, gate_up_E2IH, bias_E2I, rows, activation, interleaved, want_h, want_a, lora=None):
    num_rows, width = rows.token.numel(), gate_up_E2IH.shape[1]
    h_R2I = x_TH.new_empty(num_rows, width)
    a_RI = x_TH.new_empty(num_rows, activation.inner(width)) if want_a else None
    for e, span in _spans(rows):
        h = _add_lora(x_TH[rows.token[span]] @ gate_up_E2IH[e].T, lora, e, span)
        h_R2I[span] = h if bias_E2I is None else h + bias_E2I[e]
        if a_RI is not None:
            h = h_R2I[span].to(accumulation_dtype(x_TH.dtype))
            a_RI[span] = _activate_h(h, interleaved, activation)[0].to(a_RI.dtype)
    return h_R2I if want_h else None, a_RI


def down(a_RI, down_EHI, bias_EH, rows, lora=None):
    y_RH = a_RI.new_empty(a_RI.shape[0], down_EHI.shape[1])
    for e, span in _spans(rows):
        y = _add_lora(a_RI[span] @ down_EHI[e].T, lora, e, span)
        y_RH[span] = y if bias_EH is None else y + bias_EH[e]
    return y_RH


def scaled_up(x: ScaledRows, gate_up: PackedOperand, rows, activation, dtype, want_h, want_a, want_scaled, lora=None):
    num_rows, width = rows.token.numel(), gate_up.codes.shape[1]
    h_R2I = x.scales.new_empty(num_rows, width, dtype=dtype)
    a_RI = h_R2I.new_empty(num_rows, activation.inner(width), dtype=torch.float32)
    for e, span in _spans(rows):
        token = rows.token[span]
        own = ScaledRows(x.codes[token], x.scales[token])
        h = _add_lora(scaled_product(own, gate_up.codes[e], gate_up.scales[e]), _in_fp32(lora), e, span)
        h_R2I[span] = h.to(h_R2I.dtype)
        a_RI[span] = _activate_h(h_R2I[span].float(), False, activation)[0]
    a = a_RI.to(h_R2I.dtype) if want_a else None
    return h_R2I if want_h else None, a, scale_rows(a_RI) if want_scaled else None


def scaled_down(a: ScaledRows, down: PackedOperand, rows, dtype, lora=None):
    y_RH = a.scales.new_empty(len(a.codes), down.codes.shape[1], dtype=dtype)
    for e, span in _spans(rows):
        own = ScaledRows(*(part[span] for part in a))
        y = _add_lora(scaled_product(own, down.codes[e], down.scales[e]), _in_fp32(lora), e, span)
        y_RH[span] = y.to(y_RH.dtype)
    return y_RH


def scaled_down_backward(
    dout: ScaledRows, down, h_R2I, weight_P, rows, activation, want_dh, want_a, want_dw, want_scaled, lora=None
):
    def da_of(expert, span):
        token = rows.token[span]
        own = ScaledRows(dout.codes[token], dout.scales[token])
        product = scaled_product(own, down.codes[expert], down.scales[expert])
        return _add_lora(product, _in_fp32(lora), expert, span).to(h_R2I.dtype)

    dh_R2I, a_RI, dw_P = _rows_backward(
        da_of, h_R2I, weight_P, rows, activation, False, want_dh or want_scaled, want_a, want_dw
    )
    return dh_R2I if want_dh else None, a_RI, dw_P, scale_halves(dh_R2I) if want_scaled else None


def _in_fp32(lora: LoraTerm | None):
    return None if lora is None else LoraTerm(*(tensor.float() for tensor in lora))


def combine(y_RH, weight_P, rows, num_tokens):
    # an expert's rows belong to different tokens, so adding expert by expert has one order of summation
    dtype = accumulation_dtype(y_RH.dtype)
    out_TH = torch.zeros(num_tokens, y_RH.shape[1], dtype=dtype, device=y_RH.device)
    for _, span in _spans(rows):
        y = y_RH[span].to(dtype)
        if weight_P is not None:
            y = y * weight_P[rows.pair[span], None]
        out_TH.index_add_(0, rows.token[span], y)
    return out_TH.to(y_RH.dtype)


def down_backward(
    dout_TH, down_EHI, bias_EH, h_R2I, weight_P, rows, activation, interleaved, want_dh, want_a, want_dw, lora=None
):
    def da_of(expert, span):
        return _add_lora(dout_TH[rows.token[span]] @ down_EHI[expert], lora, expert, span)

    dh_R2I, a_RI, dw_P = _rows_backward(
        da_of, h_R2I, weight_P, rows, activation, interleaved, want_dh, want_a, want_dw
    )
    if dw_P is not None and bias_EH is not None:
        for e, span in _spans(rows):
            dw_P[rows.pair[span]] += dout_TH[rows.token[span]].to(dw_P.dtype) @ bias_EH[e].to(dw_P.dtype)
    return dh_R2I, a_RI, dw_P


def _rows_backward(da_of, h_R2I, weight_P, rows, activation, interleaved, want_dh, want_a, want_dw):
    """Compute dh, a' and dw of what gives da' of an expert's rows."""
    dtype = accumulation_dtype(h_R2I.dtype)
    dh_R2I = torch.empty_like(h_R2I) if want_dh else None
    a_RI = h_R2I.new_empty(h_R2I.shape[0], activation.inner(h_R2I.shape[1])) if want_a else None
    dw_P = torch.zeros_like(weight_P) if want_dw else None
    for e, span in _spans(rows):
        weight = weight_P[rows.pair[span], None]
        da = da_of(e, span).to(dtype) if want_dh or want_dw else 1.0
        a, gradients = _activate_h(h_R2I[span].to(dtype), interleaved, activation, weight * da)
        if dh_R2I is not None:
            dh_R2I[span] = _join(gradients, interleaved).to(dh_R2I.dtype)
        if a_RI is not None:
            a_RI[span] = (weight * a).to(a_RI.dtype)
        if dw_P is not None:
            dw_P[rows.pair[span]] = (da * a).sum(-1)
    return dh_R2I, a_RI, dw_P


def up_backward_input(dh_R2I, gate_up_E2IH, rows, lora=None):
    dx_RH = dh_R2I.new_empty(dh_R2I.shape[0], gate_up_E2IH.shape[2])
    for e, span in _spans(rows):
        dx_RH[span] = _add_lora(dh_R2I[span] @ gate_up_E2IH[e], lora, e, span)
    return dx_RH


def gate_up_gradient(dh_R2I, x_TH, rows, like_E2IH):
    gradient = torch.zeros_like(like_E2IH)
    for e, span in _spans(rows):
        gradient[e] = dh_R2I[span].T @ x_TH[rows.token[span]]
    return gradient


def down_gradient(dout_TH, a_RI, rows, like_EHI):
    gradient = torch.zeros_like(like_EHI)
    for e, span in _spans(rows):
        gradient[e] = dout_TH[rows.token[span]].T @ a_RI[span]
    return gradient


def gate_up_bias_gradient(dh_R2I, rows, like_E2I):
    gradient = torch.zeros_like(like_E2I)
    for e, span in _spans(rows):
        gradient[e] = dh_R2I[span].sum(0, dtype=accumulation_dtype(dh_R2I.dtype))
    return gradient


def down_bias_gradient(dout_TH, weight_P, rows, like_EH):
    gradient = torch.zeros_like(like_EH)
    for e, span in _spans(rows):
        weight = weight_P[rows.pair[span], None]
        gradient[e] = (weight * dout_TH[rows.token[span]].to(weight.dtype)).sum(0)
    return gradient


def _source_rows(source, rows, span, gathered):
    return source[rows.token[span]] if gathered else source[span]


def reorder(*tensors, jobs):
    viewed = [tensor.as_strided(shape, strides) for tensor, (_, shape, strides) in zip(tensors, jobs, strict=True)]
    for source_ENj, out_ENJ in zip(viewed[::2], viewed[1::2], strict=True):
        rank = source_ENj.shape[2]
        out_ENJ[:, :, rank:] = 0
        out_ENJ[:, :, :rank] = source_ENj


def lora_shrink(source, factor_EKJ, rows, scale, gathered):
    out_PJ = source.new_empty(rows.token.numel(), factor_EKJ.shape[2])
    for e, span in _spans(rows):
        product = _source_rows(source, rows, span, gathered) @ factor_EKJ[e]
        out_PJ[span] = (product.to(accumulation_dtype(source.dtype)) * scale).to(source.dtype)
    return out_PJ


def lora_b_backward(source, b_ENJ, shrunk_PJ, weight_P, rows, scale, gathered, want_dshrunk, like_ENj):
    dshrunk_PJ = lora_shrink(source, b_ENJ, rows, scale, gathered) if want_dshrunk else None
    if like_ENj is None:
        return dshrunk_PJ, None
    if weight_P is not None:
        # rows past R name no pair
        weight_R1 = F.pad(weight_P, (0, 1))[rows.pair][:, None]
        shrunk_PJ = (weight_R1 * shrunk_PJ).to(shrunk_PJ.dtype)
    gradient = torch.zeros_like(like_ENj)
    view = gradient.as_strided(*b_by_expert(gradient.shape, gradient.stride(), len(b_ENJ)))
    _write_factor_gradient(view, source, shrunk_PJ, rows, gathered)
    return dshrunk_PJ, gradient


def lora_a_gradient(shrunk_PJ, source, rows, gathered, like_EjK):
    gradient = torch.zeros_like(like_EjK)
    view = gradient.as_strided(*a_by_expert(gradient.shape, gradient.stride(), rows.offsets.shape[0] - 1))
    _write_factor_gradient(view.transpose(1, 2), source, shrunk_PJ, rows, gathered)
    return gradient


def _write_factor_gradient(gradient_ENj, source, shrunk_PJ, rows, gathered):
    dtype = accumulation_dtype(source.dtype)
    for e, span in _spans(rows):
        wide = _source_rows(source, rows, span, gathered).to(dtype)
        gradient_ENj[e] = wide.T @ shrunk_PJ[span, : gradient_ENj.shape[2]].to(dtype)
