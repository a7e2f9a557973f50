"""Linear attention and Mamba layers whose kernels are in packages that are not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
DECORATED = "is_new_implementation"  # a variable of Transformers' decorator: whether the package's function is taken


def _without_kernels(model: PreTrainedModel) -> Iterator[str]:
    """Yield the packages of functions that the model's modules call and that Transformers computes in plain PyTorch."""
    for module in {type(each).__module__ for each in model.modules()}:
        for function in vars(sys.modules[module]).values():
            code: Any = getattr(function, "__code__", None)
            if code is not None and DECORATED in code.co_freevars:
                cells = dict(zip(code.co_freevars, function.__closure__))
                if not cells[DECORATED].cell_contents:
                    yield cells["package"].cell_contents


def describe_linear_attention(model: PreTrainedModel) -> list[str]:
    """Say which packages would give the model's linear attention its kernels; no sentence where it has them or none."""
    missing = sorted(DISTRIBUTIONS.get(package, package) for package in set(_without_kernels(model)))
    if not missing:
        return []
    return [
        "warning: linear attention and convolutions run in plain PyTorch, which is slow and takes up to 106 GiB a layer "
        f"at 8,192 tokens (GLM-5-Next): pip install {' '.join(missing)}"
    ]
