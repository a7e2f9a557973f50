"""The op of `moe_experts`: forward and backward, whose computation is in products.py.

Both are torch ops, so that torch.compile sees two opaque calls; where nothing traces, the ops' functions are called
without the dispatcher. What is saved for backward is h, x if it is needed, and the routing (`save="preactivation"`), or x
and the routing (`save="input"`, or a layer in pieces: h is computed again), and rows of the adapters' rank; never the
activations a, the rows y, or gathered rows.

Forward is one op, but two halves where torch.compile traces a checkpoint, since backward needs nothing of the second, the
product with W2.

Where ranks share the experts and gather all tokens, an `Exchange` brings x and takes the output inside the op. Backward
then gathers x again, beside the first products, and sends the gradient of x beside those of the weights' gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from ..kernels.tape import Taped, leaves_of
from . import kept, pieces, products, torch_op
from .call import CALL, LayerCall, Saved
from .fetching import on_device
from .products import Arriving
from .projection import padded_rank

WHAT = "moe_experts"
_FORWARD_TAPES, _FIRST_HALF_TAPES, _SECOND_HALF_TAPES, _BACKWARD_TAPES = (
    Taped(function, derived=CALL.positions["rows"])
    for function in (products.forward, products.first_half, products.second_half, products.backward)
)


class Exchange(Protocol):
    """The exchange of tokens with the ranks that have the layer's other experts: expert_parallel.collectives.

    num_tokens: those of all ranks, which the routing is of. is_long: whether products run beside it.
    """

    num_tokens: int
    is_long: bool

    def gather(self, tensor: torch.Tensor) -> Arriving:
        """Gather the tensors [T, H] of all ranks: [num_tokens, H]."""

    def scatter_sum(self, tensor: torch.Tensor) -> Arriving:
        """Sum [num_tokens, H] over the ranks: the tokens [T, H] of this rank."""


def _experts_forward(call: LayerCall) -> list[torch.Tensor]:
    """Compute [out_TH], and after it what the flags of the options name."""
    assert call.x is not None
    options, dtype = call.options, call.x.dtype
    compute = products.forward if options.backend == "eager" else _FORWARD_TAPES
    with on_device(call, dtype) as call:
        if options.keeps_expanded:
            weights = kept.expand(call, dtype, ("gate_up", "down"))
            call = kept.use(dict(weights), call)
        results = pieces.forward(compute, call) if options.piece else compute([call])
        if options.keeps_expanded:
            kept.keep(weights, results[1:])
        return results


def _experts_first_half(call: LayerCall) -> list[torch.Tensor]:
    """Compute h, u and v as the flags of the options ask, and after them a_RI."""
    assert call.x is not None
    options, dtype = call.options, call.x.dtype
    compute = products.first_half if options.backend == "eager" else _FIRST_HALF_TAPES
    with on_device(call, dtype) as call:
        weights = kept.expand(call, dtype, ("gate_up",)) if options.keeps_expanded else {}
        results = compute([kept.use(dict(weights), call)])
        kept.keep(weights, results[:-1])
        return results


def _fake_first_half(call):
    inner = call.down.weight.shape[1 if call.options.transposed else 2]
    if call.down.format:
        _, _, inner = call.down.logical_shape()
    return [*_fake_forward(call)[1:], call.x.new_empty(call.rows.token.shape[0], inner)]


def _experts_second_half(call: LayerCall, a: torch.Tensor) -> list[torch.Tensor]:
    """Compute [out_TH] from a_RI, and v_PJ where that has been computed."""
    assert call.x is not None
    compute = products.second_half if call.options.backend == "eager" else _SECOND_HALF_TAPES
    with on_device(call, call.x.dtype) as call:
        return compute([_without_first_adapter(call)], a)


def _without_first_adapter(call: LayerCall) -> LayerCall:
    return call._replace(gate_up=call.gate_up._replace(a=None, b=None))


def _fake_second_half(call, a):
    return [call.x.new_empty(call.x.shape)]


def _in_checkpoint(run: Callable, call: LayerCall) -> list[torch.Tensor]:
    """Run `_experts_forward` as two ops, so that backward computes the first half again, and the second where something
    after the layer needs it."""
    saves = call.options.saves
    if call.options.piece or call.options.fp8 or not any(saves):
        return run(*leaves_of([call]))
    *saved, a_RI = _FIRST_HALF(False, call)
    (out_TH,) = _SECOND_HALF(False, call._replace(saved=Saved(v=saves.restore(saved).v)), a_RI)
    return [out_TH, *saved]


def _exchanged_forward(call: LayerCall, exchange: Exchange) -> list[torch.Tensor]:
    """Run `_experts_forward` on the tokens of all ranks; of x [T, H] and the output it gives this rank's."""
    assert call.x is not None
    out_TH, *saved = _experts_forward(call._replace(x=exchange.gather(call.x).wait()))
    return [exchange.scatter_sum(out_TH).wait(), *saved]


def _fake_forward(call):
    gate_up, down, x = call.gate_up, call.down, call.x
    widths = {
        "h": gate_up.weight.shape[2 if call.options.transposed and not gate_up.format else 1],
        "u": None if gate_up.a is None else padded_rank(gate_up.a, gate_up.weight.shape[0]),
        "v": None if down.a is None else padded_rank(down.a, down.weight.shape[0]),
    }
    num_rows = call.rows.token.shape[0]
    saved = {name: x.new_empty(num_rows, width) for name, width in widths.items() if width is not None}
    return [x.new_empty(x.shape), *call.options.saves.choose(Saved(**saved))]


def _experts_backward(dout: torch.Tensor, call: LayerCall, needs: str) -> list[torch.Tensor]:
    """Run `_run_backward` as an op. needs: the names, with spaces between them."""
    return _run_backward([call], dout, tuple(needs.split()), None)


def _run_backward(
    calls: list[LayerCall], dout: torch.Tensor, needs: tuple[str, ...], exchange: Exchange | None
) -> list[torch.Tensor]:
    """Compute the gradients of the leaves of LayerCall that `needs` names, in that order.

    calls: one, which is taken out of the list, so that what forward saved is freed when it has been used.
    """
    call = calls.pop()
    options, saved, dtype, dout = call.options, call.saved, dout.dtype, dout.contiguous()
    weights = kept.take_kept(options.saves.choose(saved)) if options.keeps_expanded else {}
    compute = products.backward if options.backend == "eager" else _BACKWARD_TAPES
    with on_device(call._replace(saved=Saved()), dtype) as call:
        if options.keeps_expanded and saved.h is None:  # for h gate_up is used too
            names = ("gate_up", "down") if options.piece else ("gate_up",)
            weights = weights or kept.expand(call, dtype, names)
        calls.append(kept.use(weights, call)._replace(saved=saved))
        del saved
        if exchange is not None:
            return _exchanged_backward(compute, calls, dout, needs, exchange)
        return pieces.backward(compute, calls.pop(), dout, needs) if options.piece else compute(calls, dout, needs)


def _exchanged_backward(
    compute: Callable, calls: list[LayerCall], dout: torch.Tensor, needs: tuple[str, ...], exchange: Exchange
) -> list[torch.Tensor]:
    """Run backward for all ranks' tokens, of a call with this rank's. compute: runs it."""
    x = calls[0].x
    arriving_dout = exchange.gather(dout)
    arriving_x = None if x is None else exchange.gather(x)
    dout = arriving_dout.wait()
    if exchange.is_long:
        return products.backward(calls, dout, needs, arriving_x, exchange.scatter_sum)
    if arriving_x is not None:
        calls.append(calls.pop()._replace(x=arriving_x.wait()))
    gradients = dict(zip(needs, compute(calls, dout, needs), strict=True))
    if "x" in gradients:
        gradients["x"] = exchange.scatter_sum(gradients["x"]).wait()
    return list(gradients.values())


def _fake_backward(dout, call, needs):
    likes = call._replace(x=dout.new_empty(dout.shape), weight=call.weight.new_empty(call.weight.shape))
    by_name = dict(zip(CALL.leaves, leaves_of(likes)))
    return [torch.empty_like(by_name[name]) for name in needs.split()]


def _setup_context(ctx, arguments, output):
    call, *exchange = arguments
    (ctx.exchange,) = exchange or (None,)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    saves, needs = call.options.saves, dict(zip(CALL.leaves, ctx.needs_input_grad))
    ctx.given = [isinstance(leaf, torch.Tensor) for leaf in leaves_of(call)]
    if saves.h and not needs["gate_up_weight"] and not needs["gate_up_a"]:
        call = call._replace(x=None)
    tensors = leaves_of(call._replace(saved=saves.restore(output[1:])))
    ctx.constants = [None] * len(tensors)
    for position, leaf in enumerate(tensors):
        if not isinstance(leaf, torch.Tensor):
            tensors[position], ctx.constants[position] = None, leaf
    ctx.save_for_backward(*tensors)


def _backward(ctx, dout):
    """Compute the gradients of LayerCall's leaves, None where nobody asks for one."""
    if dout is None:
        return ()
    # next_functions has one entry for each argument that is a tensor, in their order
    nodes = iter(ctx.next_functions)
    needed = torch_op.are_needed([next(nodes)[0] if given else None for given in ctx.given])
    needs = tuple(compress(CALL.leaves, needed))
    leaves = zip(ctx.saved_tensors, ctx.constants, strict=True)
    calls = CALL.nest([tensor if constant is None else constant for tensor, constant in leaves])  # one, in a list
    del leaves
    if ctx.exchange is None and (torch.is_grad_enabled() or torch_op.traced(WHAT, dout)):
        gradients = _BACKWARD.gradients(dout, calls.pop(), " ".join(needs))
    else:
        # unless the graph is retained; undocumented, what torch.compile's backward calls
        ctx.maybe_clear_saved_tensors()
        gradients = _run_backward(calls, dout, needs, ctx.exchange)
    computed = dict(zip(needs, gradients, strict=True))
    return tuple(map(computed.get, CALL.leaves))


def _has_launches(call: LayerCall) -> bool:
    """Tell whether kernels can be listed: of layers that are no pieces."""
    return call.options.backend != "eager" and not call.options.piece


def _launches_of_forward(call: LayerCall) -> None:
    if _has_launches(call):
        products.forward([call])


def _launches_of_halves(call: LayerCall) -> None:
    """Launch the kernels of `_in_checkpoint`, and those of its backward."""
    if _has_launches(call):
        saves = call.options.saves
        *saved, a_RI = products.first_half([call])
        second = _without_first_adapter(call)._replace(saved=Saved(v=saves.restore(saved).v))
        products.second_half([second], a_RI)
        products.first_half([_as_recomputed(call, a_RI.dtype)])


def _launches_of_backward(dout: torch.Tensor, call: LayerCall, needs: str) -> None:
    """Launch the kernels of `_experts_backward`; of packed experts those of a checkpoint."""
    if _has_launches(call):
        products.backward([_as_recomputed(call, dout.dtype)], dout, tuple(needs.split()))


def _as_recomputed(call: LayerCall, dtype: torch.dtype) -> LayerCall:
    """Put expanded weights into the call as backward of a checkpoint has them."""
    keeps_expanded = call.options.keeps_expanded and not call.options.fp8
    return kept.use(kept.expand_if_room(call, dtype, ("gate_up",)) if keeps_expanded else {}, call)


_FIRST_HALF = torch_op.Op(_experts_first_half, _fake_first_half, WHAT, launches=_launches_of_halves)
_SECOND_HALF = torch_op.Op(_experts_second_half, _fake_second_half, WHAT)
FORWARD = torch_op.Op(
    _experts_forward, _fake_forward, WHAT, _setup_context, _backward, _in_checkpoint, _launches_of_forward
)
_BACKWARD = torch_op.GradientOp(_experts_backward, _fake_backward, WHAT, _launches_of_backward)
_EXCHANGED = torch_op.autograd_function(WHAT, _setup_context, once_differentiable(_backward)).apply


def run_exchanged(differentiable: bool, call: LayerCall, exchange: Exchange) -> torch.Tensor:
    """Compute the output [T, H] of this rank's tokens, which is no op."""
    if differentiable:
        return _EXCHANGED(*leaves_of(call), (call, exchange), _exchanged_forward)[0]
    return _exchanged_forward(call, exchange)[0]
