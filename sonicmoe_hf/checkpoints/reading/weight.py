"""Weight: one weight of a checkpoint, read from the tensors that store it, changed, and rounded to its format again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError
from ...formats.matrix_format import MatrixFormat
from ...kernels.packed import FORMATS, Format, Quantized
from ...kernels.packed.dither import Dither
from ...kernels.packed.format import TensorSpecs
from ...kernels.packed.grid import Rounded
from .converters import Tensors, WeightGroup
from .files import Header, TensorFiles


class Change(NamedTuple):
    """The change of a weight when it is written: an adapter is added, or the values of a format take its place.

    make: makes the change of all weights that become a parameter together with it. num_experts: E of a weight that holds
    all experts, which are made one by one; None of others. expert: the expert whose own it is, by number; None of others.
    dither: by which a quantized weight is rounded; None rounds to nearest.
    """

    make: Callable[[], GroupChange]
    num_experts: int | None
    expert: int | None
    dither: Dither | None

    @classmethod
    def of(
        cls, name: str, group: WeightGroup, make: Callable[[], GroupChange], dither: Dither | None = None
    ) -> Change:
        """Describe the change of the weight `name`, one of a group's, whose change `make` gives."""
        owner = group.owners[name]
        return cls(make, group.num_experts if owner is None else None, owner, dither)


class GroupChange:
    """New values of weights that become parameters of a model together, such as gate and up of an expert.

    Values of all of them are made at once, of one expert after the other, and kept until they are asked for.
    """

    remedy = ""  # what to do where Transformers' conversion has no inverse

    def __init__(self, weights: Mapping[str, Weight], group: WeightGroup):
        self._weights, self.group = weights, group
        self._expert: int | None = None
        self._converted: Tensors = {}

    def apply(self, weight: Weight, values: torch.Tensor, expert: int | None) -> torch.Tensor:
        """Compute the new values of a weight, or of an expert's [1, ...] of it, whose old ones are `values`."""
        owner = self.group.owners[weight.name]
        expert = expert if owner is None else owner
        if expert != self._expert or weight.name not in self._converted:
            parameters = self.new_parameters(weight.dtype, expert)
            self._expert, self._converted = expert, self.group.weights(parameters, expert, self.remedy)
        return self._converted.pop(weight.name)

    def new_parameters(self, dtype: torch.dtype, expert: int | None) -> Tensors:
        """Make the new parameters, or one expert's [1, ...] of them, for weights of this dtype."""
        raise NotImplementedError

    def old_parameters(self, expert: int | None, dtype: torch.dtype | None = None) -> Tensors:
        """Read the parameters as the files have them; see `read_parameters`."""
        return read_parameters(self._weights, self.group, expert, dtype)


def read_parameters(
    weights: Mapping[str, Weight], group: WeightGroup, expert: int | None, dtype: torch.dtype | None = None
) -> Tensors:
    """Read a group's parameters as the files have them, or one expert's [1, ...] of them; in `dtype`, or that of each."""
    read = {name: weights[name].read(own, dtype) for name, own in group.reads_of(expert).items()}
    return group.parameters({name: weight.to(dtype or weight.dtype) for name, weight in read.items()}, expert)


class RoundedMatrix(NamedTuple):
    """A changed matrix [N, K], in fp32 before and with the change, and rounded to the format that it has."""

    before: torch.Tensor
    exact: torch.Tensor
    rounded: Rounded


class Weight:
    """A weight of a checkpoint, which one tensor of its files stores, or several where it is quantized.

    Attributes:
        name: the weight's. tensor_names: of the tensors that store it: values or codes, scales and what else the format
            has. format: a Format or MatrixFormat of quantized weights, None of others. change: what is done to it when it
            is written; None where nothing is.
    """

    change: Change | None = None

    def __init__(self, files: TensorFiles, name: str, format: Any = None):
        self._files, self.name, self.format = files, name, format
        self.tensor_names = [name] if format is None else format.names(name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight once it is read."""
        return self._files.tensors[self.tensor_names[0]].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight once it is read."""
        return self._files.tensors[self.tensor_names[0]].shape

    @contextmanager
    def _naming_shapes(self) -> Iterator[None]:
        """Name the file, the weight and the shapes of its tensors where its format has others, inside `with`."""
        try:
            yield
        except (ValueError, IndexError) as error:
            headers = {name: self._files.tensors[name] for name in self.tensor_names}
            shapes = ", ".join(f"{name} {header.shape}" for name, header in headers.items())
            raise CheckpointError(
                f"{self._files.folder / headers[self.tensor_names[0]].file}: no {self.format.name} weight has tensors of "
                f"these shapes: {shapes}"
            ) from error

    def by_expert(self, tensors: list[torch.Tensor]) -> Iterator[tuple[int | None, list[torch.Tensor]]]:
        """Yield each expert's number with its slices of `tensors`; None with them whole, where the weight has no change
        that is made expert by expert."""
        if self.change is None or self.change.num_experts is None:
            yield None, tensors
        else:
            yield from ((expert, [each[expert] for each in tensors]) for expert in range(self.change.num_experts))

    def specs(self, shape: tuple[int, ...], order: str) -> TensorSpecs:
        """Describe by name the shape of each tensor that stores a weight of this shape, its rows in this order (of
        kernels.packed.ORDERS), and the dtypes that it may have: () is any."""
        return {self.name: (shape, ())}

    def raw(self, expert: int | None = None) -> list[torch.Tensor]:
        """Map the tensors that store it, or one expert's [1, ...] of them, as the file has them."""
        return [self._files.map(name, expert) for name in self.tensor_names]

    def read(self, expert: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read the weight, or one expert's [1, ...] of one that holds all; it owns its memory.

        dtype: of what a quantized weight becomes; None is its `dtype`.
        """
        return self.raw(expert)[0].clone()

    def read_changed(self, expert: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read the weight, with its change if it has one; in fp32 where an adapter is added, to be rounded once."""
        values = self.read(expert, dtype)
        return values if self.change is None else self.change.make().apply(self, values, expert)

    def round_change(self, expert: int | None = None) -> RoundedMatrix:
        """Change a quantized weight, or one expert's of one that holds all, and round it to its format: each block keeps
        its scale unless a new one is clearly better."""
        raise NotImplementedError

    def _before_and_after(self, expert: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.change is not None
        before = self.read(expert, torch.float32)
        return before, self.change.make().apply(self, before, expert)

    @property
    def is_dithered(self) -> bool:
        """Tell whether its change is rounded by a dither, not to nearest."""
        return self.change is not None and self.change.dither is not None

    def _uniform(self, shape: torch.Size, expert: int | None) -> torch.Tensor | None:
        """Compute the numbers in [0, 1) by which a matrix of this shape is dithered."""
        if self.change is None or self.change.dither is None:
            return None
        number = self.change.expert if expert is None else expert
        return self.change.dither.uniform(number or 0, shape)  # 0 too where it is no expert's

    @property
    def scales_header(self) -> Header:
        """The header of its scales, where it is in a format, in the shape that they have here."""
        return self._files.tensors[self.tensor_names[1]]

    def rewrite(self, rounded: Rounded) -> list[torch.Tensor]:
        """Make the tensors that store the rounded weight, or an expert of it, in place of the first ones; the others
        stay."""
        return [rounded.codes, rounded.scales]

    def rows(self, expert: int | None, rounded: Rounded | None = None) -> list[torch.Tensor]:
        """Read the tensors that store the weight in our layout, each tensor as [rows, ...], or one expert's [1, rows,
        ...] of one that holds all. rounded: codes and scales to take in place of its own."""
        return self.raw(expert)


class UntiedWeight(Weight):
    """A weight that the files hold under the name of another, `tensor`, to which the model ties it."""

    def __init__(self, files: TensorFiles, name: str, tensor: str):
        super().__init__(files, name)
        self.tensor_names = [tensor]


class PackedExperts(Weight):
    """The weight of all experts, packed [E, out, in] under their parameter's name: here, or as gpt-oss has it.

    Args:
        dense_dtype: of what it becomes. is_transposed: whether that is [E, in, out].
    """

    def __init__(self, files: TensorFiles, name: str, format: Format, dense_dtype: torch.dtype, is_transposed: bool):
        super().__init__(files, name, format)
        self._dense_dtype, self.is_transposed = dense_dtype, is_transposed

    def _transpose_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Turn a dense weight's shape into the packed one's, and back."""
        return (shape[0], *shape[:0:-1]) if self.is_transposed else shape

    @property
    def dtype(self) -> torch.dtype:
        """See Weight."""
        return self._dense_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See Weight."""
        shapes = (self._files.tensors[tensor].shape for tensor in self.tensor_names)
        packed = Quantized(*(torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes))
        with self._naming_shapes():
            return self._transpose_shape(self.format.shape(packed))

    def specs(self, shape: tuple[int, ...], order: str) -> TensorSpecs:
        """See Weight. Of how many values share a scale the files alone know."""
        turned, scales = self._transpose_shape(shape), self._files.tensors[self.tensor_names[1]].shape
        return self.format.specs(self.name, turned, order, turned[-1] // max((1, *scales[-1:])))

    def round_change(self, expert: int | None = None) -> RoundedMatrix:
        """See Weight."""
        assert expert is not None
        before, exact = (
            (values[0].T if self.is_transposed else values[0]).contiguous()
            for values in self._before_and_after(expert)
        )
        packed, number = (self._read_packed(None), expert) if self.format.is_whole else (self._read_packed(expert), 0)
        rounded = self.format.round_expert(packed, number, exact, self._uniform(exact.shape, expert))
        return RoundedMatrix(before, exact, rounded)

    def _read_packed(self, expert: int | None) -> Quantized:
        packed = Quantized(*self.raw(expert))
        self.format.check(self.name, packed)
        return packed

    def read(self, expert: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See Weight."""
        dtype = dtype or self.dtype
        if expert is not None and self.format.is_whole:
            weight = self.format.dequantize_expert(self._read_packed(None), dtype, expert)[None]
        else:
            weight = self.format.dequantize(self._read_packed(expert), dtype)
        return weight.transpose(1, 2) if self.is_transposed else weight

    def rows(self, expert: int | None, rounded: Rounded | None = None) -> list[torch.Tensor]:
        """See Weight."""
        packed = self._read_packed(expert)
        if rounded is not None:
            packed = packed._replace(codes=rounded.codes[None], scales=rounded.scales[None])
        return self.format.rows(packed)


class MatrixWeight(Weight):
    """A matrix [out, in] in a MatrixFormat: a part of one expert's weight, or a linear layer's weight."""

    dtype = torch.bfloat16

    def __init__(self, files: TensorFiles, name: str, format: MatrixFormat):
        super().__init__(files, name, format)
        optional = [tensor for tensor in format.optional_names(name) if tensor in files.tensors]
        self.tensor_names = [*format.names_in(name, files.tensors), *optional]

    @property
    def shape(self) -> tuple[int, ...]:
        """See Weight."""
        with self._naming_shapes():
            return self.format.dense_shape(self._files.tensors[self.tensor_names[0]].shape)

    @property
    def scales_header(self) -> Header:
        """See Weight."""
        header = super().scales_header
        return header._replace(shape=self.format.scales_shape(self.shape, header.shape))

    def specs(self, shape: tuple[int, ...], order: str) -> TensorSpecs:
        """See Weight."""
        with self._naming_shapes():
            return dict(zip(self.tensor_names, self.format.specs(self.name, shape).values()))

    def read(self, expert: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See Weight."""
        return self.format.dense(*self.raw()).to(dtype or self.dtype)

    def round_change(self, expert: int | None = None) -> RoundedMatrix:
        """See Weight."""
        before, exact = self._before_and_after(expert)
        return RoundedMatrix(before, exact, self.format.round(self.raw(), exact, self._uniform(exact.shape, expert)))

    def rewrite(self, rounded: Rounded) -> list[torch.Tensor]:
        """See Weight."""
        return self.format.rewrite(self.raw(), rounded)

    def rows(self, expert: int | None, rounded: Rounded | None = None) -> list[torch.Tensor]:
        """See Weight."""
        tensors = self.raw() if rounded is None else self.rewrite(rounded)
        rows, format = self.format.read(*tensors), FORMATS[self.format.name]
        for suffix, tensor in zip(format.suffixes, rows):
            if not format.is_sound(suffix, tensor):
                raise CheckpointError(
                    f"{self.name} has NaN or infinite values in its {suffix}: the checkpoint is damaged"
                )
        return [tensor for tensor in rows if tensor is not None]
