"""Frozen experts in pinned host memory, which a copy stream brings to the GPU one layer ahead of their use.

In the order of reading: placement (which layers live there), host_memory (whose memory it is), weight (the parameter that
stands for it), stream (when a layer is copied), copies (how), memory and units (numbers of bytes).
"""
