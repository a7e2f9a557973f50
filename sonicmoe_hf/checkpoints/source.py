"""A checkpoint on disk: what is in it, checked against its own config before anything is read or written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn

from ..errors import CheckpointError
from ..formats.hub_formats import FP8_SCALES, HUB_FORMATS
from ..formats.state import stored_as
from ..kernels.quantized import FP8_BLOCK, Quantized
from ..layer.experts_module import Sizes
from ..model_patches import NativeFamily
from ..patching.experts import sizes_of
from ..patching.support import find_layers, load_family_class
from ..private.transformers import ignored_on_load, strictly_fp32_modules
from . import nvfp4
from .config_only import UNREADABLE, without_code
from .configs import declared_quantization, family_of, hub_config
from .dequantize import block_size, dequantize_fp8, fp8_scale_shape
from .files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, opened, read_headers, read_json, refuse_model_beside_adapter
from .layouts import Named, detect_layout, holder, layer_tensors
from .packed import FIRST, Part, checked, dense_expert, part_views, parts_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Expected(NamedTuple):
    """What a family's model has, read off the model built on the meta device from its config.

    plain: shapes of the tensors outside the experts. blocks: the experts' sizes, by block. optional: names that may be
    missing (tied). ignored: patterns of further names that Transformers ignores. keep_fp32: modules never cast.
    """

    plain: dict[str, tuple[int, ...]]
    blocks: dict[str, Sizes]
    optional: set[str]
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
        optional=set(model.all_tied_weights_keys),
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


class Source:
    """An opened checkpoint, whose tensors are what its config says.

    Attributes:
        folder, config: where it is, and its config.json. family, native: what config.json says.
        tensors: every tensor's header. layout: a name of CHECKPOINT_LAYOUTS. quantization: as declared_quantization.
        packed_here: whether quantize_experts or conversion packed the experts.
        expected: what the family's model has. carried: names of the tensors outside the experts' layout, scales left out.
    Raises:
        CheckpointError: something is unknown, missing, wrongly shaped or contradictory; the message names it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_json(folder / CONFIG_FILE)
        self.family, self.native = family_of(self.config, folder / CONFIG_FILE)
        refuse_model_beside_adapter(folder)
        if self.config.get("transformers_weights") is not None:
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: transformers_weights is {self.config['transformers_weights']!r}, a file that "
                f"Transformers would load; conversion reads {WEIGHTS_FILE} or {INDEX_FILE} only: remove the entry"
            )
        self.hub_config = hub_config(self.config, self.family)
        self.quantization, self.packed_here = declared_quantization(self.hub_config, folder)
        self.tensors = read_headers(folder)
        self.nvfp4 = nvfp4.packed_weights(self.tensors) if self._hub_format == "nvfp4" else set()
        self.expected = expected_tensors(self.hub_config, self.family, folder / CONFIG_FILE, len(self.tensors))
        self.layout = self._find_layout()
        self.carried: list[str] = []
        self._check_names_and_shapes()
        self._open: tuple[str, Any] | None = None
        self._last_expert: tuple[tuple[str, int], torch.Tensor] | None = None
        self._last_packed: tuple[tuple[str, int | None], Quantized] | None = None

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

    def is_packed(self, name: str) -> bool:
        """Whether the experts' weight `name` is stored as packed weights are."""
        return bool(self.format) and stored_as(name, self.format)[0] in self.tensors

    def is_kept(self, name: str, format: str) -> bool:
        """Whether the experts' weight `name` is packed, or an expert's in `format` as the hub has it."""
        if self.is_packed(name) or self._hub_format != format:
            return self.is_packed(name)
        if format == "fp8" and block_size(self.hub_config) != (FP8_BLOCK, FP8_BLOCK):
            return False
        return name in self.nvfp4 or self.tensors[name].dtype == torch.float8_e4m3fn

    @property
    def format(self) -> str:
        """The format of experts stored as packed weights are; "" where none are."""
        return self.quantization or "" if self.packed_here or self.quantization == "mxfp4" else ""

    @property
    def _hub_format(self) -> str:
        """FP8 or NVFP4 as the hub has them, in every linear layer; "" otherwise."""
        return self.quantization or "" if not self.packed_here and self.quantization in HUB_FORMATS else ""

    def packed_parts(self, named: Named) -> list[Part]:
        """The tensors that stand for a packed weight; none for another."""
        if not self.is_packed(named.name):
            return []
        return parts_of(named.name, named.shape, self.format, self.layout)

    def stored_names(self, named: Named) -> list[str]:
        """The names of the tensors that hold an experts' weight, its scales included."""
        if self.is_packed(named.name):
            return [part.name for part in self.packed_parts(named)]
        scales = HUB_FORMATS[self._hub_format].scales if self._hub_format else ()
        return [name for end in ("", *scales) if (name := named.name + end) in self.tensors]

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
        optional = {self.stored_name(name) for name in self.expected.optional}
        shapes = {**plain, **self._shapes_of_experts()}
        scales = self._scales()
        missing = sorted(set(shapes) - set(self.tensors) - optional)
        unknown = sorted(set(self.tensors) - set(shapes) - set(scales))
        carried = [name for name in unknown if any(re.search(pattern, name) for pattern in self.expected.ignored)]
        unknown = sorted(set(unknown) - set(carried))
        for what, names in (("is missing", missing), ("is unknown", unknown)):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise CheckpointError(f"{self.folder}: {names[0]}{more} {what} in a {self.family.name} model")
        for name, shape in {**shapes, **scales}.items():
            if name in self.tensors and self.shape_of(name) != shape:
                raise CheckpointError(
                    f"{self.folder}: {name} has shape {self.shape_of(name)}; by config.json it must be {shape}"
                )
        self._check_dtypes()
        kept = set(plain) | set(carried)
        self.carried = [name for name in self.tensors if name in kept and name not in scales]

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

    def _scales(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what stands beside quantized weights."""
        if self._hub_format == "nvfp4":
            return nvfp4.scales(self.tensors, self.nvfp4)
        quantized = {n: h.shape for n, h in self.tensors.items() if h.dtype == torch.float8_e4m3fn}
        if quantized and self._hub_format != "fp8":
            raise CheckpointError(f"{next(iter(quantized))} is float8, but config.json declares no fp8 quantization")
        if not quantized:
            return {}
        scales = {f"{n}_scale_inv": fp8_scale_shape(shape, self.hub_config) for n, shape in quantized.items()}
        if missing := sorted(set(scales) - set(self.tensors)):
            raise CheckpointError(f"{self.folder}: {missing[0]} is missing, the scales of an fp8 tensor")
        return scales

    def _check_dtypes(self) -> None:
        has_packed = any(name.endswith(FIRST) for name in self.tensors)
        if has_packed != bool(self.format):
            raise CheckpointError(f"{self.folder}: config.json and tensors disagree on whether experts are packed")
        is_fp8 = any(header.dtype == torch.float8_e4m3fn for header in self.tensors.values())
        if self._hub_format == "fp8" and not is_fp8:
            raise CheckpointError(f"{self.folder}: config.json declares fp8 quantization, but no tensor is float8")
        packed = {part.name: part.dtypes for part in self._parts_of_experts()}
        if (self._hub_format == "nvfp4") != bool(self.nvfp4):
            raise CheckpointError(f"{self.folder} is declared to be in NVFP4, but no weight is")
        packed |= dict.fromkeys(self.nvfp4, (torch.uint8,))
        if self._hub_format == "fp8":
            packed |= dict.fromkeys(self._scales(), FP8_SCALES)
        for name, header in self.tensors.items():
            plain_float = header.dtype.is_floating_point and header.dtype.itemsize >= 2
            if name in packed and header.dtype not in packed[name]:
                raise CheckpointError(f"{self.folder}: {name} has dtype {header.dtype}; it must be {packed[name][0]}")
            if name not in packed and not plain_float and header.dtype != torch.float8_e4m3fn:
                raise CheckpointError(f"{self.folder}: {name} has dtype {header.dtype}; weights are floats")

    def expert_dtype(self, named: Named) -> torch.dtype:
        """The dtype of the tensor `named` of this checkpoint once it is read."""
        return self.dense_dtype if self.is_packed(named.name) else self.dtype_of(named.name)

    @property
    def dense_dtype(self) -> torch.dtype:
        """What quantized weights become: bf16; of experts that were packed here, the dtype that the model computes in."""
        declared = self.config.get("dtype") or self.config.get("torch_dtype") if self.packed_here else None
        return DTYPES.get(declared, torch.bfloat16) if isinstance(declared, str) else torch.bfloat16

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a tensor once it is read."""
        dtype = self.tensors[name].dtype
        return torch.bfloat16 if dtype == torch.float8_e4m3fn or name in self.nvfp4 else dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor once it is read."""
        shape = self.tensors[name].shape
        return (*shape[:-1], 2 * shape[-1]) if name in self.nvfp4 else shape

    def _handle(self, name: str):
        """The open file that has the tensor. One file is open at a time: its mapped pages count as memory."""
        file = self.tensors[name].file
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, opened(self.folder / file))
        return self._open[1]

    def _raw(self, name: str, expert: int | None = None) -> torch.Tensor:
        try:
            if expert is None:
                return self._handle(name).get_tensor(name)
            return self._handle(name).get_slice(name)[expert : expert + 1]
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.folder / self.tensors[name].file}: {name} cannot be read: {error}"
            ) from error

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, dequantized to bf16 where it is fp8 or NVFP4; it owns its memory."""
        if name in self.nvfp4:
            tensors = (self._raw(name + end).clone() for end in ("", *nvfp4.SCALES))
            return HUB_FORMATS["nvfp4"].dense(*tensors).to(torch.bfloat16)
        if self.tensors[name].dtype == torch.float8_e4m3fn:
            raw = self._raw(name).clone()
            return dequantize_fp8(raw, self._raw(f"{name}_scale_inv"), self.hub_config)
        return self._raw(name).clone()

    def stored(self, name: str) -> torch.Tensor:
        """A whole tensor as it is stored; it owns its memory."""
        return self._raw(name).clone()

    def exact(self, name: str) -> torch.Tensor:
        """What `read` gives, in fp32, before it is rounded."""
        return self.read(name).float()

    def changes(self, name: str) -> bool:
        """Whether `read` gives other values of the tensor `name` than are stored, as a subclass's may."""
        return False

    def changes_part(self, block: str, part: str) -> bool:
        """Whether `part` gives other values than are stored."""
        return False

    def part(self, block: str, part: str, expert: int) -> torch.Tensor:
        """One part of one expert (see layouts.py), dequantized to bf16 where it is quantized."""
        stored = holder(self.layout, part)
        name = f"{block}.{stored.name.format(expert=expert)}"
        if stored.per_expert:
            quantized = name in self.nvfp4 or self.tensors[name].dtype == torch.float8_e4m3fn
            return stored.parts[part](self.read(name) if quantized else self._raw(name))
        return stored.parts[part](self._expert_slice(name, expert))

    def _expert_slice(self, name: str, expert: int) -> torch.Tensor:
        """One expert's slice of a tensor that holds all; the last one is kept, as gate and up are read in turn."""
        if self._last_expert is None or self._last_expert[0] != (name, expert):
            if self.is_packed(name):
                packed, place = self._packed(name, expert)
                whole = dense_expert(packed, self.format, self.dense_dtype, place, self.layout)
            else:
                whole = self._raw(name, expert)[0]
            self._last_expert = ((name, expert), whole)
        return self._last_expert[1]

    def _packed(self, name: str, expert: int) -> tuple[Quantized, int]:
        """What is stored of a packed weight, and the expert's place in it. NF4: of all experts, since its scales have
        scales that cross experts; else of this expert alone."""
        alone = self.format != "nf4"
        if self._last_packed is None or self._last_packed[0] != (name, expert if alone else None):
            self._last_packed = None
            stored = [self._raw(part, expert if alone else None) for part in stored_as(name, self.format)]
            packed = checked(Quantized(*(part.clone() for part in stored)), self.format, name)
            self._last_packed = (name, expert if alone else None), packed
        return self._last_packed[1], 0 if alone else expert

    def packed_parts_of(self, block: str, part: str, expert: int) -> list[torch.Tensor]:
        """What is stored of one part of one expert of a packed weight: of codes, scales, and state where there is one."""
        name = f"{block}.{holder(self.layout, part).name.format(expert=expert)}"
        if not self.is_packed(name):
            return [tensor for tensor in self._hub_packed(name) if tensor is not None]
        packed, place = self._packed(name, expert)
        views = part_views(self.layout, part, self.format)
        return [view(tensor[place]) for view, tensor in zip(views, packed) if tensor is not None]

    def _hub_packed(self, name: str) -> Quantized:
        """One expert's weight as the hub has it."""
        hub = HUB_FORMATS[self._hub_format]
        if self._last_packed is None or self._last_packed[0] != (name, None):
            self._last_packed = None
            packed = hub.pack(*(self._raw(name + end).clone() for end in ("", *hub.scales)))
            self._last_packed = (name, None), packed
        return self._last_packed[1]

    def stored_dtype(self, block: str, named: Named, place: int) -> torch.dtype | None:
        """The dtype of FP8's scales (the second of what stands for a weight) in this checkpoint; None of the rest."""
        if self.quantization != "fp8" or place != 1:
            return None
        part = next(iter(named.stored.parts))
        name = f"{block}.{holder(self.layout, part).name.format(expert=0)}"
        return torch.uint8 if self.tensors[f"{name}_scale_inv"].dtype.itemsize == 1 else torch.float32

    def close(self) -> None:
        """Close the file that is open."""
        self._open = self._last_expert = None
