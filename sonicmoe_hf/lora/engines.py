"""What inference engines call the experts of a model, and in which form they take LoRA on them. Facts, no mechanism.

Read in the sources of vLLM 0.33.0 (vllm/lora and the `is_3d_moe_weight` and `get_expert_mapping` of its models) and of
SGLang 0.5.23 (sglang/srt/lora).
"""

from __future__ import annotations

from typing import NamedTuple

ENGINES = ("vllm", "sglang")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
VLLM_ABSORBED = "kv_b_proj"  # of latent attention (MLA): vLLM decodes with matrices that it makes of the base's alone


class ServedModel(NamedTuple):
    """How a model's experts stand in engines.

    is_3d: whether vLLM holds the experts of a layer as one weight and takes PEFT's form of adapters on them.
    block: what the hub calls the block around the experts. gate, up, down: what it calls an expert's projections.
    """

    is_3d: bool = False
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_PER_EXPERT, _THREE_DIMENSIONAL = ServedModel(), ServedModel(is_3d=True)
SERVED_MODELS = {  # by model_type
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "ernie4_5_moe",
            "exaone_moe",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
        ),
        _PER_EXPERT,
    ),
    "mixtral": ServedModel(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    **dict.fromkeys(("gpt_oss", "qwen3_vl_moe", "qwen3_5_moe"), _THREE_DIMENSIONAL),
}

# linear layers that SGLang fuses, and of which it needs factors for all where there are some for one
SGLANG_FUSED = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))
