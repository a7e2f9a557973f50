"""A layer's computation on tensors that the backend's kernels read: forward, its halves, and backward.

Each function takes its arguments in a list, which it empties, so that a tensor is freed when it has been used. Formulas:
paper, section 3; adapters add to h = x W1^T and y = a W2^T as kernels/interface.py says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..kernels.interface import Activation, LoraTerm, PackedOperand, Rows
from ..kernels.scaled import SMALLEST_GRADIENT, ScaledRows, ScaledWeight
from ..kernels.tape import leaves_of
from . import backends
from .projection import Projection, pack
from .torch_op import Form


class Inputs(NamedTuple):
    """The tensors that a layer can be differentiated by, and how they are stored: x, which backward has only where it
    needs it, the two projections, the routing weights. `needs` and the gradients stand in the order of its leaves."""

    x: torch.Tensor | None
    gate_up: Projection
    down: Projection
    weight: torch.Tensor


class Options(NamedTuple):
    """The other constants that decide the function of a layer, and the backend."""

    activation: Activation
    transposed: bool
    interleaved: bool
    backend: str
    fp8: bool = False
    keeps_expanded: bool = False  # of packed weights: expanded.may_keep
    piece: int = 0  # the tokens of a piece, where a layer is cut (pieces.py)


class SaveFlags(NamedTuple):
    """Flags of the results of forward that backward is given: h, u = scale x A1^T, v = scale a A2^T."""

    h: bool
    u: bool
    v: bool


class Saved(NamedTuple):
    """The results of forward that backward is given; None for what is computed again, or not needed."""

    h: torch.Tensor | None
    u: torch.Tensor | None
    v: torch.Tensor | None


class Arriving(NamedTuple):
    """A tensor that other ranks send, to be read after `wait`."""

    tensor: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        """Give the tensor to the current stream, which waits for it."""
        self.work.wait()
        return self.tensor


INPUTS = Form({"inputs": Inputs})
_NO_GRADIENTS = Projection(None)  # type: ignore[arg-type]


class ScaledProducts:
    """FP8 products of packed FP8 weights, called as the backend's own are. What one gives the next, a or dh, stays here
    in FP8; in full it is given where the other weight has an adapter, which needs it."""

    def __init__(self, kernels: Any, dtype: torch.dtype, gate_up: Projection, down: Projection):
        self.kernels, self.dtype = kernels, dtype
        self.needs_a, self.needs_dh = down.a is not None, gate_up.a is not None
        self.between: ScaledRows | None = None

    def up(self, x, gate_up, bias, rows, activation, interleaved, want_h, want_a, lora):
        """Compute h and a."""
        h_R2I, a_RI, self.between = self.kernels.scaled_up(
            self.kernels.scale_rows(x),
            gate_up,
            rows,
            activation,
            self.dtype,
            want_h=want_h,
            want_a=want_a and self.needs_a,
            want_scaled=want_a,
            lora=lora,
        )
        return h_R2I, a_RI

    def down(self, a_RI, down, bias, rows, lora):
        """Compute y of the a that `up` gave."""
        return self.kernels.scaled_down(self.between, down, rows, self.dtype, lora=lora)

    def down_backward(
        self, dout, down, bias, h_R2I, weight_P, rows, activation, interleaved, want_dh, want_a, want_dw, lora
    ):
        """Compute dh, a' and dw."""
        dh_R2I, a_RI, dw_P, self.between = self.kernels.scaled_down_backward(
            self.kernels.scale_rows(dout, SMALLEST_GRADIENT),
            down,
            h_R2I,
            weight_P,
            rows,
            activation,
            want_dh=want_dh and self.needs_dh,
            want_a=want_a,
            want_dw=want_dw,
            want_scaled=want_dh,
            lora=_with_out_contiguous(lora),
        )
        return dh_R2I, a_RI, dw_P

    def up_backward_input(self, dh_R2I, gate_up, rows, lora):
        """Compute the gradient of gathered x from the dh that `down_backward` gave."""
        return self.kernels.scaled_down(self.between, gate_up, rows, self.dtype, lora=_with_out_contiguous(lora))


def _with_out_contiguous(lora: LoraTerm | None) -> LoraTerm | None:
    """Copy an adapter's factor for a product with W^T, which `transposed` copied too, so that `out` lies contiguous."""
    return lora and lora._replace(factor_ENJ=lora.factor_ENJ.contiguous())


class Layer:
    """A layer's projections with their adapters as the kernels take them, their weights as logical views, and its first
    half, which backward computes again where h was not kept. dtype: what is computed in."""

    def __init__(self, inputs: Inputs, rows: Rows, options: Options, dtype: torch.dtype):
        self.kernels = backends.load(options.backend)
        self.inputs, self.rows, self.dtype = inputs, rows, dtype
        self.activation, self.transposed, self.interleaved, _, self.fp8, *_ = options
        projections = self.gate_up, self.down = pack(inputs[1:3], options.transposed, dtype, self.kernels)
        self.products: Any = ScaledProducts(self.kernels, dtype, *projections) if self.fp8 else self.kernels

    @property
    def x(self) -> Any:
        """The tokens, for which a stream may have to wait."""
        x = self.inputs.x
        return x.wait() if isinstance(x, Arriving) else x

    def weight(self, projection: Projection) -> torch.Tensor | ScaledWeight:
        """Give [E, out, in], or for FP8 products its transpose in FP8, which backward's take. A packed weight is expanded
        or transposed at every use and kept by none: one block is reused."""
        if self.fp8:
            return self.kernels.transposed(projection.weight, projection.scales)
        if projection.format:
            return self.kernels.dequantize(*projection[:4], self.dtype, self.rows)
        return projection.weight.transpose(1, 2) if self.transposed else projection.weight

    def operand(self, projection: Projection) -> Any:
        """Give what forward's products take: `weight`, or the packed one itself where they read that."""
        weight, scales, state, format, *_ = projection
        if format and (self.fp8 or self.kernels.reads_packed(format, self.dtype, self.rows)):
            return PackedOperand(weight, scales, state, format)  # type: ignore[arg-type]
        return self.weight(projection)

    def shrink(self, projection: Projection, source, gathered: bool) -> torch.Tensor:
        """Compute scale * source @ A^T: u or v."""
        assert projection.a is not None
        return self.kernels.lora_shrink(source, projection.a.mT, self.rows, projection.scale, gathered=gathered)

    def up(self, u_PJ, want_h: bool, want_a: bool):
        """Compute h and a, and u unless it is given; u is None without an adapter."""
        x, gate_up, lora = self.x, self.gate_up, None
        if gate_up.b is not None:
            u_PJ = self.shrink(gate_up, x, gathered=True) if u_PJ is None else u_PJ
            lora = gate_up.term(u_PJ)
        h_R2I, a_RI = self.products.up(
            x,
            self.operand(gate_up),
            gate_up.bias,
            self.rows,
            self.activation,
            self.interleaved,
            want_h=want_h,
            want_a=want_a,
            lora=lora,
        )
        return u_PJ, h_R2I, a_RI

    def y(self, a_RI, v_PJ=None):
        """Compute v unless it is given, None without an adapter, and the second product of the a that `up` gave."""
        down, lora = self.down, None
        if down.b is not None:
            v_PJ = self.shrink(down, a_RI, gathered=False) if v_PJ is None else v_PJ
            lora = down.term(v_PJ)
        return v_PJ, self.products.down(a_RI, self.operand(down), down.bias, self.rows, lora=lora)


def forward(arguments: list[Any]) -> list[torch.Tensor]:
    """Compute [out_TH] of (inputs, options, flags, rows), and after it what `flags` name."""
    inputs, options, flags, rows = arguments
    arguments.clear()
    layer = Layer(inputs, rows, options, inputs.x.dtype)
    u_PJ, h_R2I, a_RI = layer.up(None, want_h=flags.h, want_a=True)
    v_PJ, y_RH = layer.y(a_RI)
    out_TH = layer.kernels.combine(y_RH, inputs.weight.reshape(-1), rows, inputs.x.shape[0])
    return [out_TH, *[tensor for tensor, is_saved in zip((h_R2I, u_PJ, v_PJ), flags) if is_saved]]


def first_half(arguments: list[Any]) -> list[torch.Tensor]:
    """Compute what `flags` name of (inputs, options, flags, rows), and after it a_RI."""
    inputs, options, flags, rows = arguments
    arguments.clear()
    layer = Layer(inputs, rows, options, inputs.x.dtype)
    u_PJ, h_R2I, a_RI = layer.up(None, want_h=flags.h, want_a=True)
    v_PJ = layer.shrink(layer.down, a_RI, gathered=False) if flags.v else None
    return [tensor for tensor, is_given in zip((h_R2I, u_PJ, v_PJ, a_RI), (*flags, True)) if is_given]


def second_half(arguments: list[Any]) -> list[torch.Tensor]:
    """Compute [out_TH] of (inputs, v_PJ or None, options, a_RI, rows)."""
    inputs, v_PJ, options, a_RI, rows = arguments
    arguments.clear()
    layer = Layer(inputs, rows, options, inputs.x.dtype)
    _, y_RH = layer.y(a_RI, v_PJ)
    return [layer.kernels.combine(y_RH, inputs.weight.reshape(-1), rows, inputs.x.shape[0])]


def backward(arguments: list[Any], send_dx: Callable[[torch.Tensor], Arriving] | None = None) -> list[torch.Tensor]:
    """Compute the gradients that are needed, in the order of Inputs' leaves, of (dout, h, u, v, inputs, options, needs,
    rows). dx comes first, whose rows are the largest; weights' gradients stay, and come last. send_dx: begins to exchange
    the gradient of x for another."""
    dout, h, u, v, inputs, options, needs, rows = arguments
    arguments.clear()
    saved, (need,) = [Saved(h, u, v)], INPUTS.nest(needs)
    del h, u, v
    layer = Layer(inputs, rows, options, dout.dtype)
    kernels = layer.kernels
    dw, down, dh, a, u = _down_backward(layer, need, dout, saved)
    if not need.down.weight:  # not used again, and it may be an expanded one
        inputs = layer.inputs = inputs._replace(down=inputs.down._replace(weight=None))
        layer.down = inputs.down
    dx, du, gate_up = _up_backward(layer, need, dh, u, dout.shape[0])
    sent = None if dx is None or send_dx is None else send_dx(dx)
    if need.gate_up.a:
        gate_up["a"] = kernels.lora_a_gradient(du, layer.x, rows, gathered=True, like_EjK=inputs.gate_up.a)
    if need.gate_up.weight:
        gate_up["weight"] = kernels.gate_up_gradient(dh, layer.x, rows, layer.weight(layer.gate_up))
    if need.gate_up.bias:
        gate_up["bias"] = kernels.gate_up_bias_gradient(dh, rows, inputs.gate_up.bias)
    del dh
    if need.down.weight:
        down["weight"] = kernels.down_gradient(dout, a, rows, layer.weight(layer.down))
    if need.down.bias:
        down["bias"] = kernels.down_bias_gradient(dout, inputs.weight.reshape(-1), rows, inputs.down.bias)
    if options.transposed:
        for of_projection in (gate_up, down):
            if "weight" in of_projection:
                of_projection["weight"] = of_projection["weight"].transpose(1, 2)
    dx = dx if sent is None else sent.wait()
    gradients = Inputs(dx, _NO_GRADIENTS._replace(**gate_up), _NO_GRADIENTS._replace(**down), dw)
    return [gradient for gradient in leaves_of(gradients) if isinstance(gradient, torch.Tensor)]


def _down_backward(layer: Layer, need: Any, dout, saved: list[Saved]):
    """Compute the routing weights' gradient, those of the second adapter by name, dh, a' and u; None for what is not
    needed. need: Inputs of bools."""
    kernels, inputs, rows, down = layer.kernels, layer.inputs, layer.rows, layer.down
    h, u, v = saved.pop()
    weight_P, gradients, dv, lora, dh, a, dw = inputs.weight.reshape(-1), {}, None, None, None, None, None
    want_dh = need.x or need.gate_up.weight or need.gate_up.bias or need.gate_up.a or need.gate_up.b
    want_a = need.down.weight or need.down.a
    want_da = want_dh or need.weight
    if down.b is not None and (want_da or need.down.a or need.down.b):
        dv, gradients["b"] = kernels.lora_b_backward(
            dout,
            down.b,
            v,
            weight_P,
            rows,
            down.scale,
            gathered=True,
            want_dshrunk=want_da or need.down.a,
            like_ENj=inputs.down.b if need.down.b else None,
        )
        lora = down.transposed_term(dv) if want_da else None
    if want_da or want_a:
        if h is None:
            u, h, _ = layer.up(u, want_h=True, want_a=False)
        dh, a, dw_P = layer.products.down_backward(
            dout,
            layer.weight(down),
            down.bias,
            h,
            weight_P,
            rows,
            layer.activation,
            layer.interleaved,
            want_dh=want_dh,
            want_a=want_a,
            want_dw=need.weight,
            lora=lora,
        )
        dw = dw_P.view(inputs.weight.shape) if need.weight else None
    if need.down.a:
        gradients["a"] = kernels.lora_a_gradient(dv, a, rows, gathered=False, like_EjK=inputs.down.a)
    return dw, gradients, dh, a if need.down.weight else None, u


def _up_backward(layer: Layer, need: Any, dh, u, num_tokens: int):
    """Compute the gradients of x and of the first adapter's product, and that of its B by name. need: Inputs of bools."""
    kernels, inputs, rows, gate_up = layer.kernels, layer.inputs, layer.rows, layer.gate_up
    gradients, du, dx, lora = {}, None, None, None
    if gate_up.b is not None and (need.x or need.gate_up.a or need.gate_up.b):
        du, gradients["b"] = kernels.lora_b_backward(
            dh,
            gate_up.b,
            u,
            None,
            rows,
            gate_up.scale,
            gathered=False,
            want_dshrunk=need.x or need.gate_up.a,
            like_ENj=inputs.gate_up.b if need.gate_up.b else None,
        )
        lora = gate_up.transposed_term(du) if need.x else None
    if need.x:
        dx_RH = layer.products.up_backward_input(dh, layer.weight(gate_up), rows, lora=lora)
        dx = kernels.combine(dx_RH, None, rows, num_tokens)
    return dx, du, gradients
