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
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from ..kernels.interface import Rows
from ..kernels.packed import FORMATS, Quantized
from ..kernels.tape import Taped, leaves_of
from . import expanded, pieces, products, torch_op
from .fetching import on_device
from .products import INPUTS, Arriving, Inputs, Options, Saved, SaveFlags
from .projection import padded_rank

WHAT = "moe_experts"
_FORWARD_TAPES = Taped(products.forward, num_derived=1)
_FIRST_HALF_TAPES = Taped(products.first_half, num_derived=1)
_SECOND_HALF_TAPES = Taped(products.second_half, num_derived=2)
_BACKWARD_TAPES = Taped(products.backward, num_derived=1)


class Exchange(Protocol):
    """The exchange of tokens with the ranks that have the layer's other experts: expert_parallel.collectives.

    num_tokens: those of all ranks, which the routing is of. is_long: whether products run beside it.
    """

    num_tokens: int
    is_long: bool

    def gather(self, tensor: torch.Tensor) -> Arriving:
        """Gather the tensors [T, H] of all ranks: [num_tokens, H]."""

    def scatter_sum(self, tensor: torch.Tensor) -> Arriving:
        """Sum [num_tokens, H] over the ranks: this rank's part [T, H]."""


def _experts_forward(inputs: Inputs, rows: Rows, options: Options, flags: SaveFlags) -> list[torch.Tensor]:
    """Compute [out_TH], and after it what `flags` name."""
    assert inputs.x is not None
    compute, dtype = products.forward if options.backend == "eager" else _FORWARD_TAPES, inputs.x.dtype
    with on_device(inputs, rows, options, dtype) as inputs:
        if options.keeps_expanded:
            weights = expanded.expand(inputs, rows, options, dtype, ("gate_up", "down"))
            inputs = expanded.use(dict(weights), inputs, options.transposed)
        arguments: list[Any] = [inputs, options, flags, rows]
        results = pieces.forward(compute, *arguments) if options.piece else compute(arguments)
        if options.keeps_expanded:
            expanded.keep(weights, results[1:])
        return results


def _experts_first_half(inputs: Inputs, rows: Rows, options: Options, flags: SaveFlags) -> list[torch.Tensor]:
    """Compute what `flags` name, and after it a_RI."""
    assert inputs.x is not None
    compute, dtype = products.first_half if options.backend == "eager" else _FIRST_HALF_TAPES, inputs.x.dtype
    with on_device(inputs, rows, options, dtype) as inputs:
        weights = expanded.expand(inputs, rows, options, dtype, ("gate_up",)) if options.keeps_expanded else {}
        results = compute([expanded.use(dict(weights), inputs, options.transposed), options, flags, rows])
        expanded.keep(weights, results[:-1])
        return results


def _fake_first_half(inputs, rows, options, flags):
    inner = inputs.down.weight.shape[1 if options.transposed and not inputs.down.format else 2]
    if inputs.down.format:
        inner = FORMATS[inputs.down.format].shape(Quantized(*inputs.down[:3]))[2]
    return [*_fake_forward(inputs, rows, options, flags)[1:], inputs.x.new_empty(rows.token.shape[0], inner)]


def _experts_second_half(
    inputs: Inputs, rows: Rows, options: Options, v: torch.Tensor | None, a: torch.Tensor
) -> list[torch.Tensor]:
    """Compute [out_TH] from a_RI, and v_PJ where that has been computed."""
    assert inputs.x is not None
    compute = products.second_half if options.backend == "eager" else _SECOND_HALF_TAPES
    with on_device(inputs, rows, options, inputs.x.dtype) as inputs:
        without_gate_up_adapter = inputs._replace(gate_up=inputs.gate_up._replace(a=None, b=None))
        return compute([without_gate_up_adapter, v, options, a, rows])


def _in_checkpoint(run: Callable, inputs: Inputs, rows: Rows, options: Options, flags: SaveFlags):
    """Run `_experts_forward` as two ops, so that backward computes the first half again, and the second where something
    after the layer needs it."""
    if options.piece or options.fp8 or not any(flags):
        return run(*leaves_of((inputs, rows, options, flags)))
    *saved, a_RI = _FIRST_HALF(False, inputs, rows, options, flags)
    (out_TH,) = _SECOND_HALF(False, inputs, rows, options, saved[-1] if flags.v else None, a_RI)
    return [out_TH, *saved]


def _exchanged_forward(inputs: Inputs, rows: Rows, options: Options, flags: SaveFlags, exchange: Exchange):
    """Run `_experts_forward` on the tokens of all ranks; of x [T, H] and the output it gives this rank's."""
    assert inputs.x is not None
    gathered = inputs._replace(x=exchange.gather(inputs.x).wait())
    out_TH, *saved = _experts_forward(gathered, rows, options, flags)
    return [exchange.scatter_sum(out_TH).wait(), *saved]


def _fake_forward(inputs, rows, options, flags):
    num_rows, x, (gate_up, down) = rows.token.shape[0], inputs.x, inputs[1:3]
    widths = (
        gate_up.weight.shape[2 if options.transposed and not gate_up.format else 1],
        *(None if p.a is None else padded_rank(p.a, p.weight.shape[0]) for p in (gate_up, down)),
    )
    return [
        x.new_empty(x.shape),
        *(x.new_empty(num_rows, width) for width, is_saved in zip(widths, flags) if is_saved),
    ]


def _experts_backward(
    dout: torch.Tensor, saved: Saved, inputs: Inputs, rows: Rows, options: Options, needs: list[bool]
) -> list[torch.Tensor]:
    """Run `_run_backward` as an op."""
    return _run_backward([dout, saved, inputs, rows, options, needs, None])


def _run_backward(arguments: list[Any]) -> list[torch.Tensor]:
    """Compute the gradients that `needs` asks for, in the order of Inputs' leaves. What forward saved is taken out of the
    list, so that it is freed when it has been used, and so is everything else."""
    dout, saved, inputs, rows, options, needs, exchange = arguments
    arguments.clear()
    given, dtype = [dout.contiguous(), *saved], dout.dtype
    weights = expanded.take(saved) if options.keeps_expanded else {}
    del dout, saved
    compute = products.backward if options.backend == "eager" else _BACKWARD_TAPES
    with on_device(inputs, rows, options, dtype) as inputs:
        if options.keeps_expanded and given[1] is None:  # h, for which gate_up is used too
            names = ("gate_up", "down") if options.piece else ("gate_up",)
            weights = weights or expanded.expand(inputs, rows, options, dtype, names)
        given += expanded.use(weights, inputs, options.transposed) if weights else inputs, options, tuple(needs), rows
        if exchange is not None:
            return _exchanged_backward(compute, given, exchange)
        return pieces.backward(compute, *given) if options.piece else compute(given)


def _exchanged_backward(compute: Callable, given: list[Any], exchange: Exchange) -> list[torch.Tensor]:
    """Run backward for all ranks' tokens, from a list for `products.backward` that has this rank's. compute: runs it."""
    x, (need_x, *_) = given[4].x, given[6]
    given[0] = exchange.gather(given[0])
    if x is not None:
        given[4] = given[4]._replace(x=exchange.gather(x))
    given[0] = given[0].wait()
    if exchange.is_long:
        return products.backward(given, exchange.scatter_sum)
    if x is not None:
        given[4] = given[4]._replace(x=given[4].x.wait())
    gradients = compute(given)
    if need_x:
        gradients[0] = exchange.scatter_sum(gradients[0]).wait()
    return gradients


def _fake_backward(dout, saved, inputs, rows, options, needs):
    likes = inputs._replace(x=dout.new_empty(dout.shape), weight=inputs.weight.new_empty(inputs.weight.shape))
    return [torch.empty_like(like) for like, needed in zip(leaves_of(likes), needs) if needed]


def _setup_context(ctx, arguments, output):
    inputs, rows, options, flags, *exchange = arguments
    ctx.exchange = exchange[0] if exchange else None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    needs = dict(zip(INPUTS.leaves, ctx.needs_input_grad))
    results = iter(output[1:])
    saved = [next(results) if is_saved else None for is_saved in flags]
    tensors, x = leaves_of((*saved, inputs, rows, options)), len(saved)
    ctx.given = [isinstance(leaf, torch.Tensor) for leaf in tensors[x : x + len(INPUTS.leaves)]]
    if flags.h and not needs["gate_up_weight"] and not needs["gate_up_a"]:
        tensors[x] = None
    ctx.constants = [None] * len(tensors)
    for place, leaf in enumerate(tensors):
        if not isinstance(leaf, torch.Tensor):
            tensors[place], ctx.constants[place] = None, leaf
    ctx.save_for_backward(*tensors)


def _backward(ctx, dout):
    """Give the gradients of Inputs' leaves, None where nobody asks for one."""
    if dout is None:
        return ()
    # next_functions has one entry for each argument that is a tensor, in their order
    nodes = iter(ctx.next_functions)
    needs = torch_op.are_needed([next(nodes)[0] if given else None for given in ctx.given])
    saved = zip(ctx.saved_tensors, ctx.constants, strict=True)
    arguments = _BACKWARD.nest(
        [dout, *[tensor if constant is None else constant for tensor, constant in saved], needs]
    )
    del saved
    if ctx.exchange is None and (torch.is_grad_enabled() or torch_op.traced(WHAT, dout)):
        gradients = _BACKWARD.gradients(*arguments)
    else:
        # unless the graph is retained; undocumented, what torch.compile's backward calls
        ctx.maybe_clear_saved_tensors()
        arguments.append(ctx.exchange)
        gradients = _run_backward(arguments)
    computed = iter(gradients)
    return tuple([next(computed) if needed else None for needed in needs])  # quicker than a generator


_FIRST_HALF = torch_op.Op(_experts_first_half, _fake_first_half, WHAT)
_SECOND_HALF = torch_op.Op(_experts_second_half, lambda inputs, *_: [inputs.x.new_empty(inputs.x.shape)], WHAT)
FORWARD = torch_op.Op(_experts_forward, _fake_forward, WHAT, _setup_context, _backward, _in_checkpoint)
_BACKWARD = torch_op.GradientOp(_experts_backward, _fake_backward, WHAT)
_EXCHANGED = torch_op.autograd_function(WHAT, _setup_context, once_differentiable(_backward)).apply


def run_exchanged(
    differentiable: bool, inputs: Inputs, rows: Rows, options: Options, flags: SaveFlags, exchange: Exchange
):
    """Compute the output [T, H] of this rank's tokens, which is no op."""
    arguments = inputs, rows, options, flags, exchange
    if differentiable:
        return _EXCHANGED(*leaves_of((inputs,)), arguments, _exchanged_forward)[0]
    return _exchanged_forward(*arguments)[0]
