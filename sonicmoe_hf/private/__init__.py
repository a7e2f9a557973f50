"""What sonicmoe_hf uses of PyTorch, Transformers and PEFT that they keep private, one module each.

Each module begins with a table USED: {name: (versions in which it was seen, what of ours rests on it)}. A name after a
colon is an attribute that the module before it sets on objects. tests/project/test_private.py looks up every name in the
versions installed, and every private name of our code in the tables.
"""
