"""The cache of compiled kernels, in memory and on disk.

A file's name is the digest of the kernels' sources, the versions that made it, and the static parameters; it is
written whole or not at all, and one that does not match its checksum is compiled again. Loading a file runs code in it,
so the folder is this user's alone. Where much is missing, processes beside this one compile it.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import secrets
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

from ..announce import announce, is_first_of_machine
from ..processes import start_call
from ..sources import digest_sources

# of the kernels of a layer, with its first step: benchmarks/results/starting.csv
USUAL_TIME = "usually 15 to 30 s with 16 CPU cores"
CACHE_VARIABLE = "SONICMOE_HF_CACHE"
DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)

SILENT_SECONDS = 3.0  # a longer wait announces what it waits for
MAX_WAIT_SECONDS = 300.0  # for one kernel; the slowest takes less than 20 on a busy machine
_pending: dict[Path, subprocess.Popen] = {}  # files that another process is writing, or will write
_beginning = threading.Lock()


def folder() -> Path:
    """Locate the folder of compiled kernels: SONICMOE_HF_CACHE, or ~/.cache/sonicmoe_hf.

    Raises:
        ValueError: it begins with "~", and that user has no home.
    """
    root = os.environ.get(CACHE_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "sonicmoe_hf"
    try:
        return Path(root).expanduser() / "hopper"
    except RuntimeError as error:
        raise ValueError(
            f"compiled kernels cannot be kept in {root}: {error} Set {CACHE_VARIABLE} to a folder"
        ) from error


def path_of(name: str, parameters: tuple) -> Path:
    """Name the file of a kernel: a function of compiled.py and its parameters."""
    key = hashlib.sha256(_environment() + repr((name, parameters)).encode()).hexdigest()[:32]
    return folder() / f"{name}-{key}.o"


def why_untrusted() -> str | None:
    """Explain why no kernel may be loaded from the folder, where others could have put one; None where it may."""
    try:
        status = folder().lstat()
    except OSError:
        return None  # it is still to be made
    if not stat.S_ISDIR(status.st_mode):
        reason = "it is no folder"
    elif status.st_uid != os.geteuid():
        reason = f"it belongs to user {status.st_uid}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = "others can write to it"
    else:
        return None
    return (
        f"compiled kernels in {folder()} are neither loaded nor kept: {reason}. Set {CACHE_VARIABLE} to a folder of "
        "your own, or remove this one"
    )


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def is_intact(path: Path) -> bool:
    """Tell whether the file is there whole: its checksum is the one that was written beside it."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == path.with_suffix(".sha256").read_text()
    except OSError:
        return False


def missing(wanted: list[tuple[str, tuple]]) -> list[tuple[str, tuple]]:
    """List the kernels among `wanted`, (function of compiled.py, its parameters) each, that no file has."""
    return wanted if why_untrusted() else [kernel for kernel in wanted if not is_intact(path_of(*kernel))]


def cached(compile_kernel):
    """Compile a kernel once for its (static, printable) parameters: once in a process, and once on a machine."""

    @functools.cache
    @functools.wraps(compile_kernel)
    def get(*parameters):
        if reason := why_untrusted():
            _warn(reason)
            return compile_kernel(*parameters)
        path = path_of(compile_kernel.__name__, parameters)
        _wait_for(path)
        if is_intact(path):
            import cutlass.cute as cute

            return cute.runtime.load_module(str(path), enable_tvm_ffi=True)["kernel"]
        kernel = compile_kernel(*parameters)
        with contextlib.suppress(OSError):  # an unwritable cache costs the next process a compilation, no more
            _save(kernel, path)
        return kernel

    return get


def compile_ahead(wanted: list[tuple[str, tuple]], fewest: int = 2) -> None:
    """Begin to compile kernels that will soon be asked for, (function of compiled.py, its parameters), in new processes.

    `cached` waits for them, MAX_WAIT_SECONDS at most. Where there are too few kernels, CPUs or rights for that, nothing
    is begun, and where a process fails or hangs, what it leaves is compiled as it is asked for. Of a machine's ranks
    (announce.LOCAL_RANKS) the first begins them, for all.

    fewest: processes to begin, or none: 1 where this one has something else to do for seconds.
    """
    if not is_first_of_machine() or why_untrusted():
        return
    with _beginning:
        _begin(missing(wanted), fewest)


def _begin(kernels: list[tuple[str, tuple]], fewest: int) -> None:
    kernels = [kernel for kernel in kernels if path_of(*kernel) not in _pending]
    if kernels and all(process.poll() is not None for process in _pending.values()):
        names = ", ".join(sorted({name for name, _ in kernels}))
        announce(
            f"compiling {len(kernels)} Hopper kernels ({names}) for a layer of a new size, {USUAL_TIME}; they are kept "
            f"in {folder()}, and sonicmoe-hf warmup compiles them beforehand"
        )
    processes = min(len(kernels), len(os.sched_getaffinity(0)) - 1)  # a step has 10 kernels at most
    if processes < fewest:
        return
    with contextlib.suppress(OSError):
        make_folder()
        for first in range(processes):
            share = kernels[first::processes]
            process = start_call(f"{__package__}.compiled", "compile_share", share)
            _pending.update((path_of(*kernel), process) for kernel in share)


def _wait_for(path: Path) -> None:
    """Wait until another process, if one is to write the file, has written it or has ended; after MAX_WAIT_SECONDS that
    process is killed."""
    process, began, is_said = _pending.get(path), time.monotonic(), False
    while process is not None and process.poll() is None and not path.with_suffix(".sha256").exists():
        waited = time.monotonic() - began
        if waited > SILENT_SECONDS and not is_said:
            is_said = True
            made = sum(other.with_suffix(".sha256").exists() for other in [*_pending])
            announce(
                f"waiting for {path.name.rpartition('-')[0]}: {made} of {len(_pending)} Hopper kernels are compiled"
            )
        if waited > MAX_WAIT_SECONDS:
            process.kill()
            process.wait()
        time.sleep(0.01)


@functools.cache
def _environment() -> bytes:
    """Digest the sources and versions that a compiled kernel depends on beside its parameters."""
    versions = [f"{name}=={_version(name)}" for name in DISTRIBUTIONS]
    return digest_sources(Path(__file__).with_name("compiled.py")) + "\n".join([*versions, sys.version]).encode()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def make_folder() -> None:
    """Make the folder, for this user alone: what is loaded from it runs."""
    folder().parent.mkdir(parents=True, exist_ok=True)
    folder().mkdir(mode=0o700, exist_ok=True)


def _save(kernel, path: Path) -> None:
    make_folder()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / "kernel.o"
        kernel.export_to_c(str(made), "kernel", export_only_tvm_ffi_symbols=True)
        content = made.read_bytes()
    _write(path, content)
    _write(path.with_suffix(".sha256"), hashlib.sha256(content).hexdigest().encode())


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
