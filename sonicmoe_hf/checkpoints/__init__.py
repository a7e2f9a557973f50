"""Checkpoints: the native layout, its models, and conversion to it and back."""
