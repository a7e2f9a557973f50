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

    name: the key in FORMATS of experts in it, or "int8", which is none: such matrices have no `read` and no `grid`, only
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
        """Check stretches of optional tensors, which is all of them that ranks of expert parallelism get.

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
        """Compute the shape of the scales that `read` gives of a matrix [N, K], by that of those that are stored."""
        return stored

    def round(self, stored: list[torch.Tensor], weight: torch.Tensor, uniform: torch.Tensor | None) -> Rounded:
        """Round a changed matrix in fp32 to the format that it is stored in. uniform: as of Grid.round."""
        codes, *scales = stored
        return self.grid(*scales).round(weight, scales[0], codes, uniform)

    def rewrite(self, stored: list[torch.Tensor], rounded: Rounded) -> list[torch.Tensor]:
        """Make the tensors that store a matrix which was rounded, of those that stored it."""
        return [rounded.codes.view(stored[0].dtype), rounded.scales, *stored[2:]]

    @abstractmethod
    def read(self, *tensors: torch.Tensor) -> Quantized:
        """Read a matrix as codes, scales and state of FORMATS[name], of the tensors that store it. Raises CheckpointError
        as `check`."""

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Join a weight's scales, of its gates' and its ups' (or its downs' alone) [E, parts, ...]."""
        return scales.flatten(1, 2)

    def join_parts(self, parts: list[list[Quantized]]) -> Quantized:
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
