"""LoRA adapters as files: reading, conversion to what PEFT and engines load, and merging into checkpoints."""
