"""An adapter of any form on a loaded model, as PEFT puts it there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...adapters.adapter import is_in_pefts_form
from ...adapters.convert import convert_adapter
from ...checkpoints.reading.config_only import build_from_config
from ...checkpoints.reading.files import ADAPTER_CONFIG, CONFIG_FILE, read_config
from ...errors import CheckpointError
from ...model_patches import NATIVE_PREFIX
from ...registration import install_in_peft

Biases = list[tuple[torch.nn.Parameter, torch.Tensor]]  # parameters that an adapter changes, with the base's values


@contextmanager
def adapted(model: PreTrainedModel, base: Path, adapter: Path, new: Path) -> Iterator[tuple[Any, Biases]]:
    """Put an adapter of any form on the model inside the block, by PEFT; yields PEFT's model, and the biases that it
    changes.

    base: the model's folder. new: a folder in which an adapter that PEFT would misread is written anew.

    Raises:
        CheckpointError: it cannot be read as an adapter of this model.
    """
    import peft
    from peft.utils import ModulesToSaveWrapper

    install_in_peft()  # so that the adapter's base is compared with this one
    config = read_config(base)
    if not is_in_pefts_form(adapter, build_from_config(config, base / CONFIG_FILE)):
        layout = "native" if str(config["model_type"]).startswith(NATIVE_PREFIX) else "hub"
        adapter = convert_adapter(adapter, new, layout, trained_on=base)
    biases = {n: (p, p.data.clone()) for n, p in model.named_parameters() if n.rpartition(".")[2] == "bias"}
    try:
        wrapped = peft.PeftModel.from_pretrained(model, adapter)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"PEFT cannot load {adapter / ADAPTER_CONFIG}: {error}") from error
    wrappers = {n: module for n, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)}
    try:
        yield wrapped.eval(), [(p, base_values) for p, base_values in biases.values() if not p.data.equal(base_values)]
    finally:
        for bias, base_values in biases.values():  # PEFT has written an adapter's biases into the base itself
            bias.data = base_values
        wrapped.unload()  # type: ignore[operator]
        for name, wrapper in wrappers.items():  # unload() leaves modules_to_save trained
            model.set_submodule(name, wrapper.original_module)
