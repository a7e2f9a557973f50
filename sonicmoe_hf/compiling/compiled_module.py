"""CompiledModule: a compiled layer as it is called, and a warning where torch.compile did not take it whole."""

from __future__ import annotations

import textwrap
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from packaging.version import Version
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..private.torch import (
    IN_PYTHON,
    compiled_call,
    compiled_graphs,
    eager_call,
    graph_breaks,
    mark_as_any_size,
)
from ..private.transformers import recorded_outputs, recording_into
from .liger_tracing import trace_without_liger

WITHOUT_OFFLOADING = "train with gradient checkpointing that offloads nothing"
REMEDIES = {  # by a word of torch's reason
    "liger_kernel": "switch that kernel off in liger_kernel_config",
    "offload": WITHOUT_OFFLOADING,
    "save_on_cpu": WITHOUT_OFFLOADING,  # what Transformers' own checkpointing offloads by
    "contextvar": "train without output_hidden_states",
    "hook": "remove the module's hook",
}
# torch 2.11 computes wrong gradients of what a compiled layer records inside a checkpoint
RECORDS = Version(torch.__version__) >= Version("2.13")
UNCOMPILED = (
    f"torch {torch.__version__} does not compile layers that record outputs such as router_logits, so they run "
    "uncompiled; install torch 2.13 or newer, or leave the auxiliary loss out (router_aux_loss_coef=0.0 in the arguments "
    "of TRL's trainers, else model.config.output_router_logits = False)"
)


class CompiledModule:
    """A layer that `compile_layers` compiled, or a module in it: runs compiled code where the layer is trained, else its
    own forward.

    A layer that is checkpointed is trained without gradients too, in its first forward. Evaluation and generation would
    be compiled apart, the latter for each layer, and a cache of keys and values would outlive a CUDA graph's memory.
    """

    def __init__(self, module: nn.Module, layer: nn.Module, is_captured: bool):
        self.module = module
        self.layer = layer
        self.is_captured = is_captured
        self.compiled_call = compiled_call(module)
        self.is_new = True
        self.takes_any_length = False
        self.is_uncompiled = False
        self.reasons: set[str] = set()  # why a part of it, or all, runs in Python
        # of a captured layer: how many graphs there were when it last hooked the gradients of parameters, and these hooks
        self.num_graphs = -1
        self.hooks = WeakTensorKeyDictionary()

    def __call__(self, *args, **kwargs):
        is_checkpointed = self.layer.gradient_checkpointing and self.layer.training and not self.is_captured
        if not (torch.is_grad_enabled() or is_checkpointed):
            return eager_call(self.module)(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self.compiled_call(*args, **kwargs)
        if not (RECORDS or self.is_uncompiled) and recorded_outputs():
            self._leave_uncompiled()
        if self.is_uncompiled:
            return eager_call(self.module)(*args, **kwargs)
        if self.is_new:
            trace_without_liger()
        breaks_before = graph_breaks() if self.is_new else None
        if self.takes_any_length:
            _mark_lengths(args, kwargs)
        with _traceable_records():
            result = self.compiled_call(*args, **kwargs)
        if self.is_captured and self.num_graphs != compiled_graphs():  # as where other adapters are trained
            self._hook_gradients()
        if breaks_before is not None:
            self.is_new = False
            self._warn_of_breaks(breaks_before)
        return result

    def _leave_uncompiled(self) -> None:
        """Run in Python from now on, and say why: a checkpoint's backward does not see what its forward recorded."""
        self.is_uncompiled = True
        self.reasons.add(UNCOMPILED)
        warnings.warn(UNCOMPILED, stacklevel=3)

    def _warn_of_breaks(self, before: Counter[str]) -> None:
        """Warn of each graph break that the first call added to those before it."""
        reasons = (reason for reason in graph_breaks() - before if IN_PYTHON not in reason)
        self.reasons = {self._describe(reason) for reason in reasons}
        for reason in sorted(self.reasons):
            warnings.warn(reason, stacklevel=3)

    def _describe(self, reason: str) -> str:
        """Write torch's reason for leaving code to Python as a sentence with a remedy."""
        is_whole = self.module is self.layer and self.layer.gradient_checkpointing and self.layer.training
        extent = "with gradient checkpointing all" if is_whole else "a part"
        remedy = next((each for word, each in REMEDIES.items() if word in reason.lower()), None)
        return (
            f"torch.compile left {extent} of {type(self.module).__name__} to Python: {_first_words(reason)}; "
            f"{remedy or 'take that out of the layer'} (TORCH_LOGS=graph_breaks shows the line)"
        )

    def _hook_gradients(self) -> None:
        """Register hooks of trained parameters, by which the first gradient of a step is copied out of the memory of the
        graph, which the next micro-batch writes to."""
        self.num_graphs = compiled_graphs()
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter not in self.hooks:
                self.hooks[parameter] = parameter.register_hook(partial(_copy_first, weakref.ref(parameter)))


def compiled_modules(model: nn.Module) -> list[CompiledModule]:
    """List the layers, or modules in them, that `compile_layers` compiled in a model; [] where it compiled none."""
    calls = (compiled_call(module) for module in model.modules())
    return [call for call in calls if isinstance(call, CompiledModule)]


def _first_words(reason: str) -> str:
    """Take the first line of torch's reason, and the code that it is about."""
    first, *rest = reason.splitlines()
    context = next((line for line in rest if "debug context:" in line), "").partition("debug context:")[2].strip()
    return f"{first} ({textwrap.shorten(context, 100)})" if context else first


def _mark_lengths(args: tuple, kwargs: dict) -> None:
    """Mark the dimensions of a module's arguments that are the tokens of a sequence, as many as in its states, the first:
    [B, L, H], [T, H], or in several streams [B, L, streams, H], as DeepSeek-V4's decoder layers have them."""
    given = [each if isinstance(each, tuple) else (each,) for each in (*args, *kwargs.values())]
    tensors = [each for group in given for each in group if isinstance(each, torch.Tensor)]
    if not tensors or tensors[0].dim() < 2:
        return
    states, *others = tensors
    dim_of_tokens = min(states.dim() - 2, 1)
    marked = [(states, dim_of_tokens), *((tensor, dim) for tensor in others for dim in _dims_of_length(tensor))]
    for tensor, dim in marked:
        if tensor.shape[dim] == states.shape[dim_of_tokens] > 1:
            mark_as_any_size(tensor, dim)


def _dims_of_length(tensor: torch.Tensor) -> tuple[int, ...]:
    """List the dimensions that may be a sequence's tokens in what comes after the states: cosines [B, L, D], ids [B, L],
    and masks [B, 1, L, L]. Others may be as many, and torch compiles again where one more is marked."""
    last = tensor.dim() - 1
    if last >= 3:
        return last - 1, last
    return (last - 1,) if last >= 1 and tensor.is_floating_point() else (last,) * (last >= 0)


def _copy_first(parameter: weakref.ref, gradient: torch.Tensor) -> torch.Tensor:
    """Copy the first gradient of a parameter, which would stay in the graph's memory; others are added to it."""
    return gradient.clone() if getattr(parameter(), "grad", None) is None else gradient


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
