"""Functions as torch ops, for whatever traces calls; without that, calling the function itself saves its host time.

torch.library.custom_op wraps its function in Python that looks for aliases among all inputs and outputs at each call
(0.4 ms in torch 2.11), so ops are defined a level below. Results must not share memory with inputs or each other:
torch.library.opcheck, in the tests, makes sure. torch.library.register_autograd goes through the dispatcher twice at each
call, and through Python in between. What torch.compile makes of a model asks for no gradients of the ops that it calls,
and its calls go to the functions themselves: with some 30 arguments the dispatcher takes the host half as long as such a
function does without its launches.
"""

from __future__ import annotations

import inspect
import typing

import torch

from ..private.torch import (
    are_functorch_transforms_active,
    below_autograd,
    disable_dynamo,
    forward_mode_level,
    is_in_torch_dispatch_mode,
    is_legacy_batchedtensor,
    replace_call,
    will_engine_execute_node,
)

_LIBRARY = torch.library.Library("sonicmoe_hf", "DEF")
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


class Op:
    """The op sonicmoe_hf::<function's name>, which calls `function`. Its schema comes from the function's annotations: a
    NamedTuple's fields become arguments of the op, one after the other. The tensors of the function's first argument are
    those that the op can be differentiated by.

    fake: gives empty tensors of the results' shapes, from the same arguments.
    what: the user's name of the function.
    setup_context(ctx, arguments, output), backward(ctx, gradient): as of a torch.autograd.Function that returns the
        function's results; backward gets the gradient of the first one, or None, and gives those of the first argument's
        tensors. Without them the op has no gradients.
    """

    def __init__(self, function, fake, what: str, setup_context=None, backward=None):
        self.function, self.what, self._backward = function, what, backward
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
        self._make_first, _, self._num_first = self._groups[0]

        def flat(*arguments):
            return function(*self.nest(arguments))

        def with_autograd(keyset, *arguments):
            return self._with_autograd(keyset, arguments)

        vars(flat)["__signature__"] = inspect.Signature(
            [parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters],
            return_annotation=result,
        )
        name = function.__name__.lstrip("_")
        _LIBRARY.define(name + torch.library.infer_schema(flat, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, disable_dynamo(flat), "CompositeExplicitAutograd")
        _LIBRARY.impl(name, disable_dynamo(with_autograd), "Autograd", with_keyset=True)
        torch.library.register_fake(
            f"sonicmoe_hf::{name}", lambda *arguments: fake(*self.nest(arguments)), lib=_LIBRARY
        )
        self._overload = getattr(torch.ops.sonicmoe_hf, name).default
        self._dispatch = replace_call(self._overload, self._call_overload)
        self._apply = _autograd_function(self, setup_context, backward).apply

    def __call__(self, differentiable: bool, *arguments):
        """The function's results. differentiable: whether a gradient may be asked for, of a tensor of the first argument.

        Raises:
            NotImplementedError: see `traced`.
        """
        first, *others = arguments
        tensors = (first,) if self._make_first is None else first
        if traced(self.what, *tensors):
            return self._overload(*self.flatten(arguments))
        if differentiable:
            return self._apply(*tensors, *others, self.function)
        return self.function(*arguments)

    def _with_autograd(self, keyset, arguments):
        """The op's kernel above those of devices and tracers."""
        tensors = arguments[: self._num_first]
        if are_functorch_transforms_active():
            raise NotImplementedError(_unsupported(self.what))
        if self._backward and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            _, *others = self.nest(arguments)
            run = below_autograd(self._overload, keyset)
            return list(self._apply(*tensors, *others, lambda *nested: run(*self.flatten(nested))))
        return below_autograd(self._overload, keyset)(*arguments)

    def _call_overload(self, *arguments):
        """A call of the OpOverload, as compiled code makes it: of the function, unless something looks at ops."""
        tensors = arguments[: self._num_first]
        has_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        if has_gradient or are_functorch_transforms_active() or torch.jit.is_tracing() or _is_watched(tensors):
            return self._dispatch(*arguments)
        return self.function(*self.nest(arguments))

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

    def regroup(self, arguments):
        """The function's arguments, of which the first one's tensors come one by one."""
        if self._make_first is None:
            return arguments
        return self._make_first(arguments[: self._num_first]), *arguments[self._num_first :]


class GradientOp(Op):
    """An op whose first argument is a gradient, for the backward of the function that a user calls `what`: to be
    differentiated by nothing, since there are no second derivatives."""

    def __init__(self, function, fake, what: str):
        def refuse(ctx, gradient):
            raise RuntimeError(f"{what} has no second derivatives: its gradients cannot be differentiated again")

        super().__init__(function, fake, what, lambda ctx, arguments, output: None, refuse)

    def gradients(self, gradient: torch.Tensor, *arguments):
        """The function's results. Under create_graph=True, whatever is derived from them meets the refusal."""
        has_graph = torch.is_grad_enabled()
        if has_graph and not gradient.requires_grad:
            gradient = gradient.detach().requires_grad_()
        return self(has_graph, gradient, *arguments)


def _autograd_function(op: Op, setup_context, backward):
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            *given, run = arguments
            nested = op.regroup(given)
            output = run(*nested)
            setup_context(ctx, nested, output)
            return tuple(output)

        @staticmethod
        def backward(ctx, *gradients):
            if gradients[0] is not None and is_legacy_batchedtensor(gradients[0]):
                raise NotImplementedError(_unsupported(op.what))
            inputs = backward(ctx, gradients[0])
            return *inputs, *(None,) * (len(ctx.needs_input_grad) - len(inputs))

    return Differentiable


def _unsupported(what: str) -> str:
    return (
        f"{what} works neither with torch.func (grad, vmap, jvp, ...) nor with forward-mode derivatives, gradients in a "
        "batch (is_grads_batched=True, vectorize=True) or torch.jit.trace; use backward() or torch.autograd.grad, one "
        "gradient at a time, and torch.export"
    )


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


def _is_watched(tensors) -> bool:
    """Whether a dispatch mode is on or a tensor is of a subclass, which see ops and not functions."""
    return is_in_torch_dispatch_mode() or not _PLAIN.issuperset(map(type, tensors))


def traced(what: str, *tensors) -> bool:
    """Whether a call of `what` must be one of the op: under torch.compile, torch.export, a dispatch mode, or where a
    tensor (or None) is of a subclass, as a DTensor or a FakeTensor is.

    Raises:
        NotImplementedError: under torch.func, torch.jit.trace, or with forward-mode derivatives.
    """
    if torch.compiler.is_compiling():
        return True
    if are_functorch_transforms_active() or torch.jit.is_tracing() or forward_mode_level() >= 0:
        raise NotImplementedError(_unsupported(what))
    return _is_watched(tensors)
