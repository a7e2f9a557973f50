"""Matrices in FP8, MXFP4 and NVFP4, as DeepSeek, ModelOpt and compressed-tensors store them."""

from __future__ import annotations

from collections.abc import Container

import torch

from ..errors import CheckpointError
from ..kernels.packed import Quantized, mxfp4, nvfp4
from ..kernels.packed.format import TensorSpecs
from ..kernels.packed.fp8 import FP8_BLOCK, fp8_grid
from ..kernels.packed.grid import Grid, Rounded
from .matrix_format import WEIGHT, MatrixFormat, RenamedMatrix

FP8_SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)  # what stores them; bytes: E8M0
BLOCK = (FP8_BLOCK, FP8_BLOCK)
SHORT_SCALE = "scale"  # in the place of "weight", the name of a scale
PAIRS = (torch.int8, torch.uint8)  # what stores two values a byte, the first in its low half


class FP8Matrix(MatrixFormat):
    """A matrix in FP8: X.weight float8_e4m3 [N, K]; X.weight_scale_inv [ceil(N / block), ceil(K / block)], fp32, bf16 or
    E8M0.

    block: rows and columns that share a scale. has_powers: whether scales are powers of two in any dtype.
    """

    name, dtype, scales = "fp8", torch.float8_e4m3fn, ("_scale_inv",)

    def __init__(self, block: tuple[int, int] = BLOCK, has_powers: bool = False):
        self.block, self.has_powers, self.has_standard_blocks = block, has_powers, block == BLOCK

    def names_in(self, weight_name: str, there: Container[str]) -> list[str]:
        """See MatrixFormat. DeepSeek-V4's scales have shorter names."""
        short = [weight_name, weight_name.removesuffix(WEIGHT) + SHORT_SCALE]
        return short if short[1] in there else self.names(weight_name)

    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """See MatrixFormat. The last blocks are cut off."""
        if len(shape) != 2:
            raise CheckpointError(f"fp8 tensors have two dimensions; {name} has shape {tuple(shape)}")
        blocks = tuple(-(-size // block) for size, block in zip(shape, self.block))
        return dict(zip(self.names(name), ((tuple(shape), (self.dtype,)), (blocks, FP8_SCALES))))

    def grid(self, *scales: torch.Tensor) -> Grid:
        """See MatrixFormat."""
        return fp8_grid(scales[0].dtype, self.block, self.has_powers)

    def dense_rows(self, weight: torch.Tensor, scales: torch.Tensor, rows: int, first: int) -> torch.Tensor:
        """Compute some rows in fp32, from the `first` on, of a matrix with `rows` rows, by the scales of all of it."""
        self.check(weight.new_empty(rows, weight.shape[1], device="meta"), scales)
        return self.grid(scales).dense(weight, scales, first)

    def read(self, *tensors: torch.Tensor) -> Quantized:
        """See MatrixFormat."""
        self.check(*tensors)
        weight, scales = tensors
        packed_scales = scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales.float()
        return Quantized(weight.view(torch.uint8), packed_scales)

    def write(self, matrix: Quantized) -> list[torch.Tensor]:
        """Make the tensors that store a matrix, the inverse of `read`; scales that are bytes stay bytes."""
        return [matrix.codes.view(self.dtype), matrix.scales]

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """See MatrixFormat."""
        return scales.unsqueeze(3)


class MXFP4Matrix(MatrixFormat):
    """A matrix [N, K] in OCP's MXFP4: codes [N, K / 2], two values a byte, the first in the low half; a scale, E8M0, for
    each 32 values of a row, [N, K / 32]."""

    name = "mxfp4"
    code_dtypes: tuple[torch.dtype, ...] = (torch.uint8,)

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See MatrixFormat."""
        return (*shape[:-1], 2 * shape[-1])

    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """See MatrixFormat."""
        rows, columns = shape
        scales = (torch.float8_e8m0fnu, torch.uint8)
        shapes = ((rows, columns // 2), self.code_dtypes), ((rows, columns // mxfp4.BLOCK), scales)
        return dict(zip(self.names(name), shapes))

    def grid(self, *scales: torch.Tensor) -> Grid:
        """See MatrixFormat."""
        return mxfp4.MXFP4().grid()

    def read(self, *tensors: torch.Tensor) -> Quantized:
        """See MatrixFormat."""
        self.check(*tensors)
        codes, scales = tensors
        return Quantized(codes.view(torch.uint8).unflatten(-1, (-1, mxfp4.BLOCK // 2)), scales.view(torch.uint8))

    def dense(self, *tensors: torch.Tensor) -> torch.Tensor:
        """See MatrixFormat."""
        codes, scales, _ = self.read(*tensors)
        return self.grid().dense(codes, scales).float()

    def round(self, stored: list[torch.Tensor], weight: torch.Tensor, uniform: torch.Tensor | None) -> Rounded:
        """See MatrixFormat."""
        codes, scales, _ = self.read(*stored)
        return self.grid().round(weight, scales, codes, uniform)

    def rewrite(self, stored: list[torch.Tensor], rounded: Rounded) -> list[torch.Tensor]:
        """See MatrixFormat."""
        return [rounded.codes.flatten(1).view(stored[0].dtype), rounded.scales.view(stored[1].dtype)]


class FP4Matrix(MXFP4Matrix):
    """DeepSeek-V4's experts: X.weight int8 [N, K / 2] and X.scale E8M0 [N, K / 32], beside linear layers in FP8."""

    code_dtypes, scales = PAIRS, ("_scale_inv",)

    def __init__(self, linear: FP8Matrix | None = None):
        self.fp8 = linear or FP8Matrix()

    @property
    def linear(self) -> MatrixFormat:
        """See MatrixFormat."""
        return self.fp8

    def weight_of(self, name: str, dtype: torch.dtype) -> str | None:
        """See MatrixFormat."""
        return name if dtype in PAIRS and name.endswith(f".{WEIGHT}") else None

    def names_in(self, weight_name: str, there: Container[str]) -> list[str]:
        """See MatrixFormat."""
        return self.fp8.names_in(weight_name, there)


class NVFP4Matrix(MatrixFormat):
    """A matrix in ModelOpt's NVFP4: X.weight uint8 [N, K/2], two values a byte, the first in the low half; X.weight_scale
    float8_e4m3 [N, K/16]; X.weight_scale_2, one fp32 number. A value is e2m1 * (weight_scale * weight_scale_2), in fp32.
    X.input_scale, and the k_scale and v_scale of attention, are scales of activations, for inference alone."""

    name, dtype, scales = "nvfp4", torch.uint8, ("_scale", "_scale_2")
    unused: tuple[str, ...] = (".input_scale", ".k_scale", ".v_scale")

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See MatrixFormat."""
        return (*shape[:-1], 2 * shape[-1])

    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """See MatrixFormat."""
        rows, columns = shape
        shapes = (rows, columns // 2), (rows, columns // nvfp4.BLOCK), ()
        dtypes = self.dtype, torch.float8_e4m3fn, torch.float32
        return {tensor: (shape, (dtype,)) for tensor, shape, dtype in zip(self.names(name), shapes, dtypes)}

    def grid(self, *scales: torch.Tensor) -> Grid:
        """See MatrixFormat. weight_scale_2 stays: engines that fuse projections want theirs to be equal."""
        return nvfp4.nvfp4_grid(scales[1].reshape(()))

    def read(self, *tensors: torch.Tensor) -> Quantized:
        """See MatrixFormat."""
        self.check(*tensors)
        weight, scale, scale_2 = tensors
        return Quantized(weight, scale.view(torch.uint8), scale_2.reshape(1))


class CompressedMXFP4(RenamedMatrix, MXFP4Matrix):
    """compressed-tensors' mxfp4-pack-quantized: X.weight_packed uint8 [N, K/2], two E2M1 values a byte, the first in the
    low half; X.weight_scale uint8 [N, K/32], each for 2^(scale - 127)."""

    dtype, ends = torch.uint8, ("weight_packed", "weight_scale")


class CompressedNVFP4(RenamedMatrix, NVFP4Matrix):
    """compressed-tensors' nvfp4-pack-quantized: X.weight_packed uint8 [N, K/2]; X.weight_scale float8_e4m3 [N, K/16];
    X.weight_global_scale, one fp32 number, of which a value is e2m1 * weight_scale / weight_global_scale. Here it is
    e2m1 * (weight_scale * (1 / weight_global_scale)), as engines compute it, which may differ by a bit in fp32."""

    ends = ("weight_packed", "weight_scale", "weight_global_scale")

    def grid(self, *scales: torch.Tensor) -> Grid:
        """See MatrixFormat."""
        return super().grid(scales[0], 1 / scales[1])

    def read(self, *tensors: torch.Tensor) -> Quantized:
        """See MatrixFormat."""
        matrix = super().read(*tensors)
        return matrix._replace(state=1 / tensors[2].reshape(1))
