"""Tensor descriptors: tiles that the GPU's copy engine (TMA, from sm_90 on) brings to shared memory by itself.

Threads then spend no registers, address arithmetic or masks on them: what lies outside the tensor arrives as zeros. Each
function returns None for a tensor that the engine does not take: one whose rows are not contiguous, or whose address or
strides are no multiples of 16 bytes (in bf16: H or I no multiple of 8). Kernels then read it through pointers.
"""

from __future__ import annotations

from triton.tools.tensor_descriptor import TensorDescriptor


def is_aligned(tensor, strides):
    """Tell whether the tensor's address and these strides are multiples of 16 bytes."""
    size = tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and not any(stride * size % 16 for stride in strides)


def _described(tensor, shape, strides, block):
    if strides[-1] != 1 or not is_aligned(tensor, strides[:-1]):
        return None
    return TensorDescriptor(tensor, shape, strides, block)


def row_descriptor(tensor_RN, rows, columns):
    """Describe [rows, columns] of [R, N]."""
    return _described(tensor_RN, list(tensor_RN.shape), list(tensor_RN.stride()), [rows, columns])


def weight_descriptor(weight_ENK, columns, depth):
    """Describe [1, columns, depth] of a weight's logical view [E, N, K]; of one stored as [E, K, N], [1, depth,
    columns]."""
    block = [1, columns, depth]
    if weight_ENK.stride(2) != 1:
        weight_ENK, block = weight_ENK.transpose(1, 2), [1, depth, columns]
    return _described(weight_ENK, list(weight_ENK.shape), list(weight_ENK.stride()), block)


def gate_up_descriptor(weight_E2IH, columns, depth, interleaved):
    """Describe the gate rows and the up rows of `columns` columns of I, for `depth` of H.

    Interleaved: as weight_descriptor, 2 * columns rows. Concatenated: [1, 2, columns, depth] of the view [E, 2, I, H],
    so that a load clips at I; stored transposed, None.
    """
    if interleaved:
        return weight_descriptor(weight_E2IH, 2 * columns, depth)
    num_experts, width, hidden = weight_E2IH.shape
    stride_e, stride_n, stride_k = weight_E2IH.stride()
    shape, strides = [num_experts, 2, width // 2, hidden], [stride_e, width // 2 * stride_n, stride_n, stride_k]
    return _described(weight_E2IH, shape, strides, [1, 2, columns, depth])
