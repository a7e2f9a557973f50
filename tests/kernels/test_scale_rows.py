"""The Triton kernels that prepare operands of FP8 products, interpreted on a CPU, beside the same in PyTorch."""

import pytest
import torch
from helpers.marks import rest_slow

from sonicmoe_hf.kernels import scaled
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.quantized import FP8_BLOCK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("size_out", "size_in"), rest_slow([(144, 336), (160, 144), (272, 128)]))
@pytest.mark.parametrize("parts", [1, 2])
def test_a_weight_is_transposed_bit_by_bit(size_out, size_in, parts):
    """And the halves of gate and up are filled up to whole groups with zeros."""
    codes = torch.randint(256, (3, parts * size_out, size_in), dtype=torch.uint8, device=DEVICE)
    blocks = -(-size_out // FP8_BLOCK), -(-size_in // FP8_BLOCK)
    scales = torch.rand(3, parts, blocks[0], 1, blocks[1], device=DEVICE)
    found, expected = kernels.transposed(codes, scales), scaled.transposed(codes, scales)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)
