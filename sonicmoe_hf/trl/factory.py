"""vllm_adapters: a trainer of TRL's whose vLLM gets the adapter alone, and whose experts are those of the rollout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .async_grpo import MARKER, SendsAdaptersInBackground
from .functions import module_with
from .serving import Serving
from .trainers import BUILDER, ReplaysRouting, SendsAdapters


def vllm_adapters(
    trainer_class: type,
    *,
    replay: bool = True,
    vllm_options: Mapping[str, Any] | None = None,
    served_base: str | os.PathLike | None = None,
    adapters_folder: str | os.PathLike | None = None,
    divergence_every: int = 1,
) -> type:
    """Make a subclass of a trainer of TRL's, 1.11 to 1.16, in which vLLM gets adapters in place of weights.

    With `use_vllm` the model needs an adapter: `peft_config=sonicmoe_hf.lora_config(model)`. At each sync the adapter is
    written under a new name, loaded beside the one before it, and then that one is unloaded. In subclasses of GRPOTrainer
    the experts that vLLM used are replayed in all training calls, and in those of a reference that is the policy without
    its adapter; without vLLM the policy's own are, from before the first update. Logged are serving/kl,
    serving/largest_gap and serving/divergence, between server and trainer, and serving/sync_seconds.

    Args:
        trainer_class: GRPOTrainer, a subclass of yours, RLOOTrainer and the others that build VLLMGeneration, which
            replay nothing, or AsyncGRPOTrainer.
        replay: whether GRPO's experts are replayed.
        vllm_options: more arguments of vLLM's LLM, with vllm_mode="colocate"; dtype is the trainer's unless it is here.
        served_base: folder or hub id of the base that vLLM serves where that is not the model's own, such as one of
            `sonicmoe-hf convert BASE DST --layout hub --round nf4`. It is compared with the trainer's at the start.
        adapters_folder: for the adapters, which a server reads itself; by default in the trainer's output_dir.
        divergence_every: after how many rollouts serving/divergence is measured, a forward pass; 0 is never.
    Raises:
        TypeError: the class builds no engine of TRL's.
        From its constructor ValueError: no adapter, or one that vLLM serves in part or not at all; a server that was
            started otherwise, with the command line that starts it; another base. RuntimeError: a function of TRL that
            is overridden has gone.
    Example:
        trainer = sonicmoe_hf.vllm_adapters(MyGRPOTrainer)(model, ..., args=GRPOConfig(use_vllm=True, ...))
    """
    serving = Serving(
        replay=replay,
        vllm_options=dict(vllm_options or {}),
        served_base=served_base,
        adapters_folder=adapters_folder,
        divergence_every=divergence_every,
    )
    if issubclass(trainer_class, (SendsAdapters, SendsAdaptersInBackground)):
        raise TypeError(
            f"{trainer_class.__name__} sends adapters already; give vllm_adapters TRL's own class, or yours"
        )
    if module_with(trainer_class, MARKER) is not None:
        ours: type = SendsAdaptersInBackground
    elif module_with(trainer_class, BUILDER) is None:
        raise TypeError(f"{trainer_class.__name__} is no trainer of TRL's that samples with vLLM")
    else:
        has_replay = any(
            cls.__name__ == "GRPOTrainer" and cls.__module__.startswith("trl.") for cls in trainer_class.__mro__
        )
        ours = ReplaysRouting if has_replay else SendsAdapters
    names = {"serving": serving, "__doc__": trainer_class.__doc__, "__module__": trainer_class.__module__}
    return type(trainer_class.__name__, (ours, trainer_class), names)
