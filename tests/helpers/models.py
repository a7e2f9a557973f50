"""Small models of the four families, with weights of realistic size, and how tests compare tensors."""

import copy
import io
from contextlib import contextmanager
from functools import partial

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
)
from transformers.models.ernie4_5_vl_moe.configuration_ernie4_5_vl_moe import Ernie4_5_VLMoeTextConfig
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeTextModel

import sonicmoe_hf
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.tools.comparing import relative_error

VOCABULARY = 64
ORDER_OF_SUMS = "fp32: the same numbers summed in another order"
SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2}


ON_DISK = {  # a device map of two layers, of which the second is on the disk
    **{f"model.{part}": "cpu" for part in ("embed_tokens", "layers.0", "norm", "rotary_emb")},
    "model.layers.1": "disk",
    "lm_head": "cpu",
}
IN_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16}
OF_QWEN3 = {"num_experts": 8, "moe_intermediate_size": 16, "intermediate_size": 48}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# small configs, as functions of what is to be otherwise
qwen3_moe = partial(Qwen3MoeConfig, **SHARED, **GROUPED, **OF_QWEN3, norm_topk_prob=True)
olmoe = partial(OlmoeConfig, **SHARED, **GROUPED, num_experts=8, intermediate_size=16)
gpt_oss = partial(GptOssConfig, **SHARED, **GROUPED, num_local_experts=8, intermediate_size=16, rope_parameters=ROPE)
deepseek_v3 = partial(
    DeepseekV3Config, **SHARED, **IN_GROUPS, n_shared_experts=1, first_k_dense_replace=1, num_experts_per_tok=2,
    intermediate_size=48, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8,
)  # fmt: skip
# Mamba, experts without a gate, attention, experts; the experts are of another size than the model
nemotron_h = partial(
    NemotronHConfig, **{name: size for name, size in SHARED.items() if name != "num_hidden_layers"}, **GROUPED,
    **IN_GROUPS, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], mamba_num_heads=4,
    mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=8, moe_latent_size=24,
    moe_shared_expert_intermediate_size=16, intermediate_size=48,
)  # fmt: skip
mixtral = partial(MixtralConfig, **SHARED, **GROUPED, num_local_experts=8, intermediate_size=16)
glm4_moe = partial(
    Glm4MoeConfig, **SHARED, **GROUPED, n_routed_experts=8, moe_intermediate_size=16, n_shared_experts=1,
    first_k_dense_replace=1, intermediate_size=48,
)  # fmt: skip
qwen3_vl_moe = partial(
    Qwen3VLMoeConfig,
    text_config={**SHARED, **GROUPED, **OF_QWEN3},
    vision_config={
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
    },
)
CONFIGS = {"qwen3_moe": qwen3_moe, "olmoe": olmoe, "deepseek_v3": deepseek_v3, "gpt_oss": gpt_oss}
OTHERS = {  # without a native layout
    "nemotron_h": nemotron_h,
    "mixtral": mixtral,
    "glm4_moe": glm4_moe,
    "qwen3_vl_moe": qwen3_vl_moe,
}
OF_64 = {  # sizes that every packed format takes: NF4's are multiples of 64
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64},
    "olmoe": {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 64},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64},
    "nemotron_h": {"moe_latent_size": 64, "moe_intermediate_size": 64},
}


def build(family: str, implementation: str = "eager", seed: int = 0, **changes):
    """Build a language model whose hidden pre-activations are O(1) and whose biases are not zero: at the usual
    initialisation of 0.02 a wrong gate or a forgotten bias passes every test."""
    torch.manual_seed(seed)
    auto_class = AutoModelForImageTextToText if family == "qwen3_vl_moe" else AutoModelForCausalLM
    config = (CONFIGS | OTHERS)[family](**changes)
    return with_realistic_weights(auto_class.from_config(config, experts_implementation=implementation))


@torch.no_grad()
def with_realistic_weights(model):
    """Make the model in training mode, with weights as `build` says."""
    is_transposed = model.config.model_type == "gpt_oss"
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "bias" not in name:
            fan_in = parameter.shape[-2] if is_transposed and ".experts." in name else parameter.shape[-1]
            parameter.normal_(0, 1.0 if "embed" in name else fan_in**-0.5)
        elif "bias" in name:
            parameter.normal_(0, 0.5)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.normal_(0, 0.1)
    return model.train()


def build_patched(family: str, routing=None, save: str = "preactivation", **changes):
    """Call `build`, and patch the model with this routing."""
    model = build(family, **changes)
    sonicmoe_hf.patch_model(model, routing, save=save)
    return model


@contextmanager
def patching(*families, **options):
    """Patch the models that are built inside."""
    sonicmoe_hf.patch(*families, **options)
    try:
        yield
    finally:
        sonicmoe_hf.unpatch()


def ernie_vl_text():
    """Build the layers of ERNIE 4.5 VL, whose routers of text and of images each get some of the tokens."""
    rope = {**ROPE, "mrope_section": [1, 1, 2]}
    experts = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": [16, 12], "intermediate_size": 48}
    config = Ernie4_5_VLMoeTextConfig(**SHARED, **experts, num_key_value_heads=2, rope_parameters=rope)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = Ernie4_5_VLMoeTextModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.train()


def image_tokens(inputs):
    """Make token types of `batch`, whose rows have images of other lengths, the third none."""
    types = torch.zeros_like(inputs["input_ids"])
    for row, length in enumerate((4, 9, 0, 6)):
        types[row, 2 : 2 + length] = 1 + row % 2
    return types


def twin(model):
    """Make an independent copy, patched or not as the original."""
    return copy.deepcopy(model)


def with_other_routers(model):
    """Make a copy whose routers have moved: as after some steps of training, or as a server in other
    arithmetic has in effect."""
    other = twin(model)
    with torch.no_grad():
        for layer in find_layers(other):
            layer.router.weight.add_(torch.randn_like(layer.router.weight), alpha=0.3)
    return other


def through_a_file(thing, **options):
    """Save a model by torch.save, and load it again."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **{"weights_only": False, **options})


def batch(rows: int = 4, length: int = 24, padding: bool = False, seed: int = 0):
    """Draw random tokens with labels; with padding, every sequence but the first ends early."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding:
        for row in range(1, rows):
            mask[row, length - 3 * row :] = 0
        ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def logits_of(model):
    """Compute the logits of `batch`, in evaluation."""
    with torch.no_grad():
        return model.eval()(input_ids=batch()["input_ids"]).logits


def gradients_of(model):
    """Copy every gradient that there is, by its parameter's name, of a compiled model too."""
    named = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters()}
    return {name: gradient.detach().clone() for name, gradient in named.items() if gradient is not None}


def loss_and_gradients(model, inputs):
    """Compute logits, loss and every parameter's gradient of one training forward and backward."""
    model.zero_grad(set_to_none=True)
    out = model(**inputs)
    out.loss.backward()
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **gradients_of(model)}


def assert_all_close(actual: dict, expected: dict, tolerance: float, because: str):
    """Compare every named tensor, none missing, within `tolerance` relative error; `because` is the tolerance's
    reason."""
    assert set(actual) == set(expected), set(actual) ^ set(expected)
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= tolerance, f"{worst}: relative error {errors[worst]:.2e} > {tolerance:.0e} ({because})"
