"""torch_compile=True of a Trainer's arguments after `attach`: layers compiled on their own, and no model as a whole."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DynamoBackend

from ..compiling.layers import decoder_layers
from .methods import wrap_method


def compile_options(trainer: Any, compile: bool | None) -> dict[str, Any] | None:
    """Return the options with which `compile_layers` is to compile this Trainer's model, or None where it is not to.

    From then on the Trainer's accelerator compiles no model as a whole.

    Args:
        compile: what `attach` was given: None is what the Trainer's arguments say.
    """
    args = trainer.args
    is_wanted = args.torch_compile if compile is None else compile
    if not is_wanted or not decoder_layers(trainer.model):
        return None
    for name in ("prepare", "prepare_model"):
        wrap_method(trainer.accelerator, name, _without_dynamo)
    options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    return {name: option for name, option in options.items() if option is not None}


def _without_dynamo(accelerator: Any, method: Any, *args, **kwargs) -> Any:
    """Call a method of an accelerator, whose state is that of all Trainers of the process, without torch.compile."""
    plugin = accelerator.state.dynamo_plugin
    backend, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        return method(*args, **kwargs)
    finally:
        plugin.backend = backend
