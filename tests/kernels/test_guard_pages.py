"""No Triton kernel reads or writes past a tensor's end: each ends where an unreadable page begins. Interpreted on a
CPU, in processes that are forked, because a segmentation fault ends one. What the kernels compute is other tests'
matter."""

import ctypes
import faulthandler
import mmap
import multiprocessing
import sys

import pytest
import torch
from helpers.marks import rest_slow
from kernel_products import operands, products
from moe_problems import allocations_as, layer, routing_ids
from rounding_problems import matrix

from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Activation, LoraTerm, PackedOperand, Weighting
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.layer.config import ROUNDINGS, TokenRounding

pytestmark = [
    pytest.mark.pinned,
    pytest.mark.skipif(
        torch.cuda.is_available() or sys.platform != "linux", reason="guards memory of the CPU, by Linux's calls"
    ),
]
SEGMENTATION_FAULT = -11
SECONDS = 300
NO_ACCESS = 0  # PROT_NONE
_mapped = []  # memory outlives its tensors


def guard(tensor):
    """Copy `tensor` so that its last element is the last before the unreadable page; None stays None."""
    if tensor is None or not tensor.numel():
        return tensor
    shape, strides = tensor.shape, tensor.stride()
    num_bytes = (1 + sum((size - 1) * stride for size, stride in zip(shape, strides))) * tensor.itemsize
    readable = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, readable + mmap.PAGESIZE)
    _mapped.append(memory)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert protect(first + readable, mmap.PAGESIZE, NO_ACCESS) == 0
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=readable)
    return whole[readable - num_bytes :].view(tensor.dtype).as_strided(shape, strides).copy_(tensor)


def exit_code_of(function, *arguments):
    """Get the exit code of a process that calls `function` with its allocations guarded."""

    def run():
        with allocations_as(guard, "zeros"):
            function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
    return process.exitcode


def dispatched(T, E, K, kind):
    ids = routing_ids(T, E, K, kind)
    rows = kernels.dispatch(*map(guard, ids), T, E, True)
    return ids, type(rows)(*map(guard, rows))


def every_dispatch(kind):
    for T, E, K in ((257, 3, 2), (3, 130, 2), (1, 1, 1)):
        dispatched(T, E, K, kind)


def every_product(T, H, I, E, K, kind, layout="concatenated", rank=0):
    ids, rows = dispatched(T, E, K, kind)
    t = operands(T, H, I, E, ids[0].numel(), layout, rank)
    guarded = {name: guard(part) for name, part in t._asdict().items() if isinstance(part, torch.Tensor)}
    products(kernels, rows, t._replace(**guarded, factors=tuple(map(guard, t.factors))))


def every_product_of_packed_experts(name):
    for T, H, I, E, K in ((1, 64, 64, 3, 2), (20, 320, 64, 2, 2)):
        ids, rows = dispatched(T, E, K, "list")
        tensors, _ = layer(T, H, I, E, ids[0].numel(), torch.float32)
        orders = {"gate_up": "concatenated", "down": "whole"}
        gate_up, down = (
            PackedOperand(*map(guard, FORMATS[name].quantize(tensors[w], order)), name) for w, order in orders.items()
        )
        first, second = (  # adapters' rows and factors, of rank 8
            LoraTerm(guard(torch.randn(rows.token.numel(), 8)), guard(torch.randn(E, columns, 8)))
            for columns in (2 * I, H)
        )
        _, a = kernels.up(
            guard(tensors["x"]), gate_up, guard(tensors["gate_up_bias"]), rows, Activation(), False, True, True, first
        )
        kernels.down(a, down, guard(tensors["down_bias"]), rows, second)
        for packed in (gate_up, down):
            kernels.dequantize(*packed[:3], name, torch.float32, rows)


def every_rounding(T, E, K, tile, roundings=ROUNDINGS):
    weighting = Weighting(True, 0.0, 1.0)
    for rounding in roundings:
        num_pairs = TokenRounding(rounding=rounding, tile=tile).max_rows(T, K, E)
        scores, ranking, index = map(guard, matrix("probabilities", T, E, K))
        valid, uniform = guard(torch.rand(T) > 0.3), guard(torch.rand(E))
        found = kernels.round_rows(
            scores, ranking, index, valid, uniform, rounding, tile, 1, num_pairs, weighting, torch.float32
        )
        kernels.round_rows_backward(guard(torch.randn(num_pairs)), scores, found.expert_P, found.rows, weighting)


CASES = {
    "odd sizes": (every_product, 100, 41, 35, 3, 2, "list"),
    "multiples of 16 bytes": (every_product, 100, 44, 36, 3, 2, "sentinels"),
    "one token": (every_product, 1, 16, 16, 4, 1, "top_k"),
    "adapters of odd rank": (every_product, 20, 41, 35, 3, 2, "sentinels", "concatenated", 3),
    "adapters of rank 40": (every_product, 40, 44, 36, 2, 2, "sentinels", "transposed_concatenated", 40),
    "dispatch of sentinels": (every_dispatch, "sentinels"),
    "token rounding": (every_rounding, 33, 5, 2, 8),
    "token rounding of many experts": (every_rounding, 70, 33, 2, 8, ("stochastic",)),
    # slow from here
    "dispatch of list": (every_dispatch, "list"),
    **{f"experts in {name}": (every_product_of_packed_experts, name) for name in FORMATS},
}


@pytest.mark.parametrize("case", rest_slow(CASES, 8))
def test_nothing_is_read_or_written_past_an_end(case):
    assert exit_code_of(*CASES[case]) == 0, f"{SEGMENTATION_FAULT}: an index past a tensor's end; 1: see the error"


def test_an_index_past_the_end_is_noticed():
    """dispatch asked for a token more than there are pairs of."""
    expert = guard(torch.zeros(2 * 300, dtype=torch.long))
    longer = torch.frombuffer((ctypes.c_int64 * 601).from_address(expert.data_ptr()), dtype=torch.long)
    assert exit_code_of(kernels.dispatch, expert, None, 300, 3, True) == 0

    def past_the_end():
        faulthandler.disable()  # what it would say is no news
        kernels.dispatch(longer, None, 601, 3, True)

    assert exit_code_of(past_the_end) == SEGMENTATION_FAULT
