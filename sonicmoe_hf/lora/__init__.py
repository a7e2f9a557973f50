"""LoRA on a model in memory: lora_config, and the functions that take the place of PEFT's; reads no adapter's file.

In the order of reading: config (lora_config) with names, peft_wrapper (a layer's call with adapters, and the list of what
is replaced), whole_adapter (making and collecting an adapter), shares (where ranks share the experts), factors (A and B
as tensors); then what PEFT's other functions need: packed_base, named_base and dropout (of configs), loaded_names
(saving), packed_merge with dithering, and tied_head (merging).
"""
