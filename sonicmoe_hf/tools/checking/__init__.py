"""Comparing an adapter wherever it went with what it did where it was trained: `sonicmoe-hf check`."""
