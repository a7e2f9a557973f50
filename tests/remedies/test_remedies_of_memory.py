"""Messages of experts in host memory: each is raised, and then what it names is done."""

from contextlib import nullcontext

import pytest
import torch
from accelerate import cpu_offload
from helpers.adapters import adapt
from helpers.checkpoints import make
from helpers.late_copies import late_copies  # noqa: F401 - a fixture
from helpers.models import OF_64, batch, build, logits_of, relative_error
from helpers.said import says
from peft import get_peft_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import sonicmoe_hf
from sonicmoe_hf import from_pretrained, merge_adapter, patch_model, quantize_experts
from sonicmoe_hf.streaming import copies
from sonicmoe_hf.streaming.placement import Placement
from sonicmoe_hf.streaming.weight import HostWeight

pytestmark = [pytest.mark.pinned, pytest.mark.usefixtures("late_copies")]
EXACT = 1e-5  # fp32: sums in another order


def small():
    return build("qwen3_moe", **OF_64["qwen3_moe"])


def held(model):
    return [weight for weight in model.parameters() if isinstance(weight, HostWeight)]


@pytest.fixture
def hub(tmp_path):
    make(tmp_path / "base", "qwen3_moe", dtype=torch.float32, **OF_64["qwen3_moe"])
    return tmp_path / "base"


def test_what_experts_memory_is_given():
    with says("give the bytes of experts that stay on the GPU, such as"):
        patch_model(small(), experts_memory="8 apples")
    with says('fits a GPU, but the model is on cpu; give bytes, such as "8GiB"'):
        patch_model(small(), experts_memory="auto")
    model = small()
    expected = logits_of(model)
    patch_model(model, experts_memory=0)
    assert held(model) and relative_error(logits_of(model), expected) < EXACT
    patch_model(model := small(), experts_memory="8GiB")
    assert not held(model)
    with says("experts_memory brings experts to CUDA GPUs, not to meta; leave it out"):
        Placement(small(), 0, device="meta")
    patch_model(small().to("meta"))


def test_experts_in_host_memory_are_adapted_or_trained_elsewhere(hub):
    model = from_pretrained(hub, experts_memory=0)
    with says("train adapters on them (sonicmoe_hf.lora_config), or load the model without experts_memory"):
        model.requires_grad_(True)
    adapted = get_peft_model(model, sonicmoe_hf.lora_config(model, r=2))
    adapted(**batch()).loss.backward()
    assert any(p.grad is not None for name, p in adapted.named_parameters() if "experts" in name and "lora" in name)
    whole = from_pretrained(hub)
    whole(**batch()).loss.backward()
    assert whole.model.layers[0].mlp.experts.down_proj.grad.any()


def test_experts_in_host_memory_are_read_and_merged_as_the_messages_say(hub):
    model = from_pretrained(hub, experts_memory=0)
    weight = held(model)[0]
    words = "merge with sonicmoe_hf.merge_adapter, take weight.resident(), or load the model without experts_memory"
    with says(words):
        weight + 1
    resident = AutoModelForCausalLM.from_pretrained(hub)
    expected = resident.model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(weight.resident(), expected) and torch.equal(
        from_pretrained(hub).model.layers[0].mlp.experts.gate_up_proj, expected
    )
    with says("cannot be shared with other processes; load the model there"):
        weight.share_memory_()
    folder = hub.with_name("adapter")
    trained = adapt(model, folder)
    with says("save the adapter, and merge it into the checkpoint: sonicmoe-hf merge BASE ADAPTER DST"):
        trained.merge_and_unload()
    merge_adapter(hub, folder, hub.with_name("merged"))
    assert relative_error(logits_of(from_pretrained(hub.with_name("merged"))), logits_of(trained)) < EXACT


def test_experts_are_packed_before_they_go_to_host_memory(hub):
    with says("pack them while they are loaded (sonicmoe_hf.from_pretrained(..., experts_quantization='nf4'"):
        quantize_experts(from_pretrained(hub, experts_memory=0), "nf4", experts_memory=0)
    loaded = from_pretrained(hub, experts_quantization="nf4", experts_memory=0)
    model = AutoModelForCausalLM.from_pretrained(hub)
    quantize_experts(model, "nf4", experts_memory=0)
    patch_model(model)
    assert held(loaded) and held(model) and torch.equal(logits_of(loaded), logits_of(model))


def test_packed_experts_are_kept_where_sonicmoe_hf_has_them(hub):
    model = from_pretrained(hub, experts_quantization="nf4")
    expected = logits_of(model)
    with says("keep them on the GPU, or in host memory by sonicmoe_hf"):
        cpu_offload(model, "cpu")
    streamed = from_pretrained(hub, experts_quantization="nf4", experts_memory=0)
    assert held(streamed) and relative_error(logits_of(streamed), expected) < EXACT


def test_ranks_hold_all_experts(hub):

    with says("leave it out, or let each rank hold the whole model (DDP)"):
        from_pretrained(hub, experts_memory=0, distributed_config=DistributedConfig(fsdp_size=2))
    assert held(from_pretrained(hub, experts_memory=0)), "as each rank of DDP does"


def by_cuda(monkeypatch, **calls):
    """Bring experts to a CPU by these calls of CudaCopies."""
    monkeypatch.setitem(copies.KINDS, "cpu", type("ByCuda", (copies.Copies,), calls))


def test_experts_are_on_the_gpu_to_capture_steps(hub, monkeypatch):
    by_cuda(monkeypatch, wait=copies.CudaCopies.wait)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with says("keep them on the GPU (experts_memory=None) to capture steps"):
        logits_of(from_pretrained(hub, experts_memory=0))
    model = from_pretrained(hub, experts_memory=None)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(hub))
    assert not held(model) and relative_error(logits_of(model), expected) < EXACT


class Driver:
    """A driver that pins so many bytes of host memory."""

    def __init__(self, nbytes):
        self.left = nbytes

    def cudaHostRegister(self, address, nbytes, flags):
        self.left -= nbytes
        return 2 if self.left < 0 else 0

    def cudaHostUnregister(self, address):
        return 0


def test_what_the_driver_does_not_pin_stays_on_the_gpu_or_is_smaller(hub, monkeypatch):
    by_cuda(monkeypatch, pin=copies.CudaCopies.pin, unpin=copies.CudaCopies.unpin)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    size = 2 * 8 * 3 * 64 * 64 * 4  # layers, experts and matrices of 64 x 64 in fp32
    expected = logits_of(AutoModelForCausalLM.from_pretrained(hub))

    def load(**options):
        driver = Driver(size * 2 // 3)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        return from_pretrained(hub, **options)

    words = "keep more experts on the GPU (a larger experts_memory), or use a smaller format (experts_quantization)"
    with says("the driver did not pin", words):
        load(experts_memory=0)
    model = load(experts_memory=size // 2)
    assert held(model) and relative_error(logits_of(model), expected) < EXACT
    assert held(load(experts_memory=0, experts_quantization="nf4"))
