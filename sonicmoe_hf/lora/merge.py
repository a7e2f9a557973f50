"""merge_adapter: a checkpoint with a LoRA adapter's products added to its weights, for engines without such adapters.

Transformers' own conversions say which weights of the files become an adapted parameter, of every family: they are read,
converted, changed and converted back, and all other tensors are copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..checkpoints.atomic_folder import new_folder
from ..checkpoints.config_only import build_on_meta
from ..checkpoints.convert import Conversion, Target, own_target, target_of, write_checkpoint
from ..checkpoints.converters import WITH_PEFT, WeightGroup, check_complete, weight_groups
from ..checkpoints.files import ADAPTER_CONFIG
from ..checkpoints.hub import local_folder
from ..checkpoints.layouts import NATIVE_PREFIX
from ..checkpoints.plan import TARGETS, finite_bounds
from ..checkpoints.rewriting import ALTERNATING
from ..checkpoints.source import Source
from ..checkpoints.stored import StoredWeights
from ..errors import CheckpointError
from ..layer.config import check_choice
from .adapter import Adapter
from .factors import Factors
from .rules import ADAPTER_WEIGHTS

KEEP = "keep"
QUANTIZE = (KEEP, "mxfp4", "fp8")


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
        base, adapter: folders, or hub ids. The base may be of any family that Transformers loads; the adapter may have
            been trained on either layout of it.
        dst: the new folder; it must not exist. layout: "native" or "hub", of families that have both; by default the
            base's. The hub's is what Transformers and vLLM load.
        quantize: "keep" writes the format of `base` (MXFP4, FP8 or NVFP4), in which only weights that the adapter changed
            are rounded anew and all other tensors keep their bits. "mxfp4" (gpt-oss) and "fp8" pack the experts of a
            bf16 base. None makes quantized weights bf16.
        max_shard_size: bytes, or text such as "5GB". It, one file of `base` and one layer's adapters bound the memory.
        verify: read back and compare every byte before the result appears.
        revision: of the base's hub id. on_progress: called with (bytes done, bytes in all).
    Returns:
        What was done, as `convert_checkpoint` does.
    Raises:
        CheckpointError: as `convert_checkpoint`; or the adapter is not plain LoRA, does not fit the base, changes one of
            two tied weights, or makes weights that are not finite. Nothing is written.
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
    stored = StoredWeights(local_folder(base, revision))
    folder = local_folder(adapter, only=[ADAPTER_CONFIG, ADAPTER_WEIGHTS])
    target = _target(stored, folder, layout, quantize)
    return write_checkpoint(stored, target, dst, max_shard_size, verify, on_progress)


def _target(stored: StoredWeights, adapter: Path, layout: str | None, quantize: str | None) -> Target:
    family = str(stored.config["model_type"])
    own = "native" if family.startswith(NATIVE_PREFIX) else "hub"
    family = family.removeprefix(NATIVE_PREFIX)
    keeps = quantize == KEEP or (quantize is not None and quantize == stored.quantization and not stored.packed_here)
    if not keeps and (quantize is not None or layout not in (None, own) or stored.packed_here):
        source = Source(stored.folder)
        merged = Merged(source, source.model, adapter, source.groups)
        return target_of(source, layout or ("hub" if quantize else own), quantize=quantize, changed=merged)
    model = build_on_meta(str(stored.folder))
    shapes = {name: weight.shape for name, weight in stored.weights.items()}
    found = weight_groups(model, shapes)
    check_complete(model, found, stored.folder)
    groups = {target: group for group in found for target in group.targets}
    return own_target(stored, groups, Merged(stored, model, adapter, groups), (family, own, own), keeps)


class Merged:
    """The parameters of a checkpoint's model that an adapter changes.

    Args:
        stored: the checkpoint. model: its model, on the meta device. adapter: its folder. groups: by name of a parameter,
            the weights that become it.
    Raises:
        CheckpointError: an adapted parameter is tied to another, or comes from none of the files; or as Adapter.read.
    """

    def __init__(
        self, stored: StoredWeights, model: PreTrainedModel, adapter: Path, groups: Mapping[str, WeightGroup]
    ):
        self._stored, self._groups, self._adapter = stored, groups, Adapter.read(adapter, model)
        for name in sorted({*self._adapter.factors, *self._adapter.replaced}):
            if name not in groups or stored.weights.keys().isdisjoint(groups[name].shapes):
                raise CheckpointError(
                    f"{name}, which the adapter changes, comes from no weight in {stored.folder}; {WITH_PEFT}"
                )
        self._replaced = {name for name in self._adapter.replaced if not self._is_the_bases(name)}
        self._changed = {*self._adapter.factors, *self._replaced}
        self._check(model)
        self._factors = lru_cache(ALTERNATING)(self._read_factors)

    def _is_the_bases(self, name: str) -> bool:
        """Whether the adapter's whole weight is the base's own, which PEFT saves beside adapters of embeddings."""
        first, *others = self._groups[name].shapes
        if others or self._stored.weights[first].format is not None:
            return False
        weight, replacement = self._stored.weights[first].read(), self._adapter.replaced[name]
        return weight.shape == replacement.shape and torch.equal(replacement.to(weight.dtype), weight)

    def _check(self, model: PreTrainedModel) -> None:
        tied = model.all_tied_weights_keys
        if names := sorted(self._changed.intersection({*tied, *tied.values()})):
            raise CheckpointError(
                f"the adapter changes {names[0]}, which the base ties to another (tie_word_embeddings); {WITH_PEFT}"
            )
        if names := sorted(self._replaced.intersection(self._adapter.factors)):
            raise CheckpointError(
                f"the adapter has lora_A and lora_B of {names[0]}, and a whole one that is not the base's; {WITH_PEFT}"
            )

    def changes(self, parameter: str) -> bool:
        """Whether the adapter changes a parameter of the model."""
        return parameter in self._changed

    def change(self, parameter: str, values: torch.Tensor, expert: int | None) -> torch.Tensor:
        """A parameter in fp32, or one expert's [1, ...] of it, with the adapter's product, or the adapter's own.

        Raises:
            CheckpointError: it is not finite in the dtype of the base.
        """
        changed = self._with_adapter(parameter, values, expert)
        dtype = self._stored.weights[next(iter(self._groups[parameter].shapes))].dtype
        if not finite_bounds(changed, dtype):
            raise CheckpointError(
                f"{parameter} with the adapter added has NaN or infinite values in {dtype}; look for them in the adapter "
                "and in the base"
            )
        return changed

    def _with_adapter(self, name: str, values: torch.Tensor, expert: int | None) -> torch.Tensor:
        if name in self._replaced:
            replacement = self._adapter.replaced[name].float()
            return replacement if expert is None else replacement[expert : expert + 1]
        if name not in self._adapter.factors:
            return values
        factors = self._factors(name)
        if factors.a.dim() == 2:
            return _added(values, factors)
        experts = range(values.shape[0]) if expert is None else [expert]
        return torch.stack([_added(own, factors.expert(each)) for own, each in zip(values, experts)])

    def _read_factors(self, name: str) -> Factors:
        factors = self._adapter.factors[name]
        return factors._replace(a=factors.a.float(), b=factors.b.float())


def _added(matrix: torch.Tensor, factors: Factors) -> torch.Tensor:
    """A matrix in fp32 plus scale * B A, in memory of its own."""
    matrix = matrix.T if factors.is_transposed else matrix
    total = torch.addmm(matrix, factors.b, factors.a, alpha=factors.scale)
    return total.T if factors.is_transposed else total
