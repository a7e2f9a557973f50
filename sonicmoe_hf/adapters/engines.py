"""engine_form: an adapter as inference engines load it, with one rank and one scale, and factors for every expert.

"vllm" gives what vLLM loads by default for the model: a pair of factors for each expert and projection, or PEFT's own
form for models whose experts vLLM holds as one weight. "sglang" always gives the first. Read in the sources of vLLM
0.33.0 (vllm/lora and the `is_3d_moe_weight` of its models) and of SGLang 0.5.23 (sglang/srt/lora).
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..formats.hub_names import HubNames
from ..layer.experts_module import has_gate, is_experts, weight_names
from ..lora.factors import Factors, as_alpha, split_gate_and_up
from ..lora.names import PREFIX, endings, is_in_router
from .adapter import Adapter, is_in_pefts_form, is_interleaved
from .assignment import EXPERT_MODULE
from .peft_form import MERGED, new_config, wrapper_tensors
from .trained_model import decoder_name

ENGINES = {"vllm": "vLLM 0.33", "sglang": "SGLang 0.5.23"}
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
# linear layers of which vLLM multiplies the base's weights alone: latent attention (MLA) makes matrices of kv_b_proj, and
# DeepSeek-V4's class gives the weights of these to kernels (vllm/models/deepseek_v4: attention.py, nvidia/ops/o_proj.py)
VLLM_ABSORBED = re.compile(r"\.(kv_b_proj|o_a_proj|compressor\.(indexer\.)?(kv|gate)_proj)$")
VLLM_PER_EXPERT = (  # Transformers' names of classes whose namesakes in vLLM take a pair for each expert and projection
    "AXK1ForCausalLM",
    "AfmoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "ExaoneMoeForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "Glm4vMoeForConditionalGeneration",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HYV3ForCausalLM",
    "JambaForCausalLM",
    "LagunaForCausalLM",
    "Lfm2MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MixtralForCausalLM",
    "NemotronHForCausalLM",
    "OlmoeForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
VLLM_FUSED = ("GptOssForCausalLM", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
# of VLLM_PER_EXPERT: adapted in PEFT's own form too, under --enable-mixed-moe-lora-format, as tests/serving runs them
VLLM_MIXED = ("OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
NOT_IN_SGLANG = (  # of those in vLLM
    "AXK1ForCausalLM",
    "AfmoeForCausalLM",
    "DeepseekV4ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "GraniteMoeSharedForCausalLM",
    "HYV3ForCausalLM",
    "JambaForCausalLM",
    "LagunaForCausalLM",
    "Lfm2MoeForCausalLM",
    "NemotronHForCausalLM",
)
CLASSES = {"vllm": {*VLLM_PER_EXPERT, *VLLM_FUSED}}
CLASSES["sglang"] = CLASSES["vllm"].difference(NOT_IN_SGLANG)
# linear layers that SGLang fuses, and of which it needs factors for all where there are some for one
SGLANG_FUSED = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))
ENGINE_MATRICES = ("gate_proj", "up_proj", "down_proj")  # of experts that the hub's checkpoint holds as one weight
EMBEDDINGS = ("embed_tokens", "lm_head")


def check_for_engine(adapter: Adapter, model: PreTrainedModel, engine: str) -> None:
    """Raise CheckpointError, naming the remedy, where the adapter has what the engine refuses or leaves out."""
    decoder = f"{decoder_name(model)}."
    for name in (*adapter.factors, *adapter.replaced):
        owner, _, parameter = name.rpartition(".")
        layer, module = owner.rpartition(".")[2], model.get_submodule(owner)
        absorbed = VLLM_ABSORBED.search(owner) if engine == "vllm" else None
        layer = absorbed[1] if absorbed else layer
        obstacles = {
            f"{name} is of the embeddings or the head, which not all models of engines adapt": layer in EMBEDDINGS,
            f"{name} is outside the language model, where engines may leave adapters out": not name.startswith(
                decoder
            ),
            f"{name} adapts a router, which not all models of engines adapt": is_in_router(owner),
            f"{name} adapts {layer}, and vLLM decodes without the adapters of that layer, in silence": (
                absorbed is not None
            ),
            f"the adapter is on {name}, and engines take factors of linear layers' and experts' weights alone": (
                parameter not in weight_names(module) if is_experts(module) else not isinstance(module, nn.Linear)
            ),
        }
        if reason := next((reason for reason, applies in obstacles.items() if applies), None):
            rest = f"; or leave {layer} out of target_modules when you train (exclude_modules)" if absorbed else ""
            raise CheckpointError(f"{reason}; {MERGED}{rest}")


def engine_form(
    adapter: Adapter, model: PreTrainedModel, engine: str
) -> tuple[dict[str, torch.Tensor], dict, list[str]]:
    """Make tensors and adapter_config.json for "vllm" or "sglang", and how to serve them, in sentences.

    `model` is the adapter's base in the hub layout.

    Raises:
        CheckpointError: the engine does not adapt such a model's experts, takes no such rank, or the adapter has what
            engines refuse.
    """
    name = type(model).__name__
    if name not in CLASSES[engine] or not adapter.factors:
        of = name if adapter.factors else "whole weights alone"
        raise CheckpointError(
            f"{ENGINES[engine]} is not known to take adapters of {of} (docs/models.md lists the models); {MERGED}"
        )
    check_for_engine(adapter, model, engine)
    is_3d = engine == "vllm" and name in VLLM_FUSED
    hub_names, by_name = HubNames(model), dict[str, Factors]()
    for weight, factors in _complete_factors(adapter, model, engine).items():
        templates = _matrices(model, hub_names, weight) if factors.a.dim() == 3 and not is_3d else []
        if len(templates) == 2:
            interleaved = is_interleaved(model.get_submodule(weight.rpartition(".")[0]))
            by_name.update(zip(templates, split_gate_and_up(factors, interleaved)))
        else:
            by_name[templates[0] if templates else hub_names.parameter(weight)] = factors
    rank = max(factors.rank for factors in by_name.values())
    if engine == "vllm" and rank > VLLM_RANKS[-1]:
        raise CheckpointError(f"the adapter's largest rank is {rank}, and vLLM's is {VLLM_RANKS[-1]}; {MERGED}")
    alpha = _common_alpha(by_name, rank)
    by_name = {name: factors.rescale(alpha / rank).pad_to(rank) for name, factors in by_name.items()}
    tensors = _tensors(by_name)
    every = _modules_of_the_hub(model, hub_names)
    linear = {name.removesuffix(".weight") for name, factors in by_name.items() if factors.a.dim() == 2}
    single = [
        name
        for name in every
        if name not in linear and f"{PREFIX}{name}.lora_A.weight" in tensors and EXPERT_MODULE.match(name)
    ]
    fused = [name for name in by_name if by_name[name].a.dim() == 3 and "{expert}" not in name]
    target_modules = [*sorted(endings(linear, every, lengths=(1, 2))), *sorted(endings(single, every, lengths=(1, 3)))]
    target_parameters = sorted(endings(fused, map(hub_names.parameter, model.state_dict()), lengths=(3,)))
    config = new_config(adapter.config, rank, alpha, target_modules, target_parameters)
    has_experts = any(factors.a.dim() == 3 for factors in by_name.values())
    return tensors, config, _hints(engine, rank, has_experts, is_3d)


def vllm_takes_pefts_form(folder: Path, adapter: Adapter, model: PreTrainedModel) -> bool:
    """Tell whether vLLM, started with --enable-mixed-moe-lora-format, computes with the file that PEFT wrote to `folder`
    what `model` does: it holds one rank and one scale, and factors for both weights of each layer's experts."""
    factors = adapter.factors.values()
    is_even = len({(each.rank, each.scale) for each in factors}) == 1
    modules = {weight.rpartition(".")[0] for weight, each in adapter.factors.items() if each.a.dim() == 3}
    names = (f"{module}.{name}" for module in modules for name in weight_names(model.get_submodule(module)))
    is_whole = bool(modules) and all(name in adapter.factors for name in names)
    return type(model).__name__ in VLLM_MIXED and is_even and is_whole and is_in_pefts_form(folder, model)


def _complete_factors(adapter: Adapter, model: PreTrainedModel, engine: str) -> dict[str, Factors]:
    """Complete the factors by weight: zeros for those that an engine wants because it fuses them with adapted ones."""
    weights = dict(adapter.factors)
    for weight, given in tuple(weights.items()):
        module, _, name = weight.removesuffix(".weight").rpartition(".")
        beside: tuple[str, ...] = weight_names(model.get_submodule(module)) if given.a.dim() == 3 else ()
        if engine == "sglang" and given.a.dim() == 2:
            group = next((group for group in SGLANG_FUSED if name in group), ())
            beside = tuple(f"{other}.weight" for other in group if hasattr(model.get_submodule(module), other))
        for other in beside:
            if (missing := f"{module}.{other}") not in weights:
                weights[missing] = _zeros(given, model.get_parameter(missing))
    return weights


def _zeros(like: Factors, weight: torch.Tensor) -> Factors:
    """Make factors of rank 1 for another weight, whose product is zero."""
    *experts, size_out, size_in = weight.transpose(-1, -2).shape if like.is_transposed else weight.shape
    return like._replace(a=like.a.new_zeros(*experts, 1, size_in), b=like.b.new_zeros(*experts, size_out, 1))


def _matrices(model: PreTrainedModel, hub_names: HubNames, weight: str) -> list[str]:
    """List the engines' names of an expert's matrices in a weight that holds all experts, "{expert}" for the number."""
    templates = hub_names.per_expert(weight)
    if templates:
        return [template.removesuffix(".weight") for template in templates]
    module, _, name = weight.rpartition(".")
    first, _ = weight_names(experts := model.get_submodule(module))
    names = ENGINE_MATRICES[0 if has_gate(experts) else 1 : 2] if name == first else ENGINE_MATRICES[2:]
    return [f"{hub_names.module(module)}.{{expert}}.{projection}" for projection in names]


def _common_alpha(by_name: dict[str, Factors], rank: int) -> float:
    """Compute the lora_alpha for factors of `rank`: that of the scale that all share, if it is a whole number, or else
    `rank`, so that every scale is to be multiplied into B."""
    scales = {factors.scale for factors in by_name.values()}
    alpha = as_alpha(max(scales) * rank)
    return alpha if len(scales) == 1 and isinstance(alpha, int) else rank


def _tensors(by_name: dict[str, Factors]) -> dict[str, torch.Tensor]:
    """Make the tensors of the file."""
    tensors: dict[str, torch.Tensor] = {}
    fused: dict[str, dict[str, Factors]] = {}
    for name, factors in by_name.items():
        if "{expert}" in name:
            for expert in range(len(factors.a)):
                tensors |= wrapper_tensors(name.format(expert=expert), [factors.expert(expert)])
        elif factors.a.dim() == 3:
            fused.setdefault(name.rpartition(".")[0], {})[name] = factors
        else:
            tensors |= wrapper_tensors(name.removesuffix(".weight"), [factors])
    for module, weights in fused.items():
        # gate_up_proj comes before down_proj
        tensors |= wrapper_tensors(module, [weights[name] for name in sorted(weights, reverse=True)])
    return tensors


def _modules_of_the_hub(model: PreTrainedModel, hub_names: HubNames) -> set[str]:
    """List the names of all modules that have a weight, those of single experts included."""
    names = set()
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if not is_experts(module):
            names.add(hub_names.parameter(name).rpartition(".")[0])
        elif name.rpartition(".")[2] in weight_names(module):
            matrices = _matrices(model, hub_names, name)
            names |= {matrix.format(expert=expert) for matrix in matrices for expert in range(len(parameter))}
    return names


def _hints(engine: str, rank: int, has_experts: bool, is_3d: bool) -> list[str]:
    """List the sentences that tell a user how to serve the adapter with this engine."""
    if engine == "sglang":
        return [
            f"python -m sglang.launch_server --model-path BASE --enable-lora --lora-paths NAME=ADAPTER "
            f"--max-lora-rank {rank}",
            'a request chooses it by "lora_path": "NAME", or by "model": "BASE:NAME"',
        ]
    largest = next(allowed for allowed in VLLM_RANKS if allowed >= rank)
    form = "PEFT's form for fused experts" if is_3d else "one pair of factors for each expert and projection"
    form = form if has_experts else "no factors of experts"
    hints = [
        f"{form}, rank {rank}: vllm serve BASE --enable-lora --max-lora-rank {largest} --lora-modules NAME=ADAPTER",
        'a request chooses it by "model": "NAME"; in Python by lora_request=LoRARequest("NAME", 1, "ADAPTER")',
    ]
    if has_experts:
        hints.append(
            "under --enable-expert-parallel leave out --fully-sharded-loras, and keep --all2all-backend "
            "allgather_reducescatter, the default"
        )
        hints.append("vLLM adapts experts on GPUs alone")
    if has_experts and is_3d:
        hints.append("under --enable-mixed-moe-lora-format also say is_3d_lora_weight=True in the LoRARequest")
    return hints
