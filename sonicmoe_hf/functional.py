"""moe_experts: the one differentiable function, written once over the backends' functions.

Forward and backward are torch ops, so that torch.compile sees two opaque calls; where nothing traces, the ops' functions
are called without the dispatcher. What is saved for backward is x, h and the routing (`save="preactivation"`), or x and
the routing (`save="input"`, h is computed again); never the activations a, the rows y, or gathered rows. Formulas:
paper, section 3.
"""

from __future__ import annotations

import contextlib

import torch

from . import backends, custom_op
from .config import LAYOUTS, SAVE_POLICIES, check_choice
from .dispatch import dispatch
from .kernels.interface import ACTIVATIONS, Activation, Rows, accumulation_dtype
from .routing import Routing

__all__ = ["Activation", "moe_experts"]

_NOTHING = contextlib.nullcontext()
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _without_autocast(device: torch.device):
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else _NOTHING


def _experts_forward(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weight: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    rows: list[torch.Tensor],
    activation: str,
    alpha: float,
    limit: float,
    transposed: bool,
    interleaved: bool,
    backend: str,
    keep_h: bool,
    save: str,
) -> list[torch.Tensor]:
    """[out_TH], and h_R2I after it when `keep_h`. `save` is what backward will ask for, noted on the op for autograd."""
    kernels, sorted_rows, act = backends.load(backend), Rows(*rows), Activation(activation, alpha, limit)
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    with _without_autocast(x.device):
        h, a = kernels.up(x, gate_up, gate_up_bias, sorted_rows, act, interleaved, want_h=keep_h, want_a=True)
        y = kernels.down(a, down, down_bias, sorted_rows)
        out = kernels.combine(y, weight.reshape(-1), sorted_rows, x.shape[0])
    return [out, h] if keep_h else [out]


def _fake_forward(x, gate_up, down, weight, gate_up_bias, down_bias, rows, *options):
    transposed, _, _, keep_h, _ = options[3:]
    out = x.new_empty(x.shape)
    return [out, x.new_empty(rows[1].shape[0], gate_up.shape[2 if transposed else 1])] if keep_h else [out]


NEEDS = ("x", "gate_up", "down", "weight", "gate_up_bias", "down_bias")  # the order of `needs` and of the gradients


def _experts_backward(
    dout: torch.Tensor,
    x: torch.Tensor | None,
    h: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weight: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    rows: list[torch.Tensor],
    activation: str,
    alpha: float,
    limit: float,
    transposed: bool,
    interleaved: bool,
    backend: str,
    needs: list[bool],
) -> list[torch.Tensor]:
    """`_run_backward` as an op."""
    options = activation, alpha, limit, transposed, interleaved, backend, needs
    return _run_backward(dout, x, [h], gate_up, down, weight, gate_up_bias, down_bias, rows, *options)


def _run_backward(
    dout, x, held, gate_up, down, weight, gate_up_bias, down_bias, rows, activation, alpha, limit, transposed,
    interleaved, backend, needs,
):  # fmt: skip
    """The gradients that `needs` asks for, in the order of NEEDS.

    `held` holds h, or None where it was not saved, to be computed again; h is taken out of it, so that it is freed when
    it has been used. So is everything else: dx comes first, whose rows are the largest; weights' gradients stay, and come
    last.
    """
    kernels, rows, act = backends.load(backend), Rows(*rows), Activation(activation, alpha, limit)
    need = dict(zip(NEEDS, needs))
    dout, weight_P = dout.contiguous(), weight.reshape(-1)
    gradients, h, dh, a = {}, held.pop(), None, None
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    with _without_autocast(dout.device):
        want_dh = need["x"] or need["gate_up"] or need["gate_up_bias"]
        if want_dh or need["down"] or need["weight"]:
            if h is None:
                h, _ = kernels.up(x, gate_up, gate_up_bias, rows, act, interleaved, want_h=True, want_a=False)
            dh, a, dw_P = kernels.down_backward(
                dout, down, down_bias, h, weight_P, rows, act, interleaved,
                want_dh=want_dh, want_a=need["down"], want_dw=need["weight"],
            )  # fmt: skip
            del h
        if need["weight"]:
            gradients["weight"] = dw_P.view(weight.shape)
        if need["x"]:
            dx_R = kernels.input_rows(dh, gate_up, rows)
            gradients["x"] = kernels.combine(dx_R, None, rows, dout.shape[0])
            del dx_R
        if need["gate_up"]:
            gradients["gate_up"] = kernels.gate_up_gradient(dh, x, rows, gate_up)
        if need["gate_up_bias"]:
            gradients["gate_up_bias"] = kernels.gate_up_bias_gradient(dh, rows, gate_up_bias)
        del dh
        if need["down"]:
            gradients["down"] = kernels.down_gradient(dout, a, rows, down)
        if need["down_bias"]:
            gradients["down_bias"] = kernels.down_bias_gradient(dout, weight_P, rows, down_bias)
    if transposed:
        gradients.update({name: gradients[name].transpose(1, 2) for name in ("gate_up", "down") if need[name]})
    return [gradients[name] for name in NEEDS if need[name]]


def _fake_backward(dout, x, h, gate_up, down, weight, gate_up_bias, down_bias, rows, *options):
    *_, needs = options
    likes = (dout.new_empty(dout.shape), gate_up, down, weight.new_empty(weight.shape), gate_up_bias, down_bias)
    return [torch.empty_like(like) for like, needed in zip(likes, needs) if needed]


_FORWARD = custom_op.define(_experts_forward, _fake_forward)
_BACKWARD = custom_op.define(_experts_backward, _fake_backward)


def _setup_context(ctx, inputs, output):
    x, gate_up, down, weight, gate_up_bias, down_bias, rows, *ctx.options, keep_h, save = inputs
    ctx.set_materialize_grads(False)
    needs_gate_up = ctx.needs_input_grad[1]
    h = output[1] if keep_h else None
    if h is not None:
        ctx.mark_non_differentiable(h)
    keep_x = (
        save == "input" or needs_gate_up or custom_op.transformed()
    )  # there, for the refusal of second derivatives
    ctx.save_for_backward(x if keep_x else None, h, gate_up, down, weight, gate_up_bias, down_bias, *rows)


def _needs(ctx, gate_up_bias, down_bias) -> list[bool]:
    """Which of NEEDS the running backward asks for."""
    # one for each input that is a tensor, in their order
    nodes = [node for node, _ in ctx.next_functions[: len(NEEDS)]]
    if gate_up_bias is None:
        nodes.insert(4, None)
    if down_bias is None:
        nodes.insert(5, None)
    return custom_op.are_needed(nodes[: len(NEEDS)])


def _gradients(ctx, dout):
    """The gradients of NEEDS, None where nobody asks for one."""
    if dout is None:
        return (None,) * len(NEEDS)
    x, h, gate_up, down, weight, gate_up_bias, down_bias, *rows = ctx.saved_tensors
    needs = _needs(ctx, gate_up_bias, down_bias)
    others = gate_up, down, weight, gate_up_bias, down_bias, rows, *ctx.options, needs
    if torch.is_grad_enabled() or custom_op.traced(dout):
        run = custom_op.choose(_functional_backward, _BACKWARD, _BACKWARD, dout)
        if run is _BACKWARD and torch.is_grad_enabled() and not dout.requires_grad:
            # create_graph=True: whatever is derived from these gradients meets the op's refusal
            dout = dout.detach().requires_grad_()
        found = iter(run(dout, x, h, *others))
    else:
        held = [h]
        del h
        # unless the graph is retained; undocumented, what torch.compile's backward calls
        ctx.maybe_clear_saved_tensors()
        found = iter(_run_backward(dout, x, held, *others))
    return tuple(next(found) if need else None for need in needs)


def _backward_of_op(ctx, gradients):
    return *_gradients(ctx, gradients[0]), [None] * len(Rows._fields), *(None,) * 8


def _backward(ctx, gradients):
    return *_gradients(ctx, gradients[0]), *(None,) * 9


custom_op.differentiate(_FORWARD, _backward_of_op, _setup_context)
_functional_backward = custom_op.refuse_second_derivatives(_BACKWARD, "moe_experts")
_differentiable = custom_op.without_dispatcher(_experts_forward, "moe_experts", _setup_context, _backward)
_functional = custom_op.for_torch_func(_FORWARD, "moe_experts", _setup_context, _backward)


def _check(x, gate_up, down, gate_up_bias, down_bias, layout, routing):
    """Raise what a user can act on."""
    dtype, device = x.dtype, x.device
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"x has dtype {dtype}; use one of {', '.join(map(str, FLOAT_DTYPES))}")
    tensors = (("gate_up", gate_up), ("down", down), ("gate_up_bias", gate_up_bias), ("down_bias", down_bias))
    for name, tensor in tensors:
        if tensor is not None and tensor.dtype != dtype:
            raise ValueError(
                f"{name} has dtype {tensor.dtype} but x has {dtype}; cast one of them, or run under torch.autocast"
            )
    for name, tensor in (*tensors, ("the routing", routing.expert_index), ("its weights", routing.weights)):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} but x is on {device}; move them to one device")
    if x.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        raise ValueError(
            f"x, gate_up, down have {x.dim()}, {gate_up.dim()}, {down.dim()} dimensions; they need 2 (tokens, hidden), "
            "3 and 3 (experts first)"
        )
    num_experts, width, hidden = gate_up.shape
    down_shape = num_experts, hidden, width // 2
    if LAYOUTS[layout][0]:  # transposed
        hidden, width = width, hidden
        down_shape = num_experts, width // 2, hidden
    if x.shape[1] != hidden or width % 2 or down.shape != down_shape:
        sizes = "[E, H, 2I] and [E, I, H]" if LAYOUTS[layout][0] else "[E, 2I, H] and [E, H, I]"
        raise ValueError(
            f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)}, read as [T, H], {sizes} "
            f"by layout={layout!r}, disagree; is the layout right?"
        )
    for name, bias, size in (("gate_up_bias", gate_up_bias, width), ("down_bias", down_bias, hidden)):
        if bias is not None and bias.shape != (num_experts, size):
            raise ValueError(f"{name} has shape {tuple(bias.shape)}; it must be {(num_experts, size)}")


def moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing | tuple[torch.Tensor, torch.Tensor],
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str | Activation = "swiglu",
    layout: str = "concatenated",
    save: str = "preactivation",
    backend: str | None = None,
) -> torch.Tensor:
    """out_t = sum over t's experts e of w[t,e] * (act(x_t W1_e^T + b1_e) W2_e^T + b2_e)  (paper, section 2).

    Args:
        x: [T, H], fp64, fp32, bf16 or fp16.
        gate_up, down: the experts' weights in x's dtype, stored as `layout` says: [E, 2I, H] and [E, H, I], or for the
            transposed layouts [E, H, 2I] and [E, I, H].
        routing: a `Routing`, or (expert_index [T, K], weights [T, K]). Weights are computed with in fp32.
        gate_up_bias, down_bias: [E, 2I] and [E, H], or None.
        activation: a name of kernels.interface.ACTIVATIONS, or an `Activation` with its alpha and limit.
        layout: "concatenated" (all gate rows, then all up rows; the hub's), "interleaved" (gate and up rows alternate;
            native), "transposed_concatenated", "transposed_interleaved" (gpt-oss).
        save: "preactivation" keeps h (4*I bytes a row in bf16) and x for backward; "input" keeps x alone.
        backend: overrides the automatic choice (see `sonicmoe-hf doctor`).
    Returns:
        [T, H] in x's dtype. Under torch.autocast the computation runs in autocast's dtype.
    Raises:
        ValueError: shapes, dtypes, devices or names that do not fit, with the value and the remedy.
        NotImplementedError, RuntimeError: forward-mode and second derivatives, which there are not.
    """
    check_choice("layout", layout, LAYOUTS)
    check_choice("save", save, SAVE_POLICIES)
    act = activation if isinstance(activation, Activation) else Activation(activation)
    check_choice("activation", act.name, ACTIVATIONS)
    if not isinstance(routing, Routing):
        routing = Routing(*routing)
    dtype_out = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
        gate_up_bias, down_bias = (None if b is None else b.to(dtype) for b in (gate_up_bias, down_bias))
    transposed, interleaved = LAYOUTS[layout]
    _check(x, gate_up, down, gate_up_bias, down_bias, layout, routing)

    backend = backends.choose(x.device, x.dtype, backend).name
    rows = routing.rows_for(backend, x.shape[0], gate_up.shape[0])
    if rows is None:
        rows = dispatch(
            routing.expert_index, x.shape[0], gate_up.shape[0], routing.token_index,
            sentinels=routing.sentinels, backend=backend,
        )  # fmt: skip
    weight, accumulated = routing.weights, accumulation_dtype(x.dtype)
    weight = weight if weight.dtype == accumulated else weight.to(accumulated)  # `.to` costs time even for nothing
    inputs = (x, gate_up, down, weight, gate_up_bias, down_bias)
    needs_gradients = x.requires_grad or any(t is not None and t.requires_grad for t in inputs)
    differentiable = needs_gradients and torch.is_grad_enabled()
    keep_h = differentiable and save == "preactivation"
    plain = _differentiable if differentiable or custom_op.forward_mode() else _experts_forward
    run = custom_op.choose(_functional, _FORWARD, plain, *inputs)
    out = run(
        x.contiguous(), *inputs[1:], list(rows), act.name, act.alpha, act.limit, transposed, interleaved, backend,
        keep_h, save,
    )[0]  # fmt: skip
    return out if out.dtype == dtype_out else out.to(dtype_out)
