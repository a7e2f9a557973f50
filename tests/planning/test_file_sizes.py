"""The sizes of merged checkpoints in docs/serving.md: computed from the models' sizes, as the files of small
ones show."""

from pathlib import Path

import pytest
from helpers.checkpoints import make, tensors_in
from helpers.models import CONFIGS
from test_plan import GPT_OSS, sizes_of
from transformers import Qwen3MoeConfig

from sonicmoe_hf import convert_checkpoint
from sonicmoe_hf.tools.planning.memory import experts_bytes
from sonicmoe_hf.tools.random_models import QWEN3_30B_A3B

pytestmark = pytest.mark.pinned
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
HEADER = "| GB | bf16 | `--quantize mxfp4` | `--quantize fp8` |"
FORMATS = ("bf16", "mxfp4", "fp8")
MODELS = {"gpt-oss-20b": (GPT_OSS, "mxfp4"), "Qwen3-30B-A3B": (Qwen3MoeConfig(**QWEN3_30B_A3B), "fp8")}


def bytes_of(config, format):
    """Count the bytes of the tensors of a checkpoint whose experts are in a format, and everything else in bf16."""
    sizes = sizes_of(config)
    return 2 * (sizes.total - sizes.experts) + experts_bytes(sizes, format)


@pytest.mark.parametrize(
    ("family", "format", "changes"),
    [
        ("gpt_oss", "mxfp4", {"intermediate_size": 64}),
        ("qwen3_moe", "fp8", {"hidden_size": 256, "moe_intermediate_size": 128}),
    ],
)
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
