"""Functions as torch ops, for whatever traces calls; without that, calling the function itself saves its host time.

torch.library.custom_op wraps its function in Python that looks for aliases among all inputs and outputs at each call
(0.4 ms in torch 2.11), so ops are defined a level below. Results must not share memory with inputs or each other:
torch.library.opcheck, in the tests, makes sure. torch.library.register_autograd goes through the dispatcher twice at each
call, and through Python in between. Code that torch.compile has made asks for no gradients of the ops in it, so it calls
the functions themselves: to pass some 30 arguments through the dispatcher takes the host half as long as such a function
without its launches.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..kernels.tape import leaves_of
from ..private.torch import (
    are_functorch_transforms_active,
    below_autograd,
    disable_dynamo,
    forward_mode_level,
    is_in_pre_dispatch_mode,
    is_legacy_batchedtensor,
    is_traced_in_checkpoint,
    num_dispatch_modes,
    replace_call,
    will_engine_execute_node,
)
from . import ahead

_LIBRARY = torch.library.Library("sonicmoe_hf", "DEF")


def digest_code(*folders: str) -> str:
    """Digest the sources in these folders of the package, and below."""
    files = (file for folder in folders for file in sorted((Path(__file__).parents[1] / folder).rglob("*.py")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# of what is traced below functions and ops that a model's graph holds, as an argument of theirs: torch's cache of graphs
# on disk knows them by names and arguments alone
CODE_DIGEST = digest_code("layer", "kernels", "private")
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None), str, float, int, bool}


class Form:
    """The flat form of a function's arguments, of which NamedTuples may hold further ones: their leaves, and the
    positions at which each tuple begins and ends."""

    def __init__(self, hints: dict[str, Any]):
        self.leaves: dict[str, Any] = {}  # their types, by the names of the fields that lead to them, joined by _
        self.positions: dict[str, slice] = {}  # of the leaves of each tuple, by the same names
        self._tuples: list[tuple[Any, int, int]] = []  # what makes one, and of which positions
        for name, hint in hints.items():
            self._add(name, "", hint)
        self._tuples.sort(key=lambda each: -each[1])  # from the end, so that positions before it stay as they are

    def _add(self, name: str, prefix: str, hint: Any) -> None:
        if not (isinstance(hint, type) and issubclass(hint, tuple)):
            self.leaves[name] = hint
            return
        start, fields = len(self.leaves), typing.get_type_hints(hint)
        for field, annotation in fields.items():
            self._add(prefix + field, f"{prefix}{field}_", annotation)
        self.positions[name] = slice(start, len(self.leaves))
        self._tuples.append((functools.partial(tuple.__new__, hint), start, start + len(fields)))

    def nest(self, leaves: Iterable[Any]) -> list[Any]:
        """Make the arguments of their leaves."""
        nested = list(leaves)
        for make, start, end in self._tuples:
            nested[start:end] = [make(nested[start:end])]
        return nested


class Op:
    """The op sonicmoe_hf::<function's name>, which calls `function`. Its schema comes from the function's annotations,
    where the leaves of NamedTuples are arguments of the op, one after the other. The tensors of the function's first
    argument are those that the op can be differentiated by.

    fake: gives empty tensors of the results' shapes, from the same arguments.
    what: the user's name of the function.
    setup_context(ctx, arguments, output), backward(ctx, gradient): as of a torch.autograd.Function of the first
        argument's leaves that returns the function's results; backward gets the gradient of the first result, or None.
        Without them the op has no gradients.
    in_checkpoint(run, *arguments): where compiled backward computes again what it needs, gives the results by several
        ops, of which it may need some alone; `run` is the op, of leaves.
    launches: of the same arguments as `function`, launches the kernels that it will launch; they are compiled ahead where
        the op is traced (ahead.py).
    """

    def __init__(
        self, function, fake, what: str, setup_context=None, backward=None, in_checkpoint=None, launches=None
    ):
        self.function, self.what, self._backward, self._in_checkpoint = function, what, backward, in_checkpoint
        hints = typing.get_type_hints(function)
        result = hints.pop("return")
        form = Form(hints)
        self.nest = form.nest
        self._num_first = len(Form(dict([next(iter(hints.items()))])).leaves)

        def flat(*leaves):
            return function(*form.nest(leaves))

        def fake_flat(*leaves):
            if launches is not None:
                ahead.begin(launches, form, leaves)
            return fake(*form.nest(leaves))

        def with_autograd(keyset, *leaves):
            return self._with_autograd(keyset, leaves)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        vars(flat)["__signature__"] = inspect.Signature(
            [inspect.Parameter(name, kind, annotation=hint) for name, hint in form.leaves.items()],
            return_annotation=result,
        )
        name = function.__name__.lstrip("_")
        _LIBRARY.define(name + torch.library.infer_schema(flat, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, disable_dynamo(flat), "CompositeExplicitAutograd")
        _LIBRARY.impl(name, disable_dynamo(with_autograd), "Autograd", with_keyset=True)
        torch.library.register_fake(f"sonicmoe_hf::{name}", fake_flat, lib=_LIBRARY)
        self._overload = getattr(torch.ops.sonicmoe_hf, name).default
        self._dispatch = replace_call(self._overload, self._call_overload)
        self._apply = autograd_function(what, setup_context, backward).apply

    def __call__(self, differentiable: bool, *arguments):
        """Compute the function's results. differentiable: whether a gradient of the first argument may be asked for.

        Raises:
            NotImplementedError: see `traced`.
        """
        leaves = leaves_of(arguments[:1])
        if traced(self.what, *leaves):
            return self._overload(*leaves_of(arguments))
        if differentiable:
            return self._apply(*leaves, arguments, self.function)
        return self.function(*arguments)

    def _with_autograd(self, keyset, leaves):
        """Run the op above the kernels of devices and tracers."""
        if are_functorch_transforms_active():
            raise NotImplementedError(_unsupported_message(self.what))
        run = below_autograd(self._overload, keyset)
        if self._backward and self._has_gradient(leaves):
            nested, compute = self.nest(leaves), lambda *_: run(*leaves)
            if self._in_checkpoint and is_traced_in_checkpoint():
                compute = functools.partial(self._in_checkpoint, run)
            return list(self._apply(*leaves[: self._num_first], nested, compute))
        return run(*leaves)

    def _call_overload(self, *leaves):
        """Call the function in place of the OpOverload that compiled code calls, unless something looks at ops."""
        is_transformed = are_functorch_transforms_active() or torch.jit.is_tracing()
        is_watched = num_dispatch_modes() > 0 or is_in_pre_dispatch_mode()
        is_plain = _PLAIN.issuperset(map(type, leaves[: self._num_first]))
        if is_transformed or is_watched or not is_plain or self._has_gradient(leaves):
            return self._dispatch(*leaves)
        return self.function(*self.nest(leaves))

    def _has_gradient(self, leaves) -> bool:
        first = leaves[: self._num_first]
        return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in first)


class GradientOp(Op):
    """An op whose first argument is a gradient, for the backward of the function that a user calls `what`: to be
    differentiated by nothing, since there are no second derivatives."""

    def __init__(self, function, fake, what: str, launches=None):
        def refuse(ctx, gradient):
            raise RuntimeError(f"{what} has no second derivatives: its gradients cannot be differentiated again")

        super().__init__(function, fake, what, lambda ctx, arguments, output: None, refuse, launches=launches)

    def gradients(self, gradient: torch.Tensor, *arguments):
        """Compute the function's results. Under create_graph=True, whatever is derived from them meets the refusal."""
        has_graph = torch.is_grad_enabled()
        if has_graph and not gradient.requires_grad:
            gradient = gradient.detach().requires_grad_()
        return self(has_graph, gradient, *arguments)


def autograd_function(what: str, setup_context, backward):
    """Make the torch.autograd.Function of an op; its arguments: the leaves that it is differentiated by, all arguments,
    and what is called with them."""

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            *_, arguments, run = given  # the leaves before them are there for autograd to see
            output = run(*arguments)
            setup_context(ctx, arguments, output)
            return tuple(output)

        @staticmethod
        def backward(ctx, *gradients):
            if gradients[0] is not None and is_legacy_batchedtensor(gradients[0]):
                raise NotImplementedError(_unsupported_message(what))
            inputs = backward(ctx, gradients[0])
            return *inputs, *(None,) * (len(ctx.needs_input_grad) - len(inputs))

    return Differentiable


def _unsupported_message(what: str) -> str:
    return (
        f"{what} works neither with torch.func (grad, vmap, jvp, ...) nor with forward-mode derivatives, gradients in a "
        "batch (is_grads_batched=True, vectorize=True) or torch.jit.trace; use backward() or torch.autograd.grad, one "
        "gradient at a time, and torch.export"
    )


def are_needed(nodes) -> list[bool]:
    """Tell whether the running backward goes on to each of `nodes`, a backward node's `next_functions` or None:
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


def traced(what: str, *leaves) -> bool:
    """Tell whether a call of `what` must be one of the op: under torch.compile, torch.export, a dispatch mode, or where a
    tensor among the leaves is of a subclass, as a DTensor or a FakeTensor is.

    Raises:
        NotImplementedError: under torch.func, torch.jit.trace, or with forward-mode derivatives.
    """
    if torch.compiler.is_compiling():
        return True
    if are_functorch_transforms_active() or torch.jit.is_tracing() or forward_mode_level() >= 0:
        raise NotImplementedError(_unsupported_message(what))
    return num_dispatch_modes() > 0 or is_in_pre_dispatch_mode() or not _PLAIN.issuperset(map(type, leaves))
