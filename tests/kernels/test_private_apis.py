"""Private APIs of Triton and of the CuTe DSL that kernels/triton/launch.py and kernels/hopper/cache.py use by their
arguments and attributes; what they import, importing them shows."""

import inspect

import pytest
import torch


def test_a_compiled_triton_kernel_is_launched_with_these_arguments():
    pytest.importorskip("triton")
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel

    expected = ["gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata", "launch_metadata"]
    expected += ["launch_enter_hook", "launch_exit_hook"]
    parameters = list(inspect.signature(CudaLauncher.__call__).parameters)[1:-1]
    if len(parameters) < len(expected):  # Triton 3.6 leaves naming the others to its launcher in C, in the same order
        expected = expected[: expected.index("kernel_metadata")]
    assert parameters == expected, "CudaLauncher's arguments"
    # attributes that __init__ sets, or properties
    source = inspect.getsource(CompiledKernel)
    assert [name for name in ("run", "function", "packed_metadata") if name not in source] == [], "CompiledKernel"


def test_a_triton_function_tells_its_parameters_and_the_hooks_their_listeners():
    triton = pytest.importorskip("triton")
    import triton.language as tl
    from triton import knobs
    from triton.runtime import JITFunction

    def add_kernel(to, number, SIZE: tl.constexpr):
        pass

    kernel = JITFunction(add_kernel, do_not_specialize=["number"])
    assert [parameter.do_not_specialize for parameter in kernel.params] == [False, True, False], "JITFunction.params"
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    assert all(isinstance(hook.calls, list) for hook in hooks), f"triton {triton.__version__}: knobs.runtime's hooks"


def test_a_compiled_cute_kernel_can_be_exported():
    """Export a kernel as cache.py keeps it on disk: an object file with the TVM FFI's symbols alone."""
    pytest.importorskip("cutlass")
    pytest.importorskip("triton")
    from sonicmoe_hf.kernels.hopper import compiled
    from sonicmoe_hf.kernels.hopper.config import tile

    compile_kernel = compiled.gemm_wgrad.__wrapped__.__wrapped__  # past both caches
    kernel = compile_kernel(torch.bfloat16, 128, 128, True, tile("gemm_wgrad", 128))
    parameters = inspect.signature(kernel.export_to_c).parameters
    assert "export_only_tvm_ffi_symbols" in parameters, "export_to_c"
    assert callable(compiled.cute.runtime.load_module)
