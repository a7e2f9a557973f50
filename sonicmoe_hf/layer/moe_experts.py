"""moe_experts: the one differentiable function, whose op is in experts_op.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..kernels.interface import ACTIVATIONS, Activation, Rows, accumulation_dtype, is_gated
from ..kernels.packed import FORMATS, ORDERS, Quantized
from . import backends, kept
from .call import LayerCall, Options, SaveFlags
from .config import COMPUTE_CHOICES, LAYOUTS, SAVE_CHOICES, check_choice, check_order
from .dispatch import dispatch
from .experts_op import FORWARD, Exchange, run_exchanged
from .packed_weight import PackedWeight
from .pieces import tokens_of_piece
from .projection import LowRank, Projection, projection
from .routing import Routing
from .torch_op import CODE_DIGEST

__all__ = ["Activation", "LowRank", "moe_experts"]


def _check(x, gate_up, down, gate_up_bias, down_bias, layout, routing, activation):
    """Raise ValueError where shapes, dtypes or devices do not fit."""
    dtype, device = x.dtype, x.device
    tensors = (("gate_up", gate_up), ("down", down), ("gate_up_bias", gate_up_bias), ("down_bias", down_bias))
    for name, tensor in tensors:
        if tensor is not None and tensor.dtype != dtype and not isinstance(tensor, PackedWeight):
            raise ValueError(
                f"{name} has dtype {tensor.dtype} but x has {dtype}; cast one of them, or run under torch.autocast"
            )
    for name, tensor in (*tensors, ("the routing", routing.expert_index), ("its weights", routing.weights)):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} but x is on {device}; move them to one device")
    transposed, sides = LAYOUTS[layout][0], 2 if is_gated(activation) else 1
    num_experts, width, hidden = gate_up.shape
    if transposed:
        hidden, width = width, hidden
    down_shape = (num_experts, width // sides, hidden) if transposed else (num_experts, hidden, width // sides)
    if x.shape != (x.shape[0], hidden) or width % sides or down.shape != down_shape:
        rows = "2I" if sides == 2 else "I"
        sizes = f"[E, H, {rows}] and [E, I, H]" if transposed else f"[E, {rows}, H] and [E, H, I]"
        raise ValueError(
            f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)}, read as [T, H], {sizes} "
            f"by layout={layout!r} with activation={activation!r}, disagree; is the layout right?"
        )
    for name, bias, size in (("gate_up_bias", gate_up_bias, width), ("down_bias", down_bias, hidden)):
        if bias is not None and bias.shape != (num_experts, size):
            raise ValueError(f"{name} has shape {tuple(bias.shape)}; it must be {(num_experts, size)}")


def _compute_dtype(x, gate_up, down):
    """Choose the dtype to cast to: autocast's, or that of packed weights; None where nothing is cast."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    for weight in (gate_up, down):
        if isinstance(weight, PackedWeight):
            return weight.dtype
    return None


def _in_dtype(weight, dtype, compute):
    """Cast a dense weight; take a packed one as it is, or expanded where `expanded_memory` keeps it so."""
    if not isinstance(weight, PackedWeight):
        return weight.to(dtype)
    expanded = weight.expanded
    return weight if expanded is None or compute is not None or expanded.dtype != dtype else expanded


def check_fp8(gate_up, down, has_bias: bool, layout: str, activation: str) -> None:
    """Raise a ValueError where FP8 products do not support the layer."""
    formats = [weight.format if isinstance(weight, PackedWeight) else str(weight.dtype) for weight in (gate_up, down)]
    packed = [weight for weight in (gate_up, down) if isinstance(weight, PackedWeight) and weight.format == "fp8"]
    orders = [FORMATS["fp8"].parts_and_kinds(Quantized(weight.codes, weight.scales)) for weight in packed]
    if len(packed) < 2:
        obstacle = f"experts packed as fp8 (experts_quantization='fp8'), not {' and '.join(formats)}"
    elif orders != [ORDERS["concatenated"], ORDERS["whole"]]:
        obstacle = (
            "gate_up packed in the order 'concatenated' and down in 'whole' (PackedWeight.quantize(..., order=...)), "
            f"not {orders} parts and kinds of rows"
        )
    elif layout != "concatenated" or not is_gated(activation):
        obstacle = f"layout 'concatenated' and an activation with a gate, not {layout!r} and {activation!r}"
    elif has_bias:
        obstacle = "experts without biases"
    else:
        return
    raise ValueError(f"compute='fp8' takes {obstacle}; leave compute out")


class Pairs(NamedTuple):
    """A routing of T tokens to E experts, as `dispatch` takes it; rows: what that gives, where it is known."""

    expert_index: torch.Tensor
    token_index: torch.Tensor | None
    weights: torch.Tensor
    sentinels: bool
    num_tokens: int
    num_experts: int
    rows: Rows | None


@torch.compiler.allow_in_graph
def _run(
    x: torch.Tensor,
    gate_up: Projection,
    down: Projection,
    pairs: Pairs,
    options: Options,
    save: str,
    exchange: Exchange | None,
    code_digest: str,
) -> torch.Tensor:
    """Compute `moe_experts` of tensors and constants. Compiled code guards nothing of what is named here.

    options: without what is decided here. code_digest: torch_op.CODE_DIGEST.
    """
    is_top_k = pairs.rows is None and pairs.token_index is None and exchange is None
    piece = tokens_of_piece(pairs.num_tokens, pairs.expert_index.numel()) if is_top_k else 0
    rows = pairs.rows
    if rows is None:
        rows = dispatch(
            pairs.expert_index,
            pairs.num_tokens,
            pairs.num_experts,
            pairs.token_index,
            sentinels=pairs.sentinels,
            backend=options.backend,
            piece=piece,
        )
    accumulated, weight = accumulation_dtype(x.dtype), pairs.weights
    weight = weight if weight.dtype == accumulated else weight.to(accumulated)  # `.to` costs time even for nothing
    has_gradient = x.requires_grad or weight.requires_grad or gate_up.requires_grad() or down.requires_grad()
    differentiable = has_gradient and torch.is_grad_enabled()
    keep_h = differentiable and save == "preactivation" and not piece
    options = options._replace(
        saves=SaveFlags(
            h=keep_h,
            u=differentiable and gate_up.b is not None and (gate_up.b.requires_grad or not keep_h),
            v=differentiable and down.b is not None and down.b.requires_grad,
        ),
        keeps_expanded=bool(gate_up.format or down.format) and kept.may_keep(),
        piece=piece,
    )
    call = LayerCall(weight=weight, x=x.contiguous(), gate_up=gate_up, down=down, rows=rows, options=options)
    return FORWARD(differentiable, call)[0] if exchange is None else run_exchanged(differentiable, call, exchange)


# what Dynamo puts into a graph for `moe_experts`, as torch's cache on disk names it
IN_GRAPHS = [
    f"{each.__module__}.{each.__name__}" for each in (_run, Projection, Pairs, Rows, Options, Activation, SaveFlags)
]


def moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing | tuple[torch.Tensor, torch.Tensor],
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_adapter: LowRank | Sequence[LowRank] | None = None,
    down_adapter: LowRank | Sequence[LowRank] | None = None,
    activation: str | Activation = "swiglu",
    layout: str = "concatenated",
    save: str = "preactivation",
    compute: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Compute out_t = sum over t's experts e of w[t,e] * (act(x_t W1_e^T + b1_e) W2_e^T + b2_e)  (paper, section 2).

    Autograd differentiates it once; torch.func's transforms raise errors. torch.compile(fullgraph=True) takes it as one
    op.

    Args:
        x: [T, H], fp64, fp32, bf16 or fp16.
        gate_up, down: the experts' weights in x's dtype, as `layout` says: [E, 2I, H] and [E, H, I], or for the
            transposed layouts [E, H, 2I] and [E, I, H]. An activation without a gate has I for 2I, here and below, and
            no interleaved layout. A `PackedWeight` stands for one of that shape: it is expanded to
            x's dtype for as long as a product takes, and has no gradient.
        routing: a `Routing`, or (expert_index [T, K], weights [T, K]). Weights are computed with in fp32.
        gate_up_bias, down_bias: [E, 2I] and [E, H], or None.
        gate_up_adapter, down_adapter: `LowRank` adapters a [E, r, H], b [E, 2I, r] and a [E, r, I], b [E, H, r] of the
            weights (or as PEFT stores them), several of one weight summed, or None. Whatever the layout, b's rows stand
            in the order of the 2I (or H) rows of the weight. No tensor of a weight's size is formed.
        activation: a name of kernels.interface.ACTIVATIONS, gated ("swiglu", ...) or not ("relu2", ...), or an
            `Activation` with its alpha and limit.
        layout: "concatenated" (all gate rows, then all up rows; the hub's), "interleaved" (gate and up rows alternate;
            native), "transposed_concatenated", "transposed_interleaved" (gpt-oss).
        save: "preactivation" keeps h (4*I bytes a row in bf16) and x for backward; "input" keeps x alone, as do layers
            of more than 2^18 rows of top-k, which are computed in pieces of their tokens.
        compute: None, or "fp8" for frozen experts packed as fp8: products multiply in FP8, of x, a, dout and dh
            quantized by 128 columns of a row (kernels/scaled.py), adapters' in x's dtype. Gradients are those of
            functions that round nothing.
        backend: overrides the automatic choice (see `sonicmoe-hf doctor`).
    Returns:
        [T, H] in x's dtype. Under torch.autocast the computation runs in autocast's dtype, else with packed weights in
        theirs.
    Raises:
        ValueError: shapes, dtypes, devices or names that do not fit, with the value and the remedy.
        NotImplementedError: under torch.func, with forward-mode derivatives or gradients in a batch.
        RuntimeError: second derivatives are asked for.
    """
    act = activation if isinstance(activation, Activation) else Activation(activation)
    choices = (
        ("layout", layout, LAYOUTS),
        ("save", save, SAVE_CHOICES),
        ("compute", compute, COMPUTE_CHOICES),
        ("activation", act.name, ACTIVATIONS),
    )
    for what, value, known in choices:
        if value not in known:
            check_choice(what, value, known)  # raises, with a message
    if LAYOUTS[layout][1]:
        check_order(layout, act.name)
    if not isinstance(routing, Routing):
        routing = Routing(*routing)
    dtype_out = x.dtype
    if (dtype := _compute_dtype(x, gate_up, down)) is not None:
        x = x.to(dtype)
        gate_up, down = (_in_dtype(weight, dtype, compute) for weight in (gate_up, down))
        gate_up_bias, down_bias = (None if b is None else b.to(dtype) for b in (gate_up_bias, down_bias))
    transposed, interleaved = LAYOUTS[layout]
    _check(x, gate_up, down, gate_up_bias, down_bias, layout, routing, act.name)
    first = projection("gate_up", gate_up, gate_up_bias, gate_up_adapter, transposed)
    second = projection("down", down, down_bias, down_adapter, transposed)

    backend = backends.choose(x.device, x.dtype, backend).name
    if compute == "fp8":
        check_fp8(gate_up, down, gate_up_bias is not None or down_bias is not None, layout, act.name)
    exchange, num_experts = routing.exchange, gate_up.shape[0]
    num_tokens = x.shape[0] if exchange is None else exchange.num_tokens
    pairs = Pairs(
        expert_index=routing.expert_index,
        token_index=routing.token_index,
        weights=routing.weights,
        sentinels=routing.sentinels,
        num_tokens=num_tokens,
        num_experts=num_experts,
        rows=routing.rows_for(backend, num_tokens, num_experts),
    )
    options = Options(
        activation=act, transposed=transposed, interleaved=interleaved, backend=backend, fp8=compute == "fp8"
    )
    out = _run(x, first, second, pairs, options, save, exchange, CODE_DIGEST)
    return out if out.dtype == dtype_out else out.to(dtype_out)
