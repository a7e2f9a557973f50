"""The Hopper kernels compile for sm_90a without a GPU, keep everything in registers, and have
several wgmmas in flight."""

import importlib.util
from pathlib import Path

import pytest
import torch
from kernel_helpers import script_output

from sonicmoe_hf.kernels.hopper.config import Tile
from sonicmoe_hf.kernels.interface import Activation

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


@needs_the_dsl
@pytest.mark.parametrize(
    ("barrier", "name", "parameters"),
    [
        ("full", "gemm_up", (128, 128, True, False, True, True, Activation(), False, 16, Tile(128, 3))),
        ("tile_full", "gemm_up", (128, 128, True, False, False, True, Activation(), True, 0, Tile(128, 3))),
        ("tile_empty", "gemm_down_backward", (128, 128, True, True, True, True, Activation(), False, 0, Tile(128, 5))),
        ("empty", "gemm_down", (128, 128, True, False, 0, Tile(128, 4, 192))),
        ("order", "gemm_down", (128, 128, True, False, 0, Tile(128, 4))),
        ("scheduler.empty", "gemm_wgrad", (128, 128, True, Tile(128, 4))),
    ],
)
def test_an_arrive_count_that_is_one_short_fails_the_compile(monkeypatch, barrier, name, parameters):
    from sonicmoe_hf.kernels.hopper import compiled, gemm_common

    class OneShort(gemm_common.Arrivals):
        def __init__(self, counts):
            super().__init__(counts | {barrier: counts[barrier] - 1})

    monkeypatch.setattr(gemm_common, "Arrivals", OneShort)
    compile_kernel = getattr(compiled, name).__wrapped__.__wrapped__  # past both caches
    with pytest.raises(ValueError, match=f"barrier {barrier} is initialised for .* arrivals in a phase, but gets"):
        compile_kernel(torch.bfloat16, *parameters)
