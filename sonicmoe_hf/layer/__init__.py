"""The layer: moe_experts, its torch op, dispatch and routing. Knows tensors and settings, no nn.Module."""
