"""Decoder layers compiled on their own, with Liger's kernels in them."""
