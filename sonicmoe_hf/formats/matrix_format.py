"""MatrixFormat: how the files of a checkpoint store a matrix, a part of one expert's weight or a linear layer's weight.

kernels/packed says how the weight of all experts of a layer is stored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container

import torch

from ..errors import CheckpointError
from ..kernels.packed import Quantized
from ..kernels.packed.format import TensorSpecs
from ..kernels.packed.grid import Grid, Rounded

WEIGHT = "weight"  # how the name of a matrix ends
LARGE = (4096, 4096)  # (N, K) of a matrix beside which what is stored once for all of it counts little
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of a matrix that the checkpoint has not packed


class MatrixFormat(ABC):
    """A format in which files store a matrix [N, K], a part of one expert's weight or a linear layer's weight.

    name: the key in FORMATS of experts in it, or "int8", which is none: such matrices have no `read` and no `round`, only
    values. dtype: of the tensor of codes. scales, optional, unused: how names of further tensors end. Those of the scales
    follow the weight's name, as do the optional ones, which a checkpoint may lack; the unused ones follow the module's,
    and are for inference alone. has_standard_blocks: whether a scale is for the values that it is for in FORMATS[name].
    """

    name: str
    dtype: torch.dtype
    scales: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    has_standard_blocks = True

    @property
    def element_size(self) -> float:
        """Bytes of one value and of the part of a scale that is for it, as files store a large matrix."""
        specs = self.specs(WEIGHT, LARGE).values()
        return sum(math.prod(shape) * dtypes[0].itemsize for shape, dtypes in specs) / math.prod(LARGE)

    def names(self, weight_name: str) -> list[str]:
        """Name the tensors that store the weight of this name."""
        return [weight_name, *(weight_name + end for end in self.scales)]

    def names_in(self, weight_name: str, there: Container[str]) -> list[str]:
        """Select `names` as a checkpoint with the tensors `there` has them: some write a shorter name."""
        return self.names(weight_name)

    @property
    def linear(self) -> MatrixFormat:
        """The format of linear layers beside experts in this one."""
        return self

    def check_stretches(self, *stretches: torch.Tensor) -> None:  # noqa: B027 - most formats have none
        """Check stretches of optional tensors; ranks of expert parallelism get no more of these.

        Raises:
            CheckpointError: no format here holds what they say.
        """

    def optional_names(self, weight_name: str) -> list[str]:
        """Name the tensors that may be there too."""
        return [weight_name + end for end in self.optional]

    def all_names(self, weight_name: str) -> list[str]:
        """Name the tensors that may store the weight of this name, also where it is in floats."""
        return list(dict.fromkeys([*self.names(weight_name), *self.optional_names(weight_name), weight_name]))

    def weight_of(self, name: str, dtype: torch.dtype) -> str | None:
        """Name the weight that a tensor of this name and dtype stores; None of another tensor."""
        return name if dtype == self.dtype else None

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Compute (N, K) of a matrix that is stored in this shape."""
        return shape

    @abstractmethod
    def specs(self, name: str, shape: tuple[int, ...]) -> TensorSpecs:
        """Describe the tensors that store a matrix [N, K]: by name their shape and the dtypes that they may have."""

    def check(self, *tensors: torch.Tensor) -> None:
        """Raise CheckpointError where one of the tensors that store a matrix has another shape or dtype than it must."""
        if tensors[0].dim() != 2:
            raise CheckpointError(f"{WEIGHT} has shape {tuple(tensors[0].shape)}; a matrix has two dimensions")
        specs = self.specs(WEIGHT, self.dense_shape(tensors[0].shape)).items()
        for tensor, (name, (shape, dtypes)) in zip(tensors, specs):
            own_shape = tuple(tensor.shape) or (1,)  # one number has either
            if tensor.dtype not in dtypes or own_shape != (shape or (1,)):
                raise CheckpointError(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be {dtypes[0]} of shape {shape}"
                )

    def grid(self, *scales: torch.Tensor) -> Grid:
        """Make the grid of values that a matrix with such scales can have, by their dtype and NVFP4's scale of all.
        Integers have none, and `dense` and `round` of their own."""
        raise NotImplementedError

    def dense(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Compute the values in fp32. Raises CheckpointError as `check`."""
        self.check(*tensors)
        return self.grid(*tensors[1:]).dense(tensors[0], tensors[1])

    def scales_shape(self, shape: tuple[int, ...], stored: tuple[int, ...]) -> tuple[int, ...]:
        """Compute the shape of the scales that `read` gives of a matrix [N, K], by that of those that are stored."""
        return stored

    def round(self, stored: list[torch.Tensor], weight: torch.Tensor, uniform: torch.Tensor | None) -> Rounded:
        """Round a changed matrix in fp32 to the format that it is stored in. uniform: as of Grid.round."""
        codes, *scales = stored
        return self.grid(*scales).round(weight, scales[0], codes, uniform)

    def rewrite(self, stored: list[torch.Tensor], rounded: Rounded) -> list[torch.Tensor]:
        """Make the tensors that store a rounded matrix, of those that stored it before."""
        return [rounded.codes.view(stored[0].dtype), rounded.scales, *stored[2:]]

    @abstractmethod
    def read(self, *tensors: torch.Tensor) -> Quantized:
        """Read a matrix as codes, scales and state of FORMATS[name], of the tensors that store it. Raises CheckpointError
        as `check`."""

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Join the scales [E, parts, ...] of a weight's parts, gate and up or down alone."""
        return scales.flatten(1, 2)

    def join_parts(self, parts: list[list[Quantized]]) -> Quantized:
        """Join the matrices [part][expert], gates and ups or downs alone, to the weight of all experts."""
        matrices = [matrix for parts_of_expert in zip(*parts) for matrix in parts_of_expert]

        def stack(field: str) -> torch.Tensor:
            """Stack a field of all matrices: [E, parts, ...]."""
            return torch.stack([getattr(matrix, field) for matrix in matrices]).unflatten(0, (-1, len(parts)))

        state = None if matrices[0].state is None else stack("state")
        return Quantized(stack("codes").flatten(1, 2), self.join_scales(stack("scales")), state)


class RenamedMatrix(MatrixFormat):
    """A format whose tensors have names of their own in the place of "weight", such as "X.weight_packed".

    ends: these names, in the order of `read`'s arguments; those in `optional`, which a checkpoint may lack, come last.
    """

    ends: tuple[str, ...]
    unused: tuple[str, ...] = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")

    def names(self, weight_name: str) -> list[str]:
        """See MatrixFormat."""
        return [weight_name.removesuffix(WEIGHT) + end for end in self.ends]

    def optional_names(self, weight_name: str) -> list[str]:
        """See MatrixFormat."""
        return [weight_name.removesuffix(WEIGHT) + end for end in self.optional]

    def weight_of(self, name: str, dtype: torch.dtype) -> str | None:
        """See MatrixFormat."""
        end = f".{self.ends[0]}"
        return f"{name.removesuffix(end)}.{WEIGHT}" if name.endswith(end) and dtype == self.dtype else None
