"""The folder that is written: free before the work and under the lock, whole or not there. Links lead nowhere else."""

import errno
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from filelock import FileLock
from helpers.checkpoints import SHARDS, config_in, make, same_bits, tensors_in

from sonicmoe_hf import CheckpointError, convert_checkpoint
from sonicmoe_hf.checkpoints.writing import atomic_folder, write
from sonicmoe_hf.tools.cli.main import main

pytestmark = pytest.mark.pinned


@pytest.fixture
def hub(tmp_path):
    make(tmp_path / "hub", "olmoe")
    return tmp_path / "hub"


def assert_refused_before_any_work(hub, target, match, monkeypatch, error=CheckpointError):
    with monkeypatch.context() as patch:
        patch.setattr(write, "_write_shards", lambda *args: pytest.fail("the work was begun"))
        with pytest.raises(error, match=match):
            convert_checkpoint(hub, target)
    assert not [path for path in target.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("there", [True, False], ids=["to an empty folder", "to nothing"])
def test_a_destination_that_is_a_link_is_refused_before_any_work(there, hub, tmp_path, monkeypatch):
    if there:
        (tmp_path / "elsewhere").mkdir()
    (tmp_path / "native").symlink_to(tmp_path / "elsewhere")
    assert_refused_before_any_work(hub, tmp_path / "native", "native is a link", monkeypatch)
    assert (tmp_path / "native").is_symlink()


def test_an_empty_mount_point_is_refused_before_any_work(hub, tmp_path, monkeypatch):
    (tmp_path / "native").mkdir()

    def rename(folder, target):  # as the kernel answers where `target` is mounted
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Path, "rename", rename)
    assert_refused_before_any_work(hub, tmp_path / "native", os.strerror(errno.EBUSY), monkeypatch, OSError)
    assert (tmp_path / "native").is_dir()


def test_a_destination_made_by_another_run_meanwhile_is_seen_under_the_lock(hub, tmp_path, monkeypatch):
    acquire = atomic_folder.FileLock.acquire

    def acquire_late(lock, **options):
        (tmp_path / "native").mkdir()
        (tmp_path / "native" / "mine").write_text("the other run's")
        return acquire(lock, **options)

    monkeypatch.setattr(atomic_folder.FileLock, "acquire", acquire_late)
    assert_refused_before_any_work(hub, tmp_path / "native", "exists; remove it", monkeypatch)
    assert (tmp_path / "native" / "mine").read_text() == "the other run's"


def test_links_out_of_a_checkpoint_are_named_and_their_content_is_not_copied(hub, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("mine")
    (hub / "notes.txt").symlink_to(tmp_path / "secret")
    assert_refused_before_any_work(hub, tmp_path / "native", "notes.txt is a link to .*secret, outside", monkeypatch)
    (hub / "notes.txt").unlink()
    (hub / "chat_templates").symlink_to(tmp_path / "templates")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "tools.jinja").write_text("mine")
    assert_refused_before_any_work(hub, tmp_path / "native", "tools.jinja is a link to", monkeypatch)


def test_links_within_a_checkpoint_and_to_the_blobs_of_the_hubs_cache_are_followed(hub, tmp_path):
    (hub / "LICENSE").write_text("terms")
    (hub / "LICENSE.txt").symlink_to("LICENSE")
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "abc", tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in list(hub.iterdir()):
        (blobs / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (tmp_path / "link").symlink_to(snapshot)
    for source in (hub, snapshot, tmp_path / "link"):
        convert_checkpoint(source, tmp_path / f"of {source.name}")
        copied = tmp_path / f"of {source.name}" / "LICENSE.txt"
        assert copied.read_text() == "terms" and not copied.is_symlink()


def test_an_existing_target_is_never_touched(hub):
    (hub.parent / "file").write_text("mine")
    for target in (hub, hub.parent / "file"):
        with pytest.raises(CheckpointError, match="exists; remove it"):
            convert_checkpoint(hub, target)
    (hub.parent / "empty").mkdir()
    convert_checkpoint(hub, hub.parent / "empty")
    assert config_in(hub.parent / "empty")["model_type"] == "sonicmoe_olmoe"


def test_two_conversions_into_one_folder_do_not_meet(hub):
    with FileLock(hub.parent / ".native.converting.lock"):
        (hub.parent / ".native.converting").mkdir()
        with pytest.raises(CheckpointError, match="another conversion into"):
            convert_checkpoint(hub, hub.parent / "native")
        assert (hub.parent / ".native.converting").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a place where nobody can write")
def test_a_place_that_cannot_be_written_is_not_taken_for_another_conversion(hub):
    with pytest.raises(OSError, match=r"No such file|denied|Read-only"):
        convert_checkpoint(hub, "/proc/native")


@pytest.fixture
def interruptible():
    """Make SIGINT interrupt: a test run that a shell started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_command_says_so_in_one_line_and_leaves_nothing(hub, monkeypatch, capsys, interruptible):
    monkeypatch.setattr(atomic_folder, "save_file", lambda *args, **kwargs: signal.raise_signal(signal.SIGINT))
    assert main(["convert", str(hub), str(hub.parent / "native"), "--layout", "native"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "sonicmoe-hf: interrupted"
    assert sorted(path.name for path in hub.parent.iterdir()) == ["hub"]


def _process(src, dst):
    """Fork a process that converts: started, it is at work at once."""
    options = {"max_shard_size": SHARDS}
    process = multiprocessing.get_context("fork").Process(target=convert_checkpoint, args=(src, dst), kwargs=options)
    process.start()
    return process


def _seconds_of_a_process(src, dst):
    """Measure how long it takes until the folder is there; the process takes longer to end."""
    start = time.perf_counter()
    process = _process(src, dst)
    while process.is_alive() and not dst.exists():
        time.sleep(5e-4)
    seconds = time.perf_counter() - start
    process.join()
    assert process.exitcode == 0
    shutil.rmtree(dst)
    return seconds


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_kill_at_any_moment_leaves_nothing_or_the_whole(tmp_path):
    """50 processes killed with SIGKILL at random moments of a conversion, each after the litter of the one before."""
    make(tmp_path / "hub", "qwen3_moe", num_hidden_layers=3)
    convert_checkpoint(tmp_path / "hub", tmp_path / "expected", max_shard_size=SHARDS)
    duration = min(_seconds_of_a_process(tmp_path / "hub", tmp_path / f"timed {i}") for i in range(3))
    expected, target = tensors_in(tmp_path / "expected"), tmp_path / "native"
    dice, outcomes = random.Random(0), {"nothing": 0, "the whole": 0, "litter": 0}
    for _ in range(50):
        process = _process(tmp_path / "hub", target)
        time.sleep(dice.uniform(0, 1.3 * duration))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        outcomes["litter"] += (tmp_path / ".native.converting").exists()
        outcomes["the whole" if target.exists() else "nothing"] += 1
        if target.exists():
            assert same_bits(tensors_in(target), expected)
            assert config_in(target) == config_in(tmp_path / "expected")
            shutil.rmtree(target)
    convert_checkpoint(tmp_path / "hub", target, max_shard_size=SHARDS)
    assert same_bits(tensors_in(target), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "hub", "native"]
    assert outcomes["nothing"] > 3 and outcomes["litter"] > 3, f"the moments were not spread well: {outcomes}"
