"""Adapters in the form that inference engines load: one rank and one scale in the file, and factors for every expert.

"vllm" gives what vLLM loads by default for the model: a pair of factors for each expert and projection, or PEFT's own
form for models whose experts vLLM holds as one weight. "sglang" always gives the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from ..layer.experts_module import Sizes
from .base_model import BaseModel
from .engines import SERVED_MODELS, SGLANG_FUSED, VLLM_ABSORBED, VLLM_RANKS, ServedModel
from .factors import EXPERT_WEIGHTS, PARTS, AdapterFactors, Factors, endings
from .hub_form import target_parameters, write_tensors
from .per_expert import EXPERT, hub_block, write_per_expert
from .rules import KEY, PREFIX, WITH_PEFT, check_plain, without_wrappers

MERGED = "merge it, and serve the result: sonicmoe-hf merge BASE ADAPTER DST"
MERGED_BY_PEFT = f"{WITH_PEFT}, save the model and serve that"
ROUTERS = ("gate", "router")
EMBEDDINGS = ("embed_tokens", "lm_head")
NOT_NEEDED = ("exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save")  # target_modules says all


class ServedAdapter(NamedTuple):
    """An adapter for an engine: its tensors and adapter_config.json, and how to serve it, in sentences."""

    weights: dict[str, torch.Tensor]
    config: dict
    hints: list[str]


def merged(model: BaseModel) -> str:
    """How to merge an adapter of this model: `merge_adapter` knows the families that have a native layout."""
    return MERGED if model.family is not None else MERGED_BY_PEFT


def check_servable(config: dict, names, model: BaseModel, engine: str, config_path: Path) -> None:
    """Raise CheckpointError, naming the remedy, where the adapter has what the engine refuses or leaves out."""
    remedy = merged(model)
    if saved := config.get("modules_to_save"):
        raise CheckpointError(f"{config_path}: modules_to_save is {saved!r}, of which engines take none; {remedy}")
    check_plain(config, config_path, f"no engine loads it: {MERGED_BY_PEFT}")
    for name in names:
        key = name.removeprefix(PREFIX)
        parts = set(without_wrappers(key).split(".lora_")[0].split("."))
        if parts & set(EMBEDDINGS):
            raise CheckpointError(
                f"{name} is of the embeddings or the head, which not all models of engines adapt; {remedy}; "
                f"lora_embedding: {WITH_PEFT}"
            )
        match = KEY.match(key)
        if match is None:
            raise CheckpointError(f"{name} is neither lora_A nor lora_B of a layer, which is all that engines load")
        layer = match["module"].rpartition(".")[2]
        if layer in ROUTERS:
            raise CheckpointError(f"{name} adapts a router, which not all models of engines adapt; {remedy}")
        if layer == VLLM_ABSORBED and engine == "vllm":
            raise CheckpointError(
                f"{name} adapts {layer}, and vLLM decodes without the adapters of that layer, in silence: {remedy}; or "
                f"leave {layer} out of target_modules when you train"
            )


def serve(factors: AdapterFactors, config: dict, model: BaseModel, engine: str) -> ServedAdapter:
    """The adapter for "vllm" or "sglang".

    Raises:
        CheckpointError: the engine is not known to adapt this model's experts, takes no such rank, or the adapter is on
            biases of experts.
    """
    served = model.served
    if served is None:
        raise CheckpointError(
            f"how engines name the experts of {model.model_type} is not known here, only of {', '.join(SERVED_MODELS)}; "
            f"{merged(model)}"
        )
    if not factors.every():
        raise CheckpointError("the adapter has no factors")
    is_3d = served.is_3d and engine == "vllm"
    factors = factors.fused(model.is_interleaved) if is_3d else factors.split(model.is_interleaved)
    rank = factors.rank()
    if engine == "vllm" and rank > VLLM_RANKS[-1]:
        raise CheckpointError(f"the adapter's largest rank is {rank}, and vLLM's is {VLLM_RANKS[-1]}; {merged(model)}")
    alpha = factors.common_alpha(rank)
    factors = _complete(factors.uniform(rank, alpha), model, EXPERT_WEIGHTS if is_3d else PARTS, engine)
    weights = write_tensors(factors) if is_3d else write_per_expert(factors, served)
    new_config = {
        **config,
        **dict.fromkeys(NOT_NEEDED),
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": _target_modules(weights, model, served),
        "target_parameters": target_parameters(factors, model) if is_3d else None,
    }
    return ServedAdapter(weights, new_config, _hints(engine, rank, served))


def _complete(factors: AdapterFactors, model: BaseModel, names: tuple[str, ...], engine: str) -> AdapterFactors:
    """With zeros where engines want factors for what stands beside an adapted weight; `names` are those of experts."""
    experts = {}
    for module, weights in factors.experts.items():
        sizes = model.blocks[module.removesuffix(".experts")]
        given = next(iter(weights.values()))
        experts[module] = {name: weights.get(name) or _zero_factors(sizes, name, given) for name in names}
    linear = dict(factors.linear)
    if engine == "sglang":
        for module, given in factors.linear.items():
            parent, _, name = module.rpartition(".")
            for other in next((group for group in SGLANG_FUSED if name in group), ()):
                shape = model.plain.get(f"{parent}.{other}.weight")
                if shape is not None and f"{parent}.{other}" not in linear:
                    linear[f"{parent}.{other}"] = _zeros(given, (given.rank, shape[1]), (shape[0], given.rank))
    return AdapterFactors(linear, experts)


def _zero_factors(sizes: Sizes, name: str, like: Factors) -> Factors:
    num_experts, hidden, intermediate, _ = sizes
    of_down = name in ("down", "down_proj")
    size_in, size_out = (intermediate, hidden) if of_down else (hidden, intermediate)
    size_out *= 2 if name == "gate_up_proj" else 1
    return _zeros(like, (num_experts, like.rank, size_in), (num_experts, size_out, like.rank))


def _zeros(like: Factors, shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> Factors:
    return Factors(like.a.new_zeros(shape_a), like.b.new_zeros(shape_b), like.scale)


def _target_modules(weights: dict[str, torch.Tensor], model: BaseModel, served: ServedModel) -> list[str]:
    """The linear layers, those of single experts included, by endings that no other layer of the model has."""
    modules = {match["module"] for name in weights if (match := KEY.match(name.removeprefix(PREFIX)))}
    modules -= {f"{block}.experts" for block in model.blocks}
    every = {name.rpartition(".")[0] for name in model.plain}
    for block, sizes in model.blocks.items():
        for expert in range(sizes.num_experts):
            every |= {f"{hub_block(block, served)}.experts.{expert}.{name}" for name in served[2:]}
    single = {module for module in modules if EXPERT.match(module)}
    return [*endings(modules - single, every, parts=(1, 2)), *endings(single, every, parts=(1, 3))]


def _hints(engine: str, rank: int, served: ServedModel) -> list[str]:
    if engine == "sglang":
        return [
            f"python -m sglang.launch_server --model-path BASE --enable-lora --lora-paths NAME=ADAPTER "
            f"--max-lora-rank {rank}",
            'a request chooses it by "lora_path": "NAME", or by "model": "BASE:NAME"',
        ]
    largest = next(allowed for allowed in VLLM_RANKS if allowed >= rank)
    form = "PEFT's form for fused experts" if served.is_3d else "one pair of factors for each expert and projection"
    hints = [
        f"{form}, rank {rank}: vllm serve BASE --enable-lora --max-lora-rank {largest} --lora-modules NAME=ADAPTER",
        'a request chooses it by "model": "NAME"; in Python by lora_request=LoRARequest("NAME", 1, "ADAPTER")',
        "under --enable-expert-parallel leave out --fully-sharded-loras, and keep --all2all-backend "
        "allgather_reducescatter, the default",
    ]
    if served.is_3d:
        hints.append("under --enable-mixed-moe-lora-format also say is_3d_lora_weight=True in the LoRARequest")
    return hints
