"""Attention with learned sinks (gpt-oss and others) by torch's flash kernels: attn_implementation="torch_sinks"."""
