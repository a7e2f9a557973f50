"""merge_adapter: a checkpoint with a LoRA adapter's products added to its weights, for engines without such adapters.

Each tensor of the files is read, one expert at a time, has its rows of scale * B A added, and is written in the format
that it had. A tensor may hold one matrix of a parameter of the model, such as gate of an expert's gate and up.
Transformers' conversions, by which the model is saved, cut the product of the whole parameter into these matrices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..checkpoints.layouts import CHECKPOINT_LAYOUTS, check_has_native_layout, has_native_layout
from ..checkpoints.reading.config_only import build_from_config
from ..checkpoints.reading.converters import ALTERNATING, Tensors, WeightGroup
from ..checkpoints.reading.files import ADAPTER_CONFIG, CONFIG_FILE, local_folder
from ..checkpoints.reading.source import Source
from ..checkpoints.reading.stored import TIED, StoredWeights
from ..checkpoints.reading.weight import Change, GroupChange, MatrixWeight, Weight
from ..checkpoints.writing.atomic_folder import new_folder
from ..checkpoints.writing.companions import OF_TRAINING
from ..checkpoints.writing.model_card import origin_of
from ..checkpoints.writing.output import finite_bounds
from ..checkpoints.writing.targets import Target, dense_target, own_target, target_of
from ..checkpoints.writing.write import Conversion, write_checkpoint
from ..errors import CheckpointError
from ..formats.hub_names import HubNames
from ..kernels.packed.dither import Dither
from ..layer.config import check_choice
from ..layer.experts_module import packable
from ..lora.dithering import MERGE_ROUNDINGS, dither_of
from ..lora.named_base import other_family, other_name
from ..lora.packed_base import OTHER_NORMS, PackedBase, option_to_load
from ..model_patches import NATIVE_PREFIX
from .adapter import Adapter
from .rules import ADAPTER_WEIGHTS, WITH_PEFT, AdapterConfig

OTHER_TABLE = (
    "{folder} has {name}, which no training changes, with other values than {base}: it was trained on another base; give "
    "that one to merge"
)
OTHER_FAMILY = "{sentence}, or name this one in {config} as base_model_name_or_path, if it is meant for it"
KEEP, DITHERED = "keep", MERGE_ROUNDINGS[0]
QUANTIZE = (KEEP, "mxfp4", "fp8", "int4")


def merge_adapter(
    base: str | os.PathLike,
    adapter: str | os.PathLike,
    dst: str | os.PathLike,
    layout: str | None = None,
    *,
    quantize: str | None = None,
    rounding: str = "dithered",
    seed: int = 0,
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
        quantize: "keep" writes the format of `base`, in which only values that the adapter changed are rounded anew and
            all others keep their bits. "mxfp4" (gpt-oss), "fp8" and "int4" pack the experts of a bf16 base. None makes
            quantized weights bf16.
        rounding: of changed weights to the format that they have already. "dithered": up or down by chance, so that the
            mean is exact; most of an adapter's changes are smaller than the format's steps, and "nearest" drops those.
            The result is a function of base, adapter and `seed`, on any machine.
        max_shard_size: bytes, or text such as "5GB". It, one file of `base` and one layer's adapters bound the memory.
        verify: read back and compare every byte before the result appears.
        revision: of the base's hub id. on_progress: called with (bytes done, bytes in all).
    Returns:
        What was done, as `convert_checkpoint` does. Tokenizer and chat template are the adapter's where it has them. Head
        and embeddings that the base ties are two weights in the result, if the adapter changes one of them.
    Raises:
        CheckpointError: as `convert_checkpoint`; or the adapter is not plain LoRA, does not fit the base, names one of
            another family, or makes weights that are not finite. Nothing is written.
    Example:
        sonicmoe_hf.merge_adapter("Qwen/Qwen3-30B-A3B", "outputs/lora", "merged")
    """
    if layout is not None:
        check_choice("layout", layout, CHECKPOINT_LAYOUTS)
    if quantize is not None:
        check_choice("quantize", quantize, QUANTIZE)
        if layout == "native" and quantize != KEEP:
            raise CheckpointError(f"quantize={quantize!r} writes the hub's layout; leave layout='native' out")
    check_choice("rounding", rounding, MERGE_ROUNDINGS)
    dst = new_folder(dst)
    stored = StoredWeights(local_folder(base, revision))
    folder = local_folder(adapter, only=[ADAPTER_CONFIG, ADAPTER_WEIGHTS, *OF_TRAINING])
    target = _target_of_merge(stored, folder, layout, quantize, seed if rounding == DITHERED else None)
    entries = AdapterConfig(folder).entries
    if sentence := other_name(entries.get("base_model_name_or_path"), os.fspath(base), stored.config):
        target = target._replace(notices=[sentence, *target.notices])
    origin = origin_of("merge", base, adapter, option_to_load(entries.get("auto_mapping"), stored.folder))
    return write_checkpoint(target, dst, origin, max_shard_size, verify, on_progress)


def _target_of_merge(
    stored: StoredWeights, adapter: Path, layout: str | None, quantize: str | None, seed: int | None
) -> Target:
    """Add the adapter to the base's weights, and choose the files in which they are written: the base's own, in the same
    layout and names; those of another layout or format; or, of experts that were packed here in a family without a native
    layout, dense ones under the hub's names."""
    family = str(stored.config["model_type"])
    own = "native" if family.startswith(NATIVE_PREFIX) else "hub"
    family = family.removeprefix(NATIVE_PREFIX)
    quantize = stored.format_named(quantize)
    if quantize == KEEP and layout not in (None, own):
        raise CheckpointError(f"quantize='keep' writes the base's own layout, {own!r}; leave layout out")
    keeps_format = quantize == KEEP or (
        quantize is not None and quantize == stored.quantization and not stored.is_packed_here
    )
    is_other = quantize is not None or layout not in (None, own) or stored.is_packed_here
    model = build_from_config(stored.config, stored.folder / CONFIG_FILE)
    if keeps_format or not is_other:
        notices = add_adapter(stored, model, adapter, seed)
        target = own_target(stored, (family, own, own), keeps_format)
    elif stored.is_packed_here and not has_native_layout(stored.config):
        if layout == "native" or quantize is not None:
            check_has_native_layout(stored.config, stored.folder / CONFIG_FILE)
        notices = add_adapter(stored, model, adapter, seed)
        target = dense_target(stored, model)
    else:
        source = Source(stored.folder)
        notices = add_adapter(source, model, adapter, seed)
        target = target_of(source, layout or ("hub" if quantize else own), quantize=quantize)
    return target._replace(notices=notices + target.notices, adapter=adapter)


def add_adapter(stored: StoredWeights, model: PreTrainedModel, folder: Path, seed: int | None = None) -> list[str]:
    """Add an adapter to a checkpoint's weights, whenever they are read.

    Args:
        stored: the checkpoint. model: its model, on the meta device. folder: the adapter's. seed: of the dither, by
            which packed weights are rounded; None rounds to nearest.
    Returns:
        What a user should know of it, in sentences.
    Raises:
        CheckpointError: the checkpoint lacks a weight, an adapted parameter is tied to another or comes from none of the
            files, the adapter was trained beside norms that AWQ scaled and that these are not, has other tables of
            experts, or names a base of another family; or as Adapter.read.
    """
    groups = stored.groups(model)
    adapter = Adapter.read(folder, model)
    tied = model.all_tied_weights_keys
    other = {**tied, **{source: target for target, source in tied.items()}}
    changed = {*adapter.factors, *adapter.replaced}
    stored_in = {name: groups[held] for name in changed for held in (other.get(name), name) if held in groups}
    for name in sorted(changed):
        if name not in stored_in or stored.weights.keys().isdisjoint(stored_in[name].shapes):
            raise CheckpointError(
                f"{name}, which the adapter changes, comes from no weight in {stored.folder}; {WITH_PEFT}"
            )
    replaced = {name for name, tensor in adapter.replaced.items() if not _equals_base(stored, stored_in[name], tensor)}
    if tables := sorted(name for name in replaced if not adapter.replaced[name].is_floating_point()):
        raise CheckpointError(OTHER_TABLE.format(folder=folder, name=tables[0], base=stored.folder))
    changed = {*adapter.factors, *replaced}
    notices = _untie(stored, model, groups, changed)
    change = lru_cache(ALTERNATING)(lambda parameter: _AdapterChange(stored, adapter, groups[parameter], replaced))
    for parameter in {groups[name].parameter_names[0] for name in changed}:
        for name in groups[parameter].owners:
            if (weight := stored.weights.get(name)) is not None:
                dither = None
                if seed is not None and weight.format is not None:
                    module = model.get_submodule(parameter.rpartition(".")[0])
                    dither = _dither_of_part(dither_of(parameter, module, seed), groups[parameter], name)
                weight.change = Change.of(name, groups[parameter], partial(change, parameter), dither)
    trained_packing = PackedBase.of_adapter(adapter.config.get("auto_mapping"))
    if trained_packing is not None and trained_packing.is_scaled_otherwise(partial(_plain_weight, stored, groups)):
        raise CheckpointError(OTHER_NORMS.format(model=stored.folder))
    if trained_packing is not None:
        here = packed_base_of(stored, model, groups)
        if sentence := trained_packing.difference_from(here, str(stored.folder)):
            notices.append(sentence)
    named = adapter.config.get("base_model_name_or_path")
    if sentence := other_family(named, stored.config, str(stored.folder)):
        raise CheckpointError(OTHER_FAMILY.format(sentence=sentence, config=folder / ADAPTER_CONFIG))
    return notices


def _plain_weight(stored: StoredWeights, groups: Mapping[str, WeightGroup], parameter: str) -> torch.Tensor | None:
    """Read a parameter that is one plain weight of the files; None of others."""
    names = [*groups[parameter].shapes] if parameter in groups else []
    weight = stored.weights.get(names[0]) if len(names) == 1 else None
    return None if weight is None or weight.format is not None else weight.read()


def packed_base_of(
    stored: StoredWeights, model: PreTrainedModel, groups: Mapping[str, WeightGroup]
) -> PackedBase | None:
    """Find the packing of a checkpoint's experts; None of dense ones.

    Args:
        model: the checkpoint's, on the meta device. groups: of its weights, by the model's parameters.
    """
    if stored.quantization is None:
        return None
    layers: list[list[Weight]] = []
    for module, experts in model.named_modules():
        own = [groups[name] for each in packable(experts) if (name := f"{module}.{each}") in groups]
        owners = {name: owner for group in own for name, owner in group.owners.items() if not owner}
        weights = [stored.weights[name] for name in owners]
        if any(
            each.format is None or (isinstance(each, MatrixWeight) and owners[each.name] is None) for each in weights
        ):
            return PackedBase(stored.quantization, [])  # some are dense, which loading packs, or need all experts
        if weights:
            layers.append(weights)
    return PackedBase.of_layers(stored.quantization, layers, _first_codes)


def _first_codes(weight: Weight) -> torch.Tensor:
    """Read the codes of a packed weight's first expert: it holds all experts, or is that expert's own."""
    return weight.raw(None if isinstance(weight, MatrixWeight) else 0)[0]


def _dither_of_part(dither: Dither, group: WeightGroup, name: str) -> Dither:
    """Make the dither of one of the weights that become a parameter, such as gate and up of an expert."""
    if len(group.weight_names) == 1:
        return dither
    first_row = 0
    for weights in group.weight_names.values():
        if name in weights.values():
            break
        first_row += group.shapes[next(iter(weights.values()))][0]
    return dither._replace(order="whole", first_row=first_row)


def _equals_base(stored: StoredWeights, group: WeightGroup, replacement: torch.Tensor) -> bool:
    """Tell whether the adapter's whole weight is the base's own, which PEFT saves beside adapters of embeddings."""
    first, *others = group.shapes
    if others or stored.weights[first].format is not None:
        return False
    weight = stored.weights[first].read()
    return weight.shape == replacement.shape and torch.equal(replacement.to(weight.dtype), weight)


def _untie(
    stored: StoredWeights, model: PreTrainedModel, groups: dict[str, WeightGroup], changed: Collection[str]
) -> list[str]:
    """Untie weights that the base ties, if the adapter changes one of them: PEFT adapts each alone.

    groups: gets those that the files do not hold. Returns what a user should know of it, in sentences.
    """
    tied = model.all_tied_weights_keys
    ours = sorted({*tied, *tied.values()}.intersection(changed))
    if not ours:
        return []
    state, hub_names, names = model.state_dict(), HubNames(model), {}
    for pair in tied.items():
        for name, other in (pair, pair[::-1]):
            if name not in groups:
                held, (own, shape) = hub_names.parameter(name), next(iter(groups[other].shapes.items()))
                names[held], groups[name] = own, WeightGroup(None, name, state, model.config)
                groups[name].add(name, held, shape)
    stored.untie(names)
    return [
        f"{TIED} is false in the result, whose head and embeddings are two weights: the base ties them, and the adapter "
        f"changes {' and '.join(ours)}"
    ]


class _AdapterChange(GroupChange):
    """An adapter's change of weights that become parameters of a model together: products added, or all values
    replaced."""

    remedy = f"; {WITH_PEFT}"

    def __init__(self, stored: StoredWeights, adapter: Adapter, group: WeightGroup, replaced: set[str]):
        super().__init__(stored.weights, group)
        given = {name: adapter.factors[name] for name in group.parameter_names if name in adapter.factors}
        self._factors = {name: own._replace(a=own.a.float(), b=own.b.float()) for name, own in given.items()}
        self._replaced = {name: adapter.replaced[name].float() for name in group.parameter_names if name in replaced}

    def apply(self, weight: Weight, values: torch.Tensor, expert: int | None) -> torch.Tensor:
        """Add to the values of a weight, or to an expert's [1, ...] of them, in fp32.

        Raises:
            CheckpointError: the sum is not finite in the dtype of the weight.
        """
        made, dtype = super().apply(weight, values, expert), weight.dtype
        total = made if self._replaced else made.add_(values)
        if not finite_bounds(total, dtype):
            raise CheckpointError(
                f"{weight.name} with the adapter added has NaN or infinite values in {dtype}; look for them in the "
                "adapter and in the base"
            )
        return total

    def new_parameters(self, dtype: torch.dtype, expert: int | None) -> Tensors:
        """See GroupChange: in fp32, and what is added alone where no whole weight is replaced."""
        parameters = {name: self._product(name, expert) for name in self.group.parameter_names}
        if self._replaced:
            rows = slice(None) if expert is None else slice(expert, expert + 1)
            replaced = {name: whole[rows] for name, whole in self._replaced.items()}
            for name, values in (self.old_parameters(expert, torch.float32) | replaced).items():
                parameters[name] += values
        return parameters

    def _product(self, name: str, expert: int | None) -> torch.Tensor:
        """Compute scale * B A of a parameter, or of one expert's [1, ...] of it; zeros where it is not adapted."""
        if name not in self._factors:
            return torch.zeros(self.group.parameter_shape(name, expert), dtype=torch.float32, device="cpu")
        factors = self._factors[name]
        if factors.a.dim() == 2:
            return factors.product()
        experts = range(len(factors.a)) if expert is None else [expert]
        return torch.stack([factors.expert(each).product() for each in experts])
