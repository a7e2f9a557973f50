"""PyTorch's private parts."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from .replaced import replace

is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
are_functorch_transforms_active = torch._C._are_functorch_transforms_active
current_graph_task_id = torch._C._current_graph_task_id  # -1 outside backward
disable_dynamo = torch._disable_dynamo
will_engine_execute_node = torch._C._will_engine_execute_node
# of this thread; torch's is_in_torch_dispatch_mode answers from one flag for all threads, which stays set once two have
# left their modes in another order than they entered them
num_dispatch_modes = torch._C._len_torch_dispatch_stack
is_in_pre_dispatch_mode = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
)
collectives = torch.ops._c10d_functional
to_copy = torch.ops.aten._to_copy.default
flash_forward = torch.ops.aten._flash_attention_forward.default
flash_backward = torch.ops.aten._flash_attention_backward.default
cpu_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# for subclasses: their operations go to the dispatcher
without_torch_function = torch._C._disabled_torch_function_impl
has_global_hooks = nn.modules.module._has_any_global_hook
wrapper_of = torch.Tensor._make_wrapper_subclass


def strided_shard(dim: int, num_groups: int):
    """Make the placement of a DTensor of which a rank has its shard of each of so many equal groups along a dimension."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=num_groups)


def forward_mode_level() -> int:
    """Count the levels of forward-mode derivatives that are being taken, less one."""
    return forward_ad._current_level


def below_autograd(overload, keyset):
    """Make a function of the op that goes on below autograd's kernels, one of which got this set of keys."""

    def run(*arguments):
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return run


def replace_call(overload, function: Callable) -> Callable:
    """Make the OpOverload call `function` in place of the dispatcher, and return the dispatcher. An OpOverload's hash is
    that of what it calls, so nothing may have kept it yet."""
    dispatch, overload._op = overload._op, function
    return dispatch


def capture_checkpoints(non_reentrant: Callable, reentrant: Callable) -> None:
    """Replace the generator that torch.utils.checkpoint makes of a function without reentry, and the forward of its
    CheckpointFunction, by these; each gets the original as its first argument."""
    from torch.utils import checkpoint

    name = "_checkpoint_without_reentrant_generator_impl"  # since torch 2.15, where the other name calls it
    name = name if hasattr(checkpoint, name) else "_checkpoint_without_reentrant_generator"
    generator = getattr(checkpoint, name)
    function: Any = checkpoint.CheckpointFunction
    replace(checkpoint, name, functools.partial(non_reentrant, generator))
    replace(function, "forward", staticmethod(functools.partial(reentrant, function.forward)))


IN_PYTHON = "sonicmoe_hf: it depends on values, or runs for some queries at a time"
leave_to_python = torch.compiler.disable(reason=IN_PYTHON)  # decorates functions; compile_layers knows this reason


def is_compiled() -> bool:
    """Tell whether torch.compile traces this code, or left it to Python inside a compiled function."""
    return torch.compiler.is_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def is_traced_in_checkpoint() -> bool:
    """Tell whether AOTAutograd traces a region that its compiled backward computes again."""
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    kinds = _CachingTorchDispatchMode, _CachedTorchDispatchMode  # the latter where a backend computes again itself
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    is_marked = "recompute" in torch.fx.traceback.get_current_meta()  # until torch 2.12
    return is_marked or any(isinstance(mode, kinds) for mode in modes)


def graph_breaks() -> Counter[str]:
    """Count torch's reasons for which Dynamo has left code to Python so far."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


def compiled_graphs() -> int:
    """Count the graphs that Dynamo has compiled so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def cached_graphs() -> Counter[str]:
    """Count the work of torch's cache of graphs on disk so far: autograd_cache_hit, _saved, _bypass and more."""
    from torch._dynamo.utils import counters

    return Counter(counters["aot_autograd"])


def compile_cache_folder() -> str:
    """Get the folder of torch's cache of compiled code."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return cache_dir()


def compiled_call(module: nn.Module) -> Any:
    """Get the function that Module.compile has put in the place of a module's call."""
    return module._compiled_call_impl


def eager_call(module: nn.Module) -> Any:
    """Get the function that Module.compile has compiled."""
    return module._call_impl


def set_compiled_call(module: nn.Module, call: Callable) -> None:
    """Replace the function that Module.compile has put in the place of a module's call."""
    module._compiled_call_impl = call


def call_of(module: nn.Module) -> Callable:
    """Get the module's forward, where a call of the module does nothing else, or the module: torch spends two calls more
    on finding that there are no hooks."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    is_more = hooks or module._compiled_call_impl is not None or type(module).__call__ is not nn.Module.__call__
    return module if is_more or has_global_hooks() or torch.compiler.is_compiling() else module.forward


def has_compiled_modules(modules: list[nn.Module]) -> bool:
    """Tell whether torch.compile or Module.compile was applied to one of these modules."""
    return any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in modules)


def has_checkpointing(modules: list[nn.Module]) -> bool:
    """Tell whether gradient checkpointing, Transformers' or FSDP's, recomputes one of these modules."""
    return any(
        getattr(module, "gradient_checkpointing", False) or type(module).__name__ == "CheckpointWrapper"
        for module in modules
    )


def _set_in_all_threads(settings: Any, name: str, value: Any) -> None:
    """Set one of Dynamo's or Inductor's settings in all threads, as those that compute layers again in backward. After
    torch 2.11 each has its own, and begins with the default."""
    setattr(settings, name, value)
    settings._config[name].default = value


def guard_module_hooks() -> None:
    """Make Dynamo use compiled code only for modules with hooks where those it was compiled for had them.

    By default Dynamo does not look. What was compiled without looking is compiled again.
    """
    import torch._dynamo as dynamo

    if dynamo.config.skip_nnmodule_hook_guards:
        _set_in_all_threads(dynamo.config, "skip_nnmodule_hook_guards", False)
        dynamo.reset()


def allow_recompilations(count: int) -> None:
    """Raise to `count`, where it is lower, the number of variants that torch compiles of a function before it gives it up
    and runs Python."""
    import torch._dynamo as dynamo

    _set_in_all_threads(dynamo.config, "recompile_limit", max(count, dynamo.config.recompile_limit))


def allow_caching(versions: dict[str, str]) -> None:
    """Let torch's cache on disk take graphs that call these functions.

    versions: what compiled code depends on beside a function's arguments, by its whole name.
    """
    import torch._inductor as inductor

    settings: Any = inductor.config
    marked = {**settings.unsafe_marked_cacheable_functions, **versions}
    _set_in_all_threads(settings, "unsafe_marked_cacheable_functions", marked)


def begin_compile_workers() -> None:
    """Begin the processes in which Inductor compiles kernels, and read Triton's files for the keys of its cache. By
    itself torch does both at its first graph, and compiles kernels one by one until the processes are there."""
    from torch._inductor.async_compile import maybe_warm_pool
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    maybe_warm_pool()
    if HAS_TRITON:
        threading.Thread(target=triton_key, name="keys of Triton's cache", daemon=True).start()


def mark_as_static(tensor: torch.Tensor) -> None:
    """Promise that the tensor stays where it is: compiled code that writes into it can be a CUDA graph."""
    import torch._dynamo as dynamo

    dynamo.mark_static_address(tensor)


def mark_as_any_size(tensor: torch.Tensor, dim: int) -> None:
    """Let code compiled for this tensor take any size of a dimension, where it can."""
    import torch._dynamo as dynamo

    dynamo.maybe_mark_dynamic(tensor, dim)


def example_size(size: int | torch.SymInt) -> int:
    """Look up the size of a symbol in the example that is traced, without a guard; an int stays as it is."""
    return size if isinstance(size, int) else size.node.hint
