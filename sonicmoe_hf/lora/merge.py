"""merge_adapter: a checkpoint with a LoRA adapter's products added to its weights, for engines without such adapters.

Transformers' own conversions say which weights of the files become an adapted parameter, of every family: they are read,
converted, changed and converted back, and all other tensors are copied.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..checkpoints.atomic_folder import new_folder
from ..checkpoints.config_only import build_on_meta
from ..checkpoints.convert import Conversion, Target, dense_target, kept_target, target_of, write_checkpoint
from ..checkpoints.converters import WITH_PEFT, WeightGroup, weight_groups
from ..checkpoints.files import ADAPTER_CONFIG
from ..checkpoints.hub import local_folder
from ..checkpoints.kept_format import exact_values
from ..checkpoints.layouts import NATIVE_PREFIX, holder
from ..checkpoints.plan import TARGETS, finite_bounds
from ..checkpoints.source import Source
from ..checkpoints.stored import StoredWeights
from ..errors import CheckpointError, DoctorError
from ..layer.config import check_choice
from .adapter import Adapter
from .factors import Factors
from .rules import ADAPTER_WEIGHTS

KEEP = "keep"
QUANTIZE = (KEEP, "mxfp4", "fp8")
ALTERNATING = 2  # groups whose weights may alternate in a file: gate and up of an expert, and its down


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
    base = local_folder(base, revision)
    stored = StoredWeights(base)
    try:
        model = build_on_meta(str(base))
    except DoctorError as error:
        raise CheckpointError(str(error)) from error
    read = Adapter.read(local_folder(adapter, only=[ADAPTER_CONFIG, ADAPTER_WEIGHTS]), model)
    target = _target(stored, model, read, layout, quantize)
    return write_checkpoint(stored, target, dst, max_shard_size, verify, on_progress)


def _target(
    stored: StoredWeights, model: PreTrainedModel, adapter: Adapter, layout: str | None, quantize: str | None
) -> Target:
    family = str(stored.config["model_type"])
    own = "native" if family.startswith(NATIVE_PREFIX) else "hub"
    family = family.removeprefix(NATIVE_PREFIX)
    if quantize == KEEP or (quantize is not None and quantize == stored.quantization and not stored.packed_here):
        return kept_target(stored, Merged(stored, model, adapter, exact_values), family, own, own)
    if quantize is None and layout in (None, own) and not stored.packed_here:
        return dense_target(stored, Merged(stored, model, adapter, _rounded_values), family, own)
    layout = layout or ("hub" if quantize else own)
    return target_of(_MergedSource(stored.folder, model, adapter), layout, quantize=quantize)


def _rounded_values(stored: StoredWeights, weight: str, expert: int | None = None) -> torch.Tensor:
    """A weight, or one expert's [1, ...] of it, as it is once a quantized checkpoint is made bf16."""
    return StoredWeights.read(stored, weight) if expert is None else stored.expert_slice(weight, expert)[None]


class Merged:
    """The weights of a checkpoint's files that an adapter changes.

    Args:
        stored: the files. model: theirs, on the meta device. adapter: read for this model.
        values: gives a weight, or one expert's [1, ...] of it, without the adapter.
    Raises:
        CheckpointError: an adapted parameter is tied to another, or comes of no weight of the files.
    """

    def __init__(
        self,
        stored: StoredWeights,
        model: PreTrainedModel,
        adapter: Adapter,
        values: Callable[[StoredWeights, str, int | None], torch.Tensor],
    ):
        self._stored, self._adapter, self._values = stored, adapter, values
        by_target = {target: group for group in weight_groups(model, stored.weights) for target in group.targets}
        adapted = {*adapter.factors, *adapter.replaced}
        if missing := sorted(adapted.difference(by_target)):
            raise CheckpointError(
                f"{missing[0]}, which the adapter changes, comes of no weight in {stored.folder}; {WITH_PEFT}"
            )
        self._replaced = {name for name in adapter.replaced if not self._is_the_bases(name, by_target[name])}
        changed = {*adapter.factors, *self._replaced}
        self._check(model, changed)
        groups = list({id(group): group for target, group in by_target.items() if target in changed}.values())
        self._group_of: dict[str, tuple[WeightGroup, int | None]] = {
            name: (group, place if "*" in pattern and group.num_experts else None)
            for group in groups
            for pattern, names in group.sources.items()
            for place, name in enumerate(names)
        }
        self._made: OrderedDict[tuple[str, int | None], dict[str, torch.Tensor]] = OrderedDict()
        self._factors: OrderedDict[str, Factors] = OrderedDict()

    def _is_the_bases(self, name: str, group: WeightGroup) -> bool:
        """Whether the adapter's whole weight is the base's own, which PEFT saves beside adapters of embeddings."""
        if len(group.weights) > 1 or self._stored.is_quantized(group.weights[0]):
            return False
        weight, replacement = self._values(self._stored, group.weights[0], None), self._adapter.replaced[name]
        return weight.shape == replacement.shape and torch.equal(replacement.to(weight.dtype), weight)

    def _check(self, model: PreTrainedModel, changed: set[str]) -> None:
        tied = model.all_tied_weights_keys
        if names := sorted(changed.intersection({*tied, *tied.values()})):
            raise CheckpointError(
                f"the adapter changes {names[0]}, which the base ties to another (tie_word_embeddings); {WITH_PEFT}"
            )
        if names := sorted(self._replaced.intersection(self._adapter.factors)):
            raise CheckpointError(
                f"the adapter has lora_A and lora_B of {names[0]}, and a whole one that is not the base's; {WITH_PEFT}"
            )

    def __contains__(self, weight: str) -> bool:
        return weight in self._group_of

    def exact(self, weight: str, expert: int | None = None) -> torch.Tensor:
        """A changed weight in fp32, or one expert's [1, ...] of one that holds all."""
        group, place = self._group_of[weight]
        if expert is not None and group.num_experts is None:
            return self.exact(weight)[expert : expert + 1]
        if expert is None and place is None and group.num_experts is not None:
            return torch.cat([self.exact(weight, each) for each in range(group.num_experts)])
        place = expert if place is None else place
        key = group.targets[0], place
        if key not in self._made:
            made = group.changed(lambda name, own: self._values(self._stored, name, own), self._change, place)
            _keep_last(self._made, key, {name: self._checked(name, values) for name, values in made.items()})
        return self._made[key][weight]

    def _change(self, name: str, parameter: torch.Tensor, expert: int | None) -> torch.Tensor:
        """A parameter in fp32, or one expert's [1, ...] of it, with the adapter's product, or the adapter's own."""
        if name in self._replaced:
            replacement = self._adapter.replaced[name].float()
            return replacement if expert is None else replacement[expert : expert + 1]
        if name not in self._adapter.factors:
            return parameter
        if name not in self._factors:
            factors = self._adapter.factors[name]
            _keep_last(self._factors, name, factors._replace(a=factors.a.float(), b=factors.b.float()))
        factors = self._factors[name]
        if factors.a.dim() == 2:
            return _added(parameter, factors)
        experts = range(parameter.shape[0]) if expert is None else [expert]
        return torch.stack([_added(own, factors.expert(each)) for own, each in zip(parameter, experts)])

    def _checked(self, name: str, values: torch.Tensor) -> torch.Tensor:
        dtype = self._stored.dtype_of(name)
        if not finite_bounds(values, dtype):
            raise CheckpointError(
                f"{name} with the adapter added has NaN or infinite values in {dtype}; look for them in the adapter and "
                "in the base"
            )
        return values


def _keep_last(kept: OrderedDict, key, value) -> None:
    kept[key] = value
    while len(kept) > ALTERNATING:
        kept.popitem(last=False)


def _added(matrix: torch.Tensor, factors: Factors) -> torch.Tensor:
    """A matrix in fp32 plus scale * B A, in memory of its own."""
    matrix = matrix.T if factors.is_transposed else matrix
    total = torch.addmm(matrix, factors.b, factors.a, alpha=factors.scale)
    return total.T if factors.is_transposed else total


class _MergedSource(Source):
    """A checkpoint that is converted to another layout or format with an adapter's products added."""

    def __init__(self, folder: Path, model: PreTrainedModel, adapter: Adapter):
        super().__init__(folder)
        self.merged = Merged(self, model, adapter, _rounded_values)

    def read(self, name: str) -> torch.Tensor:
        """As Source's, with the adapter's product added, rounded once."""
        return self.merged.exact(name).to(self.dtype_of(name)) if name in self.merged else super().read(name)

    def changes_part(self, block: str, part: str) -> bool:
        """As Source's."""
        return f"{block}.{holder(self.layout, part).name.format(expert=0)}" in self.merged

    def part(self, block: str, part: str, expert: int) -> torch.Tensor:
        """As Source's, with this expert's product added: exact."""
        stored = holder(self.layout, part)
        name = f"{block}.{stored.name.format(expert=expert)}"
        if name not in self.merged:
            return super().part(block, part, expert)
        exact = self.merged.exact(name) if stored.per_expert else self.merged.exact(name, expert)[0]
        return stored.parts[part](exact)
