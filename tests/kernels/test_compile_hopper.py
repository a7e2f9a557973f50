"""The Hopper kernels compile for sm_90a without a GPU, keep everything in registers, and multiply with wgmma,
several under way at once."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")
def test_every_kernel_and_option_compiles_for_sm_90a(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "CUTE_DSL_KEEP": "cubin",
        "CUTE_DSL_DUMP_DIR": str(tmp_path),
        "CUTE_DSL_NO_CACHE": "1",
    }
    script = Path(__file__).parent / "compile_hopper.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line.split("|") for line in result.stdout.splitlines() if line.count("|") == 5]
    assert 20 <= len(lines) <= 40
    for name, *fields in lines:
        found = {key: int(value) for key, value in (field.split() for field in fields)}
        assert (found["stack"], found["local"]) == (0, 0), name
        assert found["wgmma"] == found["steps"], name
        assert found["waits"] < found["wgmma"], f"{name}: the compiler has serialised the products"
