"""Checkpoints with experts in 4 or 8 bits: how they are declared, named, loaded, saved and shared by ranks.

In the order of reading: declared and declared_integers (what config.json says), matrix_format, float_matrices and
integer_matrices (how a file stores a matrix), stored_as_declared (whether files do as config.json says). Then
what becomes of tensors while they load: conversions (the table of them), parameter_conversion, matrices_apart,
experts_conversions and dense_conversion; quantizer (which Transformers calls) and state_dicts. Then ranks: shares (expert
parallelism), sharding (FSDP2) and distribution_checks. Errors that name a file or a weight come from json_files,
tensor_files and conversion_errors. The rooms above read files by the first two as well, and hub_names is for them alone.
"""
