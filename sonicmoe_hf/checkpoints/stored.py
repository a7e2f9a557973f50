"""The weights in a checkpoint's files, dense or quantized, under the files' own names; of any family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..formats.hub import HubFormat
from ..kernels.packed import FORMATS, Format, Quantized
from ..kernels.packed.dither import Dither
from ..kernels.packed.format import Stored
from ..kernels.packed.grid import Rounded
from .configs import quantization_of
from .files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Header, opened, read_config, read_headers

# model types whose dense experts are [E, in, out], and packed ones [E, out, in]
TRANSPOSED = ("aria", "aria_text", "gpt_oss", "openai_privacy_filter")
TIED = "tie_word_embeddings"  # of config.json
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Change(NamedTuple):
    """A matrix [N, K] that an adapter changes, in fp32 as it was and with the change; and that in the format it has."""

    before: torch.Tensor
    exact: torch.Tensor
    rounded: Rounded


class Weight:
    """A weight of a checkpoint: one tensor of its files.

    Attributes:
        name: the weight's. parts: names of the tensors that hold it, its scales behind it. format: a Format or HubFormat
            of quantized weights, None of others. is_transposed: whether packed weights are stored as [E, out, in] and
            dense ones as [E, in, out].
        delta: gives the adapter's part of the weight's group; None where no adapter changes it. num_experts: E of a
            changed weight that holds all experts, so that they are made one by one; None of others.
        dither: of a changed weight in a format; None where it is rounded to nearest. number: of the expert whose own it
        is, 0 of others.
    """

    is_transposed = False
    delta: Callable[[], Any] | None = None
    num_experts: int | None = None
    dither: Dither | None = None
    number = 0

    def __init__(self, stored: StoredWeights, name: str, format: Any = None):
        self._stored, self.name, self.format = stored, name, format
        self.parts = [name] if format is None else format.names(name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight once it is read."""
        return self._stored.tensors[self.parts[0]].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight once it is read."""
        return self._stored.tensors[self.parts[0]].shape

    def by_expert(self, parts: list[torch.Tensor]) -> Iterator[tuple[int | None, list[torch.Tensor]]]:
        """Yield each expert's number with its slices of `parts`; of a weight without experts None, and them whole."""
        if self.num_experts is None:
            yield None, parts
        else:
            yield from ((expert, [part[expert] for part in parts]) for expert in range(self.num_experts))

    def stored_as(self, shape: tuple[int, ...], order: str) -> Stored:
        """Return by name the shape of each tensor that stores a weight of this shape, its rows in this order of ORDERS,
        and the dtypes that it may have: () is any."""
        return {self.name: (shape, ())}

    def raw(self, expert: int | None = None) -> list[torch.Tensor]:
        """Map its parts, or one expert's [1, ...] of them, as the file has them."""
        return [self._stored.raw(part, expert) for part in self.parts]

    def read(self, expert: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read the weight, or one expert's [1, ...] of one that holds all; it owns its memory.

        dtype: of what a quantized weight becomes; None is its `dtype`.
        """
        return self.raw(expert)[0].clone()

    def merged(self, expert: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read it; where an adapter changes it with the adapter added, in fp32, to be rounded once."""
        values = self.read(expert, dtype)
        return values if self.delta is None else self.delta().add_to(self, values, expert)

    def changed(self, expert: int | None = None) -> Change:
        """Read a weight in a format that an adapter changes, or one expert's of one that holds all, and round it to its
        format: each block keeps its scale unless a new one is clearly better."""
        raise NotImplementedError

    def _before_and_after(self, expert: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.delta is not None
        before = self.read(expert, torch.float32)
        return before, self.delta().add_to(self, before, expert)

    def _uniform(self, shape: torch.Size, expert: int | None) -> torch.Tensor | None:
        """Return the numbers in [0, 1) by which a matrix of this shape is dithered."""
        return None if self.dither is None else self.dither.uniform(self.number if expert is None else expert, shape)

    @property
    def scales(self) -> Header:
        """The header of its scales, where it is in a format, in the shape that they have here."""
        return self._stored.tensors[self.parts[1]]

    def rewritten(self, rounded: Rounded) -> list[torch.Tensor]:
        """Return the first of the tensors that store it, or an expert of it, once it was rounded; those behind stay."""
        return [rounded.codes, rounded.scales]

    def rows(self, expert: int | None, rounded: Rounded | None = None) -> list[torch.Tensor]:
        """Read what stores it in our layout, each tensor as [rows, ...], or one expert's [1, rows, ...] of one that holds
        all. rounded: codes and scales to take in place of its own."""
        return self.raw(expert)


class UntiedWeight(Weight):
    """A weight that the files hold under the name of another, `part`, to which the model ties it."""

    def __init__(self, stored: StoredWeights, name: str, part: str):
        super().__init__(stored, name)
        self.parts = [part]


class PackedExperts(Weight):
    """The weight of all experts, packed [E, out, in] under their parameter's name: here, or as gpt-oss has it."""

    def __init__(self, stored: StoredWeights, name: str, format: Format):
        super().__init__(stored, name, format)
        self.is_transposed = stored.config.get("model_type") in TRANSPOSED

    def _turned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Turn a dense weight's shape into the packed one's, and back."""
        return (shape[0], *shape[:0:-1]) if self.is_transposed else shape

    @property
    def dtype(self) -> torch.dtype:
        """See Weight."""
        return self._stored.dense_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See Weight."""
        shapes = (self._stored.tensors[part].shape for part in self.parts)
        stored = Quantized(*(torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes))
        return self._turned(self.format.shape(stored))

    def stored_as(self, shape: tuple[int, ...], order: str) -> Stored:
        """See Weight. Of how many values share a scale the files alone know."""
        turned, scales = self._turned(shape), self._stored.tensors[self.parts[1]].shape
        return self.format.stored(self.name, turned, order, turned[-1] // max(1, *scales[-1:]))

    def changed(self, expert: int | None = None) -> Change:
        """See Weight."""
        assert expert is not None
        before, exact = (
            (values[0].T if self.is_transposed else values[0]).contiguous()
            for values in self._before_and_after(expert)
        )
        packed, number = (self._packed(None), expert) if self.format.is_whole else (self._packed(expert), 0)
        rounded = self.format.round_expert(packed, number, exact, self._uniform(exact.shape, expert))
        return Change(before, exact, rounded)

    def _packed(self, expert: int | None) -> Quantized:
        packed = Quantized(*self.raw(expert))
        self.format.check(self.name, packed)
        return packed

    def read(self, expert: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See Weight."""
        dtype = dtype or self.dtype
        if expert is not None and self.format.is_whole:
            weight = self.format.dequantize_expert(self._packed(None), dtype, expert)[None]
        else:
            weight = self.format.dequantize(self._packed(expert), dtype)
        return weight.transpose(1, 2) if self.is_transposed else weight

    def rows(self, expert: int | None, rounded: Rounded | None = None) -> list[torch.Tensor]:
        """See Weight."""
        packed = self._packed(expert)
        if rounded is not None:
            packed = packed._replace(codes=rounded.codes[None], scales=rounded.scales[None])
        return self.format.rows(packed)


class HubMatrix(Weight):
    """A matrix [out, in] in a format of the hub: an expert's projection, or a linear layer's weight."""

    dtype = torch.bfloat16

    def __init__(self, stored: StoredWeights, name: str, format: HubFormat):
        super().__init__(stored, name, format)
        optional = [part for part in format.optional_names(name) if part in stored.tensors]
        self.parts = [*format.names_in(name, stored.tensors), *optional]

    @property
    def shape(self) -> tuple[int, ...]:
        """See Weight."""
        return self.format.dense_shape(self._stored.tensors[self.parts[0]].shape)

    @property
    def scales(self) -> Header:
        """See Weight."""
        header = super().scales
        return header._replace(shape=self.format.scales_shape(self.shape, header.shape))

    def stored_as(self, shape: tuple[int, ...], order: str) -> Stored:
        """See Weight."""
        return dict(zip(self.parts, self.format.stored(self.name, shape).values()))

    def read(self, expert: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See Weight."""
        return self.format.dense(*self.raw()).to(dtype or self.dtype)

    def changed(self, expert: int | None = None) -> Change:
        """See Weight."""
        before, exact = self._before_and_after(expert)
        return Change(before, exact, self.format.round(self.raw(), exact, self._uniform(exact.shape, expert)))

    def rewritten(self, rounded: Rounded) -> list[torch.Tensor]:
        """See Weight."""
        return self.format.rewritten(self.raw(), rounded)

    def rows(self, expert: int | None, rounded: Rounded | None = None) -> list[torch.Tensor]:
        """See Weight."""
        stored = self.raw() if rounded is None else self.rewritten(rounded)
        rows, format = self.format.pack(*stored), FORMATS[self.format.name]
        for part, tensor in zip(format.parts, rows):
            if not format.is_sound(part, tensor):
                raise CheckpointError(
                    f"{self.name} has NaN or infinite values in its {part}: the checkpoint is damaged"
                )
        return [part for part in rows if part is not None]


class StoredWeights:
    """The files of a checkpoint, whose headers are read when they are first asked for.

    Attributes:
        folder, config: where it is, and its config.json.
        declared: what its config declares of its quantization; None where it is not quantized.
        format: of experts stored [E, ...] under their parameter's name, or how weights are stored each for itself, in
            every linear layer, or in experts with another format (`HubFormat.linear`) in others; None where nothing is
            quantized.
        keep_fp32: modules of the model that are never cast, where it is known.
    Raises:
        CheckpointError: a file is missing, damaged or contradicts another, or a quantized weight is not as declared.
    """

    keep_fp32: frozenset[str] = frozenset()

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_config(folder)
        if self.config.get("transformers_weights") is not None:
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: transformers_weights is {self.config['transformers_weights']!r}, a file that "
                f"Transformers would load; conversion reads {WEIGHTS_FILE} or {INDEX_FILE} only: remove the entry"
            )
        self.declared = quantization_of(self.config, folder)
        self.format = None if self.declared is None else self.declared.stored()
        self._open: tuple[str, Any] | None = None

    @property
    def quantization(self) -> str | None:
        """The name of the format."""
        return None if self.format is None else self.format.name

    def format_named(self, name: str | None) -> str | None:
        """Return the name of the format that users mean: "int4" of integers with zeros, too, which are "uint4"."""
        return self.quantization if (name, self.quantization) == ("int4", "uint4") else name

    @property
    def packed_here(self) -> bool:
        """True where quantize_experts or conversion packed the experts."""
        return self.declared is not None and self.declared.is_packed_here

    @cached_property
    def tensors(self) -> dict[str, Header]:
        """Every tensor's header, by name."""
        return read_headers(self.folder)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight once it is read, by name."""
        return {name: weight.shape for name, weight in self.weights.items()}

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Every weight, by name."""
        kind: type[Weight] = HubMatrix if isinstance(self.format, HubFormat) else PackedExperts
        formats: list[Any] = [] if self.format is None else [self.format]
        if isinstance(self.format, HubFormat) and self.format.linear is not self.format:
            formats.append(self.format.linear)
        weights: dict[str, Weight] = {}
        beside: set[str] = set()
        for name, header in self.tensors.items():
            there = ((format.weight_of(name, header.dtype), format) for format in formats)
            weight, format = next((each for each in there if each[0] is not None), (None, None))
            if weight is None and header.dtype == torch.float8_e4m3fn and kind is not HubMatrix:
                raise CheckpointError(
                    f"{name} is float8, but config.json declares no fp8 quantization; add quantization_config as the "
                    "original has it"
                )
            found = Weight(self, name) if weight is None else kind(self, weight, format)
            if missing := [part for part in found.parts if part not in self.tensors]:
                raise CheckpointError(f"{self.folder}: {missing[0]} is missing, a part of a quantized weight")
            weights[found.name] = found
            beside.update(found.parts[1:])
        return {name: weight for name, weight in weights.items() if name not in beside}

    def untie(self, names: Mapping[str, str]) -> None:
        """Give each of these weights an entry of its own, with the values of the one that the model ties it to, by whose
        name the files hold it; config says that none is tied."""
        self.weights.update({name: UntiedWeight(self, name, other) for name, other in names.items()})
        self.config = {**self.config, TIED: False}
        if isinstance(text := self.config.get("text_config"), dict):
            self.config["text_config"] = {**text, TIED: False}

    def is_unused(self, name: str) -> bool:
        """Say whether the tensor is for inference in the format alone."""
        return isinstance(self.format, HubFormat) and name.endswith(self.format.unused)

    @property
    def dense_dtype(self) -> torch.dtype:
        """The dtype that quantized weights become: bf16; of experts packed here, that which the model computes in."""
        declared = self.config.get("dtype") or self.config.get("torch_dtype") if self.packed_here else None
        return DTYPES.get(declared, torch.bfloat16) if isinstance(declared, str) else torch.bfloat16

    def _handle(self, name: str):
        """Open the file that has the tensor. One file is open at a time: its mapped pages count as memory."""
        file = self.tensors[name].file
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, opened(self.folder / file))
        return self._open[1]

    def raw(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Map a stored tensor, or one expert's [1, ...] of it."""
        if expert is None:
            return self._handle(name).get_tensor(name)
        with torch.device("cpu"):  # where safetensors would hand out a slice on torch's default device
            return self._handle(name).get_slice(name)[expert : expert + 1]

    def close(self) -> None:
        """Close the file that is open."""
        self._open = None
