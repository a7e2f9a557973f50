"""What a process of `sonicmoe-hf run` has follow the import of Transformers: its models and Trainers call the Session.

This imports nothing of sonicmoe_hf, whose import is that of Transformers, until the first model: Transformers is complete
then, and a Python that builds no model starts as fast as by itself.
"""

import functools
import importlib.util
import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder

ROOT = os.path.abspath(os.path.join(__file__, *[os.pardir] * 4))  # what holds the package sonicmoe_hf


def load(name, folders):
    """Import a module from these folders alone; nothing where they have none."""
    spec = PathFinder.find_spec(name, folders)
    if spec is not None and spec.loader is not None:
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def is_meant(variable):
    """Whether the settings in the environment variable are for this Python's environment."""
    return os.path.realpath(json.loads(variable)["prefix"]) == os.path.realpath(sys.prefix)


def install():
    """Have every model that this process builds from now on patched."""
    actions = {"transformers.modeling_utils": _follow_models, "transformers.trainer": _follow_trainers}
    sys.meta_path.insert(0, _Watcher(actions))
    for name in actions.keys() & sys.modules.keys():  # what another sitecustomize or a .pth file has imported
        actions[name](sys.modules[name])


@functools.cache
def _session():
    if "sonicmoe_hf" not in sys.modules:
        load("sonicmoe_hf", [ROOT])  # the one that the command is of, also where another is installed
    from sonicmoe_hf.autopatch.session import session

    return session()


def _follow_models(module):
    model = module.PreTrainedModel
    built, load_model = model.post_init, vars(model)["from_pretrained"].__func__

    @functools.wraps(built)
    def post_init(self):
        built(self)
        _session().built(self)

    @functools.wraps(load_model)
    def from_pretrained(cls, *args, **kwargs):
        return _session().load(functools.partial(load_model, cls), cls, args, kwargs)

    model.post_init, model.from_pretrained = post_init, classmethod(from_pretrained)


def _follow_trainers(module):
    own = module.Trainer.train

    @functools.wraps(own)
    def train(self, *args, **kwargs):
        _session().prepare(self)
        return own(self, *args, **kwargs)

    module.Trainer.train = train


class _ThenCall(Loader):
    """A module's own loader; `action` is called with the module when it is complete."""

    def __init__(self, loader, action):
        self.loader, self.action = loader, action

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader  # what reads sources and resources asks it
        self.loader.exec_module(module)
        self.action(module)


class _Watcher(MetaPathFinder):
    """Finds modules as everybody else does, and has an action follow the import of the watched ones."""

    def __init__(self, actions):
        self.actions = actions

    def find_spec(self, fullname, path=None, target=None):
        action = self.actions.get(fullname)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if finder is not self and find is not None else None
            if spec is not None and spec.loader is not None:
                spec.loader = _ThenCall(spec.loader, action)
                return spec
        return None
