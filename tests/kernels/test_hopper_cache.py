"""The Hopper kernels' cache on disk, which needs no GPU; test_warmup.py has the command that fills it."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("triton")

from cutlass import cute

from sonicmoe_hf.kernels.hopper import cache, compiled
from sonicmoe_hf.kernels.hopper.config import tile

pytestmark = pytest.mark.pinned

PYTHON = sys.executable
SMALL_KERNEL = "gemm_wgrad", (torch.bfloat16, 128, 128, True, tile("gemm_wgrad", 128))
TWO_PROCESSES = """
import os, torch
from sonicmoe_hf.kernels.hopper import compiled
from sonicmoe_hf.kernels.hopper.config import tile

children = []
for _ in range(2):
    if not (child := os.fork()):
        compiled.gemm_wgrad(torch.bfloat16, 128, 128, True, tile("gemm_wgrad", 128))
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
"""


@pytest.mark.slow
def test_a_kernel_is_found_on_disk_and_a_damaged_one_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cache, "_save", save := mock.Mock(wraps=cache._save))
    name, parameters = SMALL_KERNEL

    def get():
        """Tell whether it was compiled, past what this process has in memory."""
        before = save.call_count
        assert callable(getattr(compiled, name).__wrapped__(*parameters))
        return save.call_count > before

    assert get() and not get()
    (kernel,) = tmp_path.glob("hopper/*.o")
    kernel.write_bytes(kernel.read_bytes()[:-100])
    assert get() and not get()
    assert len(list(tmp_path.glob("hopper/*"))) == 2, "no temporary file is left"


@pytest.mark.parametrize("changed", [*cache.DISTRIBUTIONS, "Python", "a source outside", "a parameter"])
def test_a_kernel_of_other_versions_sources_or_parameters_is_not_found(tmp_path, monkeypatch, changed):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "compiled.py").write_text("from .kernel import x")
    (tmp_path / "folder" / "kernel.py").write_text("from ..scaled import x")
    source = tmp_path / "scaled.py"
    source.write_text("x = 1")
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "folder" / "cache.py"))
    monkeypatch.setattr(
        cache, "_environment", cache._environment.__wrapped__
    )  # past its cache, and leaving none behind
    name, parameters = SMALL_KERNEL

    def path():
        return cache.path_of(name, parameters)

    path_before = path()
    assert path() == path_before
    if changed == "a parameter":
        parameters = *parameters[:-1], "another"
    elif changed == "a source outside":
        source.write_text("x = 2")
    elif changed == "Python":
        monkeypatch.setattr(cache.sys, "version", "3.99")
    else:
        version = cache._version
        monkeypatch.setattr(cache, "_version", lambda name: "99" if name == changed else version(name))
    assert path() != path_before
    compile_kernel = mock.Mock(__name__=name, return_value="compiled", spec=[])
    monkeypatch.setattr(cache, "is_intact", lambda found: found == path_before)
    monkeypatch.setattr(cache, "_save", mock.Mock())
    assert cache.cached(compile_kernel)(*parameters) == "compiled", "what lies there is of the others"


@pytest.mark.slow
def test_processes_that_compile_the_same_kernel_at_once_leave_one_that_loads(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([PYTHON, "-c", TWO_PROCESSES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(cache, "_save", save := mock.Mock())
    name, parameters = SMALL_KERNEL
    assert callable(getattr(compiled, name).__wrapped__(*parameters))
    save.assert_not_called()
    assert len(list(tmp_path.glob("hopper/*"))) == 2, "one kernel and its checksum"


class Kernel:
    """Stands for a compiled kernel: what is tested is who may have written the file, not what is in it."""

    def export_to_c(self, path, *_, **__):
        with open(path, "wb") as file:
            file.write(b"machine code")


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Make a function that asks for a kernel as a new process would, in a cache that has it already, and tells
    whether it was loaded."""
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "mine"))
    monkeypatch.setattr(cute.runtime, "load_module", lambda *_, **__: {"kernel": "loaded"})

    def small(number):
        return Kernel()

    def loaded():
        cache._warn.cache_clear()
        return cache.cached(small)(1) == "loaded"

    assert not loaded() and loaded()
    return loaded


def test_nothing_is_loaded_from_a_folder_that_is_not_this_users_alone(ask, tmp_path, monkeypatch):
    folder = tmp_path / "mine" / "hopper"
    assert folder.stat().st_mode & 0o777 == 0o700

    def refused(reason):
        with pytest.warns(RuntimeWarning, match=rf"{folder} .*: {reason}. Set {cache.CACHE_VARIABLE}"):
            return not ask()

    for mode in (0o720, 0o702, 0o1777):
        folder.chmod(mode)
        assert refused("others can write to it")
    folder.chmod(0o755)
    assert ask(), "readable for others, as it was made before"
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert refused(rf"it belongs to user {os.getuid()}")
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert refused("it is no folder")


def test_a_home_is_written_as_a_tilde_and_one_that_there_is_not_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(cache.CACHE_VARIABLE, "~/kernels")
    assert cache.folder() == tmp_path / "kernels" / "hopper"
    monkeypatch.setenv(cache.CACHE_VARIABLE, "~nobody-of-this-name/kernels")
    with pytest.raises(ValueError, match=f"~nobody-of-this-name/kernels: .*Set {cache.CACHE_VARIABLE} to a folder"):
        cache.folder()


@pytest.mark.parametrize("suffix", [".o", ".sha256"])
def test_a_file_that_is_not_what_was_written_is_compiled_again(ask, tmp_path, suffix):
    (file,) = tmp_path.glob(f"mine/hopper/*{suffix}")
    file.write_text("other")
    assert not ask() and ask()
    file.unlink()
    assert not ask() and ask()


def test_a_long_wait_for_another_process_says_once_what_for(tmp_path, monkeypatch, capsys):
    class Process:
        polls = iter([None, None, None, 0])

        def poll(self):
            return next(self.polls)

    path, made = tmp_path / "gemm_up-0123.o", tmp_path / "gemm_down-4567.o"
    made.with_suffix(".sha256").touch()
    monkeypatch.setattr(cache, "_pending", {path: Process(), made: Process()})
    monkeypatch.setattr(cache, "SILENT_SECONDS", -1.0)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    cache._wait_for(path)
    assert capsys.readouterr().err == "sonicmoe_hf: waiting for gemm_up: 1 of 2 Hopper kernels are compiled\n"
