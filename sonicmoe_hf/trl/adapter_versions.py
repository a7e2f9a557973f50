"""AdapterVersions: the folders in which vLLM finds the adapter as training changes it, each under a new name.

vLLM keys its prefix cache by an adapter's name and path, so that weights under a name that it has seen would be served
with the old policy's keys and values.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from safetensors.torch import save_file
from torch import nn

from ..adapters.adapter import Adapter
from ..adapters.engines import VLLM_RANKS, engine_form, vllm_takes_pefts_form
from ..adapters.rules import ADAPTER_WEIGHTS
from ..checkpoints.layouts import hub_config
from ..checkpoints.reading.config_only import build_from_config
from ..checkpoints.reading.files import ADAPTER_CONFIG, CONFIG_FILE
from ..checkpoints.writing.atomic_folder import write_json
from ..errors import CheckpointError
from ..model_patches import NATIVE_FAMILIES, NATIVE_PREFIX
from .gathering import gathered_factors

NUMBER = re.compile(r"-(\d+)$")
KEPT_VERSIONS = 2  # vLLM reads paths late: a folder that is gone ends the engine
NO_ADAPTER = (
    "vLLM gets adapters, but the model has none; give peft_config=sonicmoe_hf.lora_config(model), or take TRL's own "
    "trainer for whole weights"
)


class Version(NamedTuple):
    """An adapter in a folder of its own. is_3d: whether it is in PEFT's form for fused experts."""

    name: str
    number: int
    folder: Path
    is_3d: bool


def adapter_of(model: nn.Module) -> str:
    """Find the name of the model's one active adapter.

    Raises:
        ValueError: it has none, or several, or one that vLLM would serve in part.
    """
    if not is_peft_model(model):
        raise ValueError(NO_ADAPTER)
    active: Any = model.active_adapters
    if len(active) != 1:
        raise ValueError(f"vLLM serves one adapter, but {list(active)} are active; activate one with set_adapter")
    config: Any = model.peft_config[active[0]]  # type: ignore[index]
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        raise ValueError(f"vLLM serves LoRA, not {config.peft_type}; give peft_config=sonicmoe_hf.lora_config(model)")
    unserved = {"use_dora": config.use_dora, "bias": config.bias != "none", "modules_to_save": config.modules_to_save}
    for name in (name for name, value in unserved.items() if value):
        raise ValueError(
            f"vLLM leaves out what {name}={getattr(config, name)!r} trains; leave it out of the LoraConfig"
        )
    return active[0]


class AdapterVersions:
    """The versions of the adapter of one trainer.

    Args:
        model: a PeftModel. accelerator: its trainer's. root: the folder for the versions, that engine and trainer see.
        dtype: what the engine computes in.
    Attributes:
        rank: the smallest max_lora_rank that vLLM takes for the adapter. takes_3d: whether PEFT's own form is one that
            vLLM takes for it; `is_3d`, which the caller sets, whether it is written so.
    """

    def __init__(self, model: Any, accelerator: Any, root: Path, dtype: torch.dtype):
        self.model, self.accelerator, self.root, self.dtype = model, accelerator, root, dtype
        self.adapter = adapter_of(model)
        self.prefix = f"sonicmoe-{zlib.crc32(str(root).encode()):08x}"
        self.number, self.is_3d = 0, False
        self._hub_model = _hub_model(model)
        self._prepare()

    def is_own(self, name: str) -> bool:
        """Tell whether an adapter that a server has is one of these versions, of this run or an earlier one."""
        return name.startswith(f"{self.prefix}-")

    def continue_after(self, names: Iterable[str]) -> None:
        """Make the next version's number one above those of an earlier run."""
        self.number = max([self.number, *(int(match[1]) for name in names if (match := NUMBER.search(name)))])

    def _prepare(self) -> None:
        """Set `rank`, `takes_3d` and the last number, by converting the adapter once before an engine starts.

        Raises:
            CheckpointError: vLLM takes no such adapter, or not of this model.
        """
        factors = gathered_factors(self.model, self.adapter, self.accelerator.device)
        box: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                box = [self._inspect(factors)]
            except (CheckpointError, OSError) as error:
                box = [error]
        broadcast_object_list(box, from_process=0)
        if isinstance(box[0], Exception):
            raise box[0]
        self.rank, self.takes_3d, self.number = box[0]

    def _inspect(self, factors: dict[str, torch.Tensor]) -> tuple[int, bool, int]:
        """Compute the adapter's rank, rounded up for vLLM, whether vLLM takes PEFT's own form, and the last number, and
        delete the folders that earlier runs left unfinished."""
        self.root.mkdir(parents=True, exist_ok=True)
        for unfinished in self.root.glob(f".{self.prefix}-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        folder = self.root / f".{self.prefix}-check"
        try:
            saved = self._save(factors, folder)
            adapter = Adapter.read(saved, self._hub_model)
            _, config, _ = engine_form(adapter, self._hub_model, "vllm")
            rank = next(rank for rank in VLLM_RANKS if rank >= config["r"])
            takes_3d = vllm_takes_pefts_form(saved, adapter, self._hub_model)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.continue_after(path.name for path in self.root.glob(f"{self.prefix}-*"))
        return rank, takes_3d, self.number

    def publish(self) -> Version:
        """Write the adapter as it is now; all ranks call it, and one writes.

        A folder appears whole, under a name that no run has used. The newest KEPT_VERSIONS stay, older
        ones are deleted.
        """
        self.number += 1
        name = f"{self.prefix}-{self.number}"
        folder, hidden = self.root / name, self.root / f".{name}"
        factors = gathered_factors(self.model, self.adapter, self.accelerator.device)
        if self.accelerator.is_main_process:
            saved = self._save(factors, hidden)
            if not self.is_3d:
                adapter = Adapter.read(saved, self._hub_model)
                tensors, config, _ = engine_form(adapter, self._hub_model, "vllm")
                tensors = {key: tensor.to(self.dtype).contiguous() for key, tensor in tensors.items()}
                saved = hidden / "converted"
                saved.mkdir()
                save_file(tensors, saved / ADAPTER_WEIGHTS, metadata={"format": "pt"})
                write_json(saved / ADAPTER_CONFIG, config)
            shutil.rmtree(folder, ignore_errors=True)
            saved.rename(folder)
            shutil.rmtree(hidden, ignore_errors=True)
            for old in self.root.glob(f"{self.prefix}-*"):
                if int(NUMBER.search(old.name)[1]) <= self.number - KEPT_VERSIONS:  # type: ignore[index]
                    shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return Version(name, self.number, folder, self.is_3d)

    def _save(self, factors: dict[str, torch.Tensor], folder: Path) -> Path:
        """Write the adapter by PEFT below a new folder, and return its place."""
        shutil.rmtree(folder, ignore_errors=True)
        if self.is_3d:
            factors = {name: factor.to(self.dtype) for name, factor in factors.items()}
        model = self.accelerator.unwrap_model(self.model)
        model.save_pretrained(
            folder, selected_adapters=[self.adapter], state_dict=factors, save_embedding_layers=False
        )
        return folder if self.adapter == "default" else folder / self.adapter


def _hub_model(model: Any) -> Any:
    """Build the model in the hub layout on the meta device, by whose names and shapes an adapter is read."""
    entries = json.loads(model.get_base_model().config.to_json_string(use_diff=False))
    entries.pop("quantization_config", None)
    entries["architectures"] = entries.get("architectures") or [type(model.get_base_model()).__name__]
    name = str(entries["model_type"])
    if name.startswith(NATIVE_PREFIX):
        entries = hub_config(entries, NATIVE_FAMILIES[name.removeprefix(NATIVE_PREFIX)])
    try:
        return build_from_config(entries, Path(str(model.name_or_path)) / CONFIG_FILE)
    except CheckpointError as error:
        raise ValueError(f"vLLM's form of the adapter needs the model in the hub's layout: {error}") from error
