"""Python imports this as it starts, because `sonicmoe-hf run` has put this folder on PYTHONPATH.

The models of this process are patched as they are built. Nothing of Transformers or of this package is imported before
the program does so, because programs set variables such as HF_HOME first. Last comes the sitecustomize that this hides.
"""

import functools
import importlib.util
import json
import os
import sys
from importlib.machinery import PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, *[os.pardir] * 4))  # what holds the package sonicmoe_hf


def load(name, folders):
    """Import a module from these folders alone; nothing where they have none."""
    spec = PathFinder.find_spec(name, folders)
    if spec is not None and spec.loader is not None:
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


@functools.cache
def session():
    """Import the session, which patches and reports the models of this process, at the first model."""
    if "sonicmoe_hf" not in sys.modules:
        load("sonicmoe_hf", [ROOT])  # the one that the command is of, also where another is installed
    from sonicmoe_hf.tools.autopatch.session import session

    enter()
    return session()


# functions of others in whose place ours are, until the package that registers them is imported
REPLACED: list[tuple] = []


def replace(owner, name, ours):
    """Put a function in the place of another, and enter both in the package's register once there is one."""
    REPLACED.append((owner, name, vars(owner)[name], ours))
    setattr(owner, name, ours)
    if "sonicmoe_hf.private.replaced" in sys.modules:
        enter()


def enter():
    """Enter in the package's register the functions replaced before it was imported: `uninstall` restores them."""
    from sonicmoe_hf.private.replaced import REPLACED as REGISTER
    from sonicmoe_hf.private.replaced import RUN, Replaced

    REGISTER.extend(Replaced(owner, name, original, ours, RUN) for owner, name, original, ours in REPLACED)
    REPLACED.clear()


def follow_models(modeling_utils):
    """Make constructors and from_pretrained of Transformers' models call the session."""
    model = modeling_utils.PreTrainedModel
    built, load_model = model.post_init, vars(model)["from_pretrained"].__func__

    @functools.wraps(built)
    def post_init(self):
        built(self)
        session().built(self)

    @functools.wraps(load_model)
    def from_pretrained(cls, *args, **kwargs):
        return session().load(functools.partial(load_model, cls), cls, args, kwargs)

    replace(model, "post_init", post_init)
    replace(model, "from_pretrained", classmethod(from_pretrained))
    if "SONICMOE_HF_REACHED" in os.environ:
        open(os.environ["SONICMOE_HF_REACHED"], "w").close()


def follow_grpo(grpo_trainer):
    """Make TRL's GRPOTrainer one that sends vLLM adapters, where it would send whole weights."""
    trainer = grpo_trainer.GRPOTrainer
    made = trainer.__init__

    @functools.wraps(made)
    def __init__(self, *args, **kwargs):
        session().make_grpo(self, functools.partial(made, self), args, kwargs)

    replace(trainer, "__init__", __init__)


class FirstImport:
    """A finder of one module, once: everybody else's finders find it, and `follow` comes after its import."""

    def __init__(self, module, follow):
        self.module, self.follow = module, follow

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.follow(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


settings = os.environ.get("SONICMOE_HF_RUN")
if settings and os.path.realpath(json.loads(settings)["prefix"]) == os.path.realpath(sys.prefix):
    if "transformers.modeling_utils" in sys.modules:  # which a .pth file has imported
        follow_models(sys.modules["transformers.modeling_utils"])
    else:
        sys.meta_path.insert(0, FirstImport("transformers.modeling_utils", follow_models))
    sys.meta_path.insert(0, FirstImport("trl.trainer.grpo_trainer", follow_grpo))
load("sitecustomize", [folder for folder in sys.path if os.path.abspath(folder) != HERE])
