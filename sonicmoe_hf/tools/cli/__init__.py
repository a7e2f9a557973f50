"""The `sonicmoe-hf` command.

main parses it, and commands lists its commands with their options. A command's function is in the file of its name, those
of convert and merge in checkpoints. doctor_tables and linear_attention are parts of doctor, warmup_kernels and
warmup_graphs of warmup; bar and console show what a command does and prints.
"""
