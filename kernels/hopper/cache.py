"""Compiled kernels in memory and on disk.

A file is found by the digest of this folder's sources, the versions that made it, and the static parameters; it is
written whole or not at all, and one that does not match its checksum is compiled again. Loading a file runs code in it:
one that others than this user and root could have written is not loaded. Where much is missing, processes beside this one
compile it: threads would not help, because the compiler holds Python's lock.
"""

import contextlib
import functools
import grp
import hashlib
import importlib.metadata
import os
import pickle
import pwd
import secrets
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cutlass.cute as cute

from ..announce import announce, is_first_rank

USUALLY = "usually 15 to 30 s with 16 CPU cores"  # of a layer's, with its first step: benchmarks/results/starting.csv
VARIABLE = "SONICMOE_HF_CACHE"
DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)

MAX_LINKS = 40  # on one path, as in Linux
MAX_PROCESSES = 8
MAX_WAIT_SECONDS = 300.0  # for one kernel; the slowest takes less than 20 on a busy machine
# sonicmoe_hf without its __init__.py: to compile kernels nobody needs Transformers, which takes seconds to import
WORKER = """
import sys, types
sys.modules["sonicmoe_hf"] = package = types.ModuleType("sonicmoe_hf")
package.__path__ = {path}
from sonicmoe_hf.kernels.hopper.compiled import compile_share
compile_share()
"""
_coming: dict[Path, subprocess.Popen] = {}  # the files that another process is to write


def folder() -> Path:
    """Where compiled kernels are kept: SONICMOE_HF_CACHE, or ~/.cache/sonicmoe_hf.

    Raises:
        ValueError: it begins with "~", and that user has no home.
    """
    root = os.environ.get(VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "sonicmoe_hf"
    try:
        return Path(root).expanduser() / "hopper"
    except RuntimeError as error:
        raise ValueError(f"compiled kernels cannot be kept in {root}: {error} Set {VARIABLE} to a folder") from error


def path_of(name: str, parameters: tuple) -> Path:
    """The file of a kernel: a function of compiled.py and its parameters."""
    key = hashlib.sha256(_environment() + repr((name, parameters)).encode()).hexdigest()[:32]
    return folder() / f"{name}-{key}.o"


def distrust() -> str | None:
    """Why no kernel may be loaded from the folder: others can write there, or could put another folder in its place."""
    for hop in _hops(folder()):
        status = hop.status
        owners = _owners() if hop.is_last or hop.is_in_shared else _owners() | _root_without_a_number()
        # others can make files in a folder like /tmp, but move or remove only their own; the mode of a link says nothing
        harmless = stat.S_ISLNK(status.st_mode) or (_is_sticky(status) and not hop.is_last)
        writable = not harmless and _others_can_write(status)
        if writable or status.st_uid not in owners:
            whose = "others can write to it" if writable else f"it belongs to user {status.st_uid}"
            return (
                f"compiled kernels in {folder()} are neither loaded nor kept, because of {hop.path}: {whose}. Set "
                f"{VARIABLE} to a folder that you alone can write to, or change owner and mode (chmod go-w)"
            )
    return None


class Hop(NamedTuple):
    """A folder or a link on the way to a folder. is_in_shared: others too can make files beside it, as in /tmp."""

    path: Path
    status: os.stat_result
    is_in_shared: bool
    is_last: bool


def _hops(target: Path) -> Iterator[Hop]:
    """Everything that the system passes on the way to `target`, from / on. It ends where this user will make the rest."""
    here, status, links = Path("/"), os.lstat("/"), 0
    rest = list(target.absolute().parts[1:])
    yield Hop(here, status, False, not rest)
    while rest:
        name = rest.pop(0)
        if name == "..":
            here = here.parent  # of a path without links
            continue
        path = here / name
        is_in_shared = _others_can_write(here.stat())
        try:
            status = path.lstat()
        except OSError:
            return
        is_link = stat.S_ISLNK(status.st_mode)
        yield Hop(path, status, is_in_shared, not rest and not is_link)
        if not is_link:
            here = path
            continue
        links += 1
        if links > MAX_LINKS:
            return  # nothing can be opened there
        pointed_to = path.readlink()
        if pointed_to.is_absolute():
            here = Path("/")
        rest = [part for part in pointed_to.parts if part != "/"] + rest


def _owners() -> set[int]:
    """Root, and this user unless the number is the one for all users that have none here (in a user namespace)."""
    return {0, os.geteuid()} - _root_without_a_number()


def _root_without_a_number() -> set[int]:
    """In a user namespace, as Apptainer makes, the number of root and of all others that have none there."""
    with contextlib.suppress(OSError):
        if _in_user_namespace():
            return {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    return set()


def _in_user_namespace() -> bool:
    """Whether numbers of users may be others than the machine's."""
    try:
        return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    except OSError:
        return True


def _is_sticky(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_ISVTX)


def _others_can_write(status: os.stat_result) -> bool:
    """Whether anybody but the owner and root can write there, by mode and group."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and status.st_gid not in _groups_of_one()


def _groups_of_one() -> set[int]:
    """Root's group, and the one that has this user alone, as many systems give everyone; of a user namespace none."""
    return set() if _in_user_namespace() else {0, _own_group()}


@functools.cache
def _own_group() -> int:
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return 0
    return user.pw_gid if group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name} else 0


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def is_intact(path: Path) -> bool:
    """Whether the file is there, is the one that was written, and nobody else could have written it."""
    try:
        for file in (path, path.with_suffix(".sha256")):
            status = file.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in _owners() or _others_can_write(status):
                return False
        content = path.read_bytes()
        checksum = path.with_suffix(".sha256").read_text()
    except OSError:
        return False
    return hashlib.sha256(content).hexdigest() == checksum


def missing(wanted: list[tuple[str, tuple]]) -> list[tuple[str, tuple]]:
    """Which of the kernels, (function of compiled.py, its parameters), are to be compiled."""
    return wanted if distrust() else [kernel for kernel in wanted if not is_intact(path_of(*kernel))]


def cached(compile_kernel):
    """Compile once for given (static, printable) parameters: once in a process, and once on a machine."""

    @functools.cache
    @functools.wraps(compile_kernel)
    def get(*parameters):
        if reason := distrust():
            _warn(reason)
            return compile_kernel(*parameters)
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

    `cached` waits for them, MAX_WAIT_SECONDS at most. Where there are too few kernels, CPUs or rights for that, nothing
    is begun, and where a process fails or hangs, what it leaves is compiled as it is asked for. Of a machine's ranks
    (announce.LOCAL_RANKS) the first begins them, for all.
    """
    if not is_first_rank() or distrust():
        return
    kernels, quiet = missing(wanted), subprocess.DEVNULL
    if kernels:
        names = ", ".join(sorted({name for name, _ in kernels}))
        announce(
            f"compiling {len(kernels)} Hopper kernels ({names}) for a layer of a new size, {USUALLY}; they are kept in "
            f"{folder()}, and sonicmoe-hf warmup compiles them beforehand"
        )
    processes = min(len(kernels), len(os.sched_getaffinity(0)) - 1, MAX_PROCESSES)
    if processes < 2:
        return
    command = [sys.executable, "-c", WORKER.format(path=list(sys.modules["sonicmoe_hf"].__path__))]
    with contextlib.suppress(OSError):
        make_folder()
        for first in range(processes):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
            share = kernels[first::processes]
            _coming.update((path_of(*kernel), process) for kernel in share)
            with process.stdin as pipe:
                pickle.dump(share, pipe)


def _wait_for(path: Path) -> None:
    """Until the file is there, if another process is to write it, or that process has ended; one that hangs is ended."""
    process = _coming.get(path)
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while process is not None and process.poll() is None and not path.with_suffix(".sha256").exists():
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
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


def make_folder() -> None:
    """Make the folder, writable for this user alone whatever the umask says: in another nothing would be loaded."""
    for path in (*reversed(folder().absolute().parents), folder()):
        path.mkdir(mode=0o755, exist_ok=True)


def _save(kernel, path: Path) -> None:
    make_folder()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / "kernel.o"
        kernel.export_to_c(str(made), "kernel", export_only_tvm_ffi_symbols=True)
        content = made.read_bytes()
    _write(path, content)
    _write(path.with_suffix(".sha256"), hashlib.sha256(content).hexdigest().encode())


def _write(path: Path, content: bytes) -> None:
    """Write a file as one, readable for whom the umask says: an image's users too may load what was made with it."""
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(scratch, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
