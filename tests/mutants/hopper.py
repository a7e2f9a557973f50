"""Of the Hopper kernels' device code: each hangs, reads or writes what it must not, or gives other numbers."""

from . import Mutation

KERNELS = "tests/kernels/test_hopper_simulated_kernels.py"
PARTS = "tests/kernels/test_hopper_simulated_parts.py"
UP, DOWN, DOWN_BACKWARD, WEIGHT_GRADIENT = (
    f"{KERNELS}::test_{name}" for name in ("up", "down", "down_backward", "weight_gradient")
)
ACTIVATIONS = f"{PARTS}::test_an_activation_and_its_slopes_are_eager_s"
WORK_TILES = f"{PARTS}::test_every_row_and_column_is_in_one_work_tile"
MUTATIONS = [
    Mutation(
        "kernels/hopper/epilogue.py",
        '"tile_empty": self.num_epilogue_warps}',
        '"tile_empty": self.num_epilogue_warps - 1}',
        "an arrive count one short: a tile is overwritten while the last epilogue warp reads it",
        UP,
    ),
    Mutation(
        "kernels/hopper/varlen_m.py",
        "return 1 + (32 * self.gather_warps if self.gather else 0)",
        "return 1 + (32 if self.gather else 0)",
        "the second gathering warp of up is not counted: a stage is multiplied before all of its rows are there",
        UP,
    ),
    Mutation(
        "kernels/hopper/epilogue.py",
        "stage, phase, empty_phase = Int32(0), Int32(0), Int32(1)",
        "stage, phase, empty_phase = Int32(0), Int32(0), Int32(0)",
        "the consumers wait for a tile that nobody has read to be released: they hang",
        UP,
    ),
    Mutation(
        "kernels/hopper/gemm_common.py",
        "        stage = Int32(0)\n        phase ^= 1",
        "        stage = Int32(0)",
        "the phase does not flip when the pipeline wraps: stages are used before they are ready",
        UP,
    ),
    Mutation(
        "kernels/hopper/varlen_m.py",
        "(vector ^ (first_row + row) % 8) * 16",
        "vector * 16",
        "gathered rows are not swizzled as wgmma reads them",
        UP,
    ),
    Mutation(
        "kernels/hopper/varlen_m.py",
        "size = 16 * Int32(past <= 0)",
        "size = 16 * Int32(past < 0)",
        "the last columns of gathered rows are taken to be past the end, and zero",
        UP,
    ),
    Mutation(
        "kernels/hopper/gemm_up.py",
        "self.read_product(right, shared, half, epi_tile + units_per_row, row, vector)",
        "self.read_product(right, shared, half, epi_tile + 1, row, vector)",
        "up's half is read from the wrong epi tile where a tile has more than two",
        UP,
    ),
    Mutation(
        "kernels/hopper/gemm_up.py",
        "2 * epi_tile + vector // 4, row, 2 * (vector % 4) + 1)",
        "2 * epi_tile + vector // 4, row, 2 * (vector % 4))",
        "interleaved: the second half of the pairs is computed from the first",
        UP,
    ),
    Mutation(
        "kernels/hopper/gemm_down_backward.py",
        "if lane % (EPI_TILE_N // VECTOR) == 0 and row < end:",
        "if lane % (EPI_TILE_N // VECTOR) == 0:",
        "a row past an expert's end writes dw of the next expert's row",
        DOWN_BACKWARD,
    ),
    Mutation(
        "kernels/hopper/gemm_down_backward.py",
        "weight = routing_weight[pair[row]]",
        "weight = routing_weight[row]",
        "routing weights are in the order of the pairs",
        DOWN_BACKWARD,
    ),
    Mutation(
        "kernels/hopper/rounding_error.py",
        "return (upper + (difference >> 15))",
        "return (upper - (difference >> 15))",
        "what rounding lost is taken away once more",
        UP,
    ),
    Mutation(
        "kernels/hopper/activations.py",
        "cdf + 2 * x * cdf * (1 - cdf) * scale",
        "cdf + x * cdf * (1 - cdf) * scale",
        "the slope of gelu_tanh without the factor 2 of its sigmoid",
        ACTIVATIONS,
    ),
    Mutation(
        "kernels/hopper/tile_scheduler.py",
        "if before == num_work_tiles - 1 - (static_rounds - 1) * blocks:",
        "if before == num_work_tiles - (static_rounds - 1) * blocks:",
        "the counter is not reset: the next launch computes too few tiles",
        WORK_TILES,
    ),
    Mutation(
        "kernels/hopper/tile_scheduler.py",
        "if index >= (tile_count + 1) * blocks:",
        "if index > (tile_count + 1) * blocks:",
        "the static schedule gives one tile to two blocks and another to none",
        WORK_TILES,
    ),
    Mutation(
        "kernels/hopper/tile_scheduler.py",
        "cute.arch.mbarrier_wait(full + stage, tile_count // SCHEDULER_STAGES & 1)",
        "cute.arch.mbarrier_wait(full + stage, tile_count & 1)",
        "a warp reads a work tile before it is shared, or waits for one that never comes",
        UP,
    ),
    Mutation(
        "kernels/hopper/varlen_m.py",
        "first = cutlass.min(first + half % 2 * WARPGROUP_M, end)\n                    end = cutlass.min(first + WARPGROUP_M, end)",
        "first = cutlass.min(first + half % 2 * WARPGROUP_M, end)",
        "the upper half of a work tile that was cut takes the rows of the lower one too",
        WORK_TILES,
    ),
    Mutation(
        "kernels/hopper/gemm_down.py",
        "((tile_count - 1) // 2 + 1 - consumer) % 2",
        "((tile_count - 1) // 2 + consumer) % 2",
        "both consumers wait for the other's order barrier: they hang",
        DOWN,
    ),
    Mutation(
        "kernels/hopper/gemm_down.py",
        "arrivals = 2 - Int32(first + TILE_M < end), 2",
        "arrivals = 2, 2",
        "a consumer releases stages of a tall tile for the other one, which still reads them",
        DOWN,
    ),
    Mutation(
        "kernels/hopper/gemm_wgrad.py",
        "column = cutlass.min(first + slab * 64, width - VECTOR)",
        "column = first + slab * 64",
        "columns past the last are read from the next row, past the tensor's end at the last one",
        WEIGHT_GRADIENT,
    ),
    Mutation(
        "kernels/hopper/gemm_wgrad.py",
        "pending_store = expert, 4 * row_tile + 2 * consumer + 1, column_tile, Int32(start < end)",
        "pending_store = expert, 4 * row_tile + 2 * consumer + 1, column_tile, Int32(1)",
        "half of the gradient of an expert without rows is not zero",
        WEIGHT_GRADIENT,
    ),
    Mutation(
        "kernels/hopper/mainloop.py",
        "    warpgroup.wait_group(1)\n    if has_previous:",
        "    warpgroup.wait_group(2)\n    if has_previous:",
        "a stage is released while its MMAs may still read it",
        UP,
    ),
    Mutation(
        "kernels/hopper/epilogue.py",
        "box = column_tile * per_side + i % per_side",
        "box = column_tile * per_side + i",
        "the up half of h is stored columns too far to the right",
        UP,
    ),
    Mutation(
        "kernels/hopper/gemm_common.py",
        '        cute.arch.fence_proxy("async.shared", space="cta")\n',
        "",
        "TMA may store what lay in shared memory before",
        DOWN,
    ),
    Mutation(
        "kernels/hopper/epilogue.py",
        "                    if epilogue_warp == 0:\n                        cute.arch.cp_async_bulk_wait_group(0, read=True)\n",
        "                    pass\n",
        "a half tile is released while TMA still reads it",
        UP,
    ),
    Mutation(
        "kernels/hopper/varlen.py",
        "cute.domain_offset((MAX_ROWS - (end - first), 0), tensor[(None, None, *side, end)])",
        "cute.domain_offset((MAX_ROWS - WARPGROUP_M, 0), tensor[(None, None, *side, first + WARPGROUP_M)])",
        "stores are not clipped at an expert's end",
        DOWN,
    ),
    Mutation(
        "kernels/hopper/varlen_m.py",
        "STAGE_BYTES_A // 2 * (1 + Int32(has_bottom))",
        "STAGE_BYTES_A // 2 * 2",
        "a stage waits for bytes of a half that has no rows and is not loaded: it hangs",
        DOWN,
    ),
    Mutation(
        "kernels/hopper/gemm_common.py",
        "address = first + row * (TILE_K * 2) + ((vector ^ (row % 8)) * 16)",
        "address = first + row * (TILE_K * 2) + vector * 16",
        "epilogue warps read the tile unswizzled",
        UP,
    ),
    Mutation(
        "kernels/hopper/varlen_m.py",
        "        if const_expr(v // 2 % 2 == 0):  # the next two",
        "        if const_expr(v % 4 == 0):  # the next two",
        "the bias of every second column is left out",
        UP,
    ),
]
