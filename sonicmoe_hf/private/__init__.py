"""Private parts of PyTorch and Transformers that sonicmoe_hf uses, one module each; the attributes that it puts on their
objects; the register of their functions that it replaces; and the versions of packages, installed and tested.

tests/helpers/private_names.py lists every such name with what rests on it; tests/project/test_private.py looks each up
in the versions installed.
"""
