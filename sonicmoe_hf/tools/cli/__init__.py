"""The `sonicmoe-hf` command.

main parses it, and commands lists its commands with their options. A command's function is in the file of its name, those
of convert and merge in checkpoints. doctor_tables, warmup_kernels and warmup_graphs are parts of doctor and warmup; bar
and console show what a command does and prints.
"""
