"""Attention with sinks by its formula, its inputs, and how results compare with it."""

import pytest
import torch
from torch import nn

from sonicmoe_hf.attention.implementation import sinks_attention_forward
from sonicmoe_hf.tools.comparing import relative_error

needs_flash = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="flash kernels need sm_80"
)
TOLERANCE = {
    torch.float64: 1e-12,  # the same numbers summed in another order
    # the kernels round the probabilities, o, o' and every result to 16 bits: a few times half of eps, in the norm
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}


class Attention(nn.Module):
    """A module with what the attention function asks of one."""

    class config:
        model_type = "gpt_oss"

    def __init__(self, is_causal=True):
        super().__init__()
        self.is_causal = is_causal


def reference(q, k, v, sinks, sees, scale):
    """Compute attention by its formula, [B, T, H, D]. sees: bool, broadcasts to [B, H, T, S]; a query that sees no key
    has 0."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    scores = scores.masked_fill(~sees, -torch.inf)
    sink = torch.full((q.shape[2],), -torch.inf).to(q) if sinks is None else sinks.to(q.dtype)
    scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1)[..., :-1], v)


def causal(num_queries, num_keys, window=None, is_causal=True):
    """Make a mask [T, S]: the last query has the last key's position."""
    distance = torch.arange(num_queries)[:, None] + (num_keys - num_queries) - torch.arange(num_keys)
    sees = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    return sees if window is None else sees & (distance.abs() < window)


def tensors(batch, queries, keys, heads, key_heads, size, value_size, dtype=torch.float64, device="cpu"):
    """Draw q, k, v as models hand them over [B, heads, T, D], and sinks; these in fp32 beside 16 bits."""
    torch.manual_seed(0)
    shape_q, shape_k = (batch, heads, queries, size), (batch, key_heads, keys, size)
    shapes = shape_q, shape_k, (*shape_k[:3], value_size), (heads,)
    drawn = [torch.randn(shape, device=device) for shape in shapes]
    dtypes = dtype, dtype, dtype, torch.promote_types(dtype, torch.float32)
    return [x.to(each).requires_grad_() for x, each in zip(drawn, dtypes)]


def scale_of(q):
    """Choose a scale: in fp64 another than is taken where none is given."""
    return 0.3 if q.dtype == torch.float64 else q.shape[-1] ** -0.5


def compute(inputs, mask=None, module=None, **options):
    q, k, v, sinks = inputs
    module = Attention() if module is None else module
    return sinks_attention_forward(module, q, k, v, mask, s_aux=sinks, **{"scaling": scale_of(q), **options})[0]


def gradients(out, inputs, seen=1):
    """Compute gradients for a fixed gradient of `out`, where that is `seen`; the same numbers whatever its dtype."""
    torch.manual_seed(1)
    gradient = torch.randn(out.shape, device=out.device).bfloat16().to(out) * seen
    return torch.autograd.grad(out, [x for x in inputs if x is not None], gradient.to(out.dtype))


def in_fp64(inputs, sees):
    """Compute (the inputs, the formula's result) in fp64, on the inputs' device."""
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in exact[:3])
    return exact, reference(q, k, v, exact[3], sees.to(q.device), scale_of(inputs[0]))


def compare(ours, inputs, sees, seen=1):
    """Check that the result and every gradient are the formula's, where the result is `seen`."""
    exact, theirs = in_fp64(inputs, sees)
    assert ours.shape == theirs.shape and ours.is_contiguous()
    found, expected = (ours * seen, *gradients(ours, inputs, seen)), (theirs * seen, *gradients(theirs, exact, seen))
    tolerance = TOLERANCE[ours.dtype]
    for name, a, b in zip(("o", "dq", "dk", "dv", "ds"), found, expected):
        if ours.dtype == torch.float64:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
        elif b.any():
            assert relative_error(a, b) <= tolerance, name
