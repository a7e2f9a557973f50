"""Functions as torch ops, for whatever traces calls; without that, calling the function itself saves its host time.

torch.library.custom_op wraps its function in Python that looks for aliases among all inputs and outputs at each call
(0.4 ms in torch 2.11), so ops are defined a level below. Results must not share memory with inputs or each other:
torch.library.opcheck, in the tests, makes sure.
"""

from __future__ import annotations

import torch

from .private.torch import (
    are_functorch_transforms_active,
    disable_dynamo,
    forward_mode_level,
    is_in_torch_dispatch_mode,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    will_engine_execute_node,
)

_LIBRARY = torch.library.Library("sonicmoe_hf", "DEF")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def define(function, fake):
    """The op sonicmoe_hf::<function's name> that calls `function`, whose annotations give the schema; `fake` its fake."""
    name = function.__name__.lstrip("_")
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, disable_dynamo(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"sonicmoe_hf::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.sonicmoe_hf, name).default


def differentiate(op, backward, setup_context=None):
    """Register an op's gradient formula."""
    torch.library.register_autograd(op.name(), backward, setup_context=setup_context, lib=_LIBRARY)


def refuse_second_derivatives(op, what: str):
    """Make differentiating `op`, the gradient formula of `what`, an error in words. Returns `op` for torch.func."""

    def refuse(ctx, *gradients):
        raise RuntimeError(f"{what} has no second derivatives: its gradients cannot be differentiated again")

    differentiate(op, refuse)
    return for_torch_func(op, what, lambda ctx, inputs, output: None, refuse)


def without_dispatcher(function, what: str, setup_context, backward):
    """`function`, differentiable as the op defined by it is, for where nothing traces; `backward(ctx, gradients)` gives a
    gradient or None for each of its arguments. `what` is the user's name of it."""

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = function(*inputs)
            setup_context(ctx, inputs, output)
            return tuple(output)

        @staticmethod
        def backward(ctx, *gradients):
            return backward(ctx, gradients)

        @staticmethod
        def jvp(ctx, *tangents):
            _refuse_forward_mode(what)

    return Plain.apply


def for_torch_func(op, what: str, setup_context=None, backward=None):
    """`op` as torch.func's transforms need it: grad and vjp through `setup_context` and `backward(ctx, gradients)` (no
    gradients without them), vmap as a loop. What `differentiate` registers does not work there."""

    class Functional(torch.autograd.Function):  # not Plain: a separate setup_context makes every call slower
        @staticmethod
        def forward(*inputs):
            return tuple(op(*inputs))

        @staticmethod
        def setup_context(ctx, inputs, output):
            if setup_context is not None:
                setup_context(ctx, inputs, output)

        @staticmethod
        def backward(ctx, *gradients):
            return backward(ctx, gradients)

        @staticmethod
        def jvp(ctx, *tangents):
            _refuse_forward_mode(what)

        @staticmethod
        def vmap(info, in_dims, *inputs):
            leaves, structure = tree_flatten(inputs)
            dims = tree_leaves(in_dims)
            outputs = []
            for i in range(info.batch_size):
                sample = [t if dim is None else t.select(dim, i).contiguous() for t, dim in zip(leaves, dims)]
                outputs.append(Functional.apply(*tree_unflatten(sample, structure)))
            return tuple(map(torch.stack, zip(*outputs))), (0,) * len(outputs[0])

    return Functional.apply


def _refuse_forward_mode(what: str):
    raise NotImplementedError(
        f"{what} has no forward-mode derivatives (jvp, jacfwd); use reverse mode: backward(), or torch.func's grad, vjp "
        "or jacrev"
    )


def forward_mode() -> bool:
    """Whether derivatives are taken forward, which a call without autograd would leave out."""
    return forward_mode_level() >= 0


def are_needed(nodes) -> list[bool]:
    """Whether the running backward goes on to each of `nodes`, a backward node's `next_functions` or None:
    autograd.grad(out, x) and backward(inputs=...) go to fewer than the forward recorded (ctx.needs_input_grad)."""
    try:
        return [node is not None and will_engine_execute_node(node) for node in nodes]
    except RuntimeError:  # one is a leaf that autograd.grad was given
        return [node is not None and _is_executed_or_given(node) for node in nodes]


def _is_executed_or_given(node) -> bool:
    try:
        return will_engine_execute_node(node)
    except RuntimeError:
        return True  # torch does not answer for a leaf that autograd.grad was given: its gradient is needed


def transformed() -> bool:
    """Whether a transform of torch.func runs (torch.compile traces its own way)."""
    return not torch.compiler.is_compiling() and are_functorch_transforms_active()


def choose(functional, op, function, *tensors):
    """Which of three forms of one function to call with `tensors`: torch.func's, the op, or the function itself."""
    if not traced(*tensors):
        return function
    return functional if transformed() else op


def traced(*tensors) -> bool:
    """Whether calls must be ops: under torch.compile, torch.export, torch.func, a dispatch mode, torch.jit.trace, or
    where a tensor (or None) is of a subclass, as a DTensor or a FakeTensor is."""
    for tensor in tensors:  # any(...) takes twice the time
        if tensor is not None and type(tensor) not in _PLAIN:
            return True
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or are_functorch_transforms_active()
        or torch.jit.is_tracing()
    )
