"""The Hopper kernels' cache on disk, which needs no GPU; test_warmup.py has the command that fills it."""

import contextlib
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("triton")

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
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(cache, "_save", save := mock.Mock(wraps=cache._save))
    name, parameters = SMALL_KERNEL

    def get():
        """Whether it was compiled, past what this process has in memory."""
        before = save.call_count
        assert callable(getattr(compiled, name).__wrapped__(*parameters))
        return save.call_count > before

    assert get() and not get()
    (kernel,) = tmp_path.glob("hopper/*.o")
    kernel.write_bytes(kernel.read_bytes()[:-100])
    assert get() and not get()
    assert len(list(tmp_path.glob("hopper/*"))) == 2, "no temporary file is left"


@pytest.mark.parametrize("changed", [*cache.DISTRIBUTIONS, "Python", "a source", "a parameter"])
def test_a_kernel_of_other_versions_sources_or_parameters_is_not_found(tmp_path, monkeypatch, changed):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    (tmp_path / "folder").mkdir()
    source = tmp_path / "folder" / "kernel.py"
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
    elif changed == "a source":
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
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
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
    """Asks for a kernel as a new process would, in a cache that has it already; tells whether it was loaded."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "mine"))
    monkeypatch.setattr(cache.cute.runtime, "load_module", lambda *_, **__: {"kernel": "loaded"})

    def small(number):
        return Kernel()

    def loaded():
        cache._warn.cache_clear()
        return cache.cached(small)(1) == "loaded"

    assert not loaded() and loaded()
    return loaded


def give_away(path, monkeypatch, to=12345):
    """Make it another user's."""
    if os.geteuid() == 0:
        os.chown(path, to, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize("spoiled", ["mine/hopper", "mine", "."])
def test_nothing_is_loaded_from_a_folder_that_others_can_write_to(ask, tmp_path, spoiled):
    (tmp_path / spoiled).chmod(0o777)
    with pytest.warns(RuntimeWarning, match=rf"{tmp_path / spoiled}: others can write to it. Set {cache.VARIABLE}"):
        assert not ask()
    (tmp_path / spoiled).chmod(0o755)
    assert ask()


def test_a_folder_for_everyone_in_which_one_can_touch_only_ones_own_may_be_above(ask, tmp_path):
    tmp_path.chmod(0o1777)  # as /tmp is
    assert ask()
    (tmp_path / "mine" / "hopper").chmod(0o1777)
    with pytest.warns(RuntimeWarning, match="others can write to it"):
        assert not ask()


@pytest.mark.parametrize("spoiled", ["mine/hopper", "mine"])
def test_nothing_is_loaded_from_a_folder_that_another_user_owns(ask, tmp_path, monkeypatch, spoiled):
    give_away(tmp_path / spoiled, monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"it belongs to user \d+. Set"):
        assert not ask()


def test_a_link_counts_by_where_it_lies_and_where_it_leads(ask, tmp_path, monkeypatch):
    (tmp_path / "links").mkdir(mode=0o755)
    (tmp_path / "links" / "cache").symlink_to(tmp_path / "mine")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "links" / "cache"))
    assert ask()
    (tmp_path / "links").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write to it"):
        assert not ask()
    (tmp_path / "links").chmod(0o755)
    (tmp_path / "mine").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write to it"):
        assert not ask()


def test_every_link_and_folder_on_the_way_counts(ask, tmp_path, monkeypatch):
    for name in ("links", "between"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "links" / "cache").symlink_to("../between/cache")
    (tmp_path / "between" / "cache").symlink_to(tmp_path / "links" / ".." / "mine")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "links" / "cache"))
    assert ask()
    (tmp_path / "between").chmod(0o777)
    with pytest.warns(RuntimeWarning, match=rf"{tmp_path}/between: others can write to it"):
        assert not ask()
    (tmp_path / "between").chmod(0o1777)  # nobody else can replace the link there
    assert ask()
    (tmp_path / "mine").rename(tmp_path / "elsewhere")
    (tmp_path / "mine").symlink_to("mine")
    assert cache.distrust() is None and not ask(), "a link to itself leads nowhere"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a link to another user")
def test_another_users_link_in_a_folder_for_everyone_is_not_followed(ask, tmp_path, monkeypatch):
    (tmp_path / "everyone").mkdir()
    (tmp_path / "everyone").chmod(0o1777)
    link = tmp_path / "everyone" / "cache"
    link.symlink_to(tmp_path / "mine")
    monkeypatch.setenv(cache.VARIABLE, str(link))
    assert ask()
    os.chown(link, 12345, -1, follow_symlinks=False)
    with pytest.warns(RuntimeWarning, match=rf"{link}: it belongs to user 12345"):
        assert not ask()


@pytest.fixture
def unmapped(monkeypatch):
    """A user namespace; gives the number of those who have none there, which the test's files can be given."""
    monkeypatch.setattr(cache, "_in_user_namespace", lambda: True)
    if os.geteuid() != 0:
        monkeypatch.setattr(cache, "_root_without_a_number", lambda: {os.getuid()})
    (number,) = cache._root_without_a_number()
    return number


@pytest.mark.parametrize("spoiled", ["mine/hopper", "mine/hopper/*.o", "mine/hopper/*.sha256"])
def test_in_a_user_namespace_what_anybody_may_have_written_is_not_loaded(
    ask, tmp_path, monkeypatch, unmapped, spoiled
):
    assert ask()
    (path,) = tmp_path.glob(spoiled)
    give_away(path, monkeypatch, unmapped)
    with contextlib.nullcontext() if path.is_file() else pytest.warns(RuntimeWarning, match="it belongs to user"):
        assert not ask()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user")
def test_in_a_user_namespace_roots_folders_may_be_above_but_not_in_a_folder_for_everyone(ask, tmp_path, unmapped):
    os.chown(tmp_path / "mine", unmapped, -1)
    assert ask()
    tmp_path.chmod(0o1777)
    with pytest.warns(RuntimeWarning, match=rf"mine: it belongs to user {unmapped}"):
        assert not ask()


def test_in_a_user_namespace_no_group_and_no_user_without_a_number_is_ones_own(ask, tmp_path, monkeypatch, unmapped):
    monkeypatch.setattr(cache, "_own_group", lambda: tmp_path.stat().st_gid)
    (tmp_path / "mine").chmod(0o775)
    with pytest.warns(RuntimeWarning, match="others can write to it"):
        assert not ask()
    with monkeypatch.context() as outside:
        outside.setattr(cache, "_in_user_namespace", lambda: False)
        assert ask()
    monkeypatch.setattr(os, "geteuid", lambda: unmapped)
    assert cache._owners() == {0}


def test_a_home_is_written_as_a_tilde_and_one_that_there_is_not_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(cache.VARIABLE, "~/kernels")
    assert cache.folder() == tmp_path / "kernels" / "hopper"
    monkeypatch.setenv(cache.VARIABLE, "~nobody-of-this-name/kernels")
    with pytest.raises(ValueError, match=f"~nobody-of-this-name/kernels: .*Set {cache.VARIABLE} to a folder"):
        cache.folder()


@pytest.mark.parametrize("suffix", [".o", ".sha256"])
def test_a_file_that_others_could_have_written_is_compiled_again(ask, tmp_path, monkeypatch, suffix):
    (file,) = tmp_path.glob(f"mine/hopper/*{suffix}")
    file.chmod(0o666)
    assert not ask() and ask(), "written again, for its owner alone"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert not ask() and ask(), "a link is not what was written"
    if os.geteuid() == 0:
        give_away(file, monkeypatch)
        assert not ask() and ask()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0, 0o644)])
def test_files_are_readable_as_the_umask_says_and_written_by_their_owner_alone(tmp_path, monkeypatch, umask, mode):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "deep" / "cache"))
    before = os.umask(umask)
    try:
        cache._save(Kernel(), cache.path_of("small", (1,)))
    finally:
        os.umask(before)
    files = list(tmp_path.glob("deep/cache/hopper/*"))
    assert [file.stat().st_mode & 0o777 for file in files] == [mode, mode]
    assert cache.distrust() is None
