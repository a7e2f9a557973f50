"""Frozen experts in 4 or 8 bits."""
