"""Experts' places: from files, from memory, by bytes; what such weights are to torch; errors that name the remedy."""

import copy
import os
import pickle
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from helpers.adapters import with_lora
from helpers.checkpoints import edit_tensors, tensors_in
from helpers.marks import crossed
from helpers.memory import bytes_in, peak_of_a_process, reads_peaks
from helpers.models import batch, loss_and_gradients
from helpers.native import save_both
from helpers.streamed import add_adapter, build_small, build_streamed, host_weights
from peft import prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, core_model_loading

from sonicmoe_hf import (
    PackedWeight,
    UnsupportedExpertsError,
    UnsupportedModelError,
    from_pretrained,
    patch_model,
    quantize_experts,
    unpatch_model,
)
from sonicmoe_hf.layer.experts_module import weight_names
from sonicmoe_hf.streaming import memory, placement
from sonicmoe_hf.streaming.memory import EXPERTS_MEMORY, choose_resident, free_on_host
from sonicmoe_hf.streaming.placement import Placement, bytes_of, expert_layers
from sonicmoe_hf.streaming.units import parse_bytes
from sonicmoe_hf.streaming.weight import HostWeight

BATCH = batch(2, 8)
LAYERS = 4


def logits(model):
    return model(**BATCH).logits


# what is where


@pytest.mark.parametrize("stay, kept", [(0, []), (1, [3]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3])])
def test_what_stays_is_spread_evenly(stay, kept):
    assert [number for number, stays in enumerate(choose_resident([10] * 4, 10 * stay + 9)) if stays] == kept


def test_layers_of_other_sizes_count_with_their_own():
    assert choose_resident([100, 1, 100, 1], 3) == [False, True, False, True]


@pytest.mark.parametrize(
    "given, expected",
    [
        ("8GiB", 2**33),
        ("8 gib", 2**33),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("1TiB", 2**40),
        (0, 0),
        ("0", 0),
        (17, 17),
    ],
)
def test_experts_memory_is_a_number_of_bytes(given, expected):
    assert parse_bytes(given, EXPERTS_MEMORY) == expected


@pytest.mark.parametrize("given", ["8 apples", "-1GiB", -1, 1.5, "", True, "GiB"])
def test_what_is_no_number_of_bytes_is_an_error(given):
    with pytest.raises(
        ValueError, match='give the bytes of experts that stay on the GPU, such as "8GiB" or 0, or "auto"'
    ):
        patch_model(build_small(), experts_memory=given)


@pytest.mark.parametrize("format", [None, "nf4", "mxfp4", "fp8", "nvfp4"])
def test_bytes_before_packing_are_those_that_are_stored(format):
    model = build_small()
    expected = [bytes_of(experts, format) for _, experts in expert_layers(model)]
    if format is not None:
        quantize_experts(model, format)
    stored = [sum(getattr(e, name).nbytes for name in weight_names(e)) for _, e in expert_layers(model)]
    assert stored == expected


# from files


@pytest.mark.parametrize("family, format, layout", crossed(["qwen3_moe", "gpt_oss"], ["nf4", None], ["hub", "native"]))
def test_loaded_into_host_memory_experts_are_those_loaded_to_the_device(late_copies, family, format, layout, tmp_path):
    folder = dict(zip(("hub", "native"), save_both(build_small(family).bfloat16(), tmp_path)))[layout]
    resident = from_pretrained(folder, experts_quantization=format)
    half = sum(bytes_of(experts, None) for _, experts in expert_layers(resident)) // 2
    for experts_memory, count in ((0, LAYERS), (half, LAYERS // 2)):
        model = from_pretrained(folder, experts_quantization=format, experts_memory=experts_memory)
        assert len(host_weights(model)) == 2 * count
        assert torch.equal(logits(model), logits(resident))
        assert not any(getattr(e, name).requires_grad for _, e in expert_layers(model) for name in weight_names(e))
        resident.save_pretrained(tmp_path / "resident")
        model.save_pretrained(tmp_path / "streamed")
        for file in (tmp_path / "resident").iterdir():
            assert file.read_bytes() == (tmp_path / "streamed" / file.name).read_bytes(), file.name


def test_a_checkpoint_packed_before_streams_in(late_copies, tmp_path):
    quantize_experts(build_small().bfloat16(), "mxfp4").save_pretrained(tmp_path)
    resident, model = from_pretrained(tmp_path), from_pretrained(tmp_path, experts_memory=0)
    assert len(host_weights(model)) == 2 * LAYERS and torch.equal(logits(model), logits(resident))


@pytest.mark.parametrize("format", [None, "nf4"])
def test_no_more_than_one_weight_is_on_the_device_while_a_checkpoint_streams_in(format, tmp_path, monkeypatch):
    build_small().bfloat16().save_pretrained(tmp_path)
    place, there = placement.LoadingPlacement.place, []

    def counted(self, model, name):
        experts = [weight for name, weight in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
        there.append(sum(not weight.is_meta and not isinstance(weight, HostWeight) for weight in experts))
        place(self, model, name)

    monkeypatch.setattr(placement.LoadingPlacement, "place", counted)
    monkeypatch.setattr(core_model_loading, "ThreadPoolExecutor", None)  # threads would bring more
    from_pretrained(tmp_path, experts_quantization=format, experts_memory=0)
    assert max(there) == 1 and len(there) > 2 * LAYERS


@reads_peaks
def test_a_checkpoint_streams_into_host_memory_with_one_weight_of_a_layer_beside_the_model(tmp_path):
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 64}
    build_small(layers=1, **sizes).bfloat16().save_pretrained(tmp_path, max_shard_size="10MB")
    peak = peak_of_a_process(partial(from_pretrained, tmp_path, experts_quantization="nf4", experts_memory=0))
    files, largest = bytes_in(tmp_path), 64 * 512 * 512 * 2  # mapped pages count; gate and up in bf16
    libraries = 40 * 2**20
    assert peak < 0.27 * files + files + largest + libraries, "merged before they were packed, they took two more"


def test_experts_that_the_checkpoint_does_not_have_go_to_host_memory_too(tmp_path):
    build_small().save_pretrained(tmp_path)
    edit_tensors(tmp_path, dict.fromkeys(name for name in tensors_in(tmp_path) if ".experts." in name))
    assert len(host_weights(from_pretrained(tmp_path, experts_memory=0))) == 2 * LAYERS


def test_weights_of_another_size_are_named_as_without_us_or_made_anew(late_copies, tmp_path):
    build_small().save_pretrained(tmp_path)
    config = build_small(moe_intermediate_size=128).config
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        from_pretrained(tmp_path, config=config, experts_memory=0)
    model = from_pretrained(tmp_path, config=config, experts_memory=0, ignore_mismatched_sizes=True)
    assert len(host_weights(model)) == 2 * LAYERS


def test_loads_overlap_and_those_of_other_models_are_as_before(late_copies, monkeypatch, tmp_path):
    """Two loads into host memory wait for each other inside, and a third of neither kind begins and ends meanwhile."""
    for owner, name in ((PreTrainedModel, "tie_weights"), (torch, "linspace")):
        monkeypatch.setattr(
            owner, name, getattr(owner, name)
        )  # Transformers' loads put back what the other one put there
    build_small().save_pretrained(tmp_path)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    place, both, models = placement.LoadingPlacement.place, threading.Barrier(2, timeout=20), []

    def taken(self, model, name):
        if self.placement is None:
            both.wait()
            assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "0", "the environment is everybody's"
        place(self, model, name)

    def load():
        models.append(from_pretrained(tmp_path, experts_memory=0))

    monkeypatch.setattr(placement.LoadingPlacement, "place", taken)
    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert not host_weights(AutoModelForCausalLM.from_pretrained(tmp_path))
    for thread in threads:
        thread.join()
    assert [len(host_weights(model)) for model in models] == [2 * LAYERS] * 2
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "0"


# what they are to torch


@pytest.mark.parametrize("format", [None, "nf4"])
def test_state_dicts_files_and_pickles_hold_ordinary_tensors(late_copies, format, tmp_path):
    model, resident = build_streamed(0, format), build_streamed(None, format)
    state, expected = model.state_dict(), resident.state_dict()
    assert state.keys() == expected.keys() and not any(isinstance(t, HostWeight) for t in state.values())
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    torch.save(state, tmp_path / "state")
    assert (tmp_path / "state").stat().st_size < 1.1 * sum(tensor.nbytes for tensor in expected.values()) + 2**16
    resident.load_state_dict(torch.load(tmp_path / "state"))
    weight = host_weights(model)[0]
    for copied in (pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight), weight.clone(), weight.resident()):
        assert not isinstance(copied, HostWeight)
        assert torch.equal(copied.dequantize() if format else copied, weight.dequantize())
    assert isinstance(copy.deepcopy(weight), nn.Parameter)


@pytest.mark.parametrize("format", [None, "nf4"])
def test_deepspeed_is_not_started_with_experts_in_host_memory(late_copies, monkeypatch, format):
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed := SimpleNamespace(initialize=lambda args, model: model))
    model = build_streamed(0, format)
    with pytest.raises(UnsupportedModelError, match=r"does not take experts in host memory; .*without experts_memory"):
        deepspeed.initialize(None, model)
    model = build_streamed(None)
    assert deepspeed.initialize(None, model) is model


def test_other_devices_get_ordinary_weights(late_copies):
    weight = host_weights(build_streamed(0, "nf4"))[0]
    moved = weight.to("meta")
    assert type(moved) is PackedWeight and moved.device.type == moved.codes.device.type == "meta"


def test_the_footprint_counts_what_the_host_holds(late_copies):
    for format in (None, "nf4"):
        expected = build_streamed(None, format).get_memory_footprint()
        assert build_streamed(0, format).get_memory_footprint() == pytest.approx(expected, rel=1e-12)


def test_experts_in_host_memory_are_not_trained(late_copies):
    model = build_streamed()
    with pytest.raises(RuntimeError, match="experts in host memory are frozen and have no gradient; train adapters"):
        model.requires_grad_(True)
    assert not any(weight.requires_grad for weight in host_weights(model))
    model = build_streamed(experts_memory="1GiB")  # all stay, and are as frozen
    assert not host_weights(model) and not model.model.layers[0].mlp.experts.down_proj.requires_grad


@pytest.mark.parametrize(
    "operation",
    [
        lambda w: w + 1,
        lambda w: w.mul_(2),
        lambda w: w[0],
        lambda w: torch.nn.functional.linear(w, w),
        lambda w: setattr(w, "data", torch.zeros(1)),
        lambda w: w.share_memory_(),
    ],
)
def test_what_would_read_one_as_a_tensor_is_an_error(late_copies, operation):
    with pytest.raises(RuntimeError, match=r"these experts live in host memory|cannot be shared with other processes"):
        operation(host_weights(build_streamed())[0])


@pytest.mark.parametrize("experts_memory, format", [(0, None), (0, "nf4"), (None, "nf4")])
def test_accelerate_offloads_neither_them_nor_packed_experts(late_copies, experts_memory, format):
    with pytest.raises(RuntimeError, match=r'cannot offload .*in host memory by sonicmoe_hf .*"8GiB"'):
        cpu_offload(build_streamed(experts_memory, format), "cpu")


def unpatched():
    model = build_streamed()
    unpatch_model(model)
    return model


@pytest.mark.parametrize(
    "use, error, words",
    [
        (lambda: logits(unpatched()), RuntimeError, "other experts implementations"),
        (
            lambda: add_adapter(build_streamed(0)).merge_and_unload(),
            UnsupportedModelError,
            "sonicmoe-hf merge BASE ADAPTER DST",
        ),
    ],
)
def test_what_takes_the_weights_from_the_model_is_told_that_they_are_on_the_host(late_copies, use, error, words):
    with pytest.raises(error, match=words):
        use()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_dense_experts_as_on_the_device(late_copies, dtype):
    models = [with_lora(build_small().to(dtype), target_modules=["q_proj"]) for _ in range(2)]
    for model, experts_memory in zip(models, (0, None)):
        patch_model(model, experts_memory=experts_memory)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    with torch.autocast("cpu", torch.bfloat16):
        given, expected = (loss_and_gradients(model, BATCH) for model in models)
    assert all(torch.equal(given[name], expected[name]) for name in expected)


@pytest.mark.pinned
@pytest.mark.parametrize("format", [None, "nf4"])
def test_what_libraries_do_to_parameters_changes_nothing(late_copies, format):
    model, expected = build_streamed(0, format), logits(build_streamed(None, format))
    for change in (lambda data: data, torch.Tensor.contiguous, lambda data: data.float(), torch.Tensor.clone):
        for parameter in model.parameters():
            parameter.data = change(parameter.data)
        assert torch.equal(logits(model), expected)
    model.is_loaded_in_4bit = True
    prepare_model_for_kbit_training(model.to("cpu")._apply(lambda tensor: tensor.view(tensor.shape)))
    assert len(host_weights(model)) == 2 * LAYERS and torch.equal(logits(model), expected)
    assert torch.equal(logits(model._apply(torch.clone)), expected)


# errors


def test_too_little_host_memory_is_an_error_and_nothing_moves(late_copies, monkeypatch):
    monkeypatch.setattr(placement, "free_on_host", lambda: 2**20)
    model = build_small(num_experts=64)
    with pytest.raises(
        MemoryError, match=r"puts 0\.0 GiB of experts in host memory, where 0\.0 GiB are free; keep more"
    ):
        patch_model(model, experts_memory=0)
    assert not host_weights(model)
    patch_model(model, experts_memory="1GiB")
    assert not host_weights(model) and logits(model).isfinite().all()


@pytest.mark.parametrize("format", [None, "nf4"])
def test_where_the_driver_does_not_pin_a_weight_nothing_changes(late_copies, monkeypatch, format):
    model, pin = build_small(), late_copies.pin
    before, expected = dict(model.named_parameters()), logits(model)

    def pin_three(self, host):
        if len(self.pinned) == 3:
            raise MemoryError("no more")
        pin(self, host)

    monkeypatch.setattr(late_copies, "pin", pin_three)
    with pytest.raises(MemoryError, match="no more") as raised:  # as does an interactive session, keep its traceback
        quantize_experts(model, format, experts_memory=0) if format else patch_model(model, experts_memory=0)
    assert all(parameter is before[name] and parameter.requires_grad for name, parameter in model.named_parameters())
    assert torch.equal(logits(model), expected)
    assert raised.tb and not any(engine.pinned for engine in late_copies.every)


def test_what_the_host_has_free_is_the_least_of_system_and_containers(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "PROC", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert free_on_host() is None
    (tmp_path / "memory").mkdir()
    for files, free in (
        ({"meminfo": "MemTotal: 1000 kB\nMemAvailable:    600 kB\n"}, 600 * 1024),
        (
            {
                "memory.max": "max\n",
                "memory.current": "900\n",
                "memory.stat": "anon 1\ninactive_file 200\nactive_file 100\n",
            },
            600 * 1024,
        ),
        ({"memory.max": "1000\n"}, 400),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "1"}, 400),
        ({"memory/memory.stat": "inactive_file 0\n"}, 400),
        ({"memory/memory.limit_in_bytes": "101"}, 100),
    ):
        for file, text in files.items():
            (tmp_path / file).write_text(text)
        assert free_on_host() == free


def test_auto_leaves_a_part_of_the_card(monkeypatch):
    total, free, reserved, allocated = 24 * 2**30, 20 * 2**30, 3 * 2**30, 2**30
    stats = {"reserved_bytes": {"all": {"current": reserved}}, "allocated_bytes": {"all": {"current": allocated}}}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    given = memory.bytes_for_auto(torch.device("cuda", 0), others=4 * 2**30, largest=2**30)
    assert given == (20 + 2 - 4 - 2 - 6) * 2**30


def test_experts_that_went_to_host_memory_are_not_packed_there(late_copies):
    model = build_streamed()
    expected = logits(model)
    with pytest.raises(UnsupportedExpertsError, match=r"live in host memory already.*experts_quantization='nf4'"):
        quantize_experts(model, "nf4", experts_memory=0)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    "place, words",
    [
        (lambda: patch_model(build_small(), experts_memory="auto"), "fits a GPU, but the model is on cpu"),
        (lambda: Placement(build_small(), 0, device="meta"), "brings experts to CUDA GPUs, not to meta"),
        (lambda: Placement(build_small().to("meta"), 0), r"on one device, not on \['meta'\]"),
    ],
)
def test_experts_that_cannot_be_brought_to_a_gpu_are_an_error(late_copies, place, words):
    with pytest.raises(ValueError, match=words):
        place()
