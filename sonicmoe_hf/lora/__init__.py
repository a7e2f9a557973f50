"""LoRA on experts in memory: what PEFT meets, its wrapper and its config."""
