"""Compiled kernels in memory and on disk.

A file is found by the digest of this folder's sources, the versions that made it, and the static parameters; it is
written whole or not at all, and one that does not match its checksum is compiled again. Where much is missing, processes
beside this one compile it: threads would not help, because the compiler holds Python's lock.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cutlass.cute as cute

VARIABLE = "SONICMOE_HF_CACHE"
DISTRIBUTIONS = (
    "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi",
)  # fmt: skip

MOST_PROCESSES = 8
# sonicmoe_hf without its __init__.py: to compile kernels nobody needs Transformers, which takes seconds to import
WORKER = """
import sys, types
sys.modules["sonicmoe_hf"] = package = types.ModuleType("sonicmoe_hf")
package.__path__ = {path}
from sonicmoe_hf.kernels.hopper.cache import compile_share
compile_share()
"""
_coming: dict[Path, subprocess.Popen] = {}  # the files that another process is to write


def folder() -> Path:
    """Where compiled kernels are kept: SONICMOE_HF_CACHE, or ~/.cache/sonicmoe_hf."""
    root = os.environ.get(VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sonicmoe_hf"
    return Path(root) / "hopper"


def path_of(name: str, parameters: tuple) -> Path:
    """The file of a kernel: a function of compiled.py and its parameters."""
    key = hashlib.sha256(_environment() + repr((name, parameters)).encode()).hexdigest()[:32]
    return folder() / f"{name}-{key}.o"


def is_intact(path: Path) -> bool:
    """Whether the file is there, and is the one that was written."""
    try:
        found = path.read_bytes()
        checksum = path.with_suffix(".sha256").read_text()
    except OSError:
        return False
    return hashlib.sha256(found).hexdigest() == checksum


def missing(wanted: list[tuple[str, tuple]]) -> list[tuple[str, tuple]]:
    """Which of the kernels, (function of compiled.py, its parameters), are to be compiled."""
    return [kernel for kernel in wanted if not is_intact(path_of(*kernel))]


def cached(compile_kernel):
    """Compile once for given (static, printable) parameters: once in a process, and once on a machine."""

    @functools.cache
    @functools.wraps(compile_kernel)
    def get(*parameters):
        path = path_of(compile_kernel.__name__, parameters)
        _wait_for(path)
        if is_intact(path):
            return cute.runtime.load_module(str(path), enable_tvm_ffi=True)["kernel"]
        kernel = compile_kernel(*parameters)
        with contextlib.suppress(OSError):  # an unwritable cache costs the next process a compilation, no more
            _save(kernel, path)
        return kernel

    return get


def compile_ahead(wanted: list[tuple[str, tuple]]) -> None:
    """Begin to compile kernels that will soon be asked for, (function of compiled.py, its parameters), in new processes.

    `cached` waits for them. Where there are too few kernels, CPUs or rights for that, nothing is begun, and where a
    process fails, what it leaves is compiled as it is asked for. Of a machine's ranks (torchrun, accelerate) the first
    begins them, for all.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    kernels, quiet = missing(wanted), subprocess.DEVNULL
    processes = min(len(kernels), len(os.sched_getaffinity(0)) - 1, MOST_PROCESSES)
    if processes < 2:
        return
    command = [sys.executable, "-c", WORKER.format(path=list(sys.modules["sonicmoe_hf"].__path__))]
    with contextlib.suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        for first in range(processes):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
            share = kernels[first::processes]
            _coming.update((path_of(*kernel), process) for kernel in share)
            with process.stdin as pipe:
                pickle.dump(share, pipe)


def compile_share() -> None:
    """Such a process: compile the kernels that come pickled on its standard input."""
    from . import compiled

    for name, parameters in pickle.load(sys.stdin.buffer):
        getattr(compiled, name)(*parameters)


def _wait_for(path: Path) -> None:
    """Until the file is there, if another process is to write it, or that process has ended."""
    process = _coming.get(path)
    while process is not None and process.poll() is None and not path.with_suffix(".sha256").exists():
        time.sleep(0.01)


@functools.cache
def _environment() -> bytes:
    """The digest of what a compiled kernel depends on beside its parameters."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    versions = [f"{name}=={_version(name)}" for name in DISTRIBUTIONS]
    digest.update("\n".join([*versions, sys.version]).encode())
    return digest.digest()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _save(kernel, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / "kernel.o"
        kernel.export_to_c(str(made), "kernel", export_only_tvm_ffi_symbols=True)
        content = made.read_bytes()
    _write(path, content)
    _write(path.with_suffix(".sha256"), hashlib.sha256(content).hexdigest().encode())


def _write(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
