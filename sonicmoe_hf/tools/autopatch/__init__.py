"""`sonicmoe-hf run`: a program of somebody else's, in which every model is patched as it is built, and its children.

In the order of reading: settings, program (which starts it), site/sitecustomize.py (which Python imports there first),
session (what it does with models) and adapters (--adapt-experts).
"""
