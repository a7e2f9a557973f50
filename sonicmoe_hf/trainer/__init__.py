"""Trainer support: attach, callbacks, and Trainer checkpoints that restore fused experts."""
