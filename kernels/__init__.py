"""Tensors in, tensors out: the kernels of sonicmoe-hf, one folder or file per backend. Imports nothing."""
