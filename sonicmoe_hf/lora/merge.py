"""merge_adapter: a checkpoint with a LoRA adapter's products added to its weights, for engines without such adapters.

It is a conversion whose source reads W + scale * B A where the adapter has A and B.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from ..checkpoints.atomic_folder import new_folder
from ..checkpoints.convert import KEEP, Conversion, write_checkpoint
from ..checkpoints.files import ADAPTER_CONFIG
from ..checkpoints.hub import local_folder
from ..checkpoints.layouts import holder
from ..checkpoints.plan import TARGETS, finite_bounds
from ..checkpoints.source import Source
from ..errors import CheckpointError
from ..layer.config import check_choice
from .rules import ADAPTER_WEIGHTS
from .weights import LoraWeights, Scratch

QUANTIZE = (KEEP, "mxfp4", "fp8")
MAX_PRODUCT = 1 << 22  # values of a matrix's product that are computed at a time


def merge_adapter(
    base: str | os.PathLike,
    adapter: str | os.PathLike,
    dst: str | os.PathLike,
    layout: str | None = None,
    *,
    quantize: str | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = False,
    revision: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Add a LoRA adapter of PEFT's to the weights of its base model: W + scale * B A, in fp32, in the base's dtype.

    Args:
        base, adapter: folders, or hub ids. The adapter may have been trained on either layout of the base.
        dst: the new folder; it must not exist. layout: "native" or "hub"; by default the base's. The hub's is what
            Transformers and vLLM load.
        quantize: "keep" writes the hub's layout in the format of `base` (MXFP4, FP8 or NVFP4), in which only weights that
            the adapter changed are rounded anew and all other tensors keep their bits. "mxfp4" (gpt-oss) and "fp8" pack
            the experts of a bf16 base. None makes quantized weights bf16.
        max_shard_size: bytes, or text such as "5GB". It, one file of `base` and one layer's adapters bound the memory.
        verify: read back and compare every byte before the result appears.
        revision: of the base's hub id. on_progress: called with (bytes done, bytes in all).
    Returns:
        What was done, as `convert_checkpoint` does.
    Raises:
        CheckpointError: as `convert_checkpoint`; or the adapter is not plain LoRA, does not fit the base, or makes
            weights that are not finite. Nothing is written.
    Example:
        sonicmoe_hf.merge_adapter("Qwen/Qwen3-30B-A3B", "outputs/lora", "merged")
    """
    if layout is not None:
        check_choice("layout", layout, TARGETS)
    if quantize is not None:
        check_choice("quantize", quantize, QUANTIZE)
        if layout == "native":
            raise CheckpointError(f"quantize={quantize!r} writes the hub's layout; leave layout='native' out")
    dst = new_folder(dst)
    source = _MergedSource(local_folder(base, revision), local_folder(adapter, only=[ADAPTER_CONFIG, ADAPTER_WEIGHTS]))
    layout = layout or ("native" if source.native and quantize is None else "hub")
    return write_checkpoint(source, dst, layout, None, None, max_shard_size, verify, on_progress, quantize)


class _MergedSource(Source):
    """A checkpoint whose tensors are read with the adapter in `adapter_folder` added."""

    def __init__(self, folder: Path, adapter_folder: Path):
        super().__init__(folder)
        self.adapter = LoraWeights(adapter_folder, self)
        self._totals: dict[torch.dtype, Scratch] = {}

    def read(self, name: str) -> torch.Tensor:
        """As Source's: a tensor outside the experts with its product added, or the adapter's own in its place."""
        weight, model_name = super().read(name), self.model_name(name)
        if model_name in self.adapter.replaced:
            return self.adapter.replacement(model_name).to(weight.dtype)
        if model_name in self.adapter.factors:
            for rows, product in self.adapter.products(model_name, max(1, MAX_PRODUCT // weight.shape[1])):
                weight[rows].copy_(self._sum(model_name, weight[rows], product))
        return weight

    def exact(self, name: str) -> torch.Tensor:
        """As Source's, of what `read` gives before it is rounded to the base's dtype."""
        weight, model_name = super().read(name), self.model_name(name)
        if model_name in self.adapter.replaced:
            return self.adapter.replacement(model_name).float()
        exact = weight.float()
        if model_name in self.adapter.factors:
            for rows, product in self.adapter.products(model_name, max(1, MAX_PRODUCT // weight.shape[1])):
                exact[rows] = self._sum(model_name, weight[rows], product)
        return exact

    def changes(self, name: str) -> bool:
        """As Source's."""
        return self.model_name(name) in {*self.adapter.factors, *self.adapter.replaced}

    def changes_part(self, block: str, part: str) -> bool:
        """As Source's."""
        return f"{block}.{holder(self.adapter.layout, part).name}" in self.adapter.factors

    def part(self, block: str, part: str, expert: int) -> torch.Tensor:
        """As Source's, with this expert's product added: exact, and in memory that the next part is written to."""
        weight = super().part(block, part, expert)
        stored = holder(self.adapter.layout, part)
        name = f"{block}.{stored.name}"
        if name not in self.adapter.factors:
            return weight
        product = stored.parts[part](self.adapter.expert_product(name, expert))
        return self._sum(f"{part} of expert {expert} of {block}", weight, product)

    def _sum(self, name: str, weight: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """weight + product, to be rounded once to the weight's dtype."""
        exact = torch.promote_types(weight.dtype, product.dtype)
        total = self._totals.setdefault(exact, Scratch(exact)).of(weight.shape)
        total.copy_(weight).add_(product)
        if not finite_bounds(total, weight.dtype):
            raise CheckpointError(
                f"{name} with the adapter added has NaN or infinite values in {weight.dtype}; look for them in the "
                "adapter and in the base"
            )
        return total
