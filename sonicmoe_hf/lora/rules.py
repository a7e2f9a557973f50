"""PEFT's own rules of LoRA: which parameters of experts it adapts, with which rank and alpha, by factors of which shape.

PEFT wraps a module once for every parameter of it that is adapted, the first one innermost, so
"experts.base_layer.lora_A" is the first of two and "experts.lora_A" the second. It stores the factors of an experts
parameter [E, out, in] as lora_A [r*E, in] and lora_B [out, r*E], those of a matrix [out, in] as lora_A [r, in] and
lora_B [out, r].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from ..checkpoints.converters import WITH_PEFT
from ..checkpoints.files import read_json
from ..errors import CheckpointError

ADAPTER_WEIGHTS = "adapter_model.safetensors"
NATIVE_ORDER = ("c_proj", "c_proj_bias", "c_fc", "c_fc_bias")  # in which SonicMoEExperts declares them
PREFIX = "base_model.model."
ROUTERS = {"gate", "router"}
KEY = re.compile(r"^(?P<module>.+?)\.(?P<depth>(?:base_layer\.)*)lora_(?P<side>[AB])\.weight$")
WRAPPER = re.compile(r"\.base_layer(?=\.|$)")  # what PEFT's wrappers call what is inside them
PLAIN = {  # entries of adapter_config.json that plain LoRA may set; every other must be unset
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "lora_dropout", "bias", "init_lora_weights",
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
    "modules_to_save", "megatron_core", "qalora_group_size",
}  # fmt: skip
BASE_CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that take their part out of the base
NOT_SWAPPED = [0, 19, 1]  # the first PEFT that takes out and in of [E, out, in] for what they are


def without_wrappers(name: str) -> str:
    """The name of what PEFT may have wrapped, as it was before."""
    return WRAPPER.sub("", name)


def is_in_router(name: str) -> bool:
    """Whether a module is a router, or in one: Gemma 4's router.proj, HunYuan's gate.wg."""
    return not ROUTERS.isdisjoint(name.split("."))


def read_adapter_config(path: Path) -> dict:
    """adapter_config.json of plain LoRA, whose entries that are read here are of the right kinds.

    Raises:
        CheckpointError: there is none, or it is not that of a LoRA adapter, or describes more than A and B.
    """
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA adapters are known here")
    kinds = {"base_model_name_or_path": str, "target_parameters": list, "rank_pattern": dict, "alpha_pattern": dict}
    for key, kind in kinds.items():
        value = config.get(key)
        names = value if isinstance(value, (list, dict)) else []
        if not isinstance(value, (kind, type(None))) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{path}: {key} is {value!r}; PEFT writes a {kind.__name__} of names there")
    set_otherwise = {key: value for key, value in config.items() if key not in PLAIN and value}
    if config.get("bias", "none") != "none":
        set_otherwise["bias"] = config["bias"]
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGED):
        set_otherwise["init_lora_weights"] = init
    for key, value in set_otherwise.items():
        raise CheckpointError(f"{path}: {key} is {value!r}, which is not plain LoRA; {WITH_PEFT}")
    return config


def is_target_parameter(name: str, config: dict) -> bool:
    """Whether target_parameters names the parameter `name`."""
    return any(f".{name}".endswith(f".{target}") for target in config.get("target_parameters") or ())


def resolved(config: dict, pattern: str, name: str, path: Path) -> float:
    """The rank ("rank_pattern") or alpha ("alpha_pattern") of what PEFT calls `name`: by the first entry of the pattern
    that matches an end of the name.

    Raises:
        CheckpointError: a name in the pattern is no regular expression, or the value is no positive number.
    """
    default = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}[pattern]
    patterns = config.get(pattern) or {}
    try:
        key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", name)), None)
    except re.error as error:
        raise CheckpointError(f"{path}: {pattern} has a name that is no pattern: {error}") from error
    value = config.get(default) if key is None else patterns[key]
    kinds = int if default == "r" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise CheckpointError(f"{path}: {default} of {name} is {value!r}; it must be a positive number")
    return value


def check_factors(
    weight: str, shapes, num_experts: int, sizes: tuple[int, int], rank: float, config: dict, path: Path, swaps: bool
) -> None:
    """Raise where the shapes of a weight's lora_A and lora_B are not those of this rank.

    Args:
        shapes: of lora_A and lora_B. sizes: the weight's output and input features. swaps: whether PEFT up to 0.19.0 took
            these for each other.
    Raises:
        CheckpointError: they are others, or do not show whether an older PEFT took out features for in.
    """
    size_out, size_in = sizes
    expected = (rank * num_experts, size_in), (size_out, rank * num_experts)
    version = [int(number) for number in re.findall(r"\d+", str(config.get("peft_version")))[:3]]
    is_unclear = swaps and version < NOT_SWAPPED and size_in == size_out
    if tuple(shapes) == expected and not is_unclear:
        return
    reason = f"where {expected[0]} and {expected[1]} are expected for r = {rank}"
    if tuple(shapes) == expected:
        reason = "which do not show what is in and what is out"
    if swaps:
        reason += (
            f"; PEFT up to 0.19.0 took out for in, and peft_version is {config.get('peft_version')!r}: train the adapter "
            "with a newer PEFT"
        )
    raise CheckpointError(f"{path}: lora_A and lora_B of {weight} have shapes {shapes[0]} and {shapes[1]}, {reason}")


def endings(names: Iterable[str], everything: Iterable[str], parts: tuple[int, ...]) -> list[str]:
    """What PEFT is told for `names`: of each the shortest ending of one of these numbers of parts that nothing else in
    `everything` has, or the whole name."""
    wanted, chosen = dict.fromkeys(names), dict[str, str]()
    others = [name for name in everything if name not in wanted]
    for number in reversed(parts):
        taken = {_ending(name, number) for name in others}
        chosen |= {name: _ending(name, number) for name in wanted if _ending(name, number) not in taken}
    return list(dict.fromkeys(chosen.get(name, name) for name in wanted))


def _ending(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])
