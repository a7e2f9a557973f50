"""LoRA adapters as files: reading, conversion to what PEFT and engines load, and merging into checkpoints.

In the order of reading: rules (adapter_config.json as PEFT reads it), trained_model (the names of the model that was
trained), assignment (which weight a tensor of the file is for), adapter (the factors; its docstring draws an example),
peft_form and engines (what is written of them), then the two commands, convert and merge.
"""
