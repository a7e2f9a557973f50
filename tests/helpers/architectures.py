"""Every mixture-of-experts architecture of the installed Transformers: one layer of each, tiny,
inside a PreTrainedModel."""

import importlib
import inspect
import itertools
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from sonicmoe_hf.adapters.engines import CLASSES
from sonicmoe_hf.model_patches import FAMILIES
from sonicmoe_hf.patching.support import supports
from sonicmoe_hf.routing.support import why_no_rounding

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- table: PYTHONPATH=.:tests python -m helpers.architectures -->\n", "<!-- end of table -->"
MODELS = Path(transformers.__file__).parent / "models"
HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 16, 12, 8, 2, 64
SIZES = {
    HIDDEN: ("hidden_size", "d_model"),
    INNER: (
        "moe_intermediate_size",
        "intermediate_size",
        "expert_ffn_hidden_size",
        "shared_intermediate_size",
        "moe_latent_size",
        "vision_moe_intermediate_size",
        "ffn_dim",
    ),
    EXPERTS: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"),
    TOP_K: (
        "num_experts_per_tok",
        "moe_topk",
        "top_k_experts",
        "moe_k",
        "topk_group",
        "num_experts_per_token",
        "moe_top_k",
    ),
    4: ("n_group",),
    1: ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts", "num_hidden_layers"),
}
NOT_MERGED = {
    "Inkling2LoopExperts": "not merged: its checkpoints are quantized, and conversion to dense weights has no inverse",
    "DiffusionGemmaTextExperts": "not merged: encoder and decoder share weights",
    "MuseSparkExperts": "merge untested: `lora_config` raises an error",
    "Qwen3OmniMoeTalkerTextExperts": "merge untested: its inputs are the thinker's states",
}
LIMITS = {"limit", "swiglu_limit"}


class Architecture(NamedTuple):
    """One class of experts that goes through Transformers' experts interface, and where its module's classes are."""

    folder: str
    experts: str

    @property
    def module_name(self) -> str:
        return f"transformers.models.{self.folder}.modeling_{self.folder}"

    @property
    def module(self):
        return importlib.import_module(self.module_name)


@cache
def _text(folder: str) -> str:
    return (MODELS / folder / f"modeling_{folder}.py").read_text()


@cache
def architectures() -> list[Architecture]:
    """List, of every folder of transformers.models, the experts classes that use_experts_implementation decorates."""
    architectures = []
    for folder in sorted(path.name for path in MODELS.iterdir() if (path / f"modeling_{path.name}.py").exists()):
        lines = _text(folder).splitlines()
        for line, following in itertools.pairwise(lines):
            if line.startswith("@use_experts_implementation") and following.startswith("class "):
                architectures.append(Architecture(folder, following[6:].partition("(")[0]))
    return architectures


def _shrink(config) -> PreTrainedConfig:
    config.shared_expert_intermediate_size = INNER  # the class of Qwen3-Omni's talker has it from checkpoints alone
    for size, names in SIZES.items():
        for name in names:
            old = getattr(config, name, None)
            if isinstance(old, (list, tuple)):
                setattr(config, name, [size] * len(old))
            elif hasattr(config, name):
                setattr(config, name, size)
    return config


def _configs(module):
    """Yield small configs of the folder's config classes, those of text models first."""
    configuration = importlib.import_module(module.__name__.replace(".modeling_", ".configuration_"))
    classes = [
        cls
        for _, cls in inspect.getmembers(configuration, inspect.isclass)
        if issubclass(cls, PreTrainedConfig) and cls.__module__ == configuration.__name__
    ]
    for cls in sorted(classes, key=lambda cls: "Text" not in cls.__name__):
        yield _shrink(cls())


def build_from_config(architecture: Architecture, class_name: str) -> nn.Module:
    """Build the class of the architecture's module, from the first of its configs that has what its __init__ asks for."""
    cls, problems = getattr(architecture.module, class_name), []
    layer_idx = 3 if architecture.folder == "deepseek_v4" else 1  # whose first routers read a table of token ids
    others = {"layer_idx": layer_idx, "intermediate_size": INNER}
    options = {name: others[name] for name in inspect.signature(cls).parameters if name in others}
    for config in _configs(architecture.module):
        config._experts_implementation = "eager"
        try:
            torch.manual_seed(0)
            built = cls(config, **options)
        except (AttributeError, TypeError) as problem:
            problems.append(f"{type(config).__name__}: {problem}")
            continue
        for module in built.modules():
            for limit in LIMITS & vars(module).keys():
                setattr(module, limit, 0.7)  # which many pre-activations exceed
        with torch.no_grad():
            for tensor in (*built.parameters(), *built.buffers()):
                if tensor.is_floating_point():
                    tensor.normal_(0, 0.3)
        return built
    raise AssertionError(f"{class_name}: no config of its module fits: {problems}")


class OneLayer(PreTrainedModel):
    """A model that is one module: what patching takes."""

    config_class = PreTrainedConfig

    def __init__(self, layer: nn.Module):
        super().__init__(PreTrainedConfig())
        self.layer = layer

    def forward(self, *args):
        out = self.layer(*args)
        return out[0] if isinstance(out, tuple) else out


@cache
def family_of(architecture: Architecture):
    """Find the families whose blocks are in the architecture's module and hold its experts. The text is read, since to
    import a hundred modules, and to parse them for a class's source, is a fifth of collecting the tests."""
    families = [family for family in FAMILIES.values() if family.module == architecture.module_name]
    text = _text(architecture.folder) if families else ""
    blocks = {
        family: re.search(rf"^class {family.block}\b.*?(?=^[@#\w]|\Z)", text, re.M | re.S) for family in families
    }
    return [family for family, block in blocks.items() if f"{architecture.experts}(" in block[0]]


def layers_of(architecture: Architecture) -> OneLayer:
    """Make a model of the family's block, where there is one, or of the experts alone."""
    families = family_of(architecture)
    return OneLayer(build_from_config(architecture, families[0].block if families else architecture.experts))


def table() -> str:
    """Build the table of docs/models.md: what `supports` says of one layer of every architecture, which families are not
    merged in test_merge_families, and which have a class whose adapters are written for engines."""
    lines = [
        "| model (folder of transformers.models), experts | token rounding | adapters for |",
        "|---|---|---|",
    ]
    for architecture in architectures():
        model = layers_of(architecture)
        (layer,) = supports(model)
        reason = layer.reason.partition("; ")[0].partition(": ")[2]
        engines = {"vLLM": CLASSES["vllm"], "SGLang": CLASSES["sglang"]}
        limits = ["" if layer.accelerated else f"not accelerated: {reason}", NOT_MERGED.get(architecture.experts, "")]
        limits = [f" ({each})" for each in limits if each]
        cells = [
            f"{architecture.folder}, `{architecture.experts}`{''.join(limits)}",
            "yes" if layer.accelerated and not why_no_rounding(model) else "no",
            ", ".join(
                name
                for name, classes in engines.items()
                if any(hasattr(architecture.module, each) for each in classes)
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """Put the table, brought up to date, into the text of docs/models.md."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + table() + end + after


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
