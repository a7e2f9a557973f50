"""TRL's AsyncGRPOTrainer, which sends adapters itself but refuses those of experts: its two functions that look at an
adapter and write it are replaced by ours."""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from ..errors import CheckpointError
from ..private.replaced import temporarily_replaced
from .adapter_versions import AdapterVersions, adapter_of
from .functions import ASYNC, ASYNC_GRPO, TrlClass, check_functions
from .serving import Serving, dtype_of

MARKER = "validate_lora_for_vllm_sync"  # a global of its module, by which factory.py knows AsyncGRPOTrainer
WHOLE = (
    "AsyncGRPOTrainer would merge the adapter and send whole weights, which vLLM does not take of these experts; start "
    "the server with {flags}, one replica (no --data-parallel-size), and give no weight_transfer"
)
FLAGS = "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE --enable-lora --max-lora-rank RANK"


class SendsAdaptersInBackground(TrlClass):
    """AsyncGRPOTrainer; comes before it among the bases of a class. Nothing is replayed: its workers keep no experts."""

    serving: ClassVar[Serving]

    def __init__(self, *args: Any, **options: Any):
        check_functions(ASYNC)
        self._versions: AdapterVersions | None = None
        with self._ours():
            super().__init__(*args, **options)
        if not self._lora_sync:
            adapter_of(self.model)
            raise ValueError(WHOLE.format(flags=FLAGS))

    @contextmanager
    def _ours(self):
        module = sys.modules[ASYNC_GRPO]
        with ExitStack() as stack:
            stack.enter_context(temporarily_replaced(module, MARKER, _checked_config))
            stack.enter_context(temporarily_replaced(module, "save_lora_adapter", self._save))
            yield

    def _sync_weight(self, *args: Any, **options: Any):
        with self._ours():
            return super()._sync_weight(*args, **options)

    def _save(self, model: Any, accelerator: Any, adapter_name: str, dest_dir: str) -> None:
        """Write an adapter in vLLM's form to `dest_dir`; all ranks call it."""
        if self._versions is None:
            dtype = dtype_of(model, accelerator.mixed_precision)
            self._versions = AdapterVersions(model, accelerator, Path(dest_dir).parent, dtype)
        version = self._versions.publish()
        if accelerator.is_main_process:
            shutil.rmtree(dest_dir, ignore_errors=True)
            version.folder.rename(dest_dir)


def _checked_config(model: Any) -> Any:
    """Check the adapter's config as TRL's validate_lora_for_vllm_sync does, also of one on experts."""
    try:
        adapter = adapter_of(model)
    except (CheckpointError, ValueError) as error:
        raise RuntimeError(str(error)) from error  # TRL takes ValueError as leave to send merged weights
    return model.peft_config[adapter]
