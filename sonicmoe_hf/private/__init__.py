"""What sonicmoe_hf uses of PyTorch and Transformers that they keep private, one module each, and
the attributes that it puts on their objects.

tests/helpers/private_names.py lists every such name with what rests on it; tests/project/test_private.py looks each up
in the versions installed.
"""
