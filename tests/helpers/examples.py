"""The examples, as modules, and what trains them in a moment."""

import importlib.util
import sys
from pathlib import Path
from unittest import mock

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY_SIZES = {
    "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "intermediate_size": 16,
}  # fmt: skip
TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind\n"


def load(name):
    """Load an example as a module, made anew with the file that examples share: each imports from its own folder."""
    sys.modules.pop("shared", None)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        spec.loader.exec_module(module)
    return module
