"""Facts of model families, no mechanism. A file lists the families that share its formulas.

To add a family, add it to the file whose router has the same forward (tests/patching/test_architectures.py compares the
sources), or write a file with its formulas and list it here.
"""

from . import deepseek_v2, deepseek_v3, deepseek_v4, ernie4_5_moe, gpt_oss, mixtral, olmoe
from .family import Family, NativeFamily

FAMILIES: dict[str, Family] = {
    family.name: family
    for module in (olmoe, deepseek_v3, gpt_oss, mixtral, deepseek_v2, deepseek_v4, ernie4_5_moe)
    for family in module.FAMILIES
}
NATIVE_FAMILIES: dict[str, NativeFamily] = {
    name: family for name, family in FAMILIES.items() if isinstance(family, NativeFamily)
}
NATIVE_PREFIX = "sonicmoe_"  # of the model_type in the native layout

__all__ = ["FAMILIES", "NATIVE_FAMILIES", "NATIVE_PREFIX", "Family", "NativeFamily"]
