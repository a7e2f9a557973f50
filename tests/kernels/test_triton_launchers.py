"""Launchers in C of Triton kernels, which Triton makes until 3.6: compiled ahead with the kernels. libcuda is a stub."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

nvidia = pytest.importorskip("triton.backends.nvidia.driver")

IN_A_PROCESS = """
import subprocess, sys
from pathlib import Path
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver
from sonicmoe_hf.kernels import triton
from sonicmoe_hf.kernels.listing import list_kernels
from sonicmoe_hf.kernels.triton import ahead, config

config.gpu_kind = lambda device: "hopper"
target = GPUTarget("cuda", 90, 32)
driver.set_active(ahead._Driver(target))
with list_kernels() as kernels:
    triton.dispatch(torch.empty(64, 8, dtype=torch.int64, device="meta"), None, 64, 16, False)
(launch,) = kernels.triton
module, name, *_ = ahead._key(launch)
ahead.compile_share(target, [(module, name, *launch[1:])], Path(sys.argv[1]) / "done")
subprocess.check_call = None
compiled = launch.kernel.warmup(*launch.tensors, *launch.numbers, *launch.constants, grid=(1,), **launch.options)
CudaLauncher(compiled.src, compiled.metadata)
"""


@pytest.fixture
def stub(tmp_path):
    """Make a library with the functions of libcuda that a launcher calls."""
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\(", Path(nvidia.__file__).read_text())))
    source = "\n".join(f"int {name}(void) {{ return 1; }}" for name in names)
    command = ["gcc", "-shared", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1"), "-Wl,-soname,libcuda.so.1"]
    subprocess.run(command, input=source, text=True, check=True)
    return tmp_path


@pytest.mark.skipif(not hasattr(nvidia, "make_launcher"), reason="this Triton has one launcher for all kernels")
def test_a_kernels_launcher_is_compiled_with_it(stub):
    folders = {"TRITON_CACHE_DIR": str(stub / "cache"), "TRITON_LIBCUDA_PATH": str(stub), "LD_LIBRARY_PATH": str(stub)}
    environment = {**os.environ, **folders}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", IN_A_PROCESS, str(stub)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
