"""torch_compile=True of a Trainer's arguments after `attach`: layers compiled on their own, and no model as a whole."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DynamoBackend
from transformers import TrainerCallback
from transformers.utils import logging

from ..compiling.layers import begin_compiling, checkpointable_layers, compile_layers
from ..kernels.announce import is_first_rank
from ..private.torch import has_compiled_modules
from .methods import unwrap_method, wrap_method

logger = logging.get_logger(__name__)

SAID = "sonicmoe_hf: torch compiles each layer on its own{mode}, once for all that are alike; layers: {layers}"
BY_ARGUMENT = (
    "; the model is not compiled as a whole; attach(trainer, compile=False) leaves torch_compile to the Trainer"
)


class CompiledLayers(TrainerCallback):
    """Compiles a model's layers when training begins, where that is asked for. `attach` adds it to a Trainer, before
    callbacks that look whether anything is compiled.

    compile: what `attach` was given, by which `choose` finds the options.
    """

    def __init__(self) -> None:
        self.compile: bool | None = None
        self.options: dict[str, Any] | None = None

    def choose(self, trainer: Any, compile: bool | None) -> None:
        """Choose for a Trainer; compile=None leaves what was chosen before. While layers are to be compiled, its
        accelerator compiles no model as a whole."""
        self.compile = self.compile if compile is None else compile
        self.options = compile_options(trainer, self.compile)
        for name in ("prepare", "prepare_model"):
            if self.options is not None:
                wrap_method(trainer.accelerator, name, _without_dynamo)
            else:
                unwrap_method(trainer.accelerator, name, _without_dynamo)
        if self.options is not None:
            begin_compiling(self.options)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Compile the layers."""
        if model is not None and self.options is not None:
            compile_once(model, self.options, by_argument=self.compile is None)


def compile_options(trainer: Any, compile: bool | None) -> dict[str, Any] | None:
    """Choose the options with which `compile_layers` is to compile this Trainer's model, or None where it is not to.

    Args:
        compile: what `attach` was given: None is what the Trainer's arguments say.
    """
    args = trainer.args
    is_wanted = args.torch_compile if compile is None else compile
    if not is_wanted or not checkpointable_layers(trainer.model):
        return None
    options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    return {name: option for name, option in options.items() if option is not None}


def compile_once(model: Any, options: dict[str, Any], by_argument: bool) -> None:
    """Compile a model's layers, unless modules of it are compiled already, and say so.

    by_argument: the Trainer's torch_compile asks for it, which by itself compiles the model as a whole.
    """
    if has_compiled_modules(list(model.modules())):
        return
    count = compile_layers(model, **options)
    if is_first_rank():
        mode = f" in mode {options['mode']}" if "mode" in options else ""
        logger.warning(SAID.format(layers=count, mode=mode) + (BY_ARGUMENT if by_argument else ""))


def _without_dynamo(accelerator: Any, method: Any, *args, **kwargs) -> Any:
    """Call a method of an accelerator, whose state is that of all Trainers of the process, without torch.compile."""
    plugin = accelerator.state.dynamo_plugin
    backend, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        return method(*args, **kwargs)
    finally:
        plugin.backend = backend
