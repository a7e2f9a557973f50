"""The comparison of tensors, on which every tolerance of the tests rests."""

import torch

from sonicmoe_hf.tools.comparing import relative_error


def test_the_error_is_relative_and_a_nan_is_none_that_passes():
    ones, nan = torch.ones(4), torch.tensor([float("nan"), 1.0, 1.0, 1.0])
    assert relative_error(1.5 * ones, ones) == 0.5
    assert relative_error(nan, ones) == relative_error(ones, nan) == float("inf")
    assert relative_error(torch.full((4,), float("inf")), torch.full((4,), float("inf"))) == float("inf")
    assert relative_error(2 * ones, 0 * ones) == 4, "of zeros: the norm"
