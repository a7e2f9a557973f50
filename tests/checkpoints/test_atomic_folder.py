"""The folder that is written: seen to be free before the work, looked at again under the lock. Links lead nowhere else."""

import errno
import os
from pathlib import Path

import pytest
from helpers.checkpoints import make
from peft import LoraConfig, get_peft_model

from sonicmoe_hf import CheckpointError, convert_adapter, convert_checkpoint
from sonicmoe_hf.checkpoints import atomic_folder, convert

pytestmark = pytest.mark.pinned


@pytest.fixture
def hub(tmp_path):
    make(tmp_path / "hub", "olmoe")
    return tmp_path / "hub"


def assert_refused_before_any_work(hub, target, match, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(convert, "_write_shards", lambda *args: pytest.fail("the work was begun"))
        with pytest.raises(CheckpointError, match=match):
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
    assert_refused_before_any_work(
        hub, tmp_path / "native", "if it is a mount point, name a folder in it", monkeypatch
    )
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


def test_links_out_of_an_adapter_are_named(hub, tmp_path):
    adapted = get_peft_model(make(hub, "olmoe"), LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "adapter" / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"notes\.txt is a link to .*secret, outside"):
        convert_adapter(tmp_path / "adapter", tmp_path / "converted", trained_on=hub)
    assert not (tmp_path / "converted").exists()


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
