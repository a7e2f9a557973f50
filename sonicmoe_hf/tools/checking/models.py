"""Models as Transformers and sonicmoe_hf load them from a folder, and the dtype that its weights are stored in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...checkpoints.reading.files import read_config
from ...formats.declared import QUANT_METHOD
from ...models.loading import from_pretrained
from ...private.transformers import auto_class_of


class Loading(NamedTuple):
    """Options of loading models. dtype: a name, or "auto" for the checkpoint's. experts_memory, experts_quantization: as
    sonicmoe_hf.from_pretrained takes them; without either, Transformers and PEFT compute."""

    dtype: str = "auto"
    experts_memory: str | None = None
    experts_quantization: str | None = None

    def load(self, folder: Path) -> PreTrainedModel:
        """Load the model in `folder`, onto the GPUs where there are any."""
        options: dict[str, Any] = {"dtype": self.dtype}
        declared = read_config(folder).get("quantization_config") or {}
        is_packed_here = declared.get("quant_method") == QUANT_METHOD
        if torch.cuda.is_available() and self.experts_memory is None:
            options["device_map"] = "auto"
        if is_packed_here or self.experts_memory or self.experts_quantization:
            options["experts_memory"] = self.experts_memory
            return from_pretrained(folder, experts_quantization=self.experts_quantization, **options).eval()
        auto_class = auto_class_of(AutoConfig.from_pretrained(folder)) or AutoModelForCausalLM
        model = auto_class.from_pretrained(folder, **options).eval()
        parameters = list(model.parameters())
        if self.dtype == "float32" and all(parameter.dtype.itemsize > 1 for parameter in parameters):
            for parameter in parameters:  # Transformers leaves what was not quantized in the files' dtype
                parameter.data = parameter.data.float()
        return model


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Read the dtype of a checkpoint's weights; None where they are packed."""
    config = read_config(folder)
    configs = [config, config.get("text_config") or {}]
    if any(each.get("quantization_config") for each in configs):
        return None
    name = next((each[key] for each in configs for key in ("dtype", "torch_dtype") if each.get(key)), "float32")
    return getattr(torch, str(name))
