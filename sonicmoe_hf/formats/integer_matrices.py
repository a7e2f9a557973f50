"""Matrices of 4-bit and 8-bit integers, (code - zero) * scale, as weight-only checkpoints store them: compressed-tensors'
pack-quantized, GPTQ (and AutoRound) and AWQ."""

from __future__ import annotations

from abc import abstractmethod

import torch

from ..errors import CheckpointError
from ..kernels.packed import FORMATS, Quantized
from ..kernels.packed.format import TensorSpecs
from ..kernels.packed.grid import Rounded
from ..kernels.packed.int4 import GROUP, LARGEST, ZERO, group_of, int4_grid, to_bytes, to_nibbles
from .matrix_format import RenamedMatrix

WORD = torch.int32
PER_WORD = 8  # codes of a word
SCALES = (torch.bfloat16, torch.float16, torch.float32)
AWQ_ORDER = torch.tensor(
    [0, 2, 4, 6, 1, 3, 5, 7], dtype=torch.int64, device="cpu"
)  # which of eight columns each nibble of a word has
TO_BF16_OR_PACK = (
    'load the bf16 checkpoint that it was made from, where experts_quantization="int4" packs the experts anew'
)

IN_ORDER_OF_ACTIVATIONS = (
    "the columns of a group do not lie side by side (g_idx: GPTQ in the order of activations, desc_act), which no kernel "
    f"here reads; {TO_BF16_OR_PACK}"
)


def as_words(bytes_: torch.Tensor) -> torch.Tensor:
    """Copy rows of bytes as words."""
    return bytes_.clone(memory_format=torch.contiguous_format).view(WORD)


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    """Copy rows of words as bytes."""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _as_one_expert(matrix: Quantized) -> Quantized:
    """View a matrix as the weight of one expert."""
    return Quantized(*(None if tensor is None else tensor[None] for tensor in matrix))  # type: ignore[arg-type]


class Int4Matrix(RenamedMatrix):
    """A matrix [N, K] of 4-bit codes in words.

    group: values of a row that share a scale, the last of them perhaps fewer; None: the whole row.
    """

    dtype = WORD

    def __init__(self, group: int | None, has_zeros: bool):
        self.group, self.name = group, "uint4" if has_zeros else "int4"

    @property
    def has_zeros(self) -> bool:
        """Tell whether it is declared that some zero is not 8."""
        return self.name == "uint4"

    def num_groups(self, size_in: int) -> int:
        """Count the scales of a row of the checkpoint's."""
        return -(-size_in // (self.group or size_in))

    @abstractmethod
    def _from_words(self, *tensors: torch.Tensor) -> Quantized:
        """Convert stored tensors to codes in bytes along K, and scales and zeros [N, groups] as the file has groups."""

    @abstractmethod
    def _to_words(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> list[torch.Tensor]:
        """Convert codes, scales and zeros of `_from_words` to the tensors that store them, in the order of `ends`."""

    def read(self, *tensors: torch.Tensor) -> Quantized:
        """See MatrixFormat. Groups that K or a format here does not take become several with the same scale."""
        self.check(*tensors)
        codes, scales, zeros = self._from_words(*tensors)
        size_in = 2 * codes.shape[1]
        stored_group = self.group or size_in
        group = group_of(size_in, stored_group)
        if group < GROUP:
            raise CheckpointError(
                f"{stored_group} of {size_in} values share a scale, which {self.name} cannot hold: it takes groups of a "
                f"multiple of {GROUP}; {TO_BF16_OR_PACK}"
            )

        def spread(of_groups: torch.Tensor) -> torch.Tensor:
            return of_groups.repeat_interleave(stored_group // group, 1)[:, : size_in // group].contiguous()

        if self.has_zeros:
            assert zeros is not None
            return Quantized(codes, spread(scales), spread(zeros))
        if zeros is not None and not zeros.is_meta and bool((zeros != ZERO).any()):
            raise CheckpointError(
                "the checkpoint is declared symmetric, but zeros are not those of symmetric weights; set sym to false in "
                "the quantization_config of its config.json"
            )
        return Quantized(codes, spread(scales))

    def write(self, matrix: Quantized) -> list[torch.Tensor]:
        """Make the tensors of `ends` that store a matrix, the inverse of `read`, from groups here of any length."""
        codes, scales, zeros = matrix
        size_in, num_groups = 2 * codes.shape[1], scales.shape[1]
        step = max(1, (self.group or size_in) * num_groups // size_in)
        repeats = max(1, self.num_groups(size_in) // num_groups)

        def regroup(of_groups: torch.Tensor) -> torch.Tensor:
            return of_groups[:, ::step].repeat_interleave(repeats, 1)

        scales = regroup(scales)
        zeros = torch.full_like(scales, ZERO, dtype=torch.uint8) if zeros is None else regroup(zeros)
        return self._to_words(codes, scales, zeros)

    def dense(self, *tensors: torch.Tensor) -> torch.Tensor:
        """See MatrixFormat."""
        return FORMATS[self.name].expert(_as_one_expert(self.read(*tensors)), 0)

    def scales_shape(self, shape: tuple[int, ...], stored: tuple[int, ...]) -> tuple[int, ...]:
        """See MatrixFormat."""
        return (shape[0], shape[1] // max(1, group_of(shape[1], self.group or shape[1])))

    def round(self, stored: list[torch.Tensor], weight: torch.Tensor, uniform: torch.Tensor | None) -> Rounded:
        """See MatrixFormat. Scales stay where several groups here have one of the checkpoint's."""
        matrix = self.read(*stored)
        if matrix.scales.shape[1] == self.num_groups(weight.shape[1]):
            return FORMATS[self.name].round_expert(_as_one_expert(matrix), 0, weight, uniform)
        grid = int4_grid(weight.shape[1] // matrix.scales.shape[1], matrix.scales.dtype, matrix.state)
        return grid._replace(new_scales=None).round(weight, matrix.scales, matrix.codes, uniform)

    def rewrite(self, stored: list[torch.Tensor], rounded: Rounded) -> list[torch.Tensor]:
        """See MatrixFormat. Tensors of `optional` do not depend on the values."""
        matrix = self.read(*stored)._replace(codes=rounded.codes, scales=rounded.scales)
        return [*self.write(matrix)[: len(self.ends)], *stored[len(self.ends) :]]

    def join_parts(self, parts: list[list[Quantized]]) -> Quantized:
        """See MatrixFormat: zeros have rows, as scales have."""
        joined = super().join_parts(parts)
        return joined if joined.state is None else joined._replace(state=joined.state.flatten(1, 2))


class CompressedInt4(Int4Matrix):
    """compressed-tensors' pack-quantized (Kimi K2, llm-compressor's W4A16): X.weight_packed int32 [N, K/8], whose
    nibbles, the low one first, are values + 8; X.weight_scale [N, K/group]; X.weight_zero_point int32 [N/8, K/group] of
    weights that are not symmetric, words along N; X.weight_shape (N, K), in one of two dtypes."""

    optional = ("weight_shape",)

    def __init__(self, group: int | None, has_zeros: bool):
        super().__init__(group, has_zeros)
        self.ends = ("weight_packed", "weight_scale", *(["weight_zero_point"] if has_zeros else []))

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See MatrixFormat."""
        return (shape[0], PER_WORD * shape[1])

    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """See MatrixFormat."""
        rows, columns = shape
        groups = self.num_groups(columns)
        specs: list = [((rows, columns // PER_WORD), (WORD,)), ((rows, groups), SCALES)]
        if self.has_zeros:
            specs.append(((-(-rows // PER_WORD), groups), (WORD,)))
        return dict(zip([*self.names(name), *self.optional_names(name)], [*specs, ((2,), (torch.int64, torch.int32))]))

    def check(self, *tensors: torch.Tensor) -> None:
        """See MatrixFormat."""
        super().check(*tensors)
        for shape in tensors[len(self.ends) :]:
            if not shape.is_meta and shape.tolist() != list(self.dense_shape(tensors[0].shape)):
                raise CheckpointError(
                    f"weight_shape is {shape.tolist()}, but weight_packed holds "
                    f"{list(self.dense_shape(tensors[0].shape))} values; the checkpoint is damaged"
                )

    def write(self, matrix: Quantized) -> list[torch.Tensor]:
        """See Int4Matrix: also weight_shape, in the dtype that compressed-tensors gives it."""
        codes = matrix.codes
        shape = torch.tensor([len(codes), 2 * codes.shape[1]], dtype=torch.int64, device=codes.device)
        return [*super().write(matrix), shape]

    def _from_words(self, *tensors: torch.Tensor) -> Quantized:
        packed, scales = tensors[:2]
        if not self.has_zeros:
            return Quantized(packed.view(torch.uint8), scales)
        zeros = to_nibbles(as_bytes(tensors[2].t())).t()[: len(packed)]
        return Quantized(packed.view(torch.uint8), scales, zeros.contiguous())

    def _to_words(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> list[torch.Tensor]:
        if not self.has_zeros:
            return [as_words(codes), scales]
        padded = torch.nn.functional.pad(zeros.t(), (0, -len(zeros) % PER_WORD))
        return [as_words(codes), scales, as_words(to_bytes(padded)).t().contiguous()]


class GPTQInt4(Int4Matrix):
    """A matrix of GPTQ's: X.qweight int32 [K/8, N], words along K, the low nibble first; X.scales [K/group, N]; X.qzeros
    int32 [K/group, N/8], words along N, zeros less `offset` (1, or 0 in gptq_v2); X.g_idx int32 [K], the group of each
    column, which AutoRound leaves out."""

    ends, optional = ("qweight", "scales", "qzeros"), ("g_idx",)

    def __init__(self, group: int | None, has_zeros: bool, offset: int):
        super().__init__(group, has_zeros)
        self.offset = offset

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See MatrixFormat."""
        return (shape[1], PER_WORD * shape[0])

    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """See MatrixFormat."""
        rows, columns = shape
        groups = self.num_groups(columns)
        shapes = (columns // PER_WORD, rows), (groups, rows), (groups, rows // PER_WORD), (columns,)
        dtypes = (WORD,), SCALES, (WORD,), (WORD,)
        return dict(zip([*self.names(name), *self.optional_names(name)], zip(shapes, dtypes)))

    def check(self, *tensors: torch.Tensor) -> None:
        """See MatrixFormat; also where columns of a group do not lie side by side."""
        super().check(*tensors)
        for g_idx in tensors[len(self.ends) :]:
            columns = torch.arange(len(g_idx), dtype=torch.int64, device=g_idx.device)
            if not g_idx.is_meta and not torch.equal(g_idx.long(), columns // (self.group or len(g_idx))):
                raise CheckpointError(IN_ORDER_OF_ACTIVATIONS)

    def check_stretches(self, *stretches: torch.Tensor) -> None:
        """See MatrixFormat."""
        for stretch in stretches:
            groups, sizes = torch.unique_consecutive(stretch, return_counts=True)
            if not bool((groups.diff() == 1).all() and (sizes[1:-1] == (self.group or len(stretch))).all()):
                raise CheckpointError(IN_ORDER_OF_ACTIVATIONS)

    def _from_words(self, *tensors: torch.Tensor) -> Quantized:
        qweight, scales, qzeros = tensors[:3]
        zeros = to_nibbles(as_bytes(qzeros)).t() + self.offset  # 15, of which a packer wrote -1, stands for 16
        return Quantized(as_bytes(qweight.t()), scales.t().contiguous(), zeros.contiguous())

    def _to_words(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> list[torch.Tensor]:
        packed_zeros = to_bytes((zeros - self.offset).t() & LARGEST)
        return [as_words(codes).t().contiguous(), scales.t().contiguous(), as_words(packed_zeros)]


def _from_awq_order(bytes_: torch.Tensor) -> torch.Tensor:
    """Split the bytes of words whose nibbles are in AWQ's order into nibbles [K, N]."""
    inverse = torch.argsort(AWQ_ORDER).to(bytes_.device)
    return to_nibbles(bytes_).unflatten(1, (-1, PER_WORD))[..., inverse].flatten(1)


def _to_awq_order(nibbles: torch.Tensor) -> torch.Tensor:
    """Join nibbles [K, N] to words [K, N/8] in AWQ's order."""
    ordered = nibbles.unflatten(1, (-1, PER_WORD))[..., AWQ_ORDER.to(nibbles.device)].flatten(1)
    return as_words(to_bytes(ordered))


class AWQInt4(Int4Matrix):
    """AutoAWQ's "gemm": X.qweight int32 [K, N/8] and X.qzeros int32 [K/group, N/8], words along N in an order of AWQ's,
    zeros as they are; X.scales [K/group, N]."""

    ends = ("qweight", "scales", "qzeros")

    def __init__(self, group: int | None):
        super().__init__(group, has_zeros=True)

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See MatrixFormat."""
        return (PER_WORD * shape[1], shape[0])

    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """See MatrixFormat."""
        rows, columns = shape
        groups = self.num_groups(columns)
        shapes = (columns, rows // PER_WORD), (groups, rows), (groups, rows // PER_WORD)
        return dict(zip(self.names(name), zip(shapes, ((WORD,), SCALES, (WORD,)))))

    def _from_words(self, *tensors: torch.Tensor) -> Quantized:
        qweight, scales, qzeros = tensors
        codes = to_bytes(_from_awq_order(as_bytes(qweight)).t())
        return Quantized(codes, scales.t().contiguous(), _from_awq_order(as_bytes(qzeros)).t().contiguous())

    def _to_words(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> list[torch.Tensor]:
        return [_to_awq_order(to_nibbles(codes).t()), scales.t().contiguous(), _to_awq_order(zeros.t())]


class CompressedInt8(RenamedMatrix):
    """compressed-tensors' pack-quantized in 8 bits (W8A16), which no format here holds: X.weight_packed int32 [N, K/4],
    whose bytes are values + 128, and X.weight_scale [N, K/group]."""

    name, dtype, ends, optional = "int8", WORD, ("weight_packed", "weight_scale"), ("weight_shape",)
    has_standard_blocks = False

    def __init__(self, group: int | None):
        self.group = group

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See MatrixFormat."""
        return (shape[0], WORD.itemsize * shape[1])

    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """See MatrixFormat."""
        rows, columns = shape
        shapes = (rows, columns // WORD.itemsize), (rows, -(-columns // (self.group or columns))), (2,)
        dtypes = (WORD,), SCALES, (torch.int64, torch.int32)
        return dict(zip([*self.names(name), *self.optional_names(name)], zip(shapes, dtypes)))

    def round(self, stored: list[torch.Tensor], weight: torch.Tensor, uniform: torch.Tensor | None) -> Rounded:
        """Raise CheckpointError: nothing is rounded to it."""
        raise CheckpointError(
            "experts in 8-bit integers cannot be kept in that form; leave quantize='keep' (--quantize keep) out, so that "
            "all weights become bf16"
        )

    def dense(self, *tensors: torch.Tensor) -> torch.Tensor:
        """See MatrixFormat."""
        self.check(*tensors)
        codes, scales = as_bytes(tensors[0]).int() - 128, tensors[1].float()
        return codes.float() * scales.repeat_interleave(self.group or codes.shape[1], 1)[:, : codes.shape[1]]

    def read(self, *tensors: torch.Tensor) -> Quantized:
        """Raise CheckpointError: no format here holds it."""
        raise CheckpointError(f"no format here holds experts in 8-bit integers; {TO_BF16_OR_PACK}")
