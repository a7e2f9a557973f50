"""The Hopper kernels' cache on disk, which needs no GPU; test_warmup.py has the command that fills it."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sonicmoe_hf.cli import warmup
from sonicmoe_hf.kernels.announce import LOCAL_RANKS, QUIET
from sonicmoe_hf.kernels.interface import Activation, Rows
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.layer.lora_operands import pack

pytest.importorskip("cutlass")
pytest.importorskip("triton")

from sonicmoe_hf.kernels import hopper
from sonicmoe_hf.kernels.hopper import cache, compiled
from sonicmoe_hf.kernels.hopper.config import tile
from sonicmoe_hf.kernels.hopper.variants import variants

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


def asked_for(monkeypatch, layout, activation, bias, dtype, H, I, rank=0):
    """The kernels that the backend's functions ask for, on a CPU with nothing compiled nor launched."""
    found = []

    def note(name):
        return lambda *parameters: found.append((name, parameters))

    for name in ("gemm_up", "gemm_down", "gemm_down_backward", "gemm_wgrad"):
        monkeypatch.setattr(compiled, name, note(name))
    monkeypatch.setattr(cache, "compile_ahead", ahead := mock.Mock())
    monkeypatch.setattr(hopper, "_run_on_its_device", lambda *_: None)
    monkeypatch.setattr(hopper, "triton", SimpleNamespace(routing_gradient=lambda parts, *_: parts))
    T, E, K = 64, 2, 2  # not few rows per expert
    transposed, interleaved = LAYOUTS[layout]

    def of(*size):
        return torch.empty(size, dtype=dtype)

    def weight(rows, columns):
        return of(E, columns, rows).transpose(1, 2) if transposed else of(E, rows, columns)

    width = activation.width(I)
    gate_up, down, h, a, x = weight(width, H), weight(H, I), of(T * K, width), of(T * K, I), of(T, H)
    gate_up_bias, down_bias = (of(E, width), of(E, H)) if bias else (None, None)
    on_gate_up, on_down = (
        pack(of(E, rank, w.shape[2]), of(E, w.shape[1], rank), 1.0, w) if rank else None for w in (gate_up, down)
    )
    extra, lora_shrink = dict.fromkeys(("up", "down", "down_backward", "up_backward_input")), of(T * K, rank)
    if rank:
        extra |= {"up": on_gate_up.forward_term(lora_shrink), "down": on_down.forward_term(lora_shrink)}
        extra |= {
            "up_backward_input": on_gate_up.backward_term(lora_shrink),
            "down_backward": on_down.backward_term(lora_shrink),
        }
    index = torch.zeros(T * K, dtype=torch.int32)
    rows = Rows(index[: E + 1], index, index, index[: T + 1], index, torch.zeros(T * K, 3, dtype=torch.int32))
    for want in ((True, True), (False, True), (True, False)):
        hopper.up(x, gate_up, gate_up_bias, rows, activation, interleaved, *want, extra["up"])
    hopper.down(a, down, down_bias, rows, extra["down"])
    hopper.up_backward_input(h, gate_up, rows, extra["up_backward_input"])
    for want in ((True, True, True), (True, False, True), (True, True, False), (True, False, False)):
        hopper.down_backward(
            x, down, down_bias, h, torch.ones(T * K), rows, activation, interleaved, *want, extra["down_backward"]
        )
    hopper.gate_up_gradient(h, x, rows, gate_up)
    hopper.down_gradient(x, a, rows, down)
    return found, [call.args[0] for call in ahead.call_args_list]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("bias", "I"), [(False, 192), (True, 192), (False, 768)]
)  # the last's up_backward_input is deep
@pytest.mark.parametrize("name", ["clamped_swiglu", "relu2"])
def test_warming_up_compiles_what_a_layer_asks_for_and_no_more(monkeypatch, layout, bias, I, name):
    """A layer asks for the tiles of any number of rows at once, so that another compiles nothing."""
    act, H = Activation(name), 256
    found, ahead = asked_for(monkeypatch, layout, act, bias, torch.bfloat16, H, I)
    expected = variants(H, I, torch.bfloat16, act, *LAYOUTS[layout], bias)
    assert {repr(kernel) for kernel in found} == {repr(kernel) for kernel in expected}  # the file is found by its repr
    of_training, of_inference, of_repeating = ahead
    assert of_inference == [] and of_training == of_repeating
    seldom = [kernel for kernel in found if kernel[0] == "gemm_up"]
    seldom += [kernel for kernel in found if kernel[0] == "gemm_down_backward" and not all(kernel[1][4:7])]
    assert {repr(kernel) for kernel in of_training} == {repr(kernel) for kernel in found if kernel not in seldom}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_with_adapters_asks_for_kernels_of_their_rank(monkeypatch, layout):
    """And compiles ahead what a step with frozen experts asks for."""
    act = Activation("swiglu")
    found, (of_training, of_inference, _) = asked_for(
        monkeypatch, layout, act, True, torch.bfloat16, 256, 192, rank=16
    )
    expected = variants(256, 192, torch.bfloat16, act, *LAYOUTS[layout], True, rank=16)
    assert {repr(kernel) for kernel in found} == {repr(kernel) for kernel in expected}
    assert all(parameters[-2] == 16 for name, parameters in found if name != "gemm_wgrad")
    assert of_inference == [] and {name for name, _ in of_training} == {"gemm_down", "gemm_down_backward"}
    assert {repr(kernel) for kernel in of_training} <= {repr(kernel) for kernel in found}


def small_gradients():
    return [("gemm_wgrad", (torch.bfloat16, 128, 128, across, tile("gemm_wgrad", 128))) for across in (False, True)]


@pytest.fixture
def alone(monkeypatch):
    """A process that no launcher started, with three CPUs."""
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))


@pytest.mark.slow
@pytest.mark.parametrize("interpreter", (PYTHON, "/bin/false", "/nowhere", "hangs"))
def test_kernels_come_from_other_processes_or_are_compiled_here(tmp_path, monkeypatch, alone, interpreter):
    if interpreter == "hangs":
        (tmp_path / interpreter).write_text("#!/bin/sh\nexec sleep 600\n")
        (tmp_path / interpreter).chmod(0o755)
        monkeypatch.setattr(cache, "MAX_WAIT_SECONDS", 0.5)
        interpreter = str(tmp_path / interpreter)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "executable", interpreter)
    monkeypatch.setattr(cache, "_save", save := mock.Mock(wraps=cache._save))
    cache.compile_ahead(small_gradients())
    for name, parameters in small_gradients():
        assert callable(getattr(compiled, name).__wrapped__(*parameters))  # past what this process has already
    assert save.call_count == (0 if interpreter == PYTHON else 2)
    assert len(list(tmp_path.glob("hopper/*.o"))) == 2
    assert all(process.poll() is not None for process in cache._coming.values() if interpreter != PYTHON)


@pytest.mark.parametrize(
    ("kernels", "cpus", "variables"),
    [
        (1, 9, {}),
        (2, 2, {}),
        (2, 9, {"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}),
        *((2, 9, {name: "1"}) for name in LOCAL_RANKS),
    ],
)
def test_nothing_is_begun_for_little_and_by_other_ranks(tmp_path, monkeypatch, alone, kernels, cpus, variables):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cpus))
    monkeypatch.setattr(subprocess, "Popen", begun := mock.Mock())
    cache.compile_ahead(small_gradients()[:kernels])
    begun.assert_not_called()


@pytest.mark.parametrize("variables", [{}, {"LOCAL_RANK": "0", "SLURM_LOCALID": "5"}, {"SLURM_LOCALID": "0"}])
def test_the_first_rank_begins_for_all(tmp_path, monkeypatch, alone, variables):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "Popen", begun := mock.Mock(side_effect=OSError))
    cache.compile_ahead(small_gradients())
    begun.assert_called_once()


def test_what_is_compiled_is_said_once_and_not_where_bars_are_off(tmp_path, monkeypatch, alone, capsys):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", mock.Mock(side_effect=OSError))
    monkeypatch.delenv(QUIET, raising=False)
    cache.compile_ahead(small_gradients())
    said = capsys.readouterr().err
    name = small_gradients()[0][0]
    assert f"compiling 2 Hopper kernels ({name})" in said and cache.USUALLY in said and str(tmp_path) in said
    monkeypatch.setenv(QUIET, "1")
    cache.compile_ahead(small_gradients())
    monkeypatch.delenv(QUIET)
    monkeypatch.setenv("LOCAL_RANK", "1")
    cache.compile_ahead(small_gradients())
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(cache, "is_intact", lambda path: True)
    cache.compile_ahead(small_gradients())
    assert not capsys.readouterr().err


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
def test_nothing_is_loaded_from_a_folder_that_others_can_write_to(ask, tmp_path, alone, monkeypatch, spoiled):
    (tmp_path / spoiled).chmod(0o777)
    with pytest.warns(RuntimeWarning, match=rf"{tmp_path / spoiled}: others can write to it. Set {cache.VARIABLE}"):
        assert not ask()
    monkeypatch.setattr(subprocess, "Popen", begun := mock.Mock())
    cache.compile_ahead(small_gradients())
    begun.assert_not_called()
    with pytest.raises(warmup.WarmupError, match="others can write to it"):
        list(warmup.compile_kernels(small_gradients(), 1))
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
