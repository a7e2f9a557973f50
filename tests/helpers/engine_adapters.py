"""Models and adapters that are converted for inference engines."""

import json
import re

import pytest
from helpers.checkpoints import tensors_in
from helpers.models import build

import sonicmoe_hf
from sonicmoe_hf import CheckpointError, convert_adapter
from sonicmoe_hf.adapters.engines import VLLM_ABSORBED

UNEVEN = {
    "use_rslora": True,
    "rank_pattern": {r"layers\.1\..*gate_up_proj": 4, "o_proj": 1},
    "alpha_pattern": {"experts.down_proj": 3, "o_proj": 7},
}


FAMILIES_IN_VLLM = [  # besides, built by small_model
    "afmoe",
    "axk1",
    "deepseek_v4",
    "gemma4",
    "granitemoe",
    "granitemoeshared",
    "hy_v3",
    "jamba",
    "laguna",
    "lfm2_moe",
    "minimax_m2",
    "nemotron_h",
    "phimoe",
    "qwen3_5_moe",
]
FAMILIES_IN_SGLANG = ["granitemoe", "minimax_m2", "phimoe", "qwen3_5_moe"]
OTHERS = ("mixtral", "glm4_moe", "qwen3_vl_moe")


def save_base(name, folder):
    """Save a small model in `folder`, and load it from there."""
    model = build(name)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def adapter_config(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def edit_adapter_config(adapter, **changes):
    """Change entries of an adapter's adapter_config.json."""
    (adapter / "adapter_config.json").write_text(json.dumps({**adapter_config(adapter), **changes}))


def assert_refused(adapter, match, layout="vllm", **options):
    """Check that convert_adapter raises, and writes nothing."""
    with pytest.raises(CheckpointError, match=match):
        convert_adapter(adapter, adapter.parent / "refused", layout, **options)
    assert not (adapter.parent / "refused").exists()


def merge_by_peft(adapted, folder):
    """Merge the adapter as PEFT does, and read the tensors of what it saves."""
    adapted.merge_and_unload().save_pretrained(folder)
    return tensors_in(folder)


def split_experts(tensors, family=None):
    """Split the experts' weights among a checkpoint's tensors into one each, [out, in], under the names that engines
    give them. gpt-oss stores [E, in, out], gates and ups in turn."""
    split = {}
    for name, tensor in tensors.items():
        stem = re.sub(r"\.(?:experts\.(?:gate_up|up|down)_proj|(?:input|output)_linear\.weight)$", ".experts", name)
        if stem == name or tensor.dim() != 3:
            split[name] = tensor
            continue
        for expert, weight in enumerate(tensor.transpose(1, 2) if family == "gpt_oss" else tensor):
            if "gate_up_proj" in name or "input_linear" in name:
                gate, up = (weight[0::2], weight[1::2]) if family == "gpt_oss" else weight.chunk(2)
                split |= {f"{stem}.{expert}.gate_proj.weight": gate, f"{stem}.{expert}.up_proj.weight": up}
            else:
                split[f"{stem}.{expert}.down_proj.weight"] = weight
    return split


def config_for_vllm(model):
    """Make the default configuration at rank 2, without what vLLM takes no adapters of."""
    return sonicmoe_hf.lora_config(model, r=2, exclude_modules=f".*{VLLM_ABSORBED.pattern}")
