"""The Hopper kernels compile for sm_90a without a GPU, keep everything in registers, and multiply with wgmma."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Bytes: a register or two of the finishing warpgroup, which has 104; erf takes more. None is inside a product's loop.
SPILLED = {
    "up, bias, transposed weight": 8,
    "down_backward": 8,
    "down_backward, transposed": 8,
    "down_backward, fp16": 8,
    "down_backward, narrow experts": 8,
    "down_backward, geglu": 120,
    "down_backward, geglu_tanh": 8,
    "down_backward, reglu": 16,
    "down_backward, clamped_swiglu": 8,
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")
def test_every_kernel_and_option_compiles_for_sm_90a(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_KEEP": "cubin",
        "CUTE_DSL_DUMP_DIR": str(tmp_path),
        "CUTE_DSL_NO_CACHE": "1",
    }
    script = Path(__file__).parent / "compile_hopper.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line.split("|") for line in result.stdout.splitlines() if line.count("|") == 3]
    assert 20 <= len(lines) <= 40
    for name, *fields in lines:
        found = {key: int(value) for key, value in (field.split() for field in fields)}
        # 64 of depth are four steps of 16: one m64n256k16 for each, or two m64n128k16 where four warpgroups run
        assert found["wgmma"] == (8 if name.startswith("down_backward") else 4), name
        assert found["stack"] <= SPILLED.get(name, 0), name


def test_a_kernel_is_found_on_disk_and_a_damaged_one_is_made_again(tmp_path):
    pytest.importorskip("cutlass")
    script = (
        "import sys, torch; from pathlib import Path; from sonicmoe_hf.kernels.hopper import cache, compiled;"
        "made = [];"
        "original = cache._save; cache._save = lambda k, p: (made.append(p), original(k, p));"
        "compiled.gradient(torch.bfloat16, 128, 128, True, 256, 3); print('compiled' if made else 'found')"
    )
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "SONICMOE_HF_CACHE": str(tmp_path)}

    def run():
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout.split()[-1]

    assert run() == "compiled" and run() == "found"
    (kernel,) = tmp_path.glob("hopper/*.o")
    kernel.write_bytes(kernel.read_bytes()[:-100])
    assert run() == "compiled" and run() == "found"
    assert len(list(tmp_path.glob("hopper/*"))) == 2, "no temporary file is left"
