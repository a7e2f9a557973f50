"""The weights in a checkpoint's files, dense or quantized, under the files' own names; of any family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..errors import CheckpointError
from ..formats import HUB, PACKED
from ..kernels.quantized import Quantized, weight_shape
from . import nvfp4
from .configs import declared_quantization
from .dequantize import dequantize_fp8
from .files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, opened, read_headers, read_json, refuse_model_beside_adapter
from .packed import checked, dense_expert

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRANSPOSED = ("gpt_oss",)  # families whose dense experts are [E, in, out], and packed ones [E, out, in]


class StoredWeights:
    """The files of an opened checkpoint.

    Attributes:
        folder, config: where it is, and its config.json. tensors: every tensor's header.
        quantization, packed_here: as declared_quantization.
        weights: by name of a weight, the names of the tensors that hold it, its scales behind it.
    Raises:
        CheckpointError: a file is missing, damaged or contradicts another, or a quantized weight is not as declared.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_json(folder / CONFIG_FILE)
        refuse_model_beside_adapter(folder)
        if self.config.get("transformers_weights") is not None:
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: transformers_weights is {self.config['transformers_weights']!r}, a file that "
                f"Transformers would load; conversion reads {WEIGHTS_FILE} or {INDEX_FILE} only: remove the entry"
            )
        self.quantization, self.packed_here = declared_quantization(self.config, folder)
        self.tensors = read_headers(folder)
        self.nvfp4 = nvfp4.packed_weights(self.tensors) if self.hub_format == "nvfp4" else set()
        self._check_float8()
        self.weights = self._names_by_weight()
        self._open: tuple[str, Any] | None = None
        self._last_expert: tuple[tuple[str, int], torch.Tensor] | None = None
        self._last_packed: tuple[tuple[str, int | None], Quantized] | None = None

    @property
    def format(self) -> str:
        """The format of experts stored as packed weights are; "" where none are."""
        return self.quantization or "" if self.packed_here or self.quantization == "mxfp4" else ""

    @property
    def hub_format(self) -> str:
        """FP8 or NVFP4 as the hub has them, in every linear layer; "" otherwise."""
        return self.quantization or "" if not self.packed_here and self.quantization in HUB else ""

    def _check_float8(self) -> None:
        for name, header in self.tensors.items():
            if header.dtype != torch.float8_e4m3fn or self.packed_here or self.hub_format == "nvfp4":
                continue
            if self.hub_format != "fp8":
                raise CheckpointError(f"{name} is float8, but config.json declares no fp8 quantization")
            if f"{name}_scale_inv" not in self.tensors:
                raise CheckpointError(f"{self.folder}: {name}_scale_inv is missing, the scales of an fp8 tensor")

    def _names_by_weight(self) -> dict[str, list[str]]:
        by_weight: dict[str, list[str]] = {}
        beside: set[str] = set()
        first, *others = PACKED[self.format].names("") if self.format else ("",)
        scales = HUB[self.hub_format].scales if self.hub_format else ()
        for name in self.tensors:
            weight, ends = name, scales
            if first and name.endswith(first) and name.removesuffix(first) + others[0] in self.tensors:
                weight, ends = name.removesuffix(first), tuple(others)
            stored = [name, *(weight + end for end in ends if weight + end in self.tensors)]
            by_weight[weight] = stored
            beside.update(stored[1:])
        return {weight: stored for weight, stored in by_weight.items() if weight not in beside}

    def is_packed(self, name: str) -> bool:
        """Whether the experts' weight `name` is stored as packed weights are."""
        return bool(self.format) and PACKED[self.format].names(name)[0] in self.tensors

    def is_quantized(self, name: str) -> bool:
        """Whether the weight has scales."""
        return len(self.weights[name]) > 1

    @property
    def dense_dtype(self) -> torch.dtype:
        """What quantized weights become: bf16; of experts that were packed here, the dtype that the model computes in."""
        declared = self.config.get("dtype") or self.config.get("torch_dtype") if self.packed_here else None
        return DTYPES.get(declared, torch.bfloat16) if isinstance(declared, str) else torch.bfloat16

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a weight once it is read."""
        if self.is_packed(name):
            return self.dense_dtype
        dtype = self.tensors[name].dtype
        return torch.bfloat16 if dtype == torch.float8_e4m3fn or name in self.nvfp4 else dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a weight once it is read."""
        if self.is_packed(name):
            stored = (self.tensors[part].shape for part in PACKED[self.format].names(name))
            shape = weight_shape(Quantized(*(torch.empty(part, device="meta") for part in stored)), self.format)
            return (shape[0], shape[2], shape[1]) if self.is_transposed else shape
        shape = self.tensors[name].shape
        return (*shape[:-1], 2 * shape[-1]) if name in self.nvfp4 else shape

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

    def read(self, name: str) -> torch.Tensor:
        """A whole weight, dequantized where it is quantized; it owns its memory."""
        if self.is_packed(name):
            experts = range(self.shape_of(name)[0])
            return torch.stack([self.expert_slice(name, expert) for expert in experts])
        if name in self.nvfp4:
            tensors = (self.raw(name + end).clone() for end in ("", *nvfp4.SCALES))
            return HUB["nvfp4"].dense(*tensors).to(torch.bfloat16)
        if self.tensors[name].dtype == torch.float8_e4m3fn:
            raw = self.raw(name).clone()
            return dequantize_fp8(raw, self.raw(f"{name}_scale_inv"), self.config)
        return self.stored(name)

    def expert_slice(self, name: str, expert: int) -> torch.Tensor:
        """One expert's slice of a weight that holds all; the last one is kept, as gate and up are read in turn."""
        if self._last_expert is None or self._last_expert[0] != (name, expert):
            if self.is_packed(name):
                packed, place = self.packed(name, expert)
                whole = dense_expert(packed, self.format, self.dense_dtype, place, self.is_transposed)
            else:
                whole = self.raw(name, expert)[0]
            self._last_expert = ((name, expert), whole)
        return self._last_expert[1]

    def packed(self, name: str, expert: int) -> tuple[Quantized, int]:
        """What is stored of a packed weight, and the expert's place in it. NF4: of all experts, since its scales have
        scales that cross experts; else of this expert alone."""
        alone = self.format != "nf4"
        if self._last_packed is None or self._last_packed[0] != (name, expert if alone else None):
            self._last_packed = None
            stored = [self.raw(part, expert if alone else None) for part in PACKED[self.format].names(name)]
            packed = checked(Quantized(*(part.clone() for part in stored)), self.format, name)
            self._last_packed = (name, expert if alone else None), packed
        return self._last_packed[1], 0 if alone else expert

    def close(self) -> None:
        """Close the file that is open."""
        self._open = self._last_expert = None
