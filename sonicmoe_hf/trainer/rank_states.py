"""What each rank needs to resume, beside the checkpoints of a model that Transformers loaded sharded.

Transformers' Trainer saves no optimiser of such a model (it asks for save_only_model=True), so that a resumed run would
begin with an empty one. Here each rank writes its own part of the optimiser's state, the schedule and its random numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..private.transformers import replace_optimizer_loading, save_random_state

FILE = "rank{rank}-of-{world}.pt"


def _of_rank(value: Any) -> Any:
    """A state dict with this rank's part of every sharded tensor."""
    if isinstance(value, dict):
        return {key: _of_rank(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_of_rank(one) for one in value]
    return value.to_local() if hasattr(value, "device_mesh") else value


def _sharded_as(parameter: Any, value: Any) -> Any:
    """What `_of_rank` made of a tensor that is sharded as its parameter."""
    if not hasattr(parameter, "device_mesh") or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class RankStates(TrainerCallback):
    """Writes the ranks' states whenever the Trainer has saved a checkpoint, and reads them when it resumes from one."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.load_by_trainer = replace_optimizer_loading(trainer, self.load)

    @property
    def _file(self) -> str:
        args = self.trainer.args
        return FILE.format(rank=args.process_index, world=args.world_size)

    def on_save(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(
            {"optimizer": _of_rank(optimizer.state_dict()), "lr_scheduler": lr_scheduler.state_dict()},
            folder / self._file,
        )
        save_random_state(self.trainer, str(folder))

    def load(self, checkpoint: str | None) -> None:
        """In place of the Trainer's method that loads the optimiser and the schedule.

        Raises:
            ValueError: another number of ranks wrote the checkpoint.
        """
        self.load_by_trainer(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / self._file
        if not path.is_file():
            others = sorted(file.name for file in Path(checkpoint).glob(FILE.format(rank="*", world="*")))
            if others:
                raise ValueError(
                    f"{checkpoint} was written by other ranks ({others[0]}, ...): resume with as many, or begin a new "
                    "run from its adapter"
                )
            return
        saved = torch.load(path, map_location="cpu", weights_only=True)
        optimizer, state = self.trainer.optimizer, saved["optimizer"]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, values in state["state"].items():
            state["state"][index] = {name: _sharded_as(parameters[index], value) for name, value in values.items()}
        optimizer.load_state_dict(state)
        self.trainer.lr_scheduler.load_state_dict(saved["lr_scheduler"])


def save_rank_states(trainer) -> None:
    """Have this Trainer resume adapters of a model that Transformers loaded sharded."""
    is_sharded = getattr(trainer, "is_distributed_loading_by_transformers", False) and hasattr(
        trainer.model, "peft_config"
    )
    callbacks = trainer.callback_handler.callbacks
    if is_sharded and not any(isinstance(callback, RankStates) for callback in callbacks):
        trainer.add_callback(RankStates(trainer))
