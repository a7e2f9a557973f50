"""The `sonicmoe-hf` command."""
