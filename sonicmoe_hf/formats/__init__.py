"""Checkpoints with experts in 4 or 8 bits: how they are declared, named, loaded, saved and shared by ranks."""
