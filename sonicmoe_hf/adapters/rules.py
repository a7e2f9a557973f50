"""Rules of LoRA in files: what an adapter_config.json adapts, with which rank and scale, by factors of which shape, as
PEFT has it; and in which order Unsloth wrote the columns of experts' factors.

PEFT stores the factors of an experts parameter [E, out, in] as lora_A [r*E, in] and lora_B [out, r*E], those of a matrix
[out, in] as lora_A [r, in] and lora_B [out, r].
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from ..checkpoints.reading.files import ADAPTER_CONFIG
from ..errors import CheckpointError
from ..formats.json_files import check_items, read_json
from ..lora.names import PREFIX, Names, is_target_parameter

ADAPTER_WEIGHTS = "adapter_model.safetensors"
WITH_PEFT = (
    "merge it with PEFT: PeftModel.from_pretrained(sonicmoe_hf.from_pretrained(BASE), ADAPTER).merge_and_unload()"
)
WRAPPED = re.compile(r"(?:^|(?<=\.))_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")  # and torch's
PLAIN = {  # entries of adapter_config.json that plain LoRA may set; every other must be unset
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "r",
    "rank_pattern",
    "lora_alpha",
    "alpha_pattern",
    "use_rslora",
    "lora_dropout",
    "bias",
    "init_lora_weights",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "megatron_core",
    "qalora_group_size",
    "lora_B_layout",
    "unsloth_fused_expert_lora",
}
NAMES = (  # entries that hold names
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
)
TYPES: dict[str, type | tuple[type, ...]] = {  # of entries, where they are set
    "r": int,
    "lora_alpha": (int, float),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "auto_mapping", "unsloth_fused_expert_lora"), dict),
    **dict.fromkeys(("target_modules", "exclude_modules"), (str, list)),
    **dict.fromkeys(("target_parameters", "modules_to_save"), list),
    **dict.fromkeys(("base_model_name_or_path", "bias", "task_type"), str),
    **dict.fromkeys(("use_rslora", "use_dora", "lora_bias"), bool),
    **dict.fromkeys(("layers_to_transform", "trainable_token_indices"), (int, list, dict)),
    "layers_pattern": (str, list),
}
DEFAULTS = {"r": 8, "lora_alpha": 8}  # PEFT's
ITEMS: dict[str, type | tuple[type, ...]] = {  # of lists, and of values of objects
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "target_parameters", "modules_to_save", "layers_pattern"), str
    ),
    **dict.fromkeys(("rank_pattern", "layers_to_transform"), int),
    "alpha_pattern": (int, float),
}
BASE_CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that take their part out of the base
EMPTY = (
    "{path}: lora_A and lora_B of {weight} are empty, as DeepSpeed's ZeRO-3 leaves them on each rank: save the adapter "
    'by trainer.save_model() with "stage3_gather_16bit_weights_on_model_save": true in DeepSpeed\'s config, or inside '
    "deepspeed.zero.GatheredParameters(model.parameters())"
)
NOT_SWAPPED = [0, 19, 1]  # the first PEFT that takes out and in of [E, out, in] for what they are
RANK_MAJOR, GROUPED = "rank_major", "grouped_by_expert"  # orders of lora_B's columns: PEFT's, and Unsloth's older one
UNSLOTH_ENTRIES = ("unsloth_fixed", "lora_B_layout", "unsloth_fused_expert_lora")  # that Unsloth adds to PEFT's
UNSLOTH_PARAMETERS = ("gate_up_proj", "down_proj")
UNSLOTH_FAMILIES = {  # whose experts unsloth_zoo computed in its own order until 2026.9.6, and PEFT computed the others
    "deepseek_v3",
    "ernie4_5_moe",
    "ernie4_5_vl_moe",
    "gemma4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "lfm2_moe",
    "mixtral",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe",
}


def name_in_trained_model(name: str) -> str:
    """Strip a tensor's name of PEFT's prefix and of the names that torch.compile, FSDP, checkpointing and DDP add."""
    return WRAPPED.sub("", name).removeprefix("module.").removeprefix(PREFIX).removeprefix("module.")


class NotPlainLoRAError(CheckpointError):
    """An adapter has more than lora_A, lora_B and whole weights of layers; PEFT itself may load it."""


class AdapterConfig:
    """The adapter_config.json of plain LoRA in a folder, by the rules that PEFT reads it by.

    path: the file. entries: what it holds, names as `name_in_trained_model` returns them.

    Raises:
        CheckpointError: there is none, or it is not that of a LoRA adapter, or describes more than A and B.
    """

    def __init__(self, folder: Path):
        self.path = path = folder / ADAPTER_CONFIG
        self.entries = entries = {**DEFAULTS, **read_json(path, **TYPES)}
        for entry, kind in ITEMS.items():
            check_items(entries, entry, kind, path)
        if entries.get("peft_type") != "LORA":
            raise CheckpointError(
                f"{path}: peft_type is {entries.get('peft_type')!r}; only LORA adapters are known here"
            )
        for field in NAMES:
            value = entries.get(field)
            if value is None or isinstance(value, str):
                continue
            names = [name_in_trained_model(name) for name in value]
            entries[field] = dict(zip(names, value.values())) if isinstance(value, dict) else names
        set_otherwise = {key: value for key, value in entries.items() if key not in PLAIN and value}
        if entries.get("bias", "none") != "none":
            set_otherwise["bias"] = entries["bias"]
        init = entries.get("init_lora_weights")
        if isinstance(init, str) and init.lower().startswith(BASE_CHANGED):
            set_otherwise["init_lora_weights"] = init
        positive = {**{entry: entries[entry] for entry in DEFAULTS}, **(entries.get("rank_pattern") or {})}
        for entry, value in positive.items():
            if value is None or value <= 0:
                raise CheckpointError(f"{path}: {entry} is {value}, where a number above 0 is expected")
        if set_otherwise:
            key, value = next(iter(set_otherwise.items()))
            raise NotPlainLoRAError(
                f"{path}: {key} is {value!r}, which is not plain LoRA; {WITH_PEFT}, or with the "
                "trainer that wrote it, where PEFT has no such field"
            )
        self._targets, self._excluded = (Names(entries.get(name)) for name in ("target_modules", "exclude_modules"))

    def adapts_module(self, name: str) -> bool:
        """Tell whether PEFT adapts the layer `name`: target_modules names it, and exclude_modules, modules_to_save and
        layers_to_transform do not leave it out."""
        if name not in self._targets or name in self._excluded:
            return False
        saved, layers = (self.entries.get(field) for field in ("modules_to_save", "layers_to_transform"))
        if any(re.match(rf"(.*\.)?{module}(\..*)?$", name) for module in saved or ()):
            return False
        if layers in (None, []) or isinstance(self.entries["target_modules"], str):
            return True
        patterns = self.entries.get("layers_pattern") or r"[^.]*"
        patterns = [patterns] if isinstance(patterns, str) else patterns
        numbers = [match[1] for pattern in patterns if (match := re.match(rf"(?:.*?\.)?{pattern}\.(\d+)\.", name))]
        return bool(numbers) and int(numbers[0]) in ([layers] if isinstance(layers, int) else layers)

    def replaces_module(self, name: str) -> bool:
        """Tell whether modules_to_save names the module `name`."""
        return name.endswith(tuple(self.entries.get("modules_to_save") or ()))

    def rank(self, weight: str) -> int:
        """Look up the rank of the factors of a weight of the trained model."""
        return self._by_pattern("rank_pattern", "r", self._in_patterns(weight))

    def scale(self, weight: str) -> float:
        """Compute the factor of B A of a weight of the trained model. Raises CheckpointError where lora_alpha is no
        number above 0."""
        name, rank = self._in_patterns(weight), self.rank(weight)
        alpha = self._by_pattern("alpha_pattern", "lora_alpha", name)
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
            raise CheckpointError(f"{self.path}: lora_alpha of {name} is {alpha!r}; it must be a positive number")
        return alpha / (math.sqrt(rank) if self.entries.get("use_rslora") else rank)

    def _in_patterns(self, weight: str) -> str:
        """Find the name that PEFT compares with rank_pattern and alpha_pattern: a linear layer's, or a parameter's."""
        return weight if is_target_parameter(weight, self.entries) else weight.removesuffix(".weight")

    def _by_pattern(self, pattern: str, default: str, name: str):
        """Look up the value of the first entry of `pattern` that matches an end of the name, or the default."""
        patterns = self.entries.get(pattern) or {}
        key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", name)), None)
        return self.entries.get(default) if key is None else patterns[key]

    def is_grouped_by_expert(self, parameter: str, family: str) -> bool:
        """Tell whether lora_B's columns of an experts' parameter stand expert by expert, and not rank by rank as
        PEFT's do.

        unsloth_zoo 2026.9.6 and newer write the order beside PEFT's entries. Older ones wrote "unsloth_fixed" alone, and
        had another order than PEFT in UNSLOTH_FAMILIES.

        Raises:
            CheckpointError: the order is none of the two.
        """
        mapping = self.entries.get("auto_mapping") or {}
        for entries in (self.entries, mapping):
            parameters = (entries.get("unsloth_fused_expert_lora") or {}).get("parameters") or {}
            layout = parameters.get(parameter, entries).get("lora_B_layout")
            if layout not in (None, RANK_MAJOR, GROUPED):
                raise CheckpointError(
                    f"{self.path}: lora_B_layout of {parameter} is {layout!r}, and {RANK_MAJOR} and {GROUPED} are known; "
                    "merge it with the Unsloth that trained it"
                )
            if layout is not None:
                return layout == GROUPED
        return bool(mapping.get("unsloth_fixed")) and parameter in UNSLOTH_PARAMETERS and family in UNSLOTH_FAMILIES

    def check_factors(
        self, weight: str, shapes, num_experts: int, sizes: tuple[int, int], rank: int, swaps: bool
    ) -> None:
        """Check the shapes of a weight's lora_A and lora_B against this rank.

        Args:
            shapes: of lora_A and lora_B. sizes: the weight's output and input features. swaps: whether PEFT up to 0.19.0
                took these for each other.
        Raises:
            CheckpointError: they are others, or do not show whether an older PEFT took out features for in.
        """
        size_out, size_in = sizes
        expected = (rank * num_experts, size_in), (size_out, rank * num_experts)
        version = [int(number) for number in re.findall(r"\d+", str(self.entries.get("peft_version")))[:3]]
        may_swap = swaps and version < NOT_SWAPPED
        is_unclear = may_swap and size_in == size_out
        if tuple(shapes) == expected and not is_unclear:
            return
        if all(math.prod(shape) == 0 for shape in shapes):
            raise CheckpointError(EMPTY.format(path=self.path, weight=weight))
        reason = f"where {expected[0]} and {expected[1]} are expected for r = {rank}"
        if tuple(shapes) == expected:
            reason = "which do not show which side is the input's and which the output's"
        swapped = (rank * num_experts, size_out), (size_in, rank * num_experts)
        if may_swap and tuple(shapes) in (expected, swapped):
            reason += (
                f"; PEFT up to 0.19.0 took out for in, and peft_version is {self.entries.get('peft_version')!r}: train "
                "the adapter with a newer PEFT"
            )
        elif other := _other_model(shapes, num_experts, sizes, rank):
            reason += f"; {other}"
        raise CheckpointError(
            f"{self.path}: lora_A and lora_B of {weight} have shapes {shapes[0]} and {shapes[1]}, {reason}"
        )


def _other_model(shapes, num_experts: int, sizes: tuple[int, int], rank: int) -> str:
    """Say in which sizes the model that lora_A and lora_B of these shapes are for differs from the given one; "" where
    they have another rank."""
    (rows, size_in), (size_out, columns) = shapes
    if rows != columns or rows % rank or (num_experts == 1 and rows != rank):
        return ""
    compared = {
        "experts": (rows // rank, num_experts),
        "input features": (size_in, sizes[1]),
        "output features": (size_out, sizes[0]),
    }
    trained, given = (
        " and ".join(f"{pair[side]} {name}" for name, pair in compared.items() if pair[0] != pair[1])
        for side in (0, 1)
    )
    return f"so the adapter is for {trained}, and this model has {given}; give the base that it was trained on"
