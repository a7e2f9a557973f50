"""The modules of kernels/hopper, run from their source over the stand-in for the DSL in dsl.py.

The source is changed in three ways only: a function that may wait becomes a generator and its calls `yield from` it, what
stands under `elect_one()` is a condition, and `x.to(kind)` and `x.bitcast(kind)` become functions, so that numbers are
Python's own.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import sys
import types
from pathlib import Path

from sonicmoe_hf.kernels import hopper

from . import dsl

FOLDER = Path(hopper.__file__).parent
PACKAGE = "hopper_from_source"
WAITING = {  # what the DSL has that may wait
    "mbarrier_wait",
    "sync_warp",
    "sync_threads",
    "barrier",
    "shuffle_sync",
    "shuffle_sync_bfly",
    "wait_group",
    "elect_one",
}
PARAMETERS = {"mainloop"}  # of functions, which may wait as well
REPLACED = {  # config: its classes are those that the backend passes
    "ptx": dsl.ptx,
    "config": hopper.config,
    "cache": types.SimpleNamespace(cached=lambda function: function),
}


def _called(node) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def _is_kernel(function) -> bool:
    return any(ast.unparse(decorator) == "cute.kernel" for decorator in function.decorator_list)


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {path.stem: ast.parse(path.read_text()) for path in FOLDER.glob("*.py") if path.stem not in REPLACED}


@functools.cache
def names_that_wait() -> frozenset[str]:
    """Find the functions that call one that may wait, and so on."""
    functions = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = WAITING | PARAMETERS
    while more := {
        function.name
        for function in functions
        if function.name not in names
        and not _is_kernel(function)
        and any(_called(node) in names for node in ast.walk(function))
    }:
        names |= more
    return frozenset(names)


class Rewriter(ast.NodeTransformer):
    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.returns = None
        for argument in (*node.args.args, *node.args.kwonlyargs, *filter(None, [node.args.vararg])):
            argument.annotation = None
        if node.name in names_that_wait() or _is_kernel(node):
            node.body.insert(0, ast.parse("if False: yield").body[0])
        return node

    def visit_With(self, node):
        is_election = _called(node.items[0].context_expr) == "elect_one"
        self.generic_visit(node)
        return ast.If(node.items[0].context_expr, node.body, []) if is_election else node

    def visit_Call(self, node):
        self.generic_visit(node)
        name = _called(node)
        if name in ("to", "bitcast"):
            return ast.Call(ast.Name(f"{name}_kind", ast.Load()), [node.func.value, *node.args], [])
        return ast.YieldFrom(node) if name in names_that_wait() else node


@functools.cache
def module(name: str) -> types.ModuleType:
    """Load kernels/hopper/<name>.py."""
    if name in REPLACED:
        return REPLACED[name]
    found = types.ModuleType(f"{PACKAGE}.{name}")
    sys.modules[found.__name__] = found  # where dataclasses look

    def import_of_module(name, globals_=None, locals_=None, fromlist=(), level=0):
        if level == 1:
            return module(name)
        if level == 2:
            return importlib.import_module(f"sonicmoe_hf.kernels.{name}")
        if name.partition(".")[0] in ("cutlass", "cuda"):
            return dsl.import_module(name, fromlist)
        return builtins.__import__(name, globals_, locals_, fromlist, level)

    found.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_of_module}
    found.__dict__.update({"to_kind": dsl.to_kind, "bitcast_kind": dsl.bitcast_kind})
    tree = Rewriter().visit(trees()[name])
    if name == "arrivals":  # a thread comes by the arrivals of its own role alone
        tree.body.append(ast.parse("Arrivals.check = lambda self: None").body[0])
    ast.fix_missing_locations(tree)
    exec(compile(tree, str(FOLDER / f"{name}.py"), "exec", dont_inherit=True), found.__dict__)
    return found
