"""The op of `moe_experts`: forward and backward, written once over the backends' functions.

Both are torch ops, so that torch.compile sees two opaque calls; where nothing traces, the ops' functions are called
without the dispatcher. What is saved for backward is h, x if it is needed, and the routing (`save="preactivation"`), or x
and the routing (`save="input"`, h is computed again), and rows of the adapters' rank; never the activations a, the rows
y, or gathered rows. Formulas: paper, section 3; adapters add to h = x W1^T and y = a W2^T as kernels/interface.py says.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, NamedTuple

import torch

from ..kernels.interface import Activation, PackedOperand, Rows
from ..kernels.scaled import SMALLEST_GRADIENT, ScaledRows, ScaledWeight
from ..kernels.tape import Taped
from . import backends, torch_op
from .fetching import STREAMED, fetched
from .lora_operands import pack_all, padded_rank

WHAT = "moe_experts"


class Projection(NamedTuple):
    """One of a layer's two products: its weight as it is stored, its bias, its adapter.

    weight, scales, state, format: of a packed weight, the codes and what else is stored (kernels/quantized.py), which
        have no gradient; of a dense one, itself, None, None and "".
    a, b, scale: LowRank's, or None, None, 1.0.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None
    state: torch.Tensor | None
    bias: torch.Tensor | None
    a: torch.Tensor | None
    b: torch.Tensor | None
    format: str
    scale: float


class Inputs(NamedTuple):
    """The tensors that a layer can be differentiated by, in the order of `needs` and of the gradients: x, the two
    projections', the routing weights. They and Options are the op's arguments. Backward has no x where it needs none."""

    x: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    weight: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate_up_a: torch.Tensor | None
    gate_up_b: torch.Tensor | None
    down_a: torch.Tensor | None
    down_b: torch.Tensor | None
    gate_up_scales: torch.Tensor | None = None
    gate_up_state: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None
    down_state: torch.Tensor | None = None


_NUM_INPUTS = len(Inputs._fields)


class Options(NamedTuple):
    """What else decides the function that a layer computes, and the backend."""

    activation: str
    alpha: float
    limit: float
    transposed: bool
    interleaved: bool
    gate_up_scale: float
    down_scale: float
    backend: str
    gate_up_format: str = ""
    down_format: str = ""
    fp8: bool = False


def _fields_of(projection: str):
    """What gives a Projection's tensors of Inputs, and what its other fields of Options."""
    parts = (f"{projection}_{part}" for part in ("scales", "state", "bias", "a", "b"))
    return operator.attrgetter(projection, *parts), operator.attrgetter(f"{projection}_format", f"{projection}_scale")


_GATE_UP, _DOWN = _fields_of("gate_up"), _fields_of("down")


class SaveFlags(NamedTuple):
    """Which results of forward backward is given: h, u = scale x A1^T, v = scale a A2^T."""

    h: bool
    u: bool
    v: bool


class Saved(NamedTuple):
    """Those results; None for what is computed again, or not needed."""

    h: torch.Tensor | None
    u: torch.Tensor | None
    v: torch.Tensor | None


class _Layer:
    """A layer's projections, their weights as logical views, its adapters as the kernels take them, and its first half,
    which backward computes again where h was not kept. dtype: what is computed in."""

    def __init__(self, inputs: Inputs, rows: Rows, options: Options, dtype: torch.dtype):
        self.kernels = backends.load(options.backend)
        self.inputs, self.rows, self.dtype, self.fp8 = inputs, rows, dtype, options.fp8
        self.scaled_a: ScaledRows | None = None
        self.scaled_dh: ScaledRows | None = None
        self.transposed, self.interleaved = options.transposed, options.interleaved
        self.activation = Activation(options.activation, options.alpha, options.limit)
        self.gate_up = gate_up = Projection(*_GATE_UP[0](inputs), *_GATE_UP[1](options))
        self.down = down = Projection(*_DOWN[0](inputs), *_DOWN[1](options))
        self.gate_up_adapter, self.down_adapter = pack_all(
            (
                (gate_up.a, gate_up.b, gate_up.scale, gate_up.a is not None and self._is_in_last(gate_up)),
                (down.a, down.b, down.scale, down.a is not None and self._is_in_last(down)),
            ),
            rows.offsets.shape[0] - 1,
            dtype,
            self.kernels,
        )

    def _is_in_last(self, projection: Projection) -> bool:
        """Whether in the logical view [E, out, in], which for a packed weight is not there yet, `in` is contiguous."""
        return bool(projection.format) or projection.weight.stride(1 if self.transposed else 2) == 1

    def weight(self, projection: Projection) -> torch.Tensor:
        """[E, out, in]. A packed weight is expanded at every use and kept by none: the allocator reuses one block."""
        weight = projection.weight
        if projection.format:
            packed = weight, projection.scales, projection.state, projection.format
            return self.kernels.dequantize(*packed, self.dtype, self.rows)
        return weight.transpose(1, 2) if self.transposed else weight

    def operand(self, projection: Projection) -> torch.Tensor | PackedOperand:
        """What `up` and `down` of the kernels take: `weight`, or the packed one itself where they read that."""
        if projection.format and self.kernels.reads_packed(projection.format, self.dtype, self.rows):
            return self.packed(projection)
        return self.weight(projection)

    def packed(self, projection: Projection) -> PackedOperand:
        assert projection.scales is not None  # a dense weight alone is without
        return PackedOperand(projection.weight, projection.scales, projection.state, projection.format)

    def up(self, u_PJ, want_h: bool, want_a: bool):
        """u, computed unless it is given (None without an adapter), h and a."""
        x, adapter, extra = self.inputs.x, self.gate_up_adapter, None
        if adapter is not None:
            if u_PJ is None:
                u_PJ = self.kernels.lora_shrink(x, adapter.a_EKJ, self.rows, adapter.scale, gathered=True)
            extra = adapter.forward_term(u_PJ)
        if self.fp8:
            h_R2I, a_RI, self.scaled_a = self.kernels.scaled_up(
                self.kernels.scale_rows(x), self.packed(self.gate_up), self.rows, self.activation, self.dtype,
                want_h=want_h, want_a=want_a and self.down_adapter is not None, want_scaled=want_a, extra=extra,
            )  # fmt: skip
            return u_PJ, h_R2I, a_RI
        h_R2I, a_RI = self.kernels.up(
            x, self.operand(self.gate_up), self.gate_up.bias, self.rows, self.activation, self.interleaved,
            want_h=want_h, want_a=want_a, extra=extra,
        )  # fmt: skip
        return u_PJ, h_R2I, a_RI

    def y(self, a_RI, extra):
        """The second product of what `up` gave."""
        if self.fp8:
            return self.kernels.scaled_down(self.scaled_a, self.packed(self.down), self.rows, self.dtype, extra=extra)
        return self.kernels.down(a_RI, self.operand(self.down), self.down.bias, self.rows, extra=extra)

    def down_backward(self, dout, h_R2I, want_dh: bool, want_dx: bool, want_a: bool, want_dw: bool, extra):
        """dh, which with FP8 products dx needs in FP8 alone, unless an adapter does; a' and dw."""
        kernels, activation, weight_P = self.kernels, self.activation, self.inputs.weight.reshape(-1)
        if self.fp8:
            scaled_dout = kernels.scale_rows(dout, SMALLEST_GRADIENT)
            dh_R2I, a_RI, dw_P, self.scaled_dh = kernels.scaled_down_backward(
                scaled_dout, self.transposed_packed(self.down), h_R2I, weight_P, self.rows, activation,
                want_dh=want_dh and self.gate_up_adapter is not None, want_a=want_a, want_dw=want_dw,
                want_scaled=want_dx, extra=extra,
            )  # fmt: skip
            return dh_R2I, a_RI, dw_P
        return kernels.down_backward(
            dout, self.weight(self.down), self.down.bias, h_R2I, weight_P, self.rows, activation, self.interleaved,
            want_dh=want_dh, want_a=want_a, want_dw=want_dw, extra=extra,
        )  # fmt: skip

    def dx(self, dh_R2I, extra):
        """The gradient of gathered x, of what `down_backward` gave."""
        if self.fp8:
            return self.kernels.scaled_down(
                self.scaled_dh, self.transposed_packed(self.gate_up), self.rows, self.dtype, extra=extra
            )
        return self.kernels.up_backward_input(dh_R2I, self.weight(self.gate_up), self.rows, extra=extra)

    def transposed_packed(self, projection: Projection) -> ScaledWeight:
        """A packed FP8 weight as backward's products take it; kept by none, as `weight`."""
        return self.kernels.transposed(projection.weight, projection.scales)


def _experts_forward(inputs: Inputs, rows: Rows, options: Options, flags: SaveFlags) -> list[torch.Tensor]:
    """[out_TH], and after it what `flags` name."""
    x_TH = inputs.x
    assert x_TH is not None  # only backward may be without
    return _run(_FORWARD_TAPES, x_TH, [], inputs, rows, options, flags)


def _run(function: Taped, like: torch.Tensor, given: list[Any], inputs: Inputs, rows: Rows, options: Options, how):
    """The function of `given`, which is emptied, of Inputs' tensors as the backend's kernels read them in the dtype and
    on the device of `like`, and of Rows', by a tape but for the eager backend."""
    is_eager = options.backend == "eager"
    # eager products are PyTorch's; kernels know no autocast, and the switch takes time
    is_cast = is_eager and torch.is_autocast_enabled(like.device.type)
    with (
        torch.autocast(like.device.type, enabled=False) if is_cast else contextlib.nullcontext(),
        fetched(inputs, rows, options, like.dtype) if STREAMED else contextlib.nullcontext(inputs) as inputs,
    ):
        tensors = [*given, *inputs, *rows]
        given.clear()
        return (function.function if is_eager else function)(tensors, options, how)


def _forward(tensors: list[torch.Tensor | None], options: Options, flags: SaveFlags) -> list[torch.Tensor]:
    """The same of Inputs' and Rows' tensors."""
    inputs, rows = Inputs._make(tensors[:_NUM_INPUTS]), Rows._make(tensors[_NUM_INPUTS:])
    tensors.clear()
    assert inputs.x is not None
    layer = _Layer(inputs, rows, options, inputs.x.dtype)
    kernels, adapter, v_PJ, extra = layer.kernels, layer.down_adapter, None, None
    u_PJ, h_R2I, a_RI = layer.up(None, want_h=flags.h, want_a=True)
    if adapter is not None:
        v_PJ = kernels.lora_shrink(a_RI, adapter.a_EKJ, rows, adapter.scale, gathered=False)
        extra = adapter.forward_term(v_PJ)
    out_TH = kernels.combine(layer.y(a_RI, extra), inputs.weight.reshape(-1), rows, inputs.x.shape[0])
    return [out_TH, *(tensor for tensor, is_saved in zip((h_R2I, u_PJ, v_PJ), flags) if is_saved)]


def _fake_forward(inputs, rows, options, flags):
    num_rows, x = rows.token.shape[0], inputs.x
    widths = (
        inputs.gate_up.shape[2 if options.transposed and not options.gate_up_format else 1],
        *(None if a is None else padded_rank(a, rows.offsets.shape[0] - 1) for a in (inputs.gate_up_a, inputs.down_a)),
    )
    return [
        x.new_empty(x.shape),
        *(x.new_empty(num_rows, width) for width, is_saved in zip(widths, flags) if is_saved),
    ]


def _experts_backward(
    dout: torch.Tensor, saved: Saved, inputs: Inputs, rows: Rows, options: Options, needs: list[bool]
) -> list[torch.Tensor]:
    """`_run_backward` as an op."""
    return _run_backward(dout, [saved], inputs, rows, options, needs)


def _run_backward(dout, saved: list[Saved], inputs: Inputs, rows: Rows, options: Options, needs) -> list[torch.Tensor]:
    """The gradients that `needs` asks for, in the order of Inputs.

    `saved` holds what forward saved; it is taken out, so that it is freed when it has been used. So is everything else:
    dx comes first, whose rows are the largest; weights' gradients stay, and come last.
    """
    given = [dout.contiguous(), *saved.pop()]
    return _run(_BACKWARD_TAPES, dout, given, inputs, rows, options, tuple(needs))


def _backward_of(tensors: list[Any], options: Options, needs) -> list[torch.Tensor]:
    """The same of dout, Saved's, Inputs' and Rows' tensors."""
    dout, h, u, v, *others = tensors
    tensors.clear()
    saved, need = [Saved(h, u, v)], Inputs._make(needs)
    del h, u, v
    inputs, rows = Inputs._make(others[:_NUM_INPUTS]), Rows._make(others[_NUM_INPUTS:])
    layer = _Layer(inputs, rows, options, dout.dtype)
    gradients, dh, a, u = _down_backward(layer, need, dout, saved)
    gradients |= _up_backward(layer, need, dh, u, dout.shape[0])
    kernels, x = layer.kernels, inputs.x
    if need.gate_up:
        gradients["gate_up"] = kernels.gate_up_gradient(dh, x, rows, layer.weight(layer.gate_up))
    if need.gate_up_bias:
        gradients["gate_up_bias"] = kernels.gate_up_bias_gradient(dh, rows, inputs.gate_up_bias)
    del dh
    if need.down:
        gradients["down"] = kernels.down_gradient(dout, a, rows, layer.weight(layer.down))
    if need.down_bias:
        gradients["down_bias"] = kernels.down_bias_gradient(dout, inputs.weight.reshape(-1), rows, inputs.down_bias)
    if options.transposed:
        gradients |= {name: gradients[name].transpose(1, 2) for name in ("gate_up", "down") if name in gradients}
    return [gradients[name] for name, needed in zip(Inputs._fields, need) if needed]


_FORWARD_TAPES = Taped(_forward, len(Rows._fields))
_BACKWARD_TAPES = Taped(_backward_of, len(Rows._fields))


def _down_backward(layer: _Layer, need: Any, dout, saved: list[Saved]):
    """(gradients of the routing weights and of the second adapter, dh, a', u); None for what is not needed. need: Inputs
    of bools."""
    kernels, inputs, rows, adapter = layer.kernels, layer.inputs, layer.rows, layer.down_adapter
    h, u, v = saved.pop()
    weight_P, gradients, dv, extra, dh, a = inputs.weight.reshape(-1), {}, None, None, None, None
    want_dh = need.x or need.gate_up or need.gate_up_bias or need.gate_up_a or need.gate_up_b
    want_a = need.down or need.down_a
    want_da = want_dh or need.weight
    if adapter is not None and (want_da or need.down_a or need.down_b):
        dv, gradients["down_b"] = kernels.lora_b_backward(
            dout, adapter.b_ENJ, v, weight_P, rows, adapter.scale, gathered=True,
            want_rank=want_da or need.down_a, like_ENj=inputs.down_b if need.down_b else None,
        )  # fmt: skip
        extra = adapter.backward_term(dv, copied=layer.fp8) if want_da else None
    if want_da or want_a:
        if h is None:
            u, h, _ = layer.up(u, want_h=True, want_a=False)
        dh, a, dw_P = layer.down_backward(dout, h, want_dh, need.x, want_a, need.weight, extra)
        if need.weight:
            gradients["weight"] = dw_P.view(inputs.weight.shape)
    if need.down_a:
        gradients["down_a"] = kernels.lora_a_gradient(dv, a, rows, gathered=False, like_EjK=inputs.down_a)
    return gradients, dh, a if need.down else None, u


def _up_backward(layer: _Layer, need: Any, dh, u, num_tokens: int):
    """Gradients of x and of the first adapter. need: as there."""
    kernels, inputs, rows, adapter = layer.kernels, layer.inputs, layer.rows, layer.gate_up_adapter
    gradients, du, extra = {}, None, None
    if adapter is not None and (need.x or need.gate_up_a or need.gate_up_b):
        du, gradients["gate_up_b"] = kernels.lora_b_backward(
            dh, adapter.b_ENJ, u, None, rows, adapter.scale, gathered=False,
            want_rank=need.x or need.gate_up_a, like_ENj=inputs.gate_up_b if need.gate_up_b else None,
        )  # fmt: skip
        extra = adapter.backward_term(du, copied=layer.fp8) if need.x else None
    if need.x:
        gradients["x"] = kernels.combine(layer.dx(dh, extra), None, rows, num_tokens)
    if need.gate_up_a:
        gradients["gate_up_a"] = kernels.lora_a_gradient(du, inputs.x, rows, gathered=True, like_EjK=inputs.gate_up_a)
    return gradients


def _fake_backward(dout, saved, inputs, rows, options, needs):
    likes = inputs._replace(x=dout.new_empty(dout.shape), weight=inputs.weight.new_empty(inputs.weight.shape))
    return [torch.empty_like(like) for like, needed in zip(likes, needs) if needed]


def _setup_context(ctx, arguments, output):
    inputs, rows, ctx.options, flags = arguments
    ctx.set_materialize_grads(False)
    needs = Inputs._make(ctx.needs_input_grad[: len(inputs)])
    results = iter(output[1:])
    saved = [next(results) if is_saved else None for is_saved in flags]
    ctx.mark_non_differentiable(*output[1:])
    ctx.given = [tensor is not None for tensor in inputs]
    x, *others = inputs
    keep_x = not flags.h or needs.gate_up or needs.gate_up_a
    ctx.save_for_backward(*saved, x if keep_x else None, *others, *rows)


def _backward(ctx, dout):
    """The gradients of Inputs, None where nobody asks for one."""
    if dout is None:
        return ()
    h, u, v, *others = ctx.saved_tensors
    inputs, rows = Inputs._make(others[: len(ctx.given)]), Rows._make(others[len(ctx.given) :])
    # next_functions has one entry for each argument that is a tensor, in their order
    nodes = iter(ctx.next_functions)
    needs = torch_op.are_needed([next(nodes)[0] if given else None for given in ctx.given])
    if torch.is_grad_enabled() or torch_op.traced(WHAT, dout):
        gradients = _BACKWARD.gradients(dout, Saved(h, u, v), inputs, rows, ctx.options, needs)
    else:
        saved = [Saved(h, u, v)]
        del h, u, v
        # unless the graph is retained; undocumented, what torch.compile's backward calls
        ctx.maybe_clear_saved_tensors()
        gradients = _run_backward(dout, saved, inputs, rows, ctx.options, needs)
    computed = iter(gradients)
    return [next(computed) if needed else None for needed in needs]


_FORWARD = torch_op.Op(_experts_forward, _fake_forward, WHAT, _setup_context, _backward)
_BACKWARD = torch_op.GradientOp(_experts_backward, _fake_backward, WHAT)


def run(differentiable: bool, inputs: Inputs, rows: Rows, options: Options, flags: SaveFlags) -> torch.Tensor:
    """out_TH. `flags` name what backward will have, where there is one (`differentiable`)."""
    return _FORWARD(differentiable, inputs, rows, options, flags)[0]
