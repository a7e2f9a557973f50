"""No kernel reads or writes outside its tensors: compute-sanitizer's memcheck, each tensor an allocation of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MEMCHECK = shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ["PATH"], "/usr/local/cuda/bin")))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MEMCHECK is None, reason="needs CUDA's compute-sanitizer")]


def test_nothing_outside_a_tensor_is_touched(backend):
    script = [sys.executable, str(Path(__file__).with_name("every_kernel.py")), backend]
    # LOCAL_RANK: no processes that compile ahead, which the checker would follow
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "LOCAL_RANK": "1"}
    found = subprocess.run(
        [MEMCHECK, "--tool", "memcheck", "--error-exitcode", "9", *script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    if "Device not supported" in found.stdout:
        pytest.skip("compute-sanitizer does not support this machine's runtime")
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
    assert f"{backend}: every kernel has run" in found.stdout and "ERROR SUMMARY: 0 errors" in found.stdout
