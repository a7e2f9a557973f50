"""The weights of a PEFT LoRA adapter on disk, as products to add to the weights of a checkpoint.

In lora_A [r*E, in] of experts the expert is slowest, in lora_B [out, r*E] fastest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError

from ..checkpoints.files import ADAPTER_CONFIG, headers_of, opened, refuse_model_beside_adapter
from ..checkpoints.source import Source
from ..errors import CheckpointError
from .rules import (
    ADAPTER_WEIGHTS,
    KEY,
    NATIVE_ORDER,
    PARAMETERS,
    PREFIX,
    WITH_PEFT,
    adapted_parameters,
    adapter_layout,
    both_factors,
    check_factors,
    check_plain,
    experts_shape,
    pattern_name,
    read_adapter_config,
    resolved,
    without_wrappers,
)

EMBEDDINGS = ("lm_head.weight", "model.embed_tokens.weight")  # which PEFT saves whole if one of them is adapted


class Factors(NamedTuple):
    """The names of a weight's lora_A and lora_B, what their product is multiplied by, and E; 1 for one matrix."""

    a: str
    b: str
    scale: float
    num_experts: int


class Scratch:
    """Memory for one tensor at a time, of any shape. Temporaries made anew between tensors that stay would leave holes in
    the heap, of twice the size of what is written."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        self._memory = torch.empty(0, dtype=dtype)

    def of(self, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        """An uninitialised tensor, in the place of the one before."""
        size = math.prod(shape)
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=self._memory.dtype)
        return self._memory[:size].view(shape)


class LoraWeights:
    """A LoRA adapter, opened and checked against the checkpoint `source`.

    Attributes:
        layout: the name in CHECKPOINT_LAYOUTS of the experts it was trained on.
        factors: by name of an adapted weight. replaced: by name of a weight, the adapter's tensor that takes its place.
    Raises:
        CheckpointError: it is not plain LoRA, or does not fit the checkpoint; the message names what, and the remedy.
    """

    def __init__(self, folder: Path, source: Source):
        refuse_model_beside_adapter(folder)
        self.path, self.config_path = folder / ADAPTER_WEIGHTS, folder / ADAPTER_CONFIG
        self.config = read_adapter_config(self.config_path)
        check_plain(self.config, self.config_path, WITH_PEFT)
        self.headers = headers_of(self.path)
        self.source = source
        self.carried = {source.model_name(name): source.shape_of(name) for name in source.carried}
        self.native = self._trained_on_native()
        self.layout = adapter_layout(source.family, self.native)
        self.replaced: dict[str, str] = {}
        self.factors = {name: self._factors(name, sides) for name, sides in self._pairs().items()}
        self._check_ties()
        self._layer: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None
        self._scratch = Scratch()

    def _trained_on_native(self) -> bool:
        targets = self.config.get("target_parameters") or []
        last = {target.rpartition(".")[2] for target in targets}
        if last & set(PARAMETERS) and last & set(NATIVE_ORDER):
            raise CheckpointError(f"{self.config_path}: target_parameters {targets} name experts of both layouts")
        return bool(last & set(NATIVE_ORDER))

    def _pairs(self) -> dict[str, dict[str, str]]:
        """By name of a weight, its tensors of the sides A and B; those of other kinds go to `replaced`."""
        pairs: dict[str, dict[str, str]] = {}
        for name in self.headers:
            key = name.removeprefix(PREFIX)
            match, weight = KEY.match(key), without_wrappers(key)
            if weight in EMBEDDINGS and self._is_base_weight(name, weight):
                continue
            if match is not None:
                pairs.setdefault(self._weight_of(name, match), {})[match["side"]] = name
            elif "lora_" in key or key not in self.carried:
                raise CheckpointError(
                    f"{self.path}: {name} is neither plain LoRA nor a weight of {self.source.folder} outside the "
                    f"experts; {WITH_PEFT}"
                )
            else:
                self._check_replacement(name, self.carried[key])
                self.replaced[key] = name
        for block in self.source.expected.blocks:
            for parameter in self._adapted(f"{block}.experts"):
                pairs.setdefault(f"{block}.experts.{parameter}", {})
        if not pairs and not self.replaced:
            raise CheckpointError(f"{self.path} has no weights")
        return pairs

    def _adapted(self, experts: str) -> list[str]:
        """The parameters of this experts module that are adapted, the innermost wrapper's first."""
        sizes = self.source.expected.blocks[experts.removesuffix(".experts")]
        return adapted_parameters(experts, sizes, self.config, self.native)

    def _weight_of(self, name: str, match: re.Match) -> str:
        """The name of the weight that a tensor of PEFT's adapts; wrappers of experts are nested."""
        module, depth = match["module"], match["depth"].count("base_layer.")
        if module.removesuffix(".experts") in self.source.expected.blocks:
            adapted = self._adapted(module)
            if depth < len(adapted):
                return f"{module}.{adapted[len(adapted) - 1 - depth]}"
        elif not depth and f"{module}.weight" in self.carried:
            return f"{module}.weight"
        raise CheckpointError(
            f"{self.path}: {name} adapts no weight of {self.source.folder}; of experts only the fused parameters are "
            "merged (target_parameters): an adapter with factors for single experts is made one of these by sonicmoe-hf "
            "convert ADAPTER DST --layout hub --trained-on BASE"
        )

    def _is_base_weight(self, name: str, weight: str) -> bool:
        """Whether the adapter's tensor `name` is the base's own weight, which PEFT saves with adapters of such layers."""
        if weight not in self.carried or self.headers[name].shape != self.carried[weight]:
            return False
        stored = Source.read(self.source, self.source.stored_name(weight))  # without the adapter's product
        return torch.equal(self._tensor(name).to(stored.dtype), stored)

    def _check_replacement(self, name: str, shape: tuple[int, ...]) -> None:
        if self.headers[name].shape != shape:
            raise CheckpointError(
                f"{self.path}: {name} has shape {self.headers[name].shape}, the base's {shape}; if the vocabulary was "
                "resized, resize the base's and save it first"
            )

    def _factors(self, weight: str, sides: dict[str, str]) -> Factors:
        """The names and the scale of a weight's factors, of which nothing is missing and whose shapes fit."""
        a, b = both_factors(weight, sides, self.path)
        num_experts, shape = self._product_shape(weight)
        name = pattern_name(weight, self.config)
        rank = resolved(self.config, "rank_pattern", name, self.config_path)
        alpha = resolved(self.config, "alpha_pattern", name, self.config_path)
        shapes = self.headers[a].shape, self.headers[b].shape
        sizes = (shape[0], shape[1])
        swaps = num_experts > 1 and self.layout != "gpt_oss"
        check_factors(weight, shapes, num_experts, sizes, rank, self.config, self.path, swaps)
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        return Factors(a, b, scale, num_experts)

    def _product_shape(self, weight: str) -> tuple[int, tuple[int, ...]]:
        """(E, (out, in)) of the products of a weight."""
        if weight in self.carried:
            return 1, self.carried[weight]
        block, _, parameter = weight.rpartition(".experts.")
        return experts_shape(self.source.expected.blocks[block], parameter, self.layout)

    def _check_ties(self) -> None:
        tied = self.source.expected.optional
        for name in (*self.factors, *self.replaced):
            if tied and (name in tied or name.endswith("embed_tokens.weight")):
                raise CheckpointError(
                    f"{self.path} has {name}, which the base ties to another weight (tie_word_embeddings); {WITH_PEFT}"
                )

    def _tensor(self, name: str) -> torch.Tensor:
        """A tensor of the file, which is open meanwhile only: its mapped pages count as memory."""
        try:
            with opened(self.path) as handle:
                return handle.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error

    def replacement(self, weight: str) -> torch.Tensor:
        """The adapter's own copy of a weight (modules_to_save)."""
        return self._tensor(self.replaced[weight])

    def _product(self, b: torch.Tensor, a: torch.Tensor, scale: float) -> torch.Tensor:
        """scale * b @ a in the scratch memory, where it lasts until the next product."""
        self._last = None
        return torch.matmul(b, a, out=self._scratch.of((*b.shape[:-1], a.shape[-1]))).mul_(scale)

    def products(self, weight: str, max_rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """What is added to a matrix, in fp32, some rows at a time; each lasts until the next."""
        name_a, name_b, scale, _ = self.factors[weight]
        a, b = self._tensor(name_a).float(), self._tensor(name_b).float()
        for start in range(0, b.shape[0], max_rows):
            rows = slice(start, start + max_rows)
            yield rows, self._product(b[rows], a, scale)

    def expert_product(self, weight: str, expert: int) -> torch.Tensor:
        """What is added to one expert's slice of a parameter that holds all, in fp32. The last one is kept: gate and up
        are asked for in turn."""
        if self._last is None or self._last[0] != (weight, expert):
            a, b = self._factors_of_experts(weight)
            scale = self.factors[weight].scale
            if weight.endswith("bias"):
                product = self._product(b[expert, None], a, scale)[0]
            else:
                product = self._product(b[expert], a[expert], scale)
                product = product.T if self.layout == "gpt_oss" else product
            self._last = ((weight, expert), product)
        return self._last[1]

    def _factors_of_experts(self, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A [E, r, in] and B [E, out, r] in fp32; of biases, A [r, out] and B [E, r]. Those of one layer are kept."""
        if weight not in self._layer:
            layer = weight.rpartition(".")[0]
            self._layer = {name: kept for name, kept in self._layer.items() if name.rpartition(".")[0] == layer}
            name_a, name_b, _, num_experts = self.factors[weight]
            a, b = self._tensor(name_a).float(), self._tensor(name_b).float()
            if not weight.endswith("bias"):
                a = a.unflatten(0, (num_experts, -1))
                b = b.unflatten(1, (-1, num_experts)).permute(2, 0, 1).contiguous()
            self._layer[weight] = (a, b)
        return self._layer[weight]
