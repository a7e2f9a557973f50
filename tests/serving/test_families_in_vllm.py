"""vLLM, run on a CPU, computes what was trained: from merged checkpoints, and from converted adapters beside the base."""

import pytest
from helpers.adapters import save_with_factors
from helpers.engine_adapters import config_for_vllm
from helpers.vllm_engine import FAMILIES_SERVED, complete, distance, engine, model_for_vllm
from peft import get_peft_model

from sonicmoe_hf import convert_adapter, merge_adapter
from sonicmoe_hf.adapters.adapter import Adapter
from sonicmoe_hf.adapters.engines import vllm_takes_pefts_form
from sonicmoe_hf.checkpoints.reading.config_only import build_on_meta

pytestmark = pytest.mark.serving
TOLERANCE = 1e-4  # fp32: two engines' order of sums, through two layers; of MLA 2e-5, as vLLM absorbs kv_b_proj


@pytest.mark.parametrize("family", FAMILIES_SERVED)
def test_base_adapter_and_merged_checkpoint_have_the_log_probabilities_of_transformers_and_peft(family, tmp_path):
    """Base and adapter come from one server with LoRA, whose experts are `vllm_on_cpu`; the merged checkpoint from one
    without, whose experts are vLLM's own kernels."""
    model = model_for_vllm(family, tmp_path / "base")
    adapted = save_with_factors(get_peft_model(model, config_for_vllm(model)), tmp_path / "adapter", 0.1)
    convert_adapter(tmp_path / "adapter", tmp_path / "tuned", "vllm", trained_on=tmp_path / "base")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    with engine(tmp_path / "base", enable_lora=True, max_lora_rank=8) as llm:
        base, tuned = complete(llm), complete(llm, tmp_path / "tuned")
    with engine(tmp_path / "merged") as llm:
        merged = complete(llm)
    assert distance(adapted, tuned) < TOLERANCE
    assert distance(adapted, merged) < TOLERANCE
    with adapted.disable_adapter():
        assert distance(adapted, base) < TOLERANCE
        assert distance(adapted, tuned) > 0.3, "the adapter changes much"


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "qwen3_moe"])
def test_pefts_own_file_is_served_where_it_is_said_to_be(family, tmp_path):
    """vLLM serves it where ranks and scales are one, under --enable-mixed-moe-lora-format."""
    model = model_for_vllm(family, tmp_path / "base")
    adapted = save_with_factors(get_peft_model(model, config_for_vllm(model)), tmp_path / "adapter", 0.1)
    shapes = build_on_meta(str(tmp_path / "base"))
    assert vllm_takes_pefts_form(tmp_path / "adapter", Adapter.read(tmp_path / "adapter", shapes), shapes)
    with engine(tmp_path / "base", enable_lora=True, max_lora_rank=8, enable_mixed_moe_lora_format=True) as llm:
        tuned = complete(llm, tmp_path / "adapter", is_3d_lora_weight=True)
    assert distance(adapted, tuned) < TOLERANCE
