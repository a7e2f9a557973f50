"""Comparing what an adapter does wherever it went with what it did where it was trained: `sonicmoe-hf check`."""
