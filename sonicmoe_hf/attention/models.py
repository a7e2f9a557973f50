"""Which models have attention with sinks, which of them torch's flash kernels can compute, and what else would."""

from __future__ import annotations

NAME = "torch_sinks"  # not "sdpa_...": Transformers refuses names with "sdpa" for models that have no SDPA, as these
SUPPORTED = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "openai_privacy_filter")
UNSUPPORTED = {
    "deepseek_v4": "its compressed keys are chosen by a mask, which flash kernels do not take",
    "hy_v4": "its keys are chosen for each query, which flash kernels do not do",
}


def check_model(config) -> None:
    """Raise ValueError for a model whose attention is more than sinks and a window."""
    reason = UNSUPPORTED.get(config.model_type)
    if reason is not None:
        raise ValueError(
            f'attn_implementation="{NAME}" does not compute {config.model_type}: {reason}; load it with '
            'attn_implementation="eager"'
        )
