"""Folders that appear whole or not at all, whatever kills the process that writes them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file

from ...errors import CheckpointError
from ...formats.tensor_files import open_tensors
from ...kernels.packed.format import is_sound
from ..reading.files import expand_home, same_bytes

ALLOWANCE = 1 << 20  # bytes on disk besides tensors, per file


def new_folder(dst: str | os.PathLike) -> Path:
    """Check a folder to make, and return its absolute path.

    Raises:
        CheckpointError: it is a link, or exists and is not an empty folder.
    """
    dst = expand_home(dst).absolute()
    if dst.is_symlink():
        raise CheckpointError(f"{dst} is a link, which would be replaced; name the folder itself, or a new one")
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise CheckpointError(f"{dst} exists; remove it or name another folder")
    return dst


@contextmanager
def appearing_whole(dst: Path, nbytes: int, files: list[Path], num_shards: int) -> Iterator[Path]:
    """Make a folder to write into, which becomes `dst` when the block ends well, and vanishes when it does not.

    Args:
        dst: the folder to make. nbytes, files, num_shards: what will be written, to check the space on the disk.
    Raises:
        CheckpointError: not enough space, or another run writes to `dst`.
        OSError, SafetensorError: writing failed.

    A killed run leaves its hidden folder behind; the next run into the same `dst` removes it. A lock, which the kernel
    releases when its holder dies, tells a dead run from a live one.
    """
    folder, lock_file = dst.parent / f".{dst.name}.converting", dst.parent / f".{dst.name}.converting.lock"
    lock = FileLock(lock_file)
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=dst.parent):
            pass  # where nothing can be written, FileLock may say that another process holds the lock
        lock.acquire(timeout=0)
    except Timeout:
        raise CheckpointError(f"another conversion into {dst} is running; wait for it or use another name") from None
    try:
        shutil.rmtree(folder, ignore_errors=True)
        new_folder(dst)  # another run may have made it before the lock was ours
        if dst.exists():
            folder.mkdir()
            folder.rename(dst)  # before any work, since onto a mount point none can
        need = nbytes + ALLOWANCE * (num_shards + len(files))
        free = shutil.disk_usage(dst.parent).free
        if free < need:
            raise CheckpointError(f"{dst} needs {need / 1e9:.2f} GB, but {dst.parent} has {free / 1e9:.2f} GB free")
        folder.mkdir()
        yield folder
        sync(folder)
        folder.rename(dst)
        sync(dst.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock_file.unlink(missing_ok=True)
        lock.release()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_file(source: Path, target: Path) -> None:
    """Copy the contents of `source`, following links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    sync(target)


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], verify: bool) -> None:
    """Write a safetensors file.

    Raises:
        CheckpointError: to `verify`, a tensor has NaN or infinite values, or does not come back byte by byte.
    """
    for name, tensor in tensors.items():
        if verify and not is_sound(tensor):
            raise CheckpointError(f"{name} has NaN or infinite values; nothing is written")
    save_file(tensors, path, metadata={"format": "pt"})
    sync(path)
    if verify:
        with open_tensors(path) as handle:
            for name, tensor in tensors.items():
                if not same_bytes(handle.get_tensor(name), tensor):
                    raise CheckpointError(f"{name} came back from disk changed; is the disk sound?")


def write_json(path: Path, content: dict) -> None:
    """Write an object as JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sync(path)
