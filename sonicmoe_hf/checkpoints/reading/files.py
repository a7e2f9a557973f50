"""The folder of a checkpoint, here or in the hub's cache, and its files: config.json, index, tensors and headers."""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError

from ...errors import CheckpointError
from ...formats.json_files import read_json
from ...formats.tensor_files import open_tensors

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
SECOND_COPIES = ["*/*.safetensors"]  # gpt-oss has its weights once more in original/
DOWNLOADED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "*.py", "*.tiktoken", "LICENSE*"]
# names of weights, in other formats too, and of optimiser states
WEIGHTS = re.compile(r"\.(safetensors|index\.json|bin|pt|pth|ckpt|gguf|onnx|h5|msgpack|npz)$")


class Header(NamedTuple):
    """A tensor's file, dtype and shape."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def expand_home(path: str | os.PathLike) -> Path:
    """Replace "~" or "~user" at the beginning of a path by that user's home, where there is such a user."""
    return Path(os.path.expanduser(path))


def local_folder(src: str | os.PathLike, revision: str | None = None, only: list[str] | None = None) -> Path:
    """Find the folder of a checkpoint; a hub id is downloaded into the hub's cache.

    Args:
        src: folder, or hub id. revision: of a hub id. only: patterns of the files to download; None is all that matter.
    Raises:
        CheckpointError: there is no such folder, and it is no hub id that can be reached.
    """
    path = expand_home(src)
    if path.is_dir():
        return path.absolute()
    name = os.fspath(src)
    try:
        # it asks the hub once; hf_hub_download and Transformers ask six times, for 23 seconds, where nothing answers
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=only or DOWNLOADED, ignore_patterns=SECOND_COPIES
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        enough = f"of which {CONFIG_FILE} is enough" if only is not None and CONFIG_FILE in only else ""
        raise CheckpointError(f"{not_there(name, enough)}: {reason}") from error


def not_there(source, enough: str = "") -> str:
    """Say that `source` is neither a folder nor what the hub has. enough: a sentence's end on which files would do."""
    remedy = "; unset HF_HUB_OFFLINE, or give a local folder" if constants.HF_HUB_OFFLINE else ""
    remedy = f"{remedy or '; give a local folder'}, {enough}" if enough else remedy
    return f"there is no folder {source}, and the hub did not give it{remedy}"


def read_config(folder: Path) -> dict:
    """Read the config.json of the model in `folder`.

    Raises:
        CheckpointError: there is none, as in an adapter's folder, it cannot be read, or it names no model_type.
    """
    path = folder / CONFIG_FILE
    adapter = folder / ADAPTER_CONFIG
    if not path.exists() and adapter.exists():
        base = read_json(adapter).get("base_model_name_or_path")
        raise CheckpointError(f"{folder} holds an adapter, where a model is expected: give its base, {base!r}")
    config = read_json(path, model_type=str, architectures=list, text_config=dict, quantization_config=dict)
    if not config.get("model_type"):
        raise CheckpointError(f"{path}: model_type is {config.get('model_type')!r}; download it again")
    return config


def headers_of(path: Path) -> dict[str, Header]:
    """Read the header of every tensor of one safetensors file.

    Raises:
        CheckpointError: as `open_tensors`, or torch has no tensors of a tensor's dtype.
    """
    headers = {}
    with open_tensors(path) as handle:
        for name in handle.keys():  # noqa: SIM118 - a safe_open handle is no mapping
            try:
                tensor = handle.get_tensor(name)  # mapped, and not read
            except SafetensorError as error:
                raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
            headers[name] = Header(path.name, tensor.dtype, tuple(tensor.shape))
    return headers


def check_no_model_beside_adapter(folder: Path) -> None:
    """Raise CheckpointError where a folder holds a whole model and an adapter: Transformers would load both."""
    whole = next((file for file in (WEIGHTS_FILE, INDEX_FILE) if (folder / file).exists()), None)
    if whole is not None and (folder / ADAPTER_CONFIG).exists():
        raise CheckpointError(
            f"{folder} has both {whole} and {ADAPTER_CONFIG}, and Transformers would load both; give model and adapter a "
            "folder each"
        )


def read_headers(folder: Path) -> dict[str, Header]:
    """Read the header of every tensor of the checkpoint in `folder`, from the files that its index names.

    Raises:
        CheckpointError: no safetensors weights, a file or tensor missing or damaged, a tensor in two files, an adapter or
            an index that does not name it beside model.safetensors.
    """
    check_no_model_beside_adapter(folder)
    index = folder / INDEX_FILE
    if not index.exists():
        return headers_of(folder / WEIGHTS_FILE)
    weight_map = read_json(index, weight_map=dict).get("weight_map")
    if not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map that names files; download it again")
    if (folder / WEIGHTS_FILE).exists() and WEIGHTS_FILE not in weight_map.values():
        raise CheckpointError(
            f"{folder} has both {WEIGHTS_FILE} and {INDEX_FILE}, which names other files; Transformers would load "
            f"{WEIGHTS_FILE}: remove the one that is out of date"
        )
    by_name: dict[str, Header] = {}
    for file in sorted(set(weight_map.values())):
        if not os.path.isfile(folder / file):
            raise CheckpointError(f"there is no {folder / file}, which {INDEX_FILE} names")
        headers = headers_of(folder / file)
        if twice := sorted(headers.keys() & by_name.keys()):
            name = twice[0]
            raise CheckpointError(
                f"{folder} has {name} in {by_name[name].file} and in {file}: remove the one that is out of date"
            )
        by_name |= headers
    if lost := sorted(weight_map.keys() - by_name.keys()):
        raise CheckpointError(f"{index} names {lost[0]}, which is in none of the files; download the checkpoint again")
    return by_name


def check_float(path: Path, name: str, dtype: torch.dtype) -> None:
    """Raise CheckpointError where a tensor of the file at `path`, a weight that is not quantized, is in no dtype of
    weights."""
    if not (dtype.is_floating_point and dtype.itemsize >= 2):
        raise CheckpointError(f"{path}: {name} has dtype {dtype}; weights are floats")


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Say whether two tensors have the same dtype, shape and bytes: unlike torch.equal, NaN is NaN, and 0 is not -0."""
    alike = first.dtype == second.dtype and first.shape == second.shape
    return alike and torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


class TensorFiles:
    """The tensors in a checkpoint's files, by name; the headers are read when they are first asked for.

    Raises:
        CheckpointError: as `read_headers`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: tuple[str, Any] | None = None

    @cached_property
    def tensors(self) -> dict[str, Header]:
        """Every tensor's header, by name."""
        return read_headers(self.folder)

    def _handle(self, name: str):
        """Open the file that has the tensor. One file is open at a time: its mapped pages count as memory."""
        file = self.tensors[name].file
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, open_tensors(self.folder / file))
        return self._open[1]

    def map(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Map a stored tensor, or one expert's [1, ...] of it."""
        if expert is None:
            return self._handle(name).get_tensor(name)
        with torch.device("cpu"):  # where safetensors would hand out a slice on torch's default device
            return self._handle(name).get_slice(name)[expert : expert + 1]

    def close(self) -> None:
        """Close the file that is open."""
        self._open = None
