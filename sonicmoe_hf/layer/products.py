"""A layer's computation on tensors that the backend's kernels read: forward, its halves, and backward.

Each function takes its arguments in a list, which it empties, so that a tensor is freed when it has been used. Formulas:
paper, section 3; adapters add to h = x W1^T and y = a W2^T as kernels/interface.py says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..kernels.interface import Backend, LoraTerm, PackedOperand
from ..kernels.scaled import SMALLEST_GRADIENT, ScaledRows, ScaledWeight
from . import backends
from .call import CALL, LayerCall, Saved
from .projection import Projection, prepare_adapters

_OF_GATE_UP = frozenset(name for name in CALL.leaves if name.startswith("gate_up_"))
_RELEASED = torch.empty(0, dtype=torch.float32, device="cpu")


class Arriving(NamedTuple):
    """A tensor that other ranks send, to be read after `wait`."""

    tensor: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        """Wait for the tensor in the current stream."""
        self.work.wait()
        return self.tensor


class ScaledProducts:
    """FP8 products of packed FP8 weights, called as the backend's own are. What one product gives the next, a or dh, is
    kept here in FP8, as `between`; but returned in `dtype` where the other weight has an adapter, which reads it."""

    def __init__(self, kernels: Backend, dtype: torch.dtype, gate_up: Projection, down: Projection):
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
        assert self.between is not None
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
        assert self.between is not None
        return self.kernels.scaled_down(self.between, gate_up, rows, self.dtype, lora=_with_out_contiguous(lora))


def _with_out_contiguous(lora: LoraTerm | None) -> LoraTerm | None:
    """Copy an adapter's factor for a product with W^T, which `transposed` copied too, so that `out` lies contiguous."""
    return lora and lora._replace(factor_ENJ=lora.factor_ENJ.contiguous())


class Layer:
    """A layer's projections with their adapters as the kernels take them, their weights as logical views, and its first
    half, which backward computes again where h was not kept. dtype: what is computed in."""

    def __init__(self, call: LayerCall, dtype: torch.dtype, x: Arriving | None = None):
        self.call, self.dtype, self._arriving = call, dtype, x
        self.options, self.rows = call.options, call.rows
        self.kernels = backends.load(self.options.backend)
        projections = call.gate_up, call.down
        self.gate_up, self.down = prepare_adapters(projections, self.options.transposed, dtype, self.kernels)
        self.products: Backend | ScaledProducts = self.kernels
        if self.options.fp8:
            self.products = ScaledProducts(self.kernels, dtype, self.gate_up, self.down)

    @property
    def x(self) -> torch.Tensor:
        """The tokens, for which a stream may have to wait."""
        x = self.call.x if self._arriving is None else self._arriving.wait()
        assert x is not None
        return x

    def weight(self, projection: Projection) -> torch.Tensor | ScaledWeight | PackedOperand:
        """Read [E, out, in], or for FP8 products its transpose in FP8, which backward's take. A packed weight is given as
        it is where the kernels decode it, else expanded or transposed at every use and kept by none: one block is
        reused."""
        if self.options.fp8:
            return self.kernels.transposed(projection.weight, projection.scales)
        if projection.format:
            if self.kernels.decodes(operand := projection.operand(), self.dtype, self.rows):
                return operand
            return projection.dequantize(self.kernels, self.dtype, self.rows)
        return projection.weight.transpose(1, 2) if self.options.transposed else projection.weight

    def operand(self, projection: Projection) -> torch.Tensor | ScaledWeight | PackedOperand:
        """Read the operand of forward's products: `weight`, or the packed one itself where they read that."""
        format = projection.format
        if format and (self.options.fp8 or self.kernels.reads_packed(format, self.dtype, self.rows)):
            return projection.operand()
        return self.weight(projection)

    def release_down(self) -> None:
        """Release the second product's weight, which is not used again and may be an expanded one."""
        self.down = self.down._replace(weight=_RELEASED)
        self.call = self.call._replace(down=self.down)

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
            self.options.activation,
            self.options.interleaved,
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


def forward(given: list[LayerCall]) -> list[torch.Tensor]:
    """Compute [out_TH], and after it what the flags of the options name."""
    call = given.pop()
    assert call.x is not None
    layer = Layer(call, call.x.dtype)
    saves = call.options.saves
    u_PJ, h_R2I, a_RI = layer.up(None, want_h=saves.h, want_a=True)
    v_PJ, y_RH = layer.y(a_RI)
    out_TH = layer.kernels.combine(y_RH, call.weight.reshape(-1), call.rows, call.x.shape[0])
    return [out_TH, *saves.choose(Saved(h=h_R2I, u=u_PJ, v=v_PJ))]


def first_half(given: list[LayerCall]) -> list[torch.Tensor]:
    """Compute h, u and v as the flags of the options ask, and after them a_RI."""
    call = given.pop()
    assert call.x is not None
    layer = Layer(call, call.x.dtype)
    saves = call.options.saves
    u_PJ, h_R2I, a_RI = layer.up(None, want_h=saves.h, want_a=True)
    v_PJ = layer.shrink(layer.down, a_RI, gathered=False) if saves.v else None
    return [*saves.choose(Saved(h=h_R2I, u=u_PJ, v=v_PJ)), a_RI]


def second_half(given: list[LayerCall], a_RI: torch.Tensor) -> list[torch.Tensor]:
    """Compute [out_TH]."""
    call = given.pop()
    assert call.x is not None
    layer = Layer(call, call.x.dtype)
    _, y_RH = layer.y(a_RI, call.saved.v)
    return [layer.kernels.combine(y_RH, call.weight.reshape(-1), call.rows, call.x.shape[0])]


def backward(
    given: list[LayerCall],
    dout_TH: torch.Tensor,
    needs: tuple[str, ...],
    x: Arriving | None = None,
    send_dx: Callable[[torch.Tensor], Arriving] | None = None,
) -> list[torch.Tensor]:
    """Compute the gradients that are needed, in the order of their names. dx comes first, whose rows are the largest;
    weights' gradients stay, and come last.

    x: tokens that other ranks send, in the place of the call's. send_dx: begins to exchange the gradient of x for
        another.
    """
    call = given.pop()
    layer, saved = Layer(call._replace(saved=Saved()), dout_TH.dtype, x), [call.saved]
    del call
    kernels, rows = layer.kernels, layer.rows
    gradients, dh, a, u = _down_backward(layer, needs, dout_TH, saved)
    if "down_weight" not in needs:
        layer.release_down()
    du = _up_backward(layer, needs, dh, u, dout_TH.shape[0], gradients)
    sent = send_dx(gradients.pop("x")) if "x" in needs and send_dx is not None else None
    if "gate_up_a" in needs:
        like = layer.call.gate_up.a
        gradients["gate_up_a"] = kernels.lora_a_gradient(du, layer.x, rows, gathered=True, like_EjK=like)
    if "gate_up_weight" in needs:
        gradients["gate_up_weight"] = kernels.gate_up_gradient(dh, layer.x, rows, layer.weight(layer.gate_up))
    if "gate_up_bias" in needs:
        gradients["gate_up_bias"] = kernels.gate_up_bias_gradient(dh, rows, layer.gate_up.bias)
    del dh
    if "down_weight" in needs:
        gradients["down_weight"] = kernels.down_gradient(dout_TH, a, rows, layer.weight(layer.down))
    if "down_bias" in needs:
        weight_P = layer.call.weight.reshape(-1)
        gradients["down_bias"] = kernels.down_bias_gradient(dout_TH, weight_P, rows, layer.down.bias)
    if layer.options.transposed:
        for name in gradients.keys() & {"gate_up_weight", "down_weight"}:
            gradients[name] = gradients[name].transpose(1, 2)
    if sent is not None:
        gradients["x"] = sent.wait()
    return list(map(gradients.pop, needs))


def _down_backward(layer: Layer, needs: tuple[str, ...], dout_TH: torch.Tensor, saved: list[Saved]):
    """Compute the gradients of the routing weights and of the second adapter, by name; and dh, a' and u, None for what is
    not needed."""
    kernels, call, rows, down = layer.kernels, layer.call, layer.rows, layer.down
    kept = saved.pop()
    h, u, v = kept.h, kept.u, kept.v
    del kept
    gradients: dict[str, torch.Tensor] = {}
    weight_P, dv, lora, dh, a = call.weight.reshape(-1), None, None, None, None
    want_dh = "x" in needs or not _OF_GATE_UP.isdisjoint(needs)
    want_a = "down_weight" in needs or "down_a" in needs
    want_da = want_dh or "weight" in needs
    if down.b is not None and (want_da or "down_a" in needs or "down_b" in needs):
        dv, db = kernels.lora_b_backward(
            dout_TH,
            down.b,
            v,
            weight_P,
            rows,
            down.scale,
            gathered=True,
            want_dshrunk=want_da or "down_a" in needs,
            like_ENj=call.down.b if "down_b" in needs else None,
        )
        if db is not None:
            gradients["down_b"] = db
        lora = down.transposed_term(dv) if want_da else None
    if want_da or want_a:
        if h is None:
            u, h, _ = layer.up(u, want_h=True, want_a=False)
        dh, a, dw_P = layer.products.down_backward(
            dout_TH,
            layer.weight(down),
            down.bias,
            h,
            weight_P,
            rows,
            layer.options.activation,
            layer.options.interleaved,
            want_dh=want_dh,
            want_a=want_a,
            want_dw="weight" in needs,
            lora=lora,
        )
        if dw_P is not None:
            gradients["weight"] = dw_P.view(call.weight.shape)
    if "down_a" in needs:
        gradients["down_a"] = kernels.lora_a_gradient(dv, a, rows, gathered=False, like_EjK=call.down.a)
    return gradients, dh, a if "down_weight" in needs else None, u


def _up_backward(
    layer: Layer, needs: tuple[str, ...], dh, u, num_tokens: int, gradients: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """Compute the gradient of the first adapter's product, and add those of x and of its B to `gradients`."""
    kernels, rows, gate_up = layer.kernels, layer.rows, layer.gate_up
    du, lora = None, None
    if gate_up.b is not None and ("x" in needs or "gate_up_a" in needs or "gate_up_b" in needs):
        du, db = kernels.lora_b_backward(
            dh,
            gate_up.b,
            u,
            None,
            rows,
            gate_up.scale,
            gathered=False,
            want_dshrunk="x" in needs or "gate_up_a" in needs,
            like_ENj=layer.call.gate_up.b if "gate_up_b" in needs else None,
        )
        if db is not None:
            gradients["gate_up_b"] = db
        lora = gate_up.transposed_term(du) if "x" in needs else None
    if "x" in needs:
        dx_RH = layer.products.up_backward_input(dh, layer.weight(gate_up), rows, lora=lora)
        gradients["x"] = kernels.combine(dx_RH, None, rows, num_tokens)
    return du
