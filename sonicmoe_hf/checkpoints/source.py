"""A checkpoint on disk: what is in it, checked against its own config before anything is read or written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import CheckpointError
from ..formats.fp8 import BLOCK, HubFP8
from ..kernels.quantized import Quantized
from ..layer.experts_module import Sizes
from ..model_patches import NativeFamily
from ..patching.experts import sizes_of
from ..patching.support import find_layers, load_family_class
from ..private.transformers import ignored_on_load, strictly_fp32_modules
from .config_only import UNREADABLE, without_code
from .configs import family_of, hub_config
from .files import CONFIG_FILE
from .layouts import Named, detect_layout, holder, layer_tensors
from .packed import FIRST, Part, part_views, parts_of
from .stored import StoredWeights


class Expected(NamedTuple):
    """What a family's model has, read off the model built on the meta device from its config.

    plain: shapes of the tensors outside the experts. blocks: the experts' sizes, by block. tied: pairs of names of which
    one is enough. ignored: patterns of further names that Transformers ignores. keep_fp32: modules never cast.
    """

    plain: dict[str, tuple[int, ...]]
    blocks: dict[str, Sizes]
    tied: dict[str, str]
    ignored: list[str]
    keep_fp32: set[str]


def expected_tensors(config: dict, family: NativeFamily, path: Path, at_most: int) -> Expected:
    """What the family's causal language model has under this hub config.

    Raises:
        CheckpointError: Transformers cannot build it, or it has more than `at_most` layers.
    """
    config = without_code({key: value for key, value in config.items() if key != "quantization_config"})
    for key in ("num_hidden_layers", "num_nextn_predict_layers"):
        layers = config.get(key)
        if not isinstance(layers, (int, type(None))):
            raise CheckpointError(f"{path}: {key} is {layers!r}; it must be a whole number")
        if layers is not None and layers > at_most:
            raise CheckpointError(f"{path}: {key} is {layers}, where {at_most} are possible at most")
    try:
        config = load_family_class(family, "config").from_dict(config)
        with torch.device("meta"):
            model = load_family_class(family, "causal_lm")(config)
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} does not describe a {family.name} model: {reason or type(error).__name__}"
        ) from error
    blocks = {layer.name: sizes_of(layer.experts) for layer in find_layers(model)}
    return Expected(
        plain=_plain_shapes(model, blocks),
        blocks=blocks,
        tied=dict(model.all_tied_weights_keys),
        ignored=_ignored_patterns(model),
        keep_fp32=strictly_fp32_modules(model),
    )


def _plain_shapes(model: nn.Module, blocks) -> dict[str, tuple[int, ...]]:
    experts = tuple(f"{block}.experts." for block in blocks)
    return {name: tuple(t.shape) for name, t in model.state_dict().items() if not name.startswith(experts)}


def _ignored_patterns(model: Any) -> list[str]:
    """Names that a checkpoint may hold besides the model's: old buffers, and layers for multi-token prediction."""
    first = model.config.num_hidden_layers
    extra = getattr(model.config, "num_nextn_predict_layers", 0) or 0
    layers = [rf"^model\.layers\.{first + i}\." for i in range(extra)]
    return [*ignored_on_load(model), r"rotary_emb\.inv_freq$", *layers]


class Source(StoredWeights):
    """An opened checkpoint, whose tensors are what its config says.

    Attributes:
        family, native: what config.json says. layout: a name of CHECKPOINT_LAYOUTS.
        expected: what the family's model has. carried: names of the tensors outside the experts' layout, scales left out.
    Raises:
        CheckpointError: something is unknown, missing, wrongly shaped or contradictory; the message names it.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.family, self.native = family_of(self.config, folder / CONFIG_FILE)
        self.hub_config = hub_config(self.config, self.family)
        self.expected = expected_tensors(self.hub_config, self.family, folder / CONFIG_FILE, len(self.tensors))
        self.layout = self._find_layout()
        self.carried: list[str] = []
        self._check_names_and_shapes()

    def _find_layout(self) -> str:
        layout_of: dict[str, str] = {}
        for block, sizes in self.expected.blocks.items():
            layout = detect_layout(self.tensors, block, self.family)
            if layout is None or (layout == "per_expert" and sizes.num_experts > len(self.tensors)):
                raise CheckpointError(f"{self.folder} has no experts of {block} in a layout that conversion knows")
            layout_of[block] = layout
        if not layout_of:
            raise CheckpointError(f"{self.folder / CONFIG_FILE}: this model has no mixture-of-experts layer")
        if len(set(layout_of.values())) > 1:
            first, other = next((a, b) for a in layout_of for b in layout_of if layout_of[a] != layout_of[b])
            raise CheckpointError(
                f"the experts of {first} are {layout_of[first]!r}, those of {other} {layout_of[other]!r}"
            )
        layout = next(iter(layout_of.values()))
        if self.native != (layout == "native"):
            raise CheckpointError(
                f"{self.folder / CONFIG_FILE} says model_type {self.config['model_type']!r}, but the experts are in the "
                f"{layout!r} layout: config and files contradict each other"
            )
        return layout

    def expert_tensors(self, block: str) -> list[Named]:
        """The tensors of one block's experts, in this checkpoint's layout."""
        return list(layer_tensors(self.layout, block, self.expected.blocks[block]))

    def is_kept(self, name: str, format: str) -> bool:
        """Whether the experts' weight `name` is packed, or an expert's in `format` as the hub has it."""
        hub = self.hub_format
        if self.is_packed(name) or hub is None or hub.name != format:
            return self.is_packed(name)
        return self.is_quantized(name) and (not isinstance(hub, HubFP8) or hub.block == BLOCK)

    def packed_parts(self, named: Named) -> list[Part]:
        """The tensors that stand for a packed weight; none for another."""
        if self.packed_format is None or not self.is_packed(named.name):
            return []
        return parts_of(named.name, named.shape, self.packed_format, self.layout)

    def _parts_of_experts(self) -> list[Part]:
        every = [named for block in self.expected.blocks for named in self.expert_tensors(block)]
        return [part for named in every for part in self.packed_parts(named)]

    def _shapes_of_experts(self) -> dict[str, tuple[int, ...]]:
        shapes = {part.name: part.shape for part in self._parts_of_experts()}
        for block in self.expected.blocks:
            shapes.update({n.name: n.shape for n in self.expert_tensors(block) if not self.is_packed(n.name)})
        return shapes

    def _check_names_and_shapes(self) -> None:
        plain = {self.stored_name(name): shape for name, shape in self.expected.plain.items()}
        shapes = {**plain, **self._shapes_of_experts()}
        scales = self._scales()
        missing = sorted(set(shapes) - set(self.tensors) - self._tied_to_stored())
        unknown = sorted(set(self.tensors) - set(shapes) - set(scales))
        carried = [name for name in unknown if any(re.search(pattern, name) for pattern in self.expected.ignored)]
        unknown = sorted(set(unknown) - set(carried))
        for what, names in (("is missing", missing), ("is unknown", unknown)):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise CheckpointError(f"{self.folder}: {names[0]}{more} {what} in a {self.family.name} model")
        for name, shape in {**shapes, **{name: shape for name, (shape, _) in scales.items()}}.items():
            if name in self.tensors and self.shape_of(name) != shape:
                raise CheckpointError(
                    f"{self.folder}: {name} has shape {self.shape_of(name)}; by config.json it must be {shape}"
                )
        self._check_dtypes({name: dtypes for name, (_, dtypes) in scales.items()})
        kept = set(plain) | set(carried)
        self.carried = [name for name in self.tensors if name in kept and name not in scales]

    def _tied_to_stored(self) -> set[str]:
        """Names of which the checkpoint needs none, since it has the other of the two that are tied."""
        pairs = [(self.stored_name(name), self.stored_name(other)) for name, other in self.expected.tied.items()]
        return {b if a in self.tensors else a for a, b in pairs}

    def stored_name(self, name: str) -> str:
        """The name under which this checkpoint has a tensor of the family's model outside the experts."""
        if self.layout == "upstream":
            block, _, rest = name.rpartition(f".{self.family.router_attribute}.")
            if block in self.expected.blocks:
                return f"{block}.router.{rest}"
        return name

    def model_name(self, name: str) -> str:
        """The reverse of `stored_name`."""
        if self.layout == "upstream":
            block, _, rest = name.rpartition(".router.")
            if block in self.expected.blocks:
                return f"{block}.{self.family.router_attribute}.{rest}"
        return name

    def _scales(self) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
        """The shapes and dtypes of what stands beside quantized weights; of activations' scales any is right."""
        scales: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {}
        if self.hub_format is None:
            return scales
        for name, header in self.tensors.items():
            if name.endswith(self.hub_format.unused):
                scales[name] = header.shape, (header.dtype,)
            elif self.is_quantized(name):
                wanted = self.hub_format.stored_scales(header.shape)
                for stored, (shape, dtypes) in zip(self.weights[name][1:], wanted):
                    is_one = not shape and self.tensors[stored].shape == (1,)
                    scales[stored] = (1,) if is_one else shape, dtypes
        return scales

    def _check_dtypes(self, of_scales: dict[str, tuple[torch.dtype, ...]]) -> None:
        has_packed = any(name.endswith(FIRST) for name in self.tensors)
        if has_packed != (self.packed_format is not None):
            raise CheckpointError(f"{self.folder}: config.json and tensors disagree on whether experts are packed")
        if self.hub_format is not None and not any(map(self.is_quantized, self.weights)):
            raise CheckpointError(
                f"{self.folder} is declared to be in {self.hub_format.name.upper()}, but no weight is"
            )
        wanted = of_scales | {part.name: part.dtypes for part in self._parts_of_experts()}
        for name, header in self.tensors.items():
            is_plain = header.dtype.is_floating_point and header.dtype.itemsize >= 2
            if name in wanted and header.dtype not in wanted[name]:
                raise CheckpointError(f"{self.folder}: {name} has dtype {header.dtype}; it must be {wanted[name][0]}")
            if name not in wanted and not is_plain and not self.is_quantized(name):
                raise CheckpointError(f"{self.folder}: {name} has dtype {header.dtype}; weights are floats")

    def changes_part(self, block: str, part: str) -> bool:
        """Whether `part` gives other values than are stored."""
        return False

    def part(self, block: str, part: str, expert: int) -> torch.Tensor:
        """One part of one expert (see layouts.py), dequantized to bf16 where it is quantized."""
        stored = holder(self.layout, part)
        name = f"{block}.{stored.name.format(expert=expert)}"
        return stored.parts[part](self.read(name) if stored.per_expert else self.expert_slice(name, expert))

    def packed_parts_of(self, block: str, part: str, expert: int) -> list[torch.Tensor]:
        """What is stored of one part of one expert of a packed weight: of codes, scales, and state where there is one."""
        name = f"{block}.{holder(self.layout, part).name.format(expert=expert)}"
        if not self.is_packed(name):
            return [tensor for tensor in self._hub_packed(name) if tensor is not None]
        packed, place = self.packed(name, expert)
        views = part_views(self.layout, part, str(self.quantization))
        return [view(tensor[place]) for view, tensor in zip(views, packed) if tensor is not None]

    def _hub_packed(self, name: str) -> Quantized:
        """One expert's weight as the hub has it."""
        assert self.hub_format is not None
        if self._last_packed is None or self._last_packed[0] != (name, None):
            self._last_packed = None
            packed = self.hub_format.pack(*map(self.stored, self.weights[name]))
            self._last_packed = (name, None), packed
        return self._last_packed[1]

    def stored_dtype(self, block: str, named: Named, place: int) -> torch.dtype | None:
        """The dtype of FP8's scales (the second of what stands for a weight) in this checkpoint; None of the rest."""
        if self.quantization != "fp8" or place != 1:
            return None
        part = next(iter(named.stored.parts))
        name = f"{block}.{holder(self.layout, part).name.format(expert=0)}"
        return torch.uint8 if self.tensors[f"{name}_scale_inv"].dtype.itemsize == 1 else torch.float32
