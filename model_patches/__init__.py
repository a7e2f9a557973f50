"""One file per model family: facts, no mechanism. To add a family, write its file and list it in FAMILIES."""

from . import deepseek_v3, gpt_oss, olmoe, qwen3_moe
from .family import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (qwen3_moe, olmoe, deepseek_v3, gpt_oss)
}

__all__ = ["FAMILIES", "Family"]
