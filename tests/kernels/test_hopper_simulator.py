"""The simulator's shared memory and registers lie as the CuTe DSL says, and it notices what it promises to."""

import pytest

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
from hopper_simulator import source
from hopper_simulator.tensors import SwizzledLayout, coordinates_of

from sonicmoe_hf.kernels.hopper import gemm_common, mainloop

pytestmark = pytest.mark.pinned


def while_compiling(function):
    """Call the function where the DSL computes layouts."""

    @cute.jit
    def compiled():
        function()

    cute.compile(compiled, options="--gpu-arch sm_90a")


def layouts_by_name():
    """Yield each layout as the DSL has it and as the simulator does."""
    simulated, kind = source.module("gemm_common"), cutlass.BFloat16
    for extent in (64, 128, 192, 256):
        for k_major in (True, False):
            arguments = extent, k_major, 3
            yield gemm_common.operand_layout(kind, *arguments), simulated.operand_layout(None, *arguments)
    for column_major in (False, True):
        arguments = 6, column_major
        yield gemm_common.epilogue_layout(kind, *arguments), simulated.epilogue_layout(None, *arguments)


def test_shared_memory_lies_as_the_dsl_says():
    compared = []

    def compare():
        for layout, simulated in layouts_by_name():
            assert isinstance(simulated, SwizzledLayout) and str(layout.inner) == "S<3,4,3>"  # of bytes
            rows, columns, stages = simulated.shape
            for row in range(0, rows, 9):
                for column in (row % columns, 7 * row % columns):
                    coordinate = row, column, row % stages
                    address = 2 * layout.outer(coordinate)
                    compared.append((address ^ (address >> 7 & 7) << 4, 2 * simulated.offset(*coordinate)))

    while_compiling(compare)
    assert len(compared) > 100 and all(expected == found for expected, found in compared)


def test_accumulators_lie_as_the_dsl_says():
    compared = []

    def compare():
        for columns in (128, 192):
            mma = mainloop.consumer_mma(cutlass.BFloat16, True, True, columns)
            for thread in (0, 37, 127):
                of_thread = mma.get_slice(thread).partition_C(cute.make_identity_tensor((64, columns)))
                expected = [tuple(int(i) for i in of_thread[v]) for v in range(cute.size(of_thread))]
                compared.append((expected, coordinates_of(thread, columns)))

    while_compiling(compare)
    assert len(compared) == 6 and all(expected == found for expected, found in compared)
