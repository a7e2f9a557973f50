"""The layer: moe_experts, its torch op, dispatch and routing, on tensors and settings; and what is asked of the module
that holds a layer's weights (experts_module.py)."""
