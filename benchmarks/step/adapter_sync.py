"""Times vLLM's wait at each sync of GRPO: an adapter of Qwen3-30B-A3B gathered, written and put into place,
without an engine.

    python -m benchmarks.step.adapter_sync
    python -m benchmarks.step.adapter_sync --device cpu --tiny --rounds 2     # checks the script

LoRA of rank 16 on experts, attention and shared layers, in fp32 on the device; the base is on the meta device. Each round
publishes a version in PEFT's own form, then one as `convert --layout vllm` writes it. The CSV has the seconds of a round
(from the device's factors to the renamed folder), the folder's GB and the number of its tensors.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import RANGE, Table
from benchmarks.step import models
from sonicmoe_hf.checkpoints.reading.files import headers_of
from sonicmoe_hf.trl.adapter_versions import AdapterVersions

MODEL = "Qwen3-30B-A3B"
FORMS = {"PEFT's own": True, "a pair for each expert": False}


def build_adapted(config, device: str) -> nn.Module:
    """Build the model of `config` on the meta device, with factors on `device`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = get_peft_model(model, sonicmoe_hf.lora_config(model, r=16, experts_r=16))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.requires_grad:
                values = torch.randn(parameter.shape, dtype=torch.float32, device=device)
                module._parameters[name] = nn.Parameter(values)
    return model


def main(arguments=None) -> None:
    parser = Command(__doc__, "adapter_sync.csv", "--device cpu --tiny --rounds 2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="for the adapters (default: a new one in the system's temporary one)"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    options = parser.parse_args(arguments)
    config = models.config_of(MODEL, 2 if options.tiny else models.MODELS[MODEL].layers, options.tiny)
    model = build_adapted(config, options.device)
    accelerator = SimpleNamespace(
        device=torch.device(options.device), is_main_process=True, wait_for_everyone=Accelerator().wait_for_everyone,
        unwrap_model=lambda model: model,
    )  # fmt: skip
    table = Table(options.csv, ("model", "form", "metric"), RANGE | {"rounds": len})
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        versions = AdapterVersions(model, accelerator, Path(folder), torch.bfloat16)
        if not versions.takes_3d:
            raise SystemExit(f"{MODEL} is not served in PEFT's own form")
        for form, is_3d in FORMS.items():
            versions.is_3d, seconds = is_3d, []
            for _ in range(options.rounds):
                began = time.perf_counter()
                path = versions.publish().folder / "adapter_model.safetensors"
                seconds.append(time.perf_counter() - began)
            size = {"GB": path.stat().st_size / 1e9, "tensors": len(headers_of(path))}
            table.add(f"{MODEL}, {config.num_hidden_layers} layers", form, {"seconds": seconds, **size})
    table.write()


if __name__ == "__main__":
    main()
