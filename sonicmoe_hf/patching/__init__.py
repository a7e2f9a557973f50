"""Transformers models with sonicmoe_hf experts and routing: what patching installs, what it checks, what it restores."""
