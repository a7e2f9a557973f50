"""Whole Transformers models for the benchmarks of training steps: sizes, random weights, and who computes the experts.

Weights are random and made on the device, in the order of the modules from one seed: the same for every contender.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import NamedTuple

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_outputs import CausalLMOutput

import sonicmoe_hf
from benchmarks.common.contenders import Unavailable, peer_module, scattermoe, upstream
from benchmarks.common.shapes import Shape
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.tools.random_models import PATTERN, PUBLISHED, config_from

# For a CPU, of every model its own of these. Each token goes to every expert, so that what rounding does to a score
# changes no choice; two layers of a hybrid model are one of each kind, with heads as they are, whose kernels tune once.
TINY = {
    "hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 8, "first_k_dense_replace": 0, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 16, "qk_rope_head_dim": 16, "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "vocab_size": 64, "pad_token_id": None, "eos_token_id": None,
    "full_attention_interval": 2, PATTERN: "EM*E",
}  # fmt: skip


class Model(NamedTuple):
    """A model of Transformers in a published size, and how these benchmarks train it.

    layers: its own number of them. trained_layers: how many fit one H200 where all weights are trained, with gradients
    and both of Adam's moments. tokens: of a step, unless asked otherwise. attention: its implementation. packed: the
    format of its experts in runs that pack them.
    """

    model_type: str
    sizes: dict
    layers: int
    trained_layers: int
    tokens: int = 16384
    attention: str = "sdpa"
    packed: str = "nf4"


GPT_OSS_20B = {  # config.json of openai/gpt-oss-20b; it has no sdpa
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
}
MODELS = {
    "Qwen3-30B-A3B": Model(*PUBLISHED["Qwen/Qwen3-30B-A3B"], layers=48, trained_layers=16),
    "Qwen3.5-35B-A3B": Model(*PUBLISHED["Qwen/Qwen3.5-35B-A3B"], layers=40, trained_layers=12),
    "Qwen3-235B-A22B": Model(*PUBLISHED["Qwen/Qwen3-235B-A22B"], layers=94, trained_layers=3),
    "DeepSeek-V3": Model(*PUBLISHED["deepseek-ai/DeepSeek-V3"], layers=61, trained_layers=2, tokens=8192),
    "DeepSeek-V4-Flash": Model(
        *PUBLISHED["deepseek-ai/DeepSeek-V4-Flash"],
        layers=43,
        trained_layers=2,
        attention="torch_pieces",
        packed="mxfp4",
    ),
    "GLM-5": Model(*PUBLISHED["zai-org/GLM-5"], layers=78, trained_layers=2),
    "Kimi-K2.5": Model(  # the language model of moonshotai/Kimi-K2.5, DeepSeek-V3's in other sizes
        "deepseek_v3",
        PUBLISHED["deepseek-ai/DeepSeek-V3"][1]
        | {
            "vocab_size": 163840,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.827,
        },
        layers=61,
        trained_layers=1,
        packed="int4",
    ),
    "GLM-4.5-Air": Model(*PUBLISHED["zai-org/GLM-4.5-Air"], layers=46, trained_layers=5),
    "Nemotron-3-Nano-30B-A3B": Model(
        *PUBLISHED["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"], layers=52, trained_layers=16
    ),
    # The paper gives the experts' sizes. The rest is what lm-engine's own configs of these sizes have (open-lm-engine,
    # configs/research/m2rnn/7b-normal/softmax-attention.yml), without their shared expert: 6.6e9 parameters.
    "7B": Model(
        "qwen3_moe",
        {
            "hidden_size": 1536,
            "intermediate_size": 4096,
            "moe_intermediate_size": 256,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 24,
            "num_key_value_heads": 24,
            "head_dim": 64,
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
        layers=40,
        trained_layers=16,
        tokens=24576,
    ),
    "OLMoE-1B-7B": Model(  # config.json of allenai/OLMoE-1B-7B-0924
        "olmoe",
        {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 50304,
        },
        layers=16,
        trained_layers=16,
    ),
    "gpt-oss-20b": Model("gpt_oss", GPT_OSS_20B, 24, 8, tokens=8192, attention="eager", packed="mxfp4"),
    "gpt-oss-120b": Model(  # config.json of openai/gpt-oss-120b
        "gpt_oss", GPT_OSS_20B | {"num_local_experts": 128}, 36, 3, tokens=8192, attention="eager", packed="mxfp4"
    ),
}


class Contender(NamedTuple):
    """A contender: its experts_implementation, of which "ours" is patch_model with this routing and experts_compute."""

    implementation: str
    routing: sonicmoe_hf.TokenRounding | None = None
    compute: str | None = None


def _forward_of(layer_of: Callable) -> Callable:
    """Make a peer's layer (contenders.py) as an experts_implementation."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        if self.has_bias:
            raise Unavailable("it has no biases and no gate like gpt-oss's")
        tokens, top_k = top_k_index.shape
        shape = Shape(tokens, self.hidden_dim, self.intermediate_dim, self.num_experts, top_k)
        return layer_of(shape)(hidden_states, self.gate_up_proj, self.down_proj, top_k_index, top_k_weights)

    return forward


# experts_implementation: the package whose kernels it calls, and the function. Transformers' own way to its sonicmoe is
# over the hub; here the package lies on sys.path.
PEERS = {
    "sonicmoe_of_transformers": ("sonic_moe", _forward_of(upstream)),
    "scattermoe": ("scattermoe", _forward_of(scattermoe)),
}
OURS = "sonicmoe-hf"
CONTENDERS = {
    "grouped_mm": Contender("grouped_mm"),
    "sonicmoe (Transformers)": Contender("sonicmoe_of_transformers"),
    "ScatterMoE": Contender("scattermoe"),
    OURS: Contender("ours"),
    f"{OURS}, FP8 products": Contender("ours", compute="fp8"),  # of experts in FP8
    **{
        f"{OURS}, {rounding}": Contender("ours", sonicmoe_hf.TokenRounding(rounding=rounding))
        for rounding in ("nearest", "balanced", "stochastic", "nearest_score", "up", "down")
    },
}


def check_available(name: str) -> None:
    """Register the contender as an experts_implementation, where it is one of others' kernels.

    Raises:
        Unavailable: its package is not here.
    """
    implementation = CONTENDERS[name].implementation
    if implementation in PEERS:
        package, forward = PEERS[implementation]
        peer_module(package)
        ALL_EXPERTS_FUNCTIONS.register(implementation, forward)


def config_of(name: str, layers: int, tiny: bool, **others) -> PreTrainedConfig:
    """Make the model's config with this many layers; tiny: small enough for a CPU, its kind kept. others: sizes in
    place of the model's."""
    model_type, sizes, *_ = MODELS[name]
    if tiny:
        own = AutoConfig.for_model(model_type)
        sizes = sizes | {key: value for key, value in TINY.items() if key in sizes or hasattr(own, key)}
    return config_from(model_type, sizes | {"use_cache": False} | others, layers)


def kernel_functions(modeling: ModuleType) -> dict[str, FunctionType]:
    """List the functions of linear attention and Mamba layers, by name, that a modeling file takes from another
    package where that is installed. Each wraps torch's own."""
    return {
        name: function
        for name, function in vars(modeling).items()
        if isinstance(function, FunctionType) and "is_new_implementation" in function.__code__.co_freevars
    }


def kernels_of(name: str) -> list[str]:
    """Name the kernels of the model's linear attention or Mamba layers: packages, or torch for those that are not
    installed."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(MODELS[name].model_type))]
    is_installed = {}
    for function in kernel_functions(sys.modules[model.__module__]).values():
        names = inspect.getclosurevars(function).nonlocals
        is_installed[names["package"]] = names["is_new_implementation"]
    return [package if is_here else f"torch for {package}" for package, is_here in is_installed.items()]


class SpreadLoad:
    """Forward pre-hook of routers: adds noise to their input, the same at every call, in every layer, and for every
    contender. It outweighs the input, so that each token chooses experts of its own. The sum is scaled back to the size
    of the input, or the sigmoids of DeepSeek-V3 would be 1 for many experts, and ties go to the first of them.
    """

    SIZE = 16  # beside an input that a norm has just scaled to 1

    def __init__(self):
        self.noise = None

    def make(self, num_tokens: int, hidden: int, device, dtype) -> None:
        """Make the noise of so many tokens; calls of fewer take its beginning. Compiled code makes none."""
        generator = torch.Generator(device).manual_seed(2)
        self.noise = (self.SIZE * torch.randn(num_tokens, hidden, generator=generator, device=device)).to(dtype)

    def __call__(self, router, arguments):
        x, *others = arguments
        num_tokens = x.numel() // x.shape[-1]
        if self.noise is None or len(self.noise) < num_tokens:
            self.make(num_tokens, x.shape[-1], x.device, x.dtype)
        return (x + self.noise[:num_tokens].view(x.shape)) / self.SIZE, *others


def spread_load(model, num_tokens: int = 0) -> None:
    """Spread the rows over the experts as in a balanced model. With random weights they differ: of
    Qwen3-30B-A3B's 128 experts, 16 get 92 to 97% of the rows from the second layer on, and the busiest nearly every
    token. num_tokens: of a call, for compiled code, which makes no noise."""
    hook = SpreadLoad()
    if num_tokens:
        hook.make(num_tokens, model.config.get_text_config().hidden_size, model.device, model.dtype)
    for layer in find_layers(model):
        layer.router.register_forward_pre_hook(hook)


LIGER = (
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",  # but RoPE
)  # model types of which it has all kernels; 0.8.5 imports none for Qwen3.5 on Transformers 5.23


def apply_liger(name: str, model) -> None:
    """Apply Liger's RMSNorm, RoPE and fused linear cross entropy, or the last alone; the model's experts stay as they
    are."""
    from liger_kernel import transformers as liger

    model_type = MODELS[name].model_type
    if model_type in LIGER:
        getattr(liger, f"apply_liger_kernel_to_{model_type}")(swiglu=False, model=model)
    else:
        use_fused_loss(model)


def use_fused_loss(model) -> None:
    """Use Liger's fused linear cross entropy alone."""
    model.forward = MethodType(_forward_with_fused_loss, model)


def _forward_with_fused_loss(self, input_ids, labels=None, shift_labels=None, **options):
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    chunk = {name: options.pop(name) for name in ("chunk_mem_const",) if name in options}
    hidden = getattr(self, self.base_model_prefix)(input_ids=input_ids, **options).last_hidden_state
    weight = self.lm_head.weight
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    targets = {
        "labels": labels,
        "shift_labels": shift_labels,
    }  # the second from a rank that has a part of the sequence
    return CausalLMOutput(
        LigerForCausalLMLoss(hidden, weight, hidden_size=self.config.hidden_size, **targets, **chunk)
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options that change a model before it is measured."""
    parser.add_argument("--liger", action="store_true", help="Liger's RMSNorm, RoPE and fused loss")
    parser.add_argument("--liger-loss", action="store_true", help="its fused loss alone, as for compiled layers")
    parser.add_argument(
        "--spread-load", action="store_true", help="rows per expert as in a balanced model (models.py)"
    )


def apply_settings(name: str, model, options: argparse.Namespace, num_tokens: int = 0) -> None:
    """Change the model as those of `add_settings` say that the options have. num_tokens: see `spread_load`."""
    if getattr(options, "liger", False):
        apply_liger(name, model)
    if getattr(options, "liger_loss", False):
        use_fused_loss(model)
    if getattr(options, "spread_load", False):
        spread_load(model, num_tokens)


def settings_of(name: str, options: argparse.Namespace) -> list[str]:
    """List the options of `add_settings` that were chosen for the model, as the CSVs name them."""
    has_all = options.liger and MODELS[name].model_type in LIGER
    has_loss = options.liger or options.liger_loss
    return ["Liger" if has_all else "Liger's loss"] * has_loss + ["spread load"] * options.spread_load
