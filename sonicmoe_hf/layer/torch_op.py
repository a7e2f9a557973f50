"""Functions as torch ops, for whatever traces calls; without that, calling the function itself saves its host time.

torch.library.custom_op wraps its function in Python that looks for aliases among all inputs and outputs at each call
(0.4 ms in torch 2.11), so ops are defined a level below. Results must not share memory with inputs or each other:
torch.library.opcheck, in the tests, makes sure.
"""

from __future__ import annotations

import inspect
import typing

import torch

from ..private.torch import (
    add_batch_dim,
    are_functorch_transforms_active,
    disable_dynamo,
    forward_mode_level,
    is_in_torch_dispatch_mode,
    is_legacy_batchedtensor,
    remove_batch_dim,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    will_engine_execute_node,
)

_LIBRARY = torch.library.Library("sonicmoe_hf", "DEF")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Op:
    """The op sonicmoe_hf::<function's name>, which calls `function`. Its schema comes from the function's annotations: a
    NamedTuple's fields become arguments of the op, one after the other. Calls of this object are as the function's.

    fake: gives empty tensors of the results' shapes, from the same arguments.
    """

    def __init__(self, function, fake):
        self.function = function
        hints = typing.get_type_hints(function)
        result = hints.pop("return")
        self._groups = []  # (what makes the argument of its fields, or None; where they stand, flat)
        parameters: list[inspect.Parameter] = []
        for name, hint in hints.items():
            is_tuple = isinstance(hint, type) and issubclass(hint, tuple)
            fields = typing.get_type_hints(hint) if is_tuple else {name: hint}
            self._groups.append((hint._make if is_tuple else None, len(parameters), len(parameters) + len(fields)))
            for field, annotation in fields.items():
                parameters.append(inspect.Parameter(field, inspect.Parameter.POSITIONAL_ONLY, annotation=annotation))
        self.size = len(parameters)

        def flat(*arguments):
            return function(*self.nest(arguments))

        vars(flat)["__signature__"] = inspect.Signature(
            [parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters],
            return_annotation=result,
        )
        name = function.__name__.lstrip("_")
        self.name = f"sonicmoe_hf::{name}"
        _LIBRARY.define(name + torch.library.infer_schema(flat, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, disable_dynamo(flat), "CompositeExplicitAutograd")
        torch.library.register_fake(self.name, lambda *arguments: fake(*self.nest(arguments)), lib=_LIBRARY)
        self._overload = getattr(torch.ops.sonicmoe_hf, name).default

    def __call__(self, *arguments):
        return self._overload(*self.flatten(arguments))

    def nest(self, arguments):
        """The function's arguments, of the op's."""
        return [arguments[i] if make is None else make(arguments[i:end]) for make, i, end in self._groups]

    def flatten(self, arguments):
        """The op's arguments, of the function's."""
        flat = []
        for argument, (make, _, _) in zip(arguments, self._groups):
            if make is None:
                flat.append(argument)
            else:
                flat.extend(argument)
        return flat


def differentiate(op: Op, setup_context, backward):
    """Register an op's gradient formula: `setup_context(ctx, arguments, output)` and `backward(ctx, gradients)`, which
    gives the gradients of the first tensors among the op's arguments; the others have none."""

    def setup(ctx, inputs, output):
        setup_context(ctx, op.nest(inputs), output)

    def all_gradients(ctx, gradients):  # those of the list that the op gives
        return _padded(backward(ctx, gradients[0]), op.size)

    torch.library.register_autograd(op.name, all_gradients, setup_context=setup, lib=_LIBRARY)


def _padded(gradients, size: int):
    return *gradients, *(None,) * (size - len(gradients))


def refuse_second_derivatives(op: Op, what: str):
    """Make differentiating `op`, the gradient formula of `what`, an error that says so. Returns `op` for torch.func."""

    def refuse(ctx, gradients):
        raise RuntimeError(f"{what} has no second derivatives: its gradients cannot be differentiated again")

    def setup_context(ctx, arguments, output):
        pass

    differentiate(op, setup_context, refuse)
    return for_torch_func(op, what, setup_context, refuse)


def without_dispatcher(op: Op, what: str, setup_context, backward):
    """The op's function, differentiable as by `differentiate`, for where nothing traces; only its first NamedTuple, if it
    comes first, has tensors that gradients are asked for. `what` is the user's name of it."""
    (make_first, _, num_first), *_ = op._groups

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            if make_first is not None:
                arguments = make_first(arguments[:num_first]), *arguments[num_first:]
            output = op.function(*arguments)
            setup_context(ctx, arguments, output)
            return tuple(output)

        @staticmethod
        def backward(ctx, *gradients):
            return _padded(backward(ctx, gradients[0]), len(ctx.needs_input_grad))

        @staticmethod
        def jvp(ctx, *tangents):
            _refuse_forward_mode(what)

    if make_first is None:
        return Plain.apply
    return lambda first, *others: Plain.apply(*first, *others)


def for_torch_func(op: Op, what: str, setup_context=None, backward=None):
    """`op` as torch.func's transforms need it: grad and vjp through what `differentiate` takes (no gradients without it),
    vmap as a loop. What `differentiate` registers does not work there."""

    class Functional(torch.autograd.Function):  # not Plain: a separate setup_context makes every call slower
        @staticmethod
        def forward(*inputs):
            return tuple(op(*op.nest(inputs)))

        @staticmethod
        def setup_context(ctx, inputs, output):
            if setup_context is not None:
                setup_context(ctx, op.nest(inputs), output)

        @staticmethod
        def backward(ctx, *gradients):
            return _padded(backward(ctx, gradients[0]), op.size)

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

    return lambda *arguments: Functional.apply(*op.flatten(arguments))


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


def select_variant(functional, op, function, *tensors):
    """Which of three forms of one function to call with `tensors`: torch.func's, the op, or the function itself."""
    if not traced(*tensors):
        return function
    return functional if transformed() else op


def to_be_refused(gradient: torch.Tensor) -> torch.Tensor:
    """Under create_graph=True, `gradient` as one that is differentiated: whatever is derived from what an op of
    `refuse_second_derivatives` makes of it meets the refusal."""
    needs_graph = torch.is_grad_enabled() and not gradient.requires_grad
    return gradient.detach().requires_grad_() if needs_graph else gradient


def is_batch(gradient: torch.Tensor) -> bool:
    """Whether a backward's gradient stands for many, of jacobian(vectorize=True) or autograd.grad(is_grads_batched=True).
    They are another vmap than torch.func's, inside which autograd.Function has no rule of its own."""
    return is_legacy_batchedtensor(gradient)


def for_each_gradient(op: Op):
    """`op`, whose first argument is a gradient, on each of the many that the gradient stands for; its results stand for
    as many.

    Raises:
        RuntimeError: this vmap runs inside another of its kind.
    """

    def run(batch, *arguments):
        gradients = remove_batch_dim(batch, 1, 1, 0)  # level 1, and the dimension becomes the first
        if is_batch(gradients):
            raise RuntimeError(
                "is_grads_batched=True inside itself is not supported: leave one out, or use torch.func"
            )
        gradients = to_be_refused(gradients)
        results = zip(*(op(gradient, *arguments) for gradient in gradients))
        return [add_batch_dim(torch.stack(each), 0, 1) for each in results]

    return run


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
