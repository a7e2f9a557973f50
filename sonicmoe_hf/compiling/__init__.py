"""compile_layers: layers that torch compiles one by one, also those with Liger's kernels in them.

In the order of reading: layers (what is compiled, with which options), compiled_module (what its calls do beside compiled
code) and liger_tracing (what torch traces in place of Liger's kernels).
"""
