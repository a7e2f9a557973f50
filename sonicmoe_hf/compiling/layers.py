"""compile_layers: torch.compile of each decoder layer on its own, and a warning where it did not take one whole."""

from __future__ import annotations

import textwrap
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from ..kernels.announce import is_first_rank
from ..layer.holding import expert_parallelism
from ..layer.moe_experts import IN_GRAPHS
from ..layer.torch_op import SOURCE
from ..private import attributes
from ..private.torch import (
    IN_PYTHON,
    allow_caching,
    allow_recompilations,
    begin_compile_workers,
    compiled_call,
    compiled_graphs,
    eager_call,
    graph_breaks,
    has_compiled_modules,
    mark_as_any_size,
    set_compiled_call,
)
from ..private.transformers import recorded_outputs, recording_into
from .liger_tracing import trace_without_liger

logger = logging.get_logger(__name__)

CAPTURED_MODES = "reduce-overhead", "max-autotune"  # Inductor's, with CUDA graphs
# torch's own 8 are for all models together: kinds of layers, with and without padding, of the first size and of any
RECOMPILATIONS = 64
# what torch's cache on disk may take into graphs, and what it depends on beside arguments
CACHED = dict.fromkeys(IN_GRAPHS, SOURCE)
if Version(torch.__version__) < Version("2.13"):
    # keeps the state of random numbers for a GPU's attention that is computed again; newer versions take it by themselves
    CACHED["torch.ops.higher_order.graphsafe_run_with_rng_state"] = torch.__version__
SAID = "sonicmoe_hf: torch compiles each layer on its own{mode}, once for all that are alike; decoder layers: {layers}"
NOT_CAPTURED = (
    "sonicmoe_hf: mode={mode!r} captures no CUDA graphs of {layers}, whose attention runs partly in Python: what is "
    "beside it is compiled as without the mode"
)
OF_A_TRAINER = (
    "; the model is not compiled as a whole; attach(trainer, compile=False) leaves torch_compile to the Trainer"
)
WITHOUT_OFFLOADING = "train with gradient checkpointing that offloads nothing"
REMEDIES = {  # by a word of torch's reason
    "liger_kernel": "switch that kernel off in liger_kernel_config",
    "offload": WITHOUT_OFFLOADING,
    "save_on_cpu": WITHOUT_OFFLOADING,  # what Transformers' own checkpointing offloads by
    "contextvar": "train without output_hidden_states",
    "hook": "remove the module's hook",
}


def compile_layers(model: nn.Module, **options) -> int:
    """Compile each decoder layer of a model in place: one compilation serves all layers that are alike.

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
    layers = decoder_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no decoder layers that Transformers could checkpoint; use torch.compile(model)"
        )
    begin_compiling(options)
    allow_recompilations(RECOMPILATIONS)
    allow_caching(CACHED)
    partly_in_python = {type(layer) for layer in layers if _has_pieces(layer)}
    captures = options.get("mode") in CAPTURED_MODES
    if captures and partly_in_python:
        names = " and ".join(sorted(cls.__name__ for cls in partly_in_python))
        logger.warning(NOT_CAPTURED.format(mode=options["mode"], layers=names))
    settings = {captured: _write_settings(options, captured) if captures else options for captured in (True, False)}
    for layer in layers:
        is_partly_in_python = type(layer) in partly_in_python
        is_captured = captures and not is_partly_in_python
        for module in _modules_of(layer, is_partly_in_python):
            module.compile(**settings[is_captured])
            set_compiled_call(module, _Call(module, layer, is_captured))
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


def compile_once(model: Any, options: dict[str, Any], by_argument: bool) -> None:
    """Compile a model's layers, unless modules of it are compiled already, and say so.

    by_argument: a Trainer's torch_compile asks for it, which by itself compiles the model as a whole.
    """
    if has_compiled_modules(list(model.modules())):
        return
    count = compile_layers(model, **options)
    if is_first_rank():
        mode = f" in mode {options['mode']}" if "mode" in options else ""
        logger.warning(SAID.format(layers=count, mode=mode) + (OF_A_TRAINER if by_argument else ""))


def expect_lengths(model: nn.Module) -> None:
    """Let compiled layers take any number of tokens from their first call on. By itself torch compiles them for the
    first number, and again for any."""
    for call in calls_of_layers(model):
        call.takes_any_length = True


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """List the layers of a model that `compile_layers` compiles."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def why_in_python(model: nn.Module) -> list[str]:
    """Say of a model with compiled layers what torch left to Python, each reason once with its remedy; [] of nothing."""
    return sorted({reason for call in calls_of_layers(model) for reason in call.reasons})


def can_capture(model: nn.Module) -> bool:
    """Tell whether compiled layers could be captured as CUDA graphs, and are not."""
    calls = calls_of_layers(model)
    return bool(calls) and all(call.module is call.layer and not call.is_captured for call in calls)


def calls_of_layers(model: nn.Module) -> list[_Call]:
    """List the calls of what `compile_layers` compiled in a model; [] where it compiled nothing."""
    calls = (compiled_call(module) for module in model.modules())
    return [call for call in calls if isinstance(call, _Call)]


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


def _has_pieces(layer: nn.Module) -> bool:
    """Tell whether a layer's attention runs partly in Python (attention/indexers.py)."""
    return any(vars(module).get(attributes.IN_PIECES) for module in layer.modules())


def _first_words(reason: str) -> str:
    """Take the first line of torch's reason, and the code that it is about."""
    first, *rest = reason.splitlines()
    context = next((line for line in rest if "debug context:" in line), "").partition("debug context:")[2].strip()
    return f"{first} ({textwrap.shorten(context, 100)})" if context else first


def _mark_lengths(args: tuple, kwargs: dict) -> None:
    """Mark the dimensions of a layer's arguments that have as many elements as there are tokens in a sequence."""
    given = [each if isinstance(each, tuple) else (each,) for each in (*args, *kwargs.values())]
    tensors = [each for group in given for each in group if isinstance(each, torch.Tensor)]
    length = tensors[0].shape[-2] if tensors and tensors[0].dim() > 1 else 1
    for tensor in tensors:
        for dim in _dims_of_length(tensor):
            if tensor.shape[dim] == length > 1:
                mark_as_any_size(tensor, dim)


def _dims_of_length(tensor: torch.Tensor) -> tuple[int, ...]:
    """List the dimensions that are a sequence's tokens in states [B, L, H] or [T, H], ids [B, L], and masks [B, 1, L, L].
    Others may be as many, and torch compiles again where one more is marked."""
    last = tensor.dim() - 1
    if last >= 3:
        return last - 1, last
    return (last - 1,) if last >= 1 and tensor.is_floating_point() else (last,) * (last >= 0)


def _copy_first(parameter: weakref.ref, gradient: torch.Tensor) -> torch.Tensor:
    """Copy the first gradient of a parameter, which would stay in the graph's memory; others are added to it."""
    return gradient.clone() if getattr(parameter(), "grad", None) is None else gradient


# torch 2.11 computes wrong gradients of what a compiled layer records inside a checkpoint
RECORDS = Version(torch.__version__) >= Version("2.13")
UNCOMPILED = (
    f"torch {torch.__version__} does not compile layers that record outputs such as router_logits, so they run "
    "uncompiled; install torch 2.13 or newer, or leave the auxiliary loss out (router_aux_loss_coef=0.0 in the arguments "
    "of TRL's trainers, else model.config.output_router_logits = False)"
)


@contextmanager
def _traceable_records() -> Iterator[None]:
    """Make a compiled layer's records of outputs traceable, such as router_logits, which TRL's trainers ask for.

    The layer's own lists are empty at each call, so that layers are alike, and are added to those of the model's call. A
    record of hidden states depends on how many there are already: torch then leaves the layer to Python.
    """
    outputs = recorded_outputs()
    if outputs is None or "hidden_states" in outputs:
        yield
        return
    records: dict[str, list] = {name: [] for name in outputs}
    # a checkpoint's forward may write to them; what backward computes again is not to be recorded
    writing = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    with recording_into(records), writing if records else nullcontext():
        yield
    for name, recorded in records.items():
        outputs[name].extend(recorded)


class _Call:
    """The call of a layer, or of a module in it: of compiled code where the layer is trained, else of its own forward.

    A layer that is checkpointed is trained without gradients too, in its first forward. Evaluation and generation would
    be compiled apart, the latter for each layer, and a cache of keys and values would outlive a CUDA graph's memory.
    """

    def __init__(self, module: nn.Module, layer: nn.Module, is_captured: bool):
        self.module, self.layer, self.is_captured = module, layer, is_captured
        self.compiled, self.is_new = compiled_call(module), True
        self.reasons: set[str] = set()
        self.is_uncompiled = self.takes_any_length = False
        self.num_graphs, self.kept = -1, WeakTensorKeyDictionary()

    def __call__(self, *args, **kwargs):
        is_checkpointed = self.layer.gradient_checkpointing and self.layer.training and not self.is_captured
        if not (torch.is_grad_enabled() or is_checkpointed):
            return eager_call(self.module)(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self.compiled(*args, **kwargs)
        if not (RECORDS or self.is_uncompiled) and recorded_outputs():
            # from now on: a checkpoint's backward does not see what its forward recorded
            self.is_uncompiled = True
            self.reasons.add(UNCOMPILED)
            warnings.warn(UNCOMPILED, stacklevel=2)
        if self.is_uncompiled:
            return eager_call(self.module)(*args, **kwargs)
        before = None
        if self.is_new:
            trace_without_liger()
            before = graph_breaks()
        if self.takes_any_length:
            _mark_lengths(args, kwargs)
        with _traceable_records():
            result = self.compiled(*args, **kwargs)
        if self.is_captured and self.num_graphs != compiled_graphs():  # as where other adapters are trained
            self._keep_gradients()
        if before is not None:
            self.is_new = False
            reasons = (reason for reason in graph_breaks() - before if IN_PYTHON not in reason)
            self.reasons = {self._why(reason) for reason in reasons}
            for reason in sorted(self.reasons):
                warnings.warn(reason, stacklevel=2)
        return result

    def _why(self, reason: str) -> str:
        """Write torch's reason for leaving code to Python as a sentence with a remedy."""
        is_whole = self.module is self.layer and self.layer.gradient_checkpointing and self.layer.training
        extent = "with gradient checkpointing all" if is_whole else "a part"
        remedy = next((each for word, each in REMEDIES.items() if word in reason.lower()), None)
        return (
            f"torch.compile left {extent} of {type(self.module).__name__} to Python: {_first_words(reason)}; "
            f"{remedy or 'take that out of the layer'} (TORCH_LOGS=graph_breaks shows the line)"
        )

    def _keep_gradients(self) -> None:
        """Copy the first gradients of a step out of the memory of the graph, which the next micro-batch writes to."""
        self.num_graphs = compiled_graphs()
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter not in self.kept:
                self.kept[parameter] = parameter.register_hook(partial(_copy_first, weakref.ref(parameter)))
