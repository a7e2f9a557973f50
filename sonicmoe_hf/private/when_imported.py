"""Doing something once a module has been imported, by a finder on sys.meta_path: for programs that are not ours to
change, which `sonicmoe-hf run` starts. `import sonicmoe_hf` does not use it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


class _ThenCall(Loader):
    """A module's own loader; `action` is called when the module is complete."""

    def __init__(self, loader: Loader, action: Callable[[], object]):
        self.loader, self.action = loader, action

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader  # what reads sources and resources asks it
        self.loader.exec_module(module)
        self.action()


class _Watcher(MetaPathFinder):
    """Finds modules as everybody else does, and has an action follow the import of the watched ones."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[], object]]] = {}

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        actions = self.actions.get(fullname)
        if not actions:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if finder is not self and find is not None else None
            if spec is not None and spec.loader is not None:
                spec.loader = _ThenCall(spec.loader, lambda: self._run(fullname))
                return spec
        return None

    def _run(self, fullname: str) -> None:
        for action in self.actions.pop(fullname, ()):
            action()


_watcher = _Watcher()


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Call `action` once the module `name` has been imported: now, if it has been.

    An error that `action` raises fails the import, as an error of the module itself would.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action()
        return
    _watcher.actions.setdefault(name, []).append(action)
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
