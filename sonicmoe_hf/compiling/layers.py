"""compile_layers: torch.compile of each layer on its own, a decoder's or one of vision or audio."""

from __future__ import annotations

from typing import Any

import torch
from packaging.version import Version
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from ..layer.holding import expert_parallelism
from ..layer.moe_experts import IN_GRAPHS
from ..layer.torch_op import CODE_DIGEST
from ..private import attributes
from ..private.torch import (
    allow_caching,
    allow_recompilations,
    begin_compile_workers,
    set_compiled_call,
)
from .compiled_module import CompiledModule, compiled_modules

logger = logging.get_logger(__name__)

CAPTURED_MODES = "reduce-overhead", "max-autotune"  # Inductor's, with CUDA graphs
# torch's own 8 are for all models together: kinds of layers, with and without padding, of the first size and of any
RECOMPILATIONS = 64
# what torch's cache on disk may take into graphs, and what it depends on beside arguments
CACHED = dict.fromkeys(IN_GRAPHS, CODE_DIGEST)
if Version(torch.__version__) < Version("2.13"):
    # keeps the state of random numbers for a GPU's attention that is computed again; newer versions take it by themselves
    CACHED["torch.ops.higher_order.graphsafe_run_with_rng_state"] = torch.__version__
NOT_CAPTURED = (
    "sonicmoe_hf: mode={mode!r} captures no CUDA graphs of {layers}, whose attention runs partly in Python: what is "
    "beside it is compiled as without the mode"
)


def compile_layers(model: nn.Module, **options) -> int:
    """Compile each layer of a model in place, of vision and audio too: one compilation serves all layers that are alike.

    Call it when the model is patched and quantized. Adapters and gradient checkpointing may come before or after; a layer
    is then computed again inside its own compiled code. A model compiled as a whole computes the same, but every layer of
    it is compiled anew, and Transformers builds a causal mask inside it.

    Where nothing is trained, as in evaluation and generation, layers run uncompiled. With `mode="reduce-overhead"` a
    layer's kernels are captured as CUDA graphs, for batches of one size; where sizes vary, layers run as without it.

    Where ranks share the experts, attention, norms, routers and shared experts are compiled, each on its own. So are
    attention, norms and the block of experts in models of sparse attention, whose indexers and attention in pieces of
    queries run in Python and are not captured as graphs.

    Args:
        model: a Transformers model, PEFT's or Trainer's wrapper of one.
        options: of torch.compile, such as `mode` or `dynamic`. Lengths that change are compiled once more, for all.
    Returns:
        How many layers there are.
    Raises:
        ValueError: the model has no layer of Transformers' (a GradientCheckpointingLayer).
    Warns:
        UserWarning: at a layer's first compiled call, where torch.compile left a part to Python, with torch's reason.

    Example:
        model = get_peft_model(model, sonicmoe_hf.lora_config(model))
        sonicmoe_hf.compile_layers(model, mode="reduce-overhead")
    """
    layers = checkpointable_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that Transformers could checkpoint; use torch.compile(model)"
        )
    begin_compiling(options)
    allow_recompilations(RECOMPILATIONS)
    allow_caching(CACHED)
    partly_in_python = {type(layer) for layer in layers if _runs_partly_in_python(layer)}
    captures = options.get("mode") in CAPTURED_MODES
    if captures and partly_in_python:
        names = " and ".join(sorted(cls.__name__ for cls in partly_in_python))
        logger.warning(NOT_CAPTURED.format(mode=options["mode"], layers=names))
    captured = _write_settings(options, True) if captures else options
    uncaptured = _write_settings(options, False) if captures else options
    for layer in layers:
        is_partly_in_python = type(layer) in partly_in_python
        is_captured = captures and not is_partly_in_python
        for module in _modules_of(layer, is_partly_in_python):
            module.compile(**(captured if is_captured else uncaptured))
            set_compiled_call(module, CompiledModule(module, layer, is_captured))
    return len(layers)


def begin_compiling(options: dict[str, Any]) -> None:
    """Begin the processes that compile kernels for a GPU, seconds before these options of torch.compile need them."""
    if options.get("backend", "inductor") == "inductor" and torch.cuda.is_available():
        begin_compile_workers()


def _write_settings(options: dict[str, Any], is_captured: bool) -> dict[str, Any]:
    """Write torch.compile's options with a mode of CAPTURED_MODES as Inductor's settings, without CUDA graphs where
    layers are not to be captured; else for batches of one size, each graph whole: torch 2.11 takes indices for sizes that
    vary, and would leave most of a layer out of its graphs."""
    inductor = torch._inductor.list_mode_options(options["mode"])
    whole = {"graph_partition": False, "triton.cudagraph_skip_dynamic_graphs": True}
    settings = {**inductor, **whole, **(options.get("options") or {})}
    if not is_captured:
        settings["triton.cudagraphs"] = False
    return {**{name: value for name, value in options.items() if name != "mode"}, "options": settings}


def expect_lengths(model: nn.Module) -> None:
    """Let compiled layers take any number of tokens from their first call on. By itself torch compiles them for the
    first number, and again for any."""
    for module in compiled_modules(model):
        module.takes_any_length = True


def checkpointable_layers(model: nn.Module) -> list[nn.Module]:
    """List the layers that `compile_layers` compiles: all that Transformers could checkpoint, of vision and audio too."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def why_in_python(model: nn.Module) -> list[str]:
    """Say of a model with compiled layers what torch left to Python, each reason once with its remedy; [] of nothing."""
    return sorted({reason for module in compiled_modules(model) for reason in module.reasons})


def can_capture(model: nn.Module) -> bool:
    """Tell whether compiled layers could be captured as CUDA graphs, and are not."""
    compiled = compiled_modules(model)
    return bool(compiled) and all(each.module is each.layer and not each.is_captured for each in compiled)


def _modules_of(layer: nn.Module, partly_in_python: bool) -> list[nn.Module]:
    """List the modules to compile of a layer: as a rule the layer itself. Where ranks share its experts, all modules in
    it but those; where its attention runs partly in Python, each of its modules, because torch would leave a checkpointed
    layer to Python as a whole."""
    if not _has_shares(layer):
        return list(layer.children()) if partly_in_python else [layer]
    beside: list[nn.Module] = []
    for child in layer.children():
        beside += child.children() if _has_shares(child) else [child]
    return [module for module in beside if not _has_shares(module)]


def _has_shares(module: nn.Module) -> bool:
    return any(expert_parallelism(each) is not None for each in module.modules())


def _runs_partly_in_python(layer: nn.Module) -> bool:
    """Tell whether a layer's attention runs partly in Python (attention/indexers.py)."""
    return any(vars(module).get(attributes.OUR_FORWARD) for module in layer.modules())
