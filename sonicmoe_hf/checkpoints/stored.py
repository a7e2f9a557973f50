"""The weights in a checkpoint's files, dense or quantized, under the files' own names; of any family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..errors import CheckpointError
from ..formats import PACKED, Format, HubFormat
from ..formats.grid import Grid
from ..formats.mxfp4 import mxfp4_grid
from ..kernels.quantized import Quantized, dequantize_expert, weight_shape
from .configs import quantization_of
from .files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, opened, read_headers, read_json, refuse_model_beside_adapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRANSPOSED = ("gpt_oss",)  # families whose dense experts are [E, in, out], and packed ones [E, out, in]


class StoredWeights:
    """The files of an opened checkpoint.

    Attributes:
        folder, config: where it is, and its config.json. tensors: every tensor's header.
        declared: what its config declares of its quantization; None where it is not quantized.
        packed_format: of experts stored [E, ...] under their parameter's name. hub_format: how weights are stored each
            for itself, in every linear layer. Both are None where nothing is quantized.
        weights: by name of a weight, the names of the tensors that hold it, its scales behind it.
        keep_fp32: modules of the model that are never cast, where it is known.
    Raises:
        CheckpointError: a file is missing, damaged or contradicts another, or a quantized weight is not as declared.
    """

    keep_fp32: frozenset[str] = frozenset()

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_json(folder / CONFIG_FILE)
        refuse_model_beside_adapter(folder)
        if self.config.get("transformers_weights") is not None:
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: transformers_weights is {self.config['transformers_weights']!r}, a file that "
                f"Transformers would load; conversion reads {WEIGHTS_FILE} or {INDEX_FILE} only: remove the entry"
            )
        self.declared = quantization_of(self.config, folder)
        try:
            self.packed_format = None if self.declared is None else self.declared.packed()
            self.hub_format = None if self.declared is None else self.declared.hub()
        except CheckpointError as error:
            raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
        self.tensors = read_headers(folder)
        self.weights = self._names_by_weight()
        self._open: tuple[str, Any] | None = None
        self._last_packed: tuple[tuple[str, int | None], Quantized] | None = None

    @property
    def format(self) -> Format | HubFormat | None:
        """What quantized weights are stored in; None where there are none."""
        return self.packed_format or self.hub_format

    @property
    def quantization(self) -> str | None:
        """The name of the format."""
        return None if self.format is None else self.format.name

    @property
    def packed_here(self) -> bool:
        """Whether quantize_experts or conversion packed the experts."""
        return self.declared is not None and self.declared.is_packed_here

    def _names_by_weight(self) -> dict[str, list[str]]:
        by_weight: dict[str, list[str]] = {}
        beside: set[str] = set()
        for name, header in self.tensors.items():
            weight = None if self.format is None else self.format.weight_of(name, header.dtype)
            if weight is None and header.dtype == torch.float8_e4m3fn and self.hub_format is None:
                raise CheckpointError(
                    f"{name} is float8, but config.json declares no fp8 quantization; add quantization_config as the "
                    "original has it"
                )
            stored = [name] if self.format is None or weight is None else self.format.names(weight)
            if missing := [each for each in stored if each not in self.tensors]:
                raise CheckpointError(f"{self.folder}: {missing[0]} is missing, a part of a quantized weight")
            by_weight[weight or name] = stored
            beside.update(stored[1:])
        return {weight: stored for weight, stored in by_weight.items() if weight not in beside}

    def is_unused(self, name: str) -> bool:
        """Whether the tensor is for inference in the format alone."""
        return self.hub_format is not None and name.endswith(self.hub_format.unused)

    def is_packed(self, name: str) -> bool:
        """Whether the experts' weight `name` is stored as packed weights are."""
        return self.packed_format is not None and self.is_quantized(name)

    def is_quantized(self, name: str) -> bool:
        """Whether the weight has scales."""
        return len(self.weights.get(name, ())) > 1

    def grid(self, name: str) -> Grid:
        """The values that a quantized weight can have, or one expert's of a packed one."""
        if self.hub_format is None:
            return mxfp4_grid()
        return self.hub_format.grid(*map(self.raw, self.weights[name][1:]))

    @property
    def dense_dtype(self) -> torch.dtype:
        """What quantized weights become: bf16; of experts that were packed here, the dtype that the model computes in."""
        declared = self.config.get("dtype") or self.config.get("torch_dtype") if self.packed_here else None
        return DTYPES.get(declared, torch.bfloat16) if isinstance(declared, str) else torch.bfloat16

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a weight once it is read."""
        if self.is_packed(name):
            return self.dense_dtype
        return torch.bfloat16 if self.is_quantized(name) else self.tensors[name].dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a weight once it is read."""
        if self.packed_format is not None and self.is_packed(name):
            shapes = (self.tensors[part].shape for part in self.packed_format.names(name))
            stored = Quantized(*(torch.empty(shape, device="meta") for shape in shapes))
            num_experts, size_out, size_in = weight_shape(stored, self.packed_format.name)
            return (num_experts, size_in, size_out) if self.is_transposed else (num_experts, size_out, size_in)
        shape = self.tensors[name].shape
        return self.hub_format.dense_shape(shape) if self.hub_format is not None and self.is_quantized(name) else shape

    @property
    def is_transposed(self) -> bool:
        """Whether experts that are packed [E, out, in] are [E, in, out] once they are read."""
        return self.config.get("model_type") in TRANSPOSED

    def _handle(self, name: str):
        """The open file that has the tensor. One file is open at a time: its mapped pages count as memory."""
        file = self.tensors[name].file
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, opened(self.folder / file))
        return self._open[1]

    def raw(self, name: str, expert: int | None = None) -> torch.Tensor:
        """A stored tensor, or one expert's [1, ...] of it, in the file's mapped memory."""
        try:
            if expert is None:
                return self._handle(name).get_tensor(name)
            return self._handle(name).get_slice(name)[expert : expert + 1]
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.folder / self.tensors[name].file}: {name} cannot be read: {error}"
            ) from error

    def stored(self, name: str) -> torch.Tensor:
        """A whole tensor as it is stored; it owns its memory."""
        return self.raw(name).clone()

    def read(self, name: str, expert: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A weight, or one expert's [1, ...] of one that holds all; it owns its memory.

        dtype: of what a quantized weight becomes; None is `dtype_of`.
        """
        dtype = dtype or self.dtype_of(name)
        if self.is_packed(name):
            experts = range(self.shape_of(name)[0]) if expert is None else [expert]
            weight = torch.stack([self._dense_expert(name, each, dtype) for each in experts])
            return weight.transpose(1, 2) if self.is_transposed else weight
        if self.hub_format is not None and self.is_quantized(name):
            return self.hub_format.dense(*map(self.raw, self.weights[name])).to(dtype)
        return self.raw(name, expert).clone()

    def _dense_expert(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        packed, place = self._packed(name, expert)
        return dequantize_expert(packed, str(self.quantization), dtype, place)

    def _packed(self, name: str, expert: int) -> tuple[Quantized, int]:
        """What is stored of a packed weight, and the expert's place in it. NF4: of all experts, since its scales have
        scales that cross experts; else of this expert alone. The last one is kept."""
        assert self.packed_format is not None
        own = None if self.packed_format.name == "nf4" else expert
        if self._last_packed is None or self._last_packed[0] != (name, own):
            self._last_packed = None
            packed = Quantized(*(self.raw(part, own).clone() for part in self.packed_format.names(name)))
            try:
                self.packed_format.check(name, packed)
            except ValueError as error:
                raise CheckpointError(str(error)) from error
            self._last_packed = (name, own), packed
        return self._last_packed[1], expert if own is None else 0

    def packed_rows(self, name: str, expert: int | None) -> list[torch.Tensor]:
        """What stores a quantized weight, each as [rows, ...]; one expert's [1, rows, ...] of one that holds all."""
        if self.packed_format is not None and self.is_packed(name):
            return self.packed_format.rows(self._packed(name, expert or 0)[0])
        assert self.hub_format is not None
        format = PACKED[self.hub_format.name]
        rows = [part for part in self.hub_format.pack(*map(self.stored, self.weights[name])) if part is not None]
        for part, tensor in zip(format.parts, rows):
            if not format.is_sound(part, tensor):
                raise CheckpointError(f"{name} has NaN or infinite values in its {part}: the checkpoint is damaged")
        return rows

    def close(self) -> None:
        """Close the file that is open."""
        self._open = None
