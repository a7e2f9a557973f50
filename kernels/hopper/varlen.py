"""Tensors of variable length: TMA views of the rows of one expert, which end at a row known only on the device.

A TMA descriptor is made once, on the host, for the whole tensor. These views have a mode more than the tensor, by which a
kernel moves the end of the rows to where it wants it: TMA loads read zero past it, and TMA stores write nothing.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from .config import EPI_TILE_N, WARPGROUP_M

MAX_ROWS = 1 << 30  # more rows than any tensor has
WRAP = 1 << 34  # elements; MAX_ROWS * WRAP is 2 ** 64, where addresses begin again


def varlen_rows(tensor):
    """View [rows, columns] as (MAX_ROWS, columns, MAX_ROWS) whose first mode ends where we want.

    Element (MAX_ROWS - left + i, c, end) is row end - left + i of `tensor`. For i >= left it is out of bounds. The
    pointer starts MAX_ROWS rows early; no address before the tensor is accessed.
    """
    columns = tensor.shape[1]
    stride = Int64(tensor.stride[0])
    early = tensor.iterator.toint() - Int64(MAX_ROWS) * stride * (tensor.element_type.width // 8)
    pointer = cute.make_ptr(tensor.element_type, early, cute.AddressSpace.gmem, assumed_align=16)
    layout = cute.make_layout((Int32(MAX_ROWS), columns, Int32(MAX_ROWS)), stride=(stride, 1, stride))
    return cute.make_tensor(pointer, layout)


def varlen_halves(tensor):
    """View [rows, 2I] as (MAX_ROWS, I, 2, MAX_ROWS): `varlen_rows` of the gate half and of the up half."""
    whole = varlen_rows(tensor)
    rows, columns, ends = whole.shape
    stride = whole.stride[0]
    return cute.make_tensor(
        whole.iterator, cute.make_layout((rows, columns // 2, 2, ends), stride=(stride, 1, columns // 2, stride))
    )


def varlen_h(h, in_order: bool):
    """View h for TMA stores of one epi tile of its columns `in_order`, or of gate or up."""
    return varlen_rows(h) if in_order else varlen_halves(h)


def varlen_epi_tiles(tensor, first, end, *side):
    """View the rows first .. first + WARPGROUP_M, up to `end`, of the TMA view of `varlen_rows` (or of one `side` of
    `varlen_halves`), as (WARPGROUP_M, EPI_TILE_N, number of epi tiles)."""
    rows = cute.domain_offset((MAX_ROWS - (end - first), 0), tensor[(None, None, *side, end)])
    return cute.local_tile(rows, (WARPGROUP_M, EPI_TILE_N), (0, None))


def varlen_columns(tensor):
    """View [rows, columns] as (columns, MAX_ROWS, x, x), for loads: the transpose of `varlen_rows`, pointer unmoved.

    TMA loads want a mapped pointer. So the MAX_ROWS rows are taken back by wrapping around the 64-bit address space:
    element (c, MAX_ROWS - left + i, MAX_ROWS, end) is row end - left + i.
    """
    max_int, stride = Int32((1 << 31) - 1), Int64(tensor.stride[0])
    layout = cute.make_layout(
        (tensor.shape[1], Int32(MAX_ROWS), max_int, max_int), stride=(1, stride, Int64(WRAP) - stride, stride)
    )
    return cute.make_tensor(tensor.iterator, layout)


def expert_columns(tensor, first, end):
    """View the rows first .. end of `varlen_columns` (or of its TMA view), as (columns, rows)."""
    return cute.domain_offset((0, MAX_ROWS - (end - first)), tensor[None, None, MAX_ROWS, end])
