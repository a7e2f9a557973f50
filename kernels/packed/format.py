"""The base of all formats of packed weights: the tensors that store one, checks, packing by expert, and expansion.

Letters: E experts, N rows (output features) and K columns (input features) of a weight [E, N, K].

The gate and the up projection of an expert are one weight here and two tensors in checkpoints, each with blocks or a
scale of its own, so FP8 and NVFP4 keep them apart: a weight's order says which rows are which (ORDERS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch

from ..minifloat import has_e4m3_nan
from .grid import Rounded

ORDERS = {  # (P, Q): N rows are P parts, one behind the other, each of Q kinds of rows in turn
    "whole": (1, 1),  # down
    "concatenated": (2, 1),  # gate and up: all gates, then all ups
    "interleaved": (1, 2),  # gate 0, up 0, gate 1, up 1, ...
}
E8M0_NAN = 255  # of the bytes that stand for powers of two
Mean = Callable[[torch.Tensor], torch.Tensor]
TensorSpecs = dict[
    str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]
]  # a tensor's name: its shape, and possible dtypes


class Quantized(NamedTuple):
    """A weight [E, N, K] in 4 or 8 bits; each format's class says what the tensors are. All are contiguous."""

    codes: torch.Tensor
    scales: torch.Tensor
    state: torch.Tensor | None = None


class Shapes(NamedTuple):
    """The shapes of a Quantized."""

    codes: tuple[int, ...]
    scales: tuple[int, ...]
    state: tuple[int, ...] | None


class Format:
    """A format of packed experts.

    name: in FORMATS. block: what K must be a multiple of. dims: the dimensions of codes, scales and state, None where
    there is none.

    suffixes: what follows a parameter's name in the names of the tensors that store it in checkpoints, in the order of
    Quantized. values: by suffix, the float dtype that a tensor's bytes stand for. loss: the error of rounding normally
    distributed weights, in percent (root mean squares of error and weight). element_size: bytes a weight that device_map
    counts with, somewhat more than is stored. is_whole: whether some numbers are stored for several experts together, so
    that a share of the experts cannot always be cut out. has_standard_blocks: whether a scale is
    for the values that it is for in FORMATS[name]; False of some formats of single matrices.
    """

    name: str
    block: int
    dims: tuple[int | None, ...]
    suffixes: tuple[str, ...]
    values: ClassVar[dict[str, torch.dtype]] = {}
    loss: int
    element_size = 0.6  # 4.13, 4.25 and 4.5 bits
    is_whole, has_standard_blocks = False, True

    # A weight's shape and what stores it

    def shape(self, packed: Quantized) -> tuple[int, int, int]:
        """Compute (E, N, K) of a packed weight."""
        num_experts, size_out, groups = packed.scales.shape
        return num_experts, size_out, groups * self.block

    def group(self, packed: Quantized) -> int:
        """Count the values of a row that share a scale."""
        return self.block

    def parts_and_kinds(self, packed: Quantized) -> tuple[int, int]:
        """Read (P, Q) of the weight's order; (1, 1) where the format does not store it."""
        return ORDERS["whole"]

    def shapes(self, shape: tuple[int, ...], order: str = "whole", group: int | None = None) -> Shapes:
        """Compute the shapes of the tensors that store a weight of shape (E, N, K) in an order of ORDERS.

        group: how many values of a row share a scale, where the format leaves a choice; None: as many as `pack` chooses.

        Raises:
            ValueError: K is no multiple of the format's block, or N is odd where it has gates and ups.
        """
        return self._shapes(shape, *ORDERS[order], group)

    def _shapes(self, shape: tuple[int, ...], parts: int, kinds: int, group: int | None = None) -> Shapes:
        num_experts, size_out, size_in = shape
        if size_in % self.block:
            others = [f for f in FORMATS.values() if f.block < self.block and size_in % f.block == 0]
            other = "".join(f" or {f.name}, which needs {f.block}" for f in others[:1])
            raise ValueError(
                f"{self.name} packs rows of a multiple of {self.block} values, which the weight's {size_in} input "
                f"features are not; use bf16 experts{other}"
            )
        if size_out % (parts * kinds):
            raise ValueError(f"the weight has {size_out} rows, which are no pairs of a gate and an up")
        return self._stored_shapes(num_experts, size_out, size_in, parts, kinds, group)

    def _stored_shapes(
        self, num_experts: int, size_out: int, size_in: int, parts: int, kinds: int, group: int | None
    ) -> Shapes:
        raise NotImplementedError

    def dtypes(self, field: str) -> tuple[torch.dtype, ...]:
        """List the dtypes that a field of Quantized may have, first the one that `pack` makes."""
        return (torch.float32,) if field == "state" else (torch.uint8,)

    def check_shapes(self, packed: Quantized) -> None:
        """Raise ValueError where the tensors of a packed weight do not fit together."""
        for field, tensor, dims in zip(Quantized._fields, packed, self.dims):
            num_dims = None if tensor is None else tensor.dim()
            if num_dims != dims:
                raise ValueError(f"{field} of this {self.name} weight has {num_dims} dimensions; it must have {dims}")
        order = self.parts_and_kinds(packed)
        if order not in ORDERS.values():
            raise ValueError(f"this {self.name} weight has {order} parts and kinds of rows; see ORDERS")
        wanted = self._shapes(self.shape(packed), *order, self.group(packed))
        for field, tensor, shape in zip(Quantized._fields, packed, wanted):
            if tensor is None:
                continue
            actual = tuple(tensor.shape), tensor.dtype, tensor.device
            dtypes = self.dtypes(field)
            if actual[0] != shape or actual[1] not in dtypes or actual[2] != packed.scales.device:
                raise ValueError(
                    f"{field} of this {self.name} weight is {actual}; beside scales {tuple(packed.scales.shape)} it must "
                    f"be {(shape, dtypes[0], packed.scales.device)}"
                )

    # Packing and expanding

    def quantize(self, weight_ENK: torch.Tensor, order: str = "whole", mean: Mean = torch.mean) -> Quantized:
        """Pack a weight [E, N, K] of any strides and float dtype, on its device; its rows in an order of ORDERS.

        mean: of NF4's scales [n] in fp32. Where the weight is a share of the experts, that of the whole weight's.

        Raises:
            ValueError: NaN or infinity in the weight, or K no multiple of the format's block.
        """
        return self.pack(weight_ENK, tuple(weight_ENK.shape), order, mean, weight_ENK.device)

    def pack(
        self,
        experts: Iterable[torch.Tensor],
        shape: tuple[int, ...],
        order: str = "whole",
        mean: Mean = torch.mean,
        device: torch.device | str = "cpu",
    ) -> Quantized:
        """Pack a weight of this shape [E, N, K] whose experts [N, K] come one after the other, on their device. Raises
        ValueError as `quantize`."""
        packed = [
            torch.empty(size, dtype=self.dtypes(field)[0], device=device)
            for field, size in zip(Quantized._fields, self.shapes(shape, order))
            if size is not None
        ]
        for expert, weight in enumerate(experts):
            for tensor, values in zip(packed, self.pack_expert(in_fp32(weight), *ORDERS[order]), strict=True):
                tensor[expert] = values
        return Quantized(*packed)

    def pack_expert(self, weight_NK: torch.Tensor, parts: int, kinds: int) -> tuple[torch.Tensor, ...]:
        """Pack an expert's weight in fp32, whose rows are P parts of Q kinds, into codes, scales and, where there is one,
        state."""
        raise NotImplementedError

    def expert(self, packed: Quantized, expert: int) -> torch.Tensor:
        """Compute the values [N, K] of one expert in fp32."""
        raise NotImplementedError

    def round_expert(
        self, packed: Quantized, expert: int, weight_NK: torch.Tensor, uniform: torch.Tensor | None = None
    ) -> Rounded:
        """Round a changed weight of one expert in fp32 to the format again; the state stays as it is. uniform: as of
        Grid.round."""
        raise NotImplementedError

    def dequantize(self, packed: Quantized, dtype: torch.dtype, experts: Iterable[int] | None = None) -> torch.Tensor:
        """Expand a packed weight to [E, N, K] in `dtype`, contiguous, each value rounded once.

        The values are bit by bit those of bitsandbytes' dequantize_4bit, Transformers' convert_moe_packed_tensors (which
        transposes) and Fp8Dequantize, and ModelOpt's dequantize; except where FP8's last blocks are cut off, because
        there Fp8Dequantize takes blocks of another size than the checkpoint's: the rows divided by the number of blocks.

        experts: whose rows are wanted; the others' are left uninitialised. None: all.
        """
        shape = self.shape(packed)
        weight_ENK = torch.empty(shape, dtype=dtype, device=packed.codes.device)
        for expert in range(shape[0]) if experts is None else experts:
            weight_ENK[expert] = self.expert(packed, expert)
        return weight_ENK

    def dequantize_expert(self, packed: Quantized, dtype: torch.dtype, expert: int) -> torch.Tensor:
        """Expand the rows [N, K] of one expert, as `dequantize` does."""
        return self.expert(packed, expert).to(dtype)

    # The tensors of a checkpoint

    def names(self, weight: str) -> list[str]:
        """Name the tensors that store the parameter `weight`."""
        return [f"{weight}_{suffix}" for suffix in self.suffixes]

    def weight_of(self, name: str, dtype: torch.dtype) -> str | None:
        """Name the parameter that a checkpoint's tensor `name` stores, if it is the first of those that do; None
        otherwise."""
        first = self.names("")[0]
        return name.removesuffix(first) if name.endswith(first) else None

    def tensors(self, name: str, packed: Quantized) -> dict[str, torch.Tensor]:
        """Name the tensors of a packed weight, which store the parameter `name`."""
        return dict(zip(self.names(name), (tensor for tensor in packed if tensor is not None), strict=True))

    def read(self, name: str, tensors: dict[str, torch.Tensor], first: int = 0) -> Quantized:
        """Assemble the weight `name` from a checkpoint's tensors, the inverse of `tensors`. Raises ValueError as
        `check`."""
        packed = Quantized(*(tensors[tensor] for tensor in self.names(name)))
        self.check(name, packed, first)
        return packed

    def check(self, name: str, packed: Quantized, first: int = 0) -> None:
        """Raise ValueError where tensors of a checkpoint do not fit together or stand for values that are not finite.
        first: which expert of the layer is the weight's first."""
        try:
            self.check_shapes(packed)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        for suffix, tensor in zip(self.suffixes, packed):
            if tensor is None or tensor.is_meta:
                continue
            for number, one in enumerate(
                tensor if tensor.dim() > 1 else [tensor], first
            ):  # one expert at a time, since the check takes memory
                if not self.is_sound(suffix, one):
                    where = f" in expert {number}" if tensor.dim() > 1 else ""
                    raise ValueError(f"{name}_{suffix} has NaN or infinite values{where}: the checkpoint is damaged")

    def is_sound(self, suffix: str, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor whose name ends in `suffix` stands for finite values."""
        is_bytes = tensor.dtype == torch.uint8 and suffix in self.values
        return is_sound(tensor.view(self.values[suffix]) if is_bytes else tensor)

    def specs(self, name: str, shape: tuple[int, ...], order: str, group: int | None = None) -> TensorSpecs:
        """Describe the tensors that store the weight `name` [E, N, K]: by name their shape and the dtypes that they may
        have, first the one that `pack` makes. group: as of `shapes`. Raises ValueError where K is no multiple of the
        format's block."""
        try:
            shapes = self.shapes(shape, order, group)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        fields = zip(self.names(name), Quantized._fields, shapes)
        return {tensor: (shape, self.dtypes(field)) for tensor, field, shape in fields if shape is not None}

    def rows(self, packed: Quantized) -> list[torch.Tensor]:
        """List the tensors that store a weight, each [E, rows, ...] with its rows in the weight's order, so that whatever
        moves the rows of a dense weight moves these."""
        return [tensor for tensor in packed if tensor is not None]

    def has_blocks_of(self, other: Any) -> bool:
        """Tell whether `other`, a format of all experts or of single matrices, or None, has the same codes and blocks."""
        return other is not None and other.name == self.name and other.has_standard_blocks

    # A rank's share of the experts. Tensors [E, ...] are cut along E; these methods are for formats with others.

    def check_share(self, experts: slice, values_per_expert: int) -> None:
        """Raise ValueError where these experts cannot be cut out of the whole weight without being quantized anew."""

    def join(self, suffix: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Join the ranks' shares of the tensor whose name ends in `suffix`, in the order of ranks."""
        return torch.cat(tensors)


FORMATS: dict[str, Format] = {}  # by name; packed/__init__.py fills it


def views_of_parts(tensor: torch.Tensor, parts: int, kinds: int) -> Iterator[torch.Tensor]:
    """Yield the rows [N / P Q, ...] of each part and kind of a tensor [N, ...], without a copy."""
    by_part = tensor.view(parts, -1, kinds, *tensor.shape[1:])
    for part in by_part:
        yield from part.unbind(1)


def in_fp32(weight_NK: torch.Tensor) -> torch.Tensor:
    """Convert a weight to fp32, contiguous. Raises ValueError where it is not finite."""
    weight = weight_NK.float().contiguous()
    check_finite(weight)
    return weight


def check_finite(weight: torch.Tensor) -> None:
    """Raise ValueError where a weight has NaN or infinity."""
    if not bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all()):
        raise ValueError("the weight has NaN or infinite values, which no format holds; load a sound one")


def is_sound(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor of a checkpoint has no NaN or infinity; plain integers have none."""
    if tensor.dtype == torch.float8_e4m3fn:
        return not has_e4m3_nan(tensor.view(torch.uint8))
    if tensor.dtype == torch.float8_e8m0fnu:
        return not bool((tensor.view(torch.uint8) == E8M0_NAN).any())
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
