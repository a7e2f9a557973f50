"""Functions as torch ops, for whatever traces calls; without that, calling the function itself saves its host time.

torch.library.custom_op wraps its function in Python that looks for aliases among all inputs and outputs at each call
(0.4 ms in torch 2.11), so ops are defined a level below. Results must not share memory with inputs or each other:
torch.library.opcheck, in the tests, makes sure.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_LIBRARY = torch.library.Library("sonicmoe_hf", "DEF")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def define(function, fake):
    """The op sonicmoe_hf::<function's name> that calls `function`, whose annotations give the schema; `fake` its fake."""
    name = function.__name__.lstrip("_")
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, torch._disable_dynamo(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"sonicmoe_hf::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.sonicmoe_hf, name).default


def differentiate(op, backward, setup_context=None):
    """Register an op's gradient formula."""
    torch.library.register_autograd(op.name(), backward, setup_context=setup_context, lib=_LIBRARY)


def refuse_second_derivatives(op, what: str):
    """Make differentiating `op`, the gradient formula of `what`, an error in words."""

    def refuse(ctx, *gradients):
        raise RuntimeError(f"{what} has no second derivatives: its gradients cannot be differentiated again")

    differentiate(op, refuse)


def without_dispatcher(function, setup_context, backward):
    """`function`, differentiable as the op defined by it is, for where nothing traces; `backward(ctx, gradients)` gives a
    gradient or None for each of its arguments."""

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = function(*inputs)
            setup_context(ctx, inputs, output)
            return tuple(output)

        @staticmethod
        def backward(ctx, *gradients):
            return backward(ctx, gradients)

    return Plain.apply


def traced(*tensors) -> bool:
    """Whether calls must be ops: under torch.compile, torch.export, torch.func, a dispatch mode, torch.jit.trace, or
    where a tensor (or None) is of a subclass, as a DTensor or a FakeTensor is."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()
        or any(tensor is not None and type(tensor) not in _PLAIN for tensor in tensors)
    )
