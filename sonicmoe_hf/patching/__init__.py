"""Transformers models whose experts sonicmoe_hf computes: what patching installs, checks and restores; knows no routing.

In the order of reading: patch (the steps of patching), moe_layers (the layers and models that it finds), support (which
of them it fits) with forwards (what a call of experts reaches) and adopted, experts (the function that Transformers
calls), guard (the hook that checks calls), quantize (experts packed in memory) and loading_packed (while they are
loaded), own_configs, and what users are told: layer_ranges, beside_bitsandbytes.
"""
