"""LoRA on experts: what PEFT meets (its wrapper, its config), and adapters as files (conversion, merging)."""
