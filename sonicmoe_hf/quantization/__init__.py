"""Frozen experts in 4 bits."""
