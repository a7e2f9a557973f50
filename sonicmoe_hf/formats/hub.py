"""Matrices as checkpoints of the hub store them, an expert's projection or a linear layer's weight in FP8, FP4 or NVFP4.

kernels/packed says how a layer's experts are stored in one weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container

import torch

from ..errors import CheckpointError
from ..kernels.packed import FORMATS, Quantized, mxfp4, nvfp4
from ..kernels.packed.format import TensorSpecs
from ..kernels.packed.fp8 import FP8_BLOCK, fp8_grid
from ..kernels.packed.grid import Grid, Rounded

FP8_SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)  # what stores them; bytes: E8M0
BLOCK = (FP8_BLOCK, FP8_BLOCK)
WEIGHT, SHORT_SCALE = ".weight", ".scale"  # how names end
PAIRS = (torch.int8, torch.uint8)  # what stores two values a byte, the first in its low half


class HubFormat(ABC):
    """A format in which checkpoints of the hub store a matrix [N, K], an expert's projection or a linear layer's weight.

    name: the key in FORMATS of experts in it. dtype: of the tensor of codes. scales, optional, unused: how names of
    further tensors end. Those of the scales follow the weight's name, as do the optional ones, which a checkpoint may
    lack; the unused ones follow the module's, and are for inference alone. has_our_blocks: whether a scale is for the
    same values as in FORMATS.
    """

    name: str
    dtype: torch.dtype
    scales: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    has_our_blocks = True

    @property
    def element_size(self) -> float:
        """Bytes of one value with its share of the scales, as `Format.element_size`."""
        return FORMATS[self.name].element_size

    def names(self, weight: str) -> list[str]:
        """Name the tensors that store `weight`."""
        return [weight, *(weight + end for end in self.scales)]

    def names_in(self, weight: str, there: Container[str]) -> list[str]:
        """Select `names` as a checkpoint with the tensors `there` has them: some write a shorter name."""
        return self.names(weight)

    @property
    def linear(self) -> HubFormat:
        """The format of linear layers beside experts in this one."""
        return self

    def check_stretches(self, *stretches: torch.Tensor) -> None:  # noqa: B027 - most formats have none
        """Check stretches of optional tensors, which is all of them that ranks of expert parallelism get.

        Raises:
            CheckpointError: no format here holds what they say.
        """

    def optional_names(self, weight: str) -> list[str]:
        """Name the tensors that may be there too."""
        return [weight + end for end in self.optional]

    def weight_of(self, name: str, dtype: torch.dtype) -> str | None:
        """Name the weight that a tensor of this name and dtype stores; None of another tensor."""
        return name if dtype == self.dtype else None

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Compute (N, K) of a matrix that is stored in this shape."""
        return shape

    @abstractmethod
    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """Describe, by name, shape and dtypes of the tensors that store a matrix [N, K]."""

    def check(self, *tensors: torch.Tensor) -> None:
        """Raise CheckpointError where a matrix and its scales do not fit together."""
        expected = self.specs("weight", self.dense_shape(tensors[0].shape)).items()
        for tensor, (name, (shape, dtypes)) in zip(tensors, expected):
            check_matrix(tensor, shape, dtypes, name)

    @abstractmethod
    def grid(self, *scales: torch.Tensor) -> Grid:
        """Make the grid of values that a matrix with such scales can have, by their dtype and NVFP4's scale of all."""

    def dense(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Compute the values in fp32. Raises CheckpointError as `check`."""
        self.check(*tensors)
        return self.grid(*tensors[1:]).dense(tensors[0], tensors[1])

    def scales_shape(self, shape: tuple[int, ...], stored: tuple[int, ...]) -> tuple[int, ...]:
        """Compute the shape of the scales that `pack` gives of a matrix [N, K], by that of those that are stored."""
        return stored

    def round(self, stored: list[torch.Tensor], weight: torch.Tensor, uniform: torch.Tensor | None) -> Rounded:
        """Round a changed matrix in fp32 to the format that it is stored in. uniform: as of Grid.round."""
        codes, *scales = stored
        return self.grid(*scales).round(weight, scales[0], codes, uniform)

    def rewrite(self, stored: list[torch.Tensor], rounded: Rounded) -> list[torch.Tensor]:
        """Make the tensors that store a matrix which was rounded, of those that stored it."""
        return [rounded.codes.view(stored[0].dtype), rounded.scales, *stored[2:]]

    @abstractmethod
    def pack(self, *tensors: torch.Tensor) -> Quantized:
        """Convert one expert to codes, scales and state. Raises CheckpointError as `check`."""

    def unpack_new(self, packed: Quantized) -> list[torch.Tensor]:
        """Make the tensors by which a matrix in the blocks of FORMATS is stored anew; the bits of its scales count."""
        return [packed.codes.view(self.dtype), packed.scales]

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Join a weight's scales, of its gates' and its ups' (or its downs' alone) [E, parts, ...]."""
        return scales.flatten(1, 2)

    def join(self, parts: list[list[Quantized]]) -> Quantized:
        """Join one weight of the parts [part][expert], gate and up or down alone, one behind the other."""
        by_expert = [part for of_expert in zip(*parts) for part in of_expert]

        def field(name: str) -> torch.Tensor:
            """Stack a field of all parts: [E, parts, ...]."""
            return torch.stack([getattr(part, name) for part in by_expert]).unflatten(0, (-1, len(parts)))

        state = None if by_expert[0].state is None else field("state")
        return Quantized(field("codes").flatten(1, 2), self.join_scales(field("scales")), state)


def check_matrix(tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], what: str) -> None:
    """Raise CheckpointError where a tensor of a checkpoint has another shape, or none of these dtypes."""
    if tensor.dtype not in dtypes or (tuple(tensor.shape) or (1,)) != (shape or (1,)):  # a number has either shape
        raise CheckpointError(
            f"{what} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be {dtypes[0]} of shape {shape}"
        )


class HubFP8(HubFormat):
    """X.weight float8_e4m3 [N, K], and X.weight_scale_inv [ceil(N / block), ceil(K / block)]: fp32, bf16, or E8M0.

    block: rows and columns that share a scale. has_powers: whether scales are powers of two in any dtype.
    """

    name, dtype, scales = "fp8", torch.float8_e4m3fn, ("_scale_inv",)

    def __init__(self, block: tuple[int, int] = BLOCK, has_powers: bool = False):
        self.block, self.has_powers, self.has_our_blocks = block, has_powers, block == BLOCK

    def names_in(self, weight: str, there: Container[str]) -> list[str]:
        """See HubFormat. DeepSeek-V4's scales have shorter names."""
        short = [weight, weight.removesuffix(WEIGHT) + SHORT_SCALE]
        return short if short[1] in there else self.names(weight)

    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """See HubFormat. The last blocks are cut off."""
        if len(shape) != 2:
            raise CheckpointError(f"fp8 tensors have two dimensions; {name} has shape {tuple(shape)}")
        blocks = tuple(-(-size // block) for size, block in zip(shape, self.block))
        return dict(zip(self.names(name), ((tuple(shape), (self.dtype,)), (blocks, FP8_SCALES))))

    def grid(self, *scales: torch.Tensor) -> Grid:
        """See HubFormat."""
        return fp8_grid(scales[0].dtype, self.block, self.has_powers)

    def dense_rows(self, weight: torch.Tensor, scales: torch.Tensor, rows: int, first: int) -> torch.Tensor:
        """Compute some rows in fp32, from the `first` on, of a matrix with `rows` rows, by the scales of all of it."""
        self.check(weight.new_empty(rows, weight.shape[1], device="meta"), scales)
        return self.grid(scales).dense(weight, scales, first)

    def pack(self, *tensors: torch.Tensor) -> Quantized:
        """See HubFormat."""
        self.check(*tensors)
        weight, scales = tensors
        stored = scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales.float()
        return Quantized(weight.view(torch.uint8), stored)

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """See HubFormat."""
        return scales.unsqueeze(3)


class MXFP4Matrix(HubFormat):
    """A matrix [N, K] in OCP's MXFP4: codes [N, K / 2], two values a byte, the first in the low half; a scale, E8M0, for
    each 32 values of a row, [N, K / 32]."""

    name = "mxfp4"
    code_dtypes: tuple[torch.dtype, ...] = (torch.uint8,)

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See HubFormat."""
        return (*shape[:-1], 2 * shape[-1])

    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """See HubFormat."""
        rows, columns = shape
        scales = (torch.float8_e8m0fnu, torch.uint8)
        shapes = ((rows, columns // 2), self.code_dtypes), ((rows, columns // mxfp4.BLOCK), scales)
        return dict(zip(self.names(name), shapes))

    def grid(self, *scales: torch.Tensor) -> Grid:
        """See HubFormat."""
        return mxfp4.MXFP4().grid()

    def pack(self, *tensors: torch.Tensor) -> Quantized:
        """See HubFormat."""
        self.check(*tensors)
        codes, scales = tensors
        return Quantized(codes.view(torch.uint8).unflatten(-1, (-1, mxfp4.BLOCK // 2)), scales.view(torch.uint8))

    def dense(self, *tensors: torch.Tensor) -> torch.Tensor:
        """See HubFormat."""
        codes, scales, _ = self.pack(*tensors)
        return self.grid().dense(codes, scales).float()

    def round(self, stored: list[torch.Tensor], weight: torch.Tensor, uniform: torch.Tensor | None) -> Rounded:
        """See HubFormat."""
        codes, scales, _ = self.pack(*stored)
        return self.grid().round(weight, scales, codes, uniform)

    def rewrite(self, stored: list[torch.Tensor], rounded: Rounded) -> list[torch.Tensor]:
        """See HubFormat."""
        return [rounded.codes.flatten(1).view(stored[0].dtype), rounded.scales.view(stored[1].dtype)]


class HubFP4(MXFP4Matrix):
    """DeepSeek-V4's: experts' X.weight int8 [N, K / 2] and X.scale E8M0 [N, K / 32], beside linear layers in FP8."""

    code_dtypes, scales = PAIRS, ("_scale_inv",)

    def __init__(self, linear: HubFP8 | None = None):
        self.fp8 = linear or HubFP8()

    @property
    def linear(self) -> HubFormat:
        """See HubFormat."""
        return self.fp8

    def weight_of(self, name: str, dtype: torch.dtype) -> str | None:
        """See HubFormat."""
        return name if dtype in PAIRS and name.endswith(WEIGHT) else None

    def names_in(self, weight: str, there: Container[str]) -> list[str]:
        """See HubFormat."""
        return self.fp8.names_in(weight, there)


class HubNVFP4(HubFormat):
    """X.weight uint8 [N, K/2], two values a byte, the first in the LOW half; X.weight_scale, float8_e4m3 [N, K/16];
    X.weight_scale_2, one fp32 number. A value is e2m1 * (weight_scale * weight_scale_2), in fp32. X.input_scale, and the
    k_scale and v_scale of attention, are scales of activations, for inference alone."""

    name, dtype, scales = "nvfp4", torch.uint8, ("_scale", "_scale_2")
    unused = (".input_scale", ".k_scale", ".v_scale")

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See HubFormat."""
        return (*shape[:-1], 2 * shape[-1])

    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """See HubFormat."""
        rows, columns = shape
        shapes = (rows, columns // 2), (rows, columns // nvfp4.BLOCK), ()
        dtypes = self.dtype, torch.float8_e4m3fn, torch.float32
        return {tensor: (shape, (dtype,)) for tensor, shape, dtype in zip(self.names(name), shapes, dtypes)}

    def grid(self, *scales: torch.Tensor) -> Grid:
        """See HubFormat. weight_scale_2 stays: engines that fuse projections want theirs to be equal."""
        return nvfp4.nvfp4_grid(scales[1].reshape(()))

    def pack(self, *tensors: torch.Tensor) -> Quantized:
        """See HubFormat."""
        self.check(*tensors)
        weight, scale, scale_2 = tensors
        return Quantized(weight, scale.view(torch.uint8), scale_2.reshape(1))


HUB: dict[str, HubFormat] = {
    format.name: format for format in (HubFP8(), HubFP4(), HubNVFP4())
}  # by the experts' format
