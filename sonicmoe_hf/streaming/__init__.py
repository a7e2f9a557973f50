"""Frozen experts in pinned host memory, which a copy stream brings to the GPU one layer ahead of their use."""
