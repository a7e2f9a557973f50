"""Experts in host memory on several ranks: those of one host share one copy under DDP, and what would share or shard
experts otherwise is an error."""

import contextlib
import gc
import mmap
import os
import signal
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.adapters import with_lora
from helpers.models import batch, loss_and_gradients
from helpers.parallel import OWN_BATCH, assert_mean_of_ranks, whole_gradients
from helpers.ranks import WORLD, forkserver, join
from helpers.streamed import build_small, build_streamed, host_weights, peak_growth, save_shards, streamed_layers
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from sonicmoe_hf import UnsupportedExpertsError, UnsupportedModelError, from_pretrained, patch_model, quantize_experts
from sonicmoe_hf.models import loading
from sonicmoe_hf.streaming import host_memory, placement
from sonicmoe_hf.streaming.copies import Copies, page_aligned
from sonicmoe_hf.streaming.host_memory import FILE
from sonicmoe_hf.streaming.placement import expert_layers
from sonicmoe_hf.streaming.stream import room_for
from sonicmoe_hf.streaming.weight import HostWeight

LAYERS, PAGE = 4, mmap.PAGESIZE
TIMEOUT = 15  # seconds, of the process group that loses a rank


@pytest.mark.parametrize("by", ["tensor parallelism", "DeepSpeed's ZeRO-3"])
def test_loading_for_ranks_that_share_or_shard_experts_is_an_error(late_copies, monkeypatch, tmp_path, by):
    build_small().save_pretrained(tmp_path)
    config = {"distributed_config": DistributedConfig(tp_size=2)} if by == "tensor parallelism" else {}
    monkeypatch.setattr(loading, "is_deepspeed_zero3_enabled", lambda: not config)
    with pytest.raises(UnsupportedModelError, match="experts_memory takes experts that ranks neither share nor shard"):
        from_pretrained(tmp_path, experts_memory=0, **config)


@pytest.mark.parametrize(
    "mark, by",
    [(("_is_expert_parallel", True), "expert"), (("ds_id", 7), r"DeepSpeed's ZeRO-3")],  # ds_id: deepspeed.zero.Init's
)
def test_experts_that_ranks_share_or_shard_are_an_error(late_copies, mark, by):
    model = build_small()
    experts = model.model.layers[1].mlp.experts
    setattr(experts.down_proj if mark[0] == "ds_id" else experts, *mark)
    with pytest.raises(UnsupportedExpertsError, match=rf"layers\.1\.mlp\.experts is shared or sharded .* \(.*{by}"):
        patch_model(model, experts_memory=0)
    assert not host_weights(model)


def with_adapters(experts_memory, format=None):
    return with_lora(build_streamed(experts_memory, format), ["mlp.experts.down_proj"], target_modules=["q_proj"])


def memory_of(process="self"):
    """Read {inode: bytes that it takes} of the shared memory that a process holds for experts."""
    gc.collect()  # models that are gone
    found = {}
    for number in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            if FILE in os.readlink(f"/proc/{process}/fd/{number}"):
                status = os.stat(f"/proc/{process}/fd/{number}")
                found[status.st_ino] = status.st_blocks * 512
    return found


def under_ddp(rank, format):
    found = []
    for experts_memory in (None, 0):
        model = with_adapters(experts_memory, format)
        loss = loss_and_gradients(DistributedDataParallel(model), batch(**OWN_BATCH[rank]))["loss"]
        found.append((loss, whole_gradients(model)))
    return *found, memory_of(), [layer.fills for layer in streamed_layers(model)]


@pytest.mark.parametrize("format", [None, "nf4"])
def test_ddp_shares_one_copy_of_experts_in_host_memory(ranks, format):
    results = ranks.run(under_ddp, format)
    for (loss, resident), (own_loss, host), *_ in results:
        assert torch.equal(loss, own_loss) and resident.keys() == host.keys()
        assert all(torch.equal(resident[name], host[name]) for name in resident)
    assert_mean_of_ranks(with_adapters(None, format), [host for _, host, *_ in results])
    assert results[0][2] == results[1][2] and len(results[0][2]) == 2 * LAYERS, "the same memory"
    assert [fills for *_, fills in results] == [[True, False] * 2, [False, True] * 2], "each rank fills half of it"


def loaded(rank, folder, format):
    """Load a model; return its logits, how many experts' weights were on the device at most, and bytes of the experts and
    of the memory that holds them. Then the first rank changes a byte, and the others return whether they see it."""
    place, there = placement.LoadingPlacement.place, []

    def counted(self, model, name):
        there.append(
            sum(
                not w.is_meta and not isinstance(w, HostWeight)
                for _, e in expert_layers(model)
                for w in e.parameters()
            )
        )
        place(self, model, name)

    with mock.patch.object(placement.LoadingPlacement, "place", counted):
        model = from_pretrained(folder, experts_quantization=format, experts_memory=0)
    with torch.no_grad():
        logits = model(**batch(2, 8)).logits
    first = host_weights(model)[0].codes.view(torch.uint8).flatten()
    before = int(first[0])
    dist.barrier()
    if rank == 0:
        first[0] = before ^ 1
    dist.barrier()
    stored = sum(weight.nbytes for weight in host_weights(model))
    return logits, max(there), stored, memory_of(), int(first[0]) == before ^ 1


@pytest.mark.parametrize("format", [None, "nf4"])
def test_ranks_load_one_copy_weight_by_weight(ranks, tmp_path, format):
    build_small().bfloat16().save_pretrained(tmp_path)
    with torch.no_grad():
        expected = from_pretrained(tmp_path, experts_quantization=format)(**batch(2, 8)).logits
    results = ranks.run(loaded, str(tmp_path), format)
    for logits, on_device, stored, memory, seen in results:
        assert torch.equal(logits, expected) and on_device == 1 and seen, "one rank's write is seen by the other"
        assert len(memory) == 2 * LAYERS and stored <= sum(memory.values()) <= stored + len(memory) * (
            PAGE + room_for(0)
        )
    assert results[0][3] == results[1][3], "the same memory"


def loaded_while_watched(rank, folder):
    from_pretrained(folder, experts_memory=0)  # imports
    with peak_growth() as peak:
        model = from_pretrained(folder, experts_memory=0)
    weights = [weight.nbytes for weight in host_weights(model)]
    return peak[0], sum(weights), max(weights), sum(memory_of().values())


def test_loading_takes_one_copy_of_the_host_memory_and_a_weight_a_rank(ranks, tmp_path):
    """Each rank adds what Transformers makes of one weight on the device, which is the CPU here: its experts as they are
    read, stacks of their gates and ups, and both in one. What earlier tests have freed comes back with up to two more."""
    save_shards(tmp_path)
    for own, stored, largest, shared_bytes in ranks.run(loaded_while_watched, str(tmp_path)):
        assert stored <= shared_bytes < 1.01 * stored and own < 6 * largest < 0.7 * stored


def with_weights_of_its_own(rank, folders):
    model, errors = build_small(seed=rank), []
    for place in (
        lambda: patch_model(model, experts_memory=0),
        lambda: quantize_experts(model, "nf4", experts_memory=0),
        lambda: from_pretrained(folders[rank], experts_memory=0),
    ):
        with pytest.raises(
            ValueError, match=r"rank.*other weights in model\.layers\.0\.mlp\.experts\.\w+ than"
        ) as error:
            place()
        errors.append(str(error.value))
    return errors, len(host_weights(model)), {type(parameter) for parameter in model.parameters()}


def test_ranks_with_other_weights_do_not_share_memory(ranks, tmp_path):
    folders = [str(tmp_path / str(rank)) for rank in range(WORLD)]
    for rank, folder in enumerate(folders):
        build_small(seed=rank).save_pretrained(folder)
    for rank, (errors, moved, kinds) in enumerate(ranks.run(with_weights_of_its_own, folders)):
        assert all(error.startswith(f"ranks [{1 - rank}]") for error in errors)
        assert not moved and kinds == {torch.nn.Parameter}, "nothing is changed"


def without_a_way(rank, way):
    """Place experts where the last rank cannot share memory; return (the warnings, logits, how many layers it fills)."""
    refused = mock.Mock(side_effect=PermissionError(13, "Permission denied", "/proc/1/fd/5"))
    monkeypatch = pytest.MonkeyPatch()
    ways = {"memfd": (os, "memfd_create"), "its size": (os, "ftruncate"), "/proc": (host_memory, "_open")}
    patching = mock.patch.object(*ways[way], refused)
    with (
        patching if rank == WORLD - 1 else contextlib.nullcontext(),
        mock.patch.object(host_memory.logger, "warning") as warning,
    ):
        model = build_streamed()
        once = sum(weight.nbytes for weight in host_weights(model))
        monkeypatch.setattr(placement, "free_on_host", lambda: once * 3 // 2)
        with pytest.raises(MemoryError, match="keep more experts on the GPU"):
            build_streamed()
        monkeypatch.undo()
    with torch.no_grad():
        logits = model(**batch(2, 8)).logits
    filled = sum(layer.fills for layer in streamed_layers(model))
    return [call.args[0] for call in warning.call_args_list], logits, filled, memory_of()


@pytest.mark.parametrize("way", ["memfd", "its size", "/proc"])
def test_where_the_system_does_not_share_memory_each_rank_has_a_copy(ranks, way):
    expected = build_streamed(None)(**batch(2, 8)).logits
    for warnings, logits, filled, memory in ranks.run(without_a_way, way):
        assert torch.equal(logits, expected) and filled == LAYERS and not memory
        assert (
            "2 ranks of this host hold a copy each" in warnings[0]
            and "Permission denied: '/proc/1/fd/5'" in warnings[0]
        )


def where_one_driver_does_not_pin(rank, after, shares):
    """Place experts while the last rank pins so many weights and no more; return its error, whether the model is as
    it was, what is pinned and shared then, and how many layers a second try places."""
    model, pinned = build_small(), set()

    def pin(copies, host):
        if rank == WORLD - 1 and len(pinned) == after:
            raise MemoryError("the driver did not pin it")
        pinned.add(host.data_ptr())

    copies = mock.patch.multiple(Copies, pin=pin, unpin=lambda copies, host: pinned.discard(host.data_ptr()))
    with copies, contextlib.nullcontext() if shares else mock.patch.object(os, "memfd_create", side_effect=OSError):
        with pytest.raises(MemoryError) as raised:
            patch_model(model, experts_memory=0)
        left, error = [len(host_weights(model)), len(pinned)], str(raised.value)
        del raised
        left.append(memory_of())
    patch_model(model, experts_memory=0)
    return error, left, len(host_weights(model))


@pytest.mark.parametrize("after, shares", [(0, True), (LAYERS + 1, True), (3, False)])
def test_a_rank_whose_driver_does_not_pin_ends_the_others_at_once_with_its_error(ranks, after, shares):
    """The driver fails at the first weight that a rank fills, at one that another rank fills, and where each rank has a
    copy."""
    for error, left, placed in ranks.run(where_one_driver_does_not_pin, after, shares):
        assert error == "rank 1 of this host: the driver did not pin it"
        assert left == [0, 0, {}] and placed == 2 * LAYERS, "nothing is changed, pinned or open, and all may try again"


def test_a_file_that_is_not_mapped_is_closed():
    file = os.memfd_create(FILE)
    with pytest.raises(ValueError, match="file size"):
        page_aligned(PAGE, file)  # an empty one
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_ranks_that_have_not_met_yet_are_told_that_each_holds_a_copy(late_copies, monkeypatch, messages):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_weights(build_streamed())
    assert messages.about("4 ranks of this host hold a copy each") and messages.about("make TrainingArguments")


def written(rank):
    model, same, other = build_streamed(), build_streamed(None).state_dict(), build_streamed(None, seed=1).state_dict()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(same)
    with pytest.raises(RuntimeError, match="ranks of this host share, and do not take other values"):
        model.load_state_dict(other)
    experts = {name: value for name, value in model.state_dict().items() if "experts" in name}
    return experts, all(torch.equal(experts[name], expected[name]) for name in experts)


def test_shared_experts_take_the_values_that_they_have_alone(ranks):
    (given, is_whole), (_, others) = ranks.run(written)
    assert (
        is_whole
        and others
        and all(
            torch.equal(value, given[name])
            for name, value in build_streamed(None).state_dict().items()
            if name in given
        )
    )


def trained(rank, folder, steps, resume=None):
    rows = [{key: value[0] for key, value in batch(1, 8, seed=seed).items()} for seed in range(12)]
    args = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        save_steps=1,
        report_to="none",
        use_cpu=True,
        seed=0,
        lr_scheduler_type="constant",
    )
    model = with_adapters(0, "nf4")
    Trainer(model=model, args=args, train_dataset=rows).train(resume_from_checkpoint=resume)
    model.save_pretrained(f"{folder}/adapter")
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.pinned  # Transformers 5.17 resumes no optimiser on several CPU ranks
def test_ranks_that_share_memory_resume_and_save(ranks, tmp_path):
    whole = ranks.run(trained, str(tmp_path), 3)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    resumed = ranks.run(trained, str(tmp_path), 3, f"{tmp_path}/checkpoint-2")
    for expected, given in zip(whole, resumed):
        assert all(torch.equal(given[name], value) for name, value in expected.items())
    given = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == given.keys() and all(torch.equal(given[name], value) for name, value in saved.items())


def train_until_one_is_killed(rank, folder):
    join(rank, WORLD, f"{folder}/store", timeout=timedelta(seconds=TIMEOUT))
    model = DistributedDataParallel(with_adapters(0))
    for step in range(3):
        loss_and_gradients(model, batch(seed=rank))
        (folder / f"{rank} did {step}").write_text(" ".join(map(str, memory_of())))
        if step == 1 and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.pinned
def test_memory_is_freed_when_one_rank_is_killed_and_the_other_has_ended_with_an_error(tmp_path):
    processes = [
        forkserver().Process(target=train_until_one_is_killed, args=(rank, tmp_path)) for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + 120
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 1]
    files = set((tmp_path / "1 did 1").read_text().split())
    assert len(files) == 2 * LAYERS and not (tmp_path / "1 did 2").exists()
    left = [
        process
        for process in os.listdir("/proc")
        if process.isdigit() and files & set(map(str, _memory_of_any(process)))
    ]
    assert not left


def _memory_of_any(process):
    with contextlib.suppress(OSError):
        return memory_of(process)
    return {}


def under_fsdp2(rank):
    model = with_adapters(0)
    try:
        fully_shard(model.get_base_model().model.layers[0])
    except RuntimeError as error:
        return str(error)


def test_fsdp2_of_experts_in_host_memory_is_an_error(ranks):
    assert all("FSDP" in error and "replicate them by DDP" in error for error in ranks.run(under_fsdp2))
