"""The sizes of adapters and merged checkpoints in docs/serving.md: computed from the models' sizes, as the files of small
ones show."""

from pathlib import Path

import pytest
from helpers.checkpoints import make, tensors_in
from helpers.models import CONFIGS, build
from peft import get_peft_model
from test_plan import GPT_OSS, sizes_of
from transformers import Qwen3MoeConfig

from sonicmoe_hf import convert_adapter, convert_checkpoint, lora_config
from sonicmoe_hf.demo.model import QWEN3_30B_A3B
from sonicmoe_hf.planning.memory import stored_bytes

pytestmark = pytest.mark.pinned
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
HEADER = "| GB | bf16 | `--quantize mxfp4` | `--quantize fp8` |"
FORMATS = ("bf16", "mxfp4", "fp8")
MODELS = {"gpt-oss-20b": (GPT_OSS, "mxfp4"), "Qwen3-30B-A3B": (Qwen3MoeConfig(**QWEN3_30B_A3B), "fp8")}


def bytes_of(config, format):
    """What the tensors of a checkpoint take whose experts are in a format, and everything else in bf16."""
    sizes = sizes_of(config)
    return 2 * (sizes.total - sizes.experts) + stored_bytes(sizes, format)


@pytest.mark.parametrize(("family", "format", "changes"), [
    ("gpt_oss", "mxfp4", {"intermediate_size": 64}),
    ("qwen3_moe", "fp8", {"hidden_size": 256, "moe_intermediate_size": 128}),
])  # fmt: skip
def test_the_tensors_of_a_small_checkpoint_take_what_is_computed(family, format, changes, tmp_path):
    make(tmp_path / "bf16", family, **changes)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "packed", "hub", quantize=format)
    for folder, name in (("bf16", "bf16"), ("packed", format)):
        found = sum(tensor.nbytes for tensor in tensors_in(tmp_path / folder).values())
        assert found == bytes_of(CONFIGS[family](**changes), name), folder


def test_the_document_has_the_computed_sizes():
    _, _, after = DOCUMENT.read_text(encoding="utf-8").partition(HEADER + "\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in after.split("\n\n")[0].splitlines()[1:]]
    assert {name: cells for name, *cells in rows} == {
        name: [f"{bytes_of(config, f) / 1e9:.1f}" if f in ("bf16", format) else "" for f in FORMATS]
        for name, (config, format) in MODELS.items()
    }


def adapter_parameters(config, r, experts_r, form):
    """Of an adapter on experts and attention. An engine's has the largest rank everywhere, and an A for each of gate and
    up, which share theirs in PEFT's."""
    hidden, intermediate = config.hidden_size, config.moe_intermediate_size
    queries, keys = (config.head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads))
    attention = r * (2 * (hidden + queries) + 2 * (hidden + keys))
    if form == "peft":
        experts = experts_r * ((hidden + 2 * intermediate) + (intermediate + hidden))
    else:
        experts = max(r, experts_r) * 3 * (hidden + intermediate)
    return config.num_hidden_layers * (attention + config.num_experts * experts)


@pytest.mark.parametrize("experts_r", [4, 2])
def test_the_tensors_of_a_small_adapter_are_those_that_are_computed(experts_r, tmp_path):
    model = build("qwen3_moe")
    model.config.save_pretrained(tmp_path / "base")
    get_peft_model(model, lora_config(model, 4, experts_r=experts_r)).save_pretrained(tmp_path / "peft")
    convert_adapter(tmp_path / "peft", tmp_path / "vllm", "vllm", trained_on=tmp_path / "base")
    for form in ("peft", "vllm"):
        found = sum(tensor.numel() for tensor in tensors_in(tmp_path / form).values())
        assert found == adapter_parameters(model.config, 4, experts_r, form), form


def test_the_document_has_the_computed_sizes_of_adapters():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    config = Qwen3MoeConfig(**QWEN3_30B_A3B)
    peft, vllm, less = (
        f"{2 * adapter_parameters(config, 16, experts_r, form) / 1e9:.2f}"
        for experts_r, form in ((16, "peft"), (16, "vllm"), (2, "peft"))
    )
    assert f"PEFT's file has {peft} GB, and vLLM's {vllm}," in text
    assert f"PEFT's file has {less} GB, but the engines' stays as large" in text
