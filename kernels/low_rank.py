"""The two forms in which A and B of low-rank adapters lie in memory: by expert, and as PEFT stores them.

A is [E, r, in], or [r*E, in] with the expert slowest; B is [E, out, r], or [out, r*E] with the expert fastest.
"""

from __future__ import annotations


def by_expert(a, b, num_experts: int):
    """View an A of either form as [E, r, in] and a B as [E, out, r], which autograd differentiates for nothing."""
    a = a if a.dim() == 3 else a_of_experts(a, num_experts)
    return a, b if b.dim() == 3 else b_of_experts(b, num_experts)


def a_of_experts(a, num_experts: int):
    """View PEFT's A as [E, r, in]."""
    return a.reshape(num_experts, -1, a.shape[1])


def b_of_experts(b, num_experts: int):
    """View PEFT's B as [E, out, r]."""
    return b.reshape(len(b), -1, num_experts).permute(2, 0, 1)


def a_as_peft(a):
    """Invert `a_of_experts`."""
    return a.flatten(0, 1)


def b_as_peft(b):
    """Invert `b_of_experts`."""
    return b.permute(1, 2, 0).flatten(1)


def a_by_expert(shape, strides, num_experts: int):
    """View the shape and strides of an A of either form as those of [E, r, in]."""
    if len(shape) == 3:
        return tuple(shape), tuple(strides)
    (rows, length), (by_row, by_column) = shape, strides
    rank = rows // num_experts
    return (num_experts, rank, length), (rank * by_row, by_row, by_column)


def b_by_expert(shape, strides, num_experts: int):
    """View the shape and strides of a B of either form as those of [E, out, r]."""
    if len(shape) == 3:
        return tuple(shape), tuple(strides)
    (size, columns), (by_row, by_column) = shape, strides
    return (num_experts, size, columns // num_experts), (by_column, by_row, num_experts * by_column)


def swapped(shape_and_strides):
    """Exchange the last two dimensions of a shape and its strides."""
    (experts, height, width), (by_expert, by_row, by_column) = shape_and_strides
    return (experts, width, height), (by_expert, by_column, by_row)
