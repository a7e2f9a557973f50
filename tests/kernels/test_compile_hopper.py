"""The Hopper kernels compile for sm_90a without a GPU, keep everything in registers, and have several wgmmas in flight."""

import importlib.util
from pathlib import Path

import pytest
from kernel_helpers import script_output

pytestmark = pytest.mark.pinned

SCRIPT = Path(__file__).with_name("compile_hopper.py")
needs_the_dsl = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="no nvidia-cutlass-dsl")


def check_compiled(folder, *options):
    environment = {"CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(folder), "CUTE_DSL_NO_CACHE": "1"}
    lines = script_output(SCRIPT, *options, environment=environment)
    assert len(lines) >= 10
    for name, *fields in lines:
        figures = {key: int(value) for key, value in (field.split() for field in fields)}
        assert (figures["stack"], figures["local"]) == (0, 0), name
        assert figures["wgmma"] > 0, name
        assert figures["waits"] < figures["wgmma"], f"{name}: ptxas has serialised the wgmmas"


@pytest.mark.slow
@needs_the_dsl
def test_representative_kernels_compile_for_sm_90a(tmp_path):
    check_compiled(tmp_path)


@pytest.mark.gpu
@needs_the_dsl
def test_every_kernel_and_option_compiles_for_sm_90a(tmp_path):
    check_compiled(tmp_path, "--all")
