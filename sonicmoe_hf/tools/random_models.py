"""Published models with random weights, whole or their first layers, packed or not: for measurements and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from ..attention.models import choose_attention
from ..formats.quantizer import mark_model_packed
from ..formats.shares import keep_from_fsdp, restore_parameters
from ..formats.state_dicts import hold_packed
from ..kernels.packed import FORMATS
from ..layer.experts_module import is_transposed, matrix_shape, packable, row_order
from ..layer.holding import local_tensor
from ..layer.packed_weight import PackedWeight
from ..patching.moe_layers import find_layers
from ..private.transformers import auto_class_of
from ..streaming.placement import Placement

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig

PATTERN = "hybrid_override_pattern"  # a letter a layer, as Nemotron-H's config.json has it
QWEN3_30B_A3B: dict[str, Any] = {  # config.json of Qwen/Qwen3-30B-A3B
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_hidden_layers": 48, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "use_cache": False,
}  # fmt: skip
# model_type and sizes by hub id: what the config.json there says besides the defaults of Transformers' own class
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", QWEN3_30B_A3B),
    "Qwen/Qwen3.5-35B-A3B": ("qwen3_5_moe_text", {"full_attention_interval": 4, "use_cache": False}),
    "Qwen/Qwen3-235B-A22B": (
        "qwen3_moe",
        QWEN3_30B_A3B
        | {
            "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
    ),
    "deepseek-ai/DeepSeek-V3": (
        "deepseek_v3",
        {
            "max_position_embeddings": 163840, "use_cache": False,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
            },
        },
    ),
    "deepseek-ai/DeepSeek-V4-Flash": ("deepseek_v4", {"use_cache": False}),
    "openai/gpt-oss-120b": ("gpt_oss", {"use_cache": False}),
    "zai-org/GLM-5": ("glm_moe_dsa", {"use_cache": False}),
    "zai-org/GLM-4.5-Air": ("glm4_moe", {"head_dim": 128, "attention_bias": True, "use_cache": False}),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2,
            "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_routed_experts": 128,
            "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
            "routed_scaling_factor": 2.5, "vocab_size": 131072, "use_cache": False,
        },
    ),
}  # fmt: skip


def config_of(name: str, layers: int | None = None) -> PreTrainedConfig:
    """Make the config of a hub id or local folder, with that many layers, its first, in place of all.

    Those of PUBLISHED need no network.
    """
    if name in PUBLISHED:
        model_type, sizes = PUBLISHED[name]
        return config_from(model_type, sizes, layers)
    return AutoConfig.from_pretrained(name, **({} if layers is None else {"num_hidden_layers": layers}))


def config_from(model_type: str, sizes: dict[str, Any], layers: int | None = None) -> PreTrainedConfig:
    """Make the config of a model_type with these sizes, and its first `layers` where that is given."""
    if layers is not None:
        cut = {PATTERN: sizes[PATTERN][:layers]} if PATTERN in sizes else {"num_hidden_layers": layers}
        sizes = sizes | cut
    return AutoConfig.for_model(model_type, **sizes)


def random_model(name: str, layers: int | None = None, **options) -> PreTrainedModel:
    """Make a model with random weights, on the accelerator where there is one. Its attention is that of
    `sonicmoe_hf.from_pretrained`.

    Args:
        name, layers: of its config, as `config_of` takes them.
        options: of an Auto class's `from_config`, such as dtype.
    """
    with torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu"):
        model = _build(config_of(name, layers), options)
    fill_tables(model)
    return model


@torch.no_grad()
def fill_tables(model: nn.Module) -> None:
    """Draw the tables from which routers take experts: without a checkpoint they send every token to expert 0."""
    for layer in find_layers(model):
        if layer.family is not None and layer.family.has_fixed_experts(layer.router):
            table = getattr(layer.router, layer.family.table or "")
            scores = torch.rand(len(table), layer.router.num_experts, dtype=torch.float32, device=table.device)
            table.copy_(scores.topk(table.shape[1]).indices)


def random_packed_model(
    config: PreTrainedConfig,
    experts: str | None = "nf4",
    linear: str | None = None,
    device=None,
    distributed_config: DistributedConfig | None = None,
    experts_memory: str | int | None = None,
    **options,
) -> PreTrainedModel:
    """Make a model with random weights, some of them packed, module by module: at no moment is more than one expert or
    one linear layer there that is still to be packed.

    Args:
        config: of the model.
        experts: format of the experts' weights, one of kernels.packed.FORMATS; None: as they are.
        linear: bitsandbytes' quant_type for the linear layers but the last, "nf4" or "fp4"; None: as they are.
        device: where it is made; default: the accelerator where there is one.
        distributed_config: how ranks share it; each makes its own share or shard.
        experts_memory: as `from_pretrained` takes it.
        options: of an Auto class's `from_config`, such as dtype.
    """
    device = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    with torch.device("meta"):
        model = _build(config, options)
    if distributed_config is not None:
        device = _distribute(model, distributed_config, experts)
    placement = None if experts_memory is None else Placement(model, experts_memory, experts, device)
    std = getattr(config.get_text_config(), "initializer_range", 0.02)
    names = [name for name, _ in model.named_modules()]  # names alone: what is packed must not be held
    for name in logging.tqdm(names, desc="Making random weights"):
        module = model.get_submodule(name)
        weights = packable(module) if experts is not None else ()
        _initialize(model, module, device, weights)
        for weight in weights:
            packed = _random_weight(module, weight, experts or "", std, device)
            hold_packed(module, weight, packed if placement is None else placement.hold(module, weight, packed))
        if placement is not None and experts is None:
            placement.hold_all(module)
        if linear is not None:
            _pack_linear(model, name, module, linear)
    if placement is not None:
        placement.finish()
    fill_tables(model)
    model.tie_weights()
    if experts is not None:
        mark_model_packed(model)
    if linear is not None:
        model.is_loaded_in_4bit = True  # PEFT asks for it before it looks for bitsandbytes' layers
    return model


def _build(config: PreTrainedConfig, options: dict[str, Any]) -> Any:
    """Build the model of a config, with the attention that from_pretrained would choose unless the options name one."""
    model = (auto_class_of(config) or AutoModelForCausalLM).from_config(config, **options)
    if options.get("attn_implementation") is None:
        choose_attention(model)
    return model


def _initialize(model: PreTrainedModel, module: nn.Module, device: Any, packed_later: tuple[str, ...]) -> None:
    """Initialise a module's own parameters and buffers, on the meta device until now, to the values that its model begins
    with; the parameters `packed_later` stay there."""
    on_meta = {name: module._parameters[name] for name in packed_later}
    module._parameters.update(dict.fromkeys(packed_later))
    module.to_empty(device=device, recurse=False)
    if not isinstance(
        module, nn.Linear | nn.Embedding
    ):  # some families initialise a router when its block's turn comes
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=getattr(model.config.get_text_config(), "initializer_range", 0.02))
    module._parameters.update(on_meta)
    model._init_weights(module)


def _random_weight(experts: nn.Module, name: str, format: str, std: float, device: Any) -> PackedWeight:
    """Make a packed weight, one random expert after the other, that stands for a parameter on the meta device."""
    weight = local_tensor(experts._parameters[name])
    num_experts, *size = shape = matrix_shape(experts, weight)
    values = (std * torch.randn(size, dtype=torch.float32, device=device) for _ in range(num_experts))
    packed = FORMATS[format].pack(values, shape, row_order(experts, name), device=device)
    return PackedWeight.of(packed, format, weight.dtype, is_transposed(experts))


def _distribute(model: PreTrainedModel, distributed_config: DistributedConfig, experts: str | None) -> Any:
    """Split a model on the meta device over ranks as from_pretrained does; returns this rank's device."""
    modules = [module for module in model.modules() if experts is not None and packable(module)]
    for module in modules:
        keep_from_fsdp(module, packable(module), experts or "")
    layers: tuple[Any, Any] = model.get_output_embeddings(), model.get_input_embeddings()
    head, embeddings = layers
    if head is not None and head.weight is embeddings.weight:  # FSDP2 shards them before they are tied
        head.weight = nn.Parameter(torch.empty_like(embeddings.weight))
    config, device, mesh = model.prepare_distribute_model(distributed_config)
    model.maybe_distribute_model(model, config, mesh)
    for module in modules:
        restore_parameters(module)
    return device


def pack_linear_layers(model: Any, quant_type: str) -> None:
    """Pack the linear layers of a loaded model but its head as bitsandbytes' "nf4" or "fp4", one after the other."""
    for name in [name for name, _ in model.named_modules()]:
        _pack_linear(model, name, model.get_submodule(name), quant_type)
    model.is_loaded_in_4bit = True  # PEFT asks for it before it looks for bitsandbytes' layers


def _pack_linear(model: PreTrainedModel, name: str, module: nn.Module, quant_type: str) -> None:
    if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _linear_in_4_bits(module, quant_type))


def _linear_in_4_bits(linear: nn.Linear, quant_type: str) -> nn.Module:
    """Make bitsandbytes' layer with the weights of a linear one, double quantization included."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    bias, weight = linear.bias is not None, linear.weight
    packed = Linear4bit(
        linear.in_features, linear.out_features, bias, torch.bfloat16, True, quant_type, device=weight.device
    )
    packed.weight = Params4bit(
        weight.data.cpu(), False, compress_statistics=True, quant_type=quant_type, module=packed
    )
    if bias:
        packed.bias = linear.bias
    return packed.to(weight.device)  # which packs them
