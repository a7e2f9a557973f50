"""Small models with their experts in host memory."""

import contextlib
import ctypes
import gc
import threading
import time
from pathlib import Path

from helpers.adapters import with_lora
from helpers.models import OF_64, build

from sonicmoe_hf import patch_model, quantize_experts
from sonicmoe_hf.streaming.placement import bytes_of, expert_layers
from sonicmoe_hf.streaming.weight import HostWeight


def build_small(family="qwen3_moe", layers=4, **changes):
    return build(family, **{**OF_64[family], "num_hidden_layers": layers, **changes})


def build_streamed(experts_memory=0, format=None, family="qwen3_moe", **changes):
    """Build a patched model whose experts are in host memory but for `experts_memory` bytes; "half": of their bytes."""
    model = build_small(family, **changes)
    if experts_memory == "half":
        experts_memory = sum(bytes_of(experts, format) for _, experts in expert_layers(model)) // 2
    if format is not None:
        quantize_experts(model, format, experts_memory=experts_memory)
        patch_model(model)
    else:
        patch_model(model, experts_memory=experts_memory)
    return model


def add_adapter(model, checkpointing=None):
    """Add an adapter to the model. checkpointing: whether it is reentrant; None: layers are not recomputed."""
    model = with_lora(model, target_modules=["q_proj"])
    if checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    return model


def host_weights(model):
    return [weight for weight in model.parameters() if isinstance(weight, HostWeight)]


def streamed_layers(model):
    """List the layers that are copied, in the order of the model."""
    return list(dict.fromkeys(weight.layer for weight in host_weights(model)))


def copies_of(model):
    return host_weights(model)[0].layer.stream.copies


def save_shards(folder):
    """Save a model of six layers, each in a shard of its own."""
    model = build_small(hidden_size=512, moe_intermediate_size=512, layers=6).bfloat16()
    model.save_pretrained(folder, max_shard_size="14MB")
    assert len(list(Path(folder).glob("*.safetensors"))) == 6


def _own_memory():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


@contextlib.contextmanager
def peak_growth():
    """Make a list that has, after `with`, by how many bytes this process's own memory grew at most: without what it
    shares, and without pages of files, which the system can take back."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: larger blocks go back to the system as soon as they are freed
    libc.malloc_trim(0)
    start, peak, done = _own_memory(), [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], _own_memory() - start)
            time.sleep(5e-4)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
