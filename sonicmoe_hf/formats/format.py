"""What every format of packed experts is: the tensors that store a weight, their names, and what of them is sound.

kernels/quantized.py says what the bytes mean. A weight is stored in two ways: as this package saves it, [E, N, ...] under
the parameter's name (Format), and as checkpoints of the hub have it (HubFormat).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from ..errors import CheckpointError
from ..kernels.minifloat import has_e4m3_nan
from ..kernels.quantized import Quantized, check_quantized, stored_dtypes, stored_shapes
from ..layer.holding import Holding
from ..layer.packed_weight import PackedWeight
from .grid import Grid

E8M0_NAN = 255  # of the bytes that stand for powers of two
Pack = Callable[..., PackedWeight]
Stored = dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]  # by name: shape, and the dtypes that it may have


class Format:
    """A format of packed experts.

    name: in kernels.quantized.FORMATS. parts: what follows a parameter's name in those of the tensors that store it, in
    the order of Quantized. values: what bytes of a part stand for, where they are floats. loss: percent of normally
    distributed weights that rounding changes (root mean squares of error and weight). element_size: bytes a weight that
    device_map counts with, somewhat more than is stored. is_whole: whether what is stored ties experts together.
    """

    name: str
    parts: tuple[str, ...]
    values: ClassVar[dict[str, torch.dtype]] = {}
    loss: int
    element_size = 0.6  # 4.13, 4.25 and 4.5 bits
    is_whole, has_our_blocks = False, True

    def names(self, weight: str) -> list[str]:
        """The names of the tensors that store the parameter `weight`."""
        return [f"{weight}_{part}" for part in self.parts]

    def weight_of(self, name: str, dtype: torch.dtype) -> str | None:
        """The parameter of which a checkpoint's tensor is the first that stores it; None of another tensor."""
        first = self.names("")[0]
        return name.removesuffix(first) if name.endswith(first) else None

    def tensors(self, name: str, weight: PackedWeight) -> dict[str, torch.Tensor]:
        """What stores the parameter `name`, by name."""
        parts = (part for part in weight.packed if part is not None)
        return dict(zip(self.names(name), parts, strict=True))

    def weight(
        self, name: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype, is_transposed: bool, first: int = 0
    ) -> PackedWeight:
        """The weight that `tensors` took apart. Raises ValueError as `check`."""
        packed = Quantized(*(tensors[stored] for stored in self.names(name)))
        self.check(name, packed, first)
        return PackedWeight.of(packed, self.name, dtype, is_transposed)

    def check(self, name: str, packed: Quantized, first: int = 0) -> None:
        """Raise ValueError where tensors of a checkpoint do not fit together or stand for values that are not finite.
        first: which expert of the layer is the weight's first."""
        try:
            check_quantized(packed, self.name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        for part, tensor in zip(self.parts, packed):
            if tensor is not None and not tensor.is_meta and not self.is_sound(part, tensor):
                unsound = (expert for expert, one in enumerate(tensor, first) if not self.is_sound(part, one))
                where = f" in expert {next(unsound)}" if tensor.dim() > 1 else ""
                raise ValueError(f"{name}_{part} has NaN or infinite values{where}: the checkpoint is damaged")

    def is_sound(self, part: str, tensor: torch.Tensor) -> bool:
        """Whether one of `parts` stands for finite values."""
        is_bytes = tensor.dtype == torch.uint8 and part in self.values
        return is_sound(tensor.view(self.values[part]) if is_bytes else tensor)

    def stored(self, name: str, shape: tuple[int, ...], order: str) -> Stored:
        """By name, the shape of each of the tensors that store the weight `name` [E, N, K], and the dtypes that it may
        have, the first where it is made here. Raises CheckpointError where K is no multiple of the format's block."""
        try:
            shapes = stored_shapes(self.name, shape, order)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
        fields = zip(self.names(name), Quantized._fields, shapes)
        return {stored: (part, stored_dtypes(self.name, field)) for stored, field, part in fields if part is not None}

    def rows(self, packed: Quantized) -> list[torch.Tensor]:
        """What stores a weight, each tensor as [E, rows, ...] with rows in the weight's order, so that whatever moves the
        rows of a dense weight moves these."""
        return [part for part in packed if part is not None]

    def is_that_of(self, format: Format | HubFormat | None) -> bool:
        """Whether what is stored in `format` has the blocks of this one."""
        return format is not None and format.name == self.name and format.has_our_blocks

    # A rank's part of the experts: whatever belongs to one expert alone goes along with it.

    def check_share(self, experts: slice, values_per_expert: int) -> None:
        """Raise ValueError where these experts cannot be stored apart with the values that they have in all of them."""

    def pack_share(self, pack: Pack, shape: torch.Size, device: torch.device, holding: Holding) -> PackedWeight:
        """What `pack` makes of a rank's experts, whose weight has this shape, with the values that it has in the whole
        weight. All ranks of the group call it. Raises ValueError, on every rank, where `pack` does."""
        return pack()

    def stored_share(self, tensors: list[torch.Tensor], holding: Holding) -> list[torch.Tensor]:
        """What stores a rank's experts, of what Transformers read for them: every tensor cut along its first dimension.
        All ranks of the group call it."""
        return tensors

    def join(self, part: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        """One of `parts` of the whole weight, from those of the ranks in their order."""
        return torch.cat(tensors)


class HubFormat:
    """How checkpoints of the hub store a matrix [N, K], an expert's projection or a linear layer's weight.

    name: in kernels.quantized.FORMATS, of experts. dtype: of a matrix that is in it. scales: what follows the weight's
    name in those of its scales. unused: what ends names of tensors beside it that are for inference alone.
    """

    name: str
    dtype: torch.dtype
    scales: tuple[str, ...]
    unused: tuple[str, ...] = ()
    has_our_blocks = True

    def names(self, weight: str) -> list[str]:
        """The names of the tensors that store `weight`."""
        return [weight, *(weight + end for end in self.scales)]

    def weight_of(self, name: str, dtype: torch.dtype) -> str | None:
        """As Format's."""
        return name if dtype == self.dtype else None

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(N, K) of a matrix that is stored in this shape."""
        return shape

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        """As Format's, of a matrix [N, K]."""
        raise NotImplementedError

    def check(self, *tensors: torch.Tensor) -> None:
        """Raise CheckpointError where a matrix and its scales do not fit together."""
        parts = self.stored("weight", self.dense_shape(tensors[0].shape)).items()
        for tensor, (stored, (shape, dtypes)) in zip(tensors, parts):
            check_matrix(tensor, shape, dtypes, stored)

    def grid(self, *scales: torch.Tensor) -> Grid:
        """The values that a matrix with such scales can have: their dtype says it, and NVFP4's scale of the whole."""
        raise NotImplementedError

    def dense(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The values in fp32. Raises CheckpointError as `check`."""
        self.check(*tensors)
        return self.grid(*tensors[1:]).dense(tensors[0], tensors[1])

    def pack(self, *tensors: torch.Tensor) -> Quantized:
        """One expert's codes, scales and state. Raises CheckpointError as `check`."""
        raise NotImplementedError

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """A weight's scales, of its gates' and its ups' (or its downs' alone) [E, parts, ...]."""
        return scales.flatten(1, 2)

    def join(self, parts: list[list[Quantized]]) -> Quantized:
        """One weight of the parts [part][expert], gate and up or down alone, one behind the other."""
        by_expert = [part for of_expert in zip(*parts) for part in of_expert]

        def field(name: str) -> torch.Tensor:
            """[E, parts, ...]."""
            return torch.stack([getattr(part, name) for part in by_expert]).unflatten(0, (-1, len(parts)))

        state = None if by_expert[0].state is None else field("state")
        return Quantized(field("codes").flatten(1, 2), self.join_scales(field("scales")), state)


def check_matrix(tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], what: str) -> None:
    """Raise CheckpointError where a tensor of a checkpoint has another shape, or none of these dtypes."""
    if tensor.dtype not in dtypes or (tuple(tensor.shape) or (1,)) != (shape or (1,)):  # a number has either shape
        raise CheckpointError(
            f"{what} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be {dtypes[0]} of shape {shape}"
        )


def is_sound(stored: torch.Tensor) -> bool:
    """Whether what is stored has no NaN or infinity; bytes show none."""
    if stored.dtype == torch.float8_e4m3fn:
        return not has_e4m3_nan(stored.view(torch.uint8))
    if stored.dtype == torch.float8_e8m0fnu:
        return not bool((stored.view(torch.uint8) == E8M0_NAN).any())
    return not stored.is_floating_point() or bool(torch.isfinite(stored).all())
