"""Tapes: what a call allocates and launches, recorded once for its sizes and then run as straight-line Python.

One layer's forward and backward take some 15 launches. Between them the host chooses kernels, tiles and grids and
describes operands: all of that follows from sizes, and takes longer than the launches do. `Taped` calls a function
whose sizes come again under a `Recorder`, which writes a Python function that allocates, launches and frees the same in
that order. Later calls with tensors of these sizes run that:

    def scaled_sum(given):                          def tape(leaves, ...):
        x, y = given                                    t0, t1, *_ = leaves
        given.clear()
        scaled = torch.empty_like(x)                    b1 = t0.new_empty((4, 8, ))
        torch.mul(x, 2.0, out=scaled)                   c3(t0, c2, out=b1)
        del x                                           del t0
        out = torch.empty_like(y)                       b4 = t1.new_empty((2, 8, ))
        torch.add(scaled[:2], y, out=out)               v5 = b1.as_strided((2, 8), (8, 1), 0)
                                                        c6(v5, t1, out=b4)
        return [out]                                    return [b4]

t: given; b: made; v: a view; c: a constant of the tape, here 2.0 and the two operations.

A function can be recorded if it allocates, takes views, calls torch ops, and launches in ways that tell `recording()`, on
tensors that it was given or has made. Where it does something else (reads a value on the host, uses a tensor that came
from elsewhere), it is called as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Leaves = list  # of tensors and constants

ALIGNMENT = 16  # bytes; launches are prepared for pointers that are multiples of it
TAPES = 4096  # of one function, at most: one for each combination of sizes, constants and layout
# Of those with the same sizes. Recording takes ten times as long as the call, which sizes that seldom come again, such as
# the rows that a rank of expert parallelism receives, would never make up for; a model's layers share theirs.
RECORDED_CALL = 4
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CONSTANTS = (type(None), bool, int, str, float, torch.dtype, torch.device, torch.layout, torch.memory_format)
_HERE = contextlib.nullcontext()
_thread = threading.local()
Tape = Callable[[Leaves, list], "list[torch.Tensor] | None"]


def recording() -> Recorder | None:
    """Look up this thread's recorder; None outside of a recording."""
    return getattr(_thread, "recorder", None)


@contextlib.contextmanager
def launching(device: int):
    """Wrap a launch on this GPU, which need not be the current one (-1: a CPU); yield the recorder to note it, or
    None."""
    recorder = recording()
    elsewhere = device >= 0 and device != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else _HERE, _HERE if recorder is None else recorder.noting():
        yield recorder


class Unrecordable(Exception):
    """Raised where a call does something that no line of a tape can repeat."""


class _Expression(str):
    """Source of a value, which stands in a line of a tape as it is."""


class _Root(NamedTuple):
    """A tensor that a tape has a name for: one that it is given, or makes. Views of it are written as `as_strided`."""

    name: str
    address: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_given: bool
    views: dict[Any, str]


def leaves_of(arguments: Sequence[Any]) -> Leaves:
    """Flatten the arguments: the items of tuples among them, also of tuples in tuples, replace these."""
    leaves = []
    for argument in arguments:
        if isinstance(argument, tuple):
            leaves += leaves_of(argument)
        else:
            leaves.append(argument)
    return leaves


def _extent(tensor: torch.Tensor) -> int:
    """Count the bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    elements = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
    return elements * tensor.element_size()


class Recorder(TorchDispatchMode):
    """Writes the tape of a call with these leaves, of whose tensors no two may share memory and none may be empty."""

    def __init__(self, leaves: Leaves):
        super().__init__()
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.problem: str | None = None
        self.guards: set[Callable[[], bool]] = set()
        self._beginning: dict[str, _Expression] = {}
        self._names: dict[int, _Expression] = {}  # of constants, by id
        self._is_paused = False
        self._count = 0
        self._memory: dict[int, tuple[StorageWeakRef, list[_Root]]] = {}  # by the storage
        self._device = leaves[0].device
        tensors = ((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        self._given = [self._add(tensor, f"t{i}", True) for i, tensor in tensors]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self._is_paused:
            return function(*args, **(kwargs or {}))
        with self.noting():
            result = function(*args, **(kwargs or {}))
            self._note(function, args, kwargs or {}, result)
        return result

    @contextlib.contextmanager
    def noting(self):
        """Wrap a launch and its note, so that operations of torch inside the launch are not noted too."""
        self._free()
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        except Unrecordable as problem:
            self.problem = self.problem or str(problem)
        finally:
            self._is_paused = was_paused

    def call(self, function: Callable, *arguments, **options) -> None:
        """Note a launch as this call, which changes nothing but tensors' contents."""
        self.lines.append(self.made(function, *arguments, **options))

    def expression(self, value) -> _Expression:
        """Write source of a value."""
        if isinstance(value, _Expression):
            return value
        if isinstance(value, torch.Tensor):
            return _Expression(self._tensor(value))
        if type(value) in (list, tuple):
            given = "".join(f"{self.expression(each)}, " for each in value)
            return _Expression(f"[{given}]" if type(value) is list else f"({given})")
        if isinstance(value, _CONSTANTS):
            return self.constant(value)
        raise Unrecordable(f"an argument of {type(value)}")

    def pointer(self, tensor: torch.Tensor | None) -> _Expression:
        """Write source of a tensor's address, or of None."""
        if tensor is None:
            return _Expression("None")
        root = self._root(tensor)
        offset = tensor.data_ptr() - root.address
        return _Expression(f"{root.name}.data_ptr(){f' + {offset}' if offset else ''}")

    def made(self, function: Callable | _Expression, *arguments, **options) -> _Expression:
        """Write source of this call of a function."""
        given = [self.expression(argument) for argument in arguments]
        given += [_Expression(f"{name}={self.expression(value)}") for name, value in options.items()]
        name = function if isinstance(function, _Expression) else self.constant(function)
        return _Expression(f"{name}({', '.join(given)})")

    def once(self, function: Callable, *arguments) -> _Expression:
        """Write source of a call that the tape makes once, before its other lines."""
        source = self.made(function, *arguments)
        return self._beginning.setdefault(source, _Expression(self._new_name("a")))

    def finish(self, result) -> Tape:
        """Compile the tape. It takes leaves of the same sizes, and the list that has those to be freed, empties both, and
        gives the function's results; or None, having done nothing, where it is not for these.

        Raises:
            Unrecordable: with what was met.
        """
        if self.problem:
            raise Unrecordable(self.problem)
        results = ", ".join(self._tensor(tensor) for tensor in result)
        given = {root.name for root in self._given}
        last = max((int(name[1:]) for name in given), default=-1)
        names = ", ".join(f"t{i}" if f"t{i}" in given else "_" for i in range(last + 1))
        addresses = " | ".join(f"{root.name}.data_ptr()" for root in self._given)
        guards = "".join(f" or {self.constant(guard)}()" for guard in self.guards)
        if self._device.type == "cuda":
            guards += f" or {self.constant(torch.cuda.current_device)}() != {self._device.index}"
        source = "\n    ".join(
            [
                "def tape(leaves, given):",
                f"{names}, *_ = leaves",
                f"if ({addresses}) % {ALIGNMENT}{guards}: return None",
                "del _",
                "leaves.clear()",
                "given.clear()",
                *(f"{name} = {source}" for source, name in self._beginning.items()),
                *self.lines,
                f"return [{results}]",
            ]
        )
        scope = dict(self.constants)
        exec(compile(source, "<tape>", "exec"), scope)
        tape = scope["tape"]
        tape.source = source
        return tape

    def _new_name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def constant(self, value) -> _Expression:
        """Write source of a value that holds no tensors and does not change; the tape keeps it."""
        if value is None or type(value) in (bool, int, str):
            return _Expression(repr(value))
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = _Expression(self._new_name("c"))
            self.constants[name] = value
        return name

    def _add(self, tensor: torch.Tensor, name: str, is_given: bool) -> _Root:
        reference = StorageWeakRef(tensor.untyped_storage())
        address = tensor.data_ptr()
        root = _Root(
            name, address, address + _extent(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), is_given, {}
        )
        self._memory.setdefault(reference.cdata, (reference, []))[1].append(root)
        return root

    def _roots(self, tensor: torch.Tensor) -> list[_Root]:
        """List the roots in a tensor's storage."""
        return self._memory.get(StorageWeakRef(tensor.untyped_storage()).cdata, (None, []))[1]

    def _root(self, tensor: torch.Tensor) -> _Root:
        """Find the root in whose memory a tensor lies."""
        roots, address = self._roots(tensor), tensor.data_ptr()
        for root in roots:
            if not root.is_given or root.address <= address < root.end:
                return root
        raise Unrecordable(f"a tensor {tuple(tensor.shape)} that the call was not given")

    def _tensor(self, tensor: torch.Tensor) -> str:
        root = self._root(tensor)
        shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.data_ptr() - root.address
        if (offset, tensor.dtype, shape, strides) == (0, root.dtype, root.shape, root.strides):
            return root.name
        key = offset, tensor.dtype, shape, strides
        name = root.views.get(key)
        if name is None:
            name = root.views[key] = self._new_name("v")
            of, size = root.name, tensor.element_size()
            if tensor.dtype != root.dtype:
                of = f"{of}.view({self.constant(tensor.dtype)})"
                if root.strides and (root.strides[-1] != 1 or root.shape[-1] * root.dtype.itemsize % size):
                    raise Unrecordable(f"a view of {root.dtype} as {tensor.dtype}")
            if offset % size:
                raise Unrecordable("a view between elements")
            start = f"{of}.storage_offset() + " if root.is_given else ""
            self.lines.append(f"{name} = {of}.as_strided({shape}, {strides}, {start}{offset // size})")
        return name

    def _free(self) -> None:
        """Delete the tape's name of each tensor that the function has freed since the last line."""
        for key, (reference, roots) in list(self._memory.items()):
            if reference.expired():
                names = [name for root in roots for name in (root.name, *root.views.values())]
                self.lines.append(f"del {', '.join(names)}")
                del self._memory[key]

    def _allocation(self, tensor: torch.Tensor) -> str:
        """Write source of an empty tensor like this one, by a method of a given one: half the time of torch.empty."""
        alive = [root for root in self._given if any(root in roots for _, roots in self._memory.values())]
        if not alive:
            like = {"dtype": tensor.dtype, "device": tensor.device}
            return self.made(torch.empty_strided, tuple(tensor.shape), tensor.stride(), **like)
        root = next((root for root in alive if root.dtype == tensor.dtype), alive[0])
        dtype = {} if root.dtype == tensor.dtype else {"dtype": tensor.dtype}
        shape, strides = tuple(tensor.shape), tensor.stride()
        if strides == torch.empty(shape, dtype=torch.uint8, device="meta").stride():
            return self.made(_Expression(f"{root.name}.new_empty"), shape, **dtype)
        return self.made(_Expression(f"{root.name}.new_empty_strided"), shape, strides, **dtype)

    def _note(self, function, args, kwargs, result) -> None:
        if _DEPENDS_ON_VALUES.intersection(function.tags):
            raise Unrecordable(f"what {function} gives depends on values")
        results = [result] if isinstance(result, torch.Tensor) else result
        if not isinstance(results, (list, tuple)) or not all(isinstance(each, torch.Tensor) for each in results):
            raise Unrecordable(f"{function} gives {type(result).__name__}")
        if any(each.device != self._device for each in results):
            raise Unrecordable(f"{function} gives a tensor of another device")
        is_new = [not self._roots(each) for each in results]
        if function in _ALLOCATIONS:
            name = self._new_name("b")
            self.lines.append(f"{name} = {self._allocation(result)}")
            self._add(result, name, False)
        elif any(is_new) or function._schema.is_mutable:
            call = self.made(function, *args, **kwargs)
            if not any(is_new):
                self.lines.append(call)
                return
            if not all(is_new):
                raise Unrecordable(f"{function} gives new tensors and views")
            names = [self._new_name("b") for _ in results]
            self.lines.append(f"{', '.join(names)}{'' if result is results[0] else ','} = {call}")
            for each, name in zip(results, names):
                self._add(each, name, False)


def _share_memory(tensors: list[torch.Tensor]) -> bool:
    extents = sorted((tensor.data_ptr(), _extent(tensor)) for tensor in tensors)
    return any(start + size > following for (start, size), (following, _) in itertools.pairwise(extents))


def _never(leaves, given):
    return None


class Taped:
    """Runs `function(given, *others)`, which empties the list `given` and returns a list of tensors, by its tape.

    The arguments, and what is in the list, are tensors, constants, and tuples of such and of tuples; the first leaf is a
    tensor, and all tensors are on one device. What the function does follows from the tensors' sizes and the constants
    alone.
    derived: the slice of the leaves that are tensors without gaps, whose sizes follow from the other leaves.
    """

    def __init__(self, function: Callable[..., list[torch.Tensor]], derived: slice = slice(0, 0)):
        self.function, self.derived = function, derived
        self.tapes: dict[Any, Tape] = {}
        self._counts: dict[Any, int] = {}  # of calls with sizes that have no tape

    def __call__(self, given: list[Any], *others: Any) -> list[torch.Tensor]:
        if recording() is not None:  # the other function's tape has this one's lines
            return self.function(given, *others)
        leaves = leaves_of((*given, *others))
        sizes = [
            (x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x
            for x in leaves[: self.derived.start] + leaves[self.derived.stop :]
        ]
        key = (leaves[0].get_device(), *sizes)
        tape = self.tapes.get(key)
        if tape is not None:
            result = tape(leaves, given)
            if result is not None:
                return result
        elif self._is_due(key) and _can_be_recorded(leaves):
            return self._record(key, leaves, given, others)
        leaves.clear()
        return self.function(given, *others)

    def _is_due(self, key) -> bool:
        if len(self._counts) >= TAPES:
            self._counts.clear()
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key] >= RECORDED_CALL

    def _record(self, key, leaves: Leaves, given: list[Any], others: tuple) -> list[torch.Tensor]:
        recorder = Recorder(leaves)
        leaves.clear()
        _thread.recorder = recorder
        try:
            with recorder:
                result = self.function(given, *others)
        finally:
            _thread.recorder = None
        if len(self.tapes) >= TAPES:
            self.tapes.clear()
        self._counts.pop(key, None)
        try:
            self.tapes[key] = recorder.finish(result)
        except Unrecordable:
            self.tapes[key] = _never
        return result


def _can_be_recorded(leaves: Leaves) -> bool:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    is_ordinary = all(t.numel() and t.data_ptr() % ALIGNMENT == 0 for t in tensors) and not _share_memory(tensors)
    index = tensors[0].get_device()
    return is_ordinary and (index < 0 or index == torch.cuda.current_device())
