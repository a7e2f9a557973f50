"""Resuming of each rank, beside the checkpoints of a model that Transformers loaded sharded.

Transformers' Trainer saves no optimiser of such a model (it asks for save_only_model=True), so that a resumed run would
begin with an empty one. Here each rank writes its shard of the optimiser's state, the schedule and its random numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..layer.holding import local_tensor, mesh_of
from ..private.transformers import OPTIMIZER_LOADING_METHOD, save_random_state
from .methods import find_callback, wrap_method

FILE = "rank{rank}-of-{world}.pt"


def _sharded_as(parameter: Any, value: Any) -> Any:
    """Make a tensor that is sharded as its parameter, from this rank's shard of it."""
    if mesh_of(parameter) is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(parameter.device),
        mesh_of(parameter),
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class RankStates(TrainerCallback):
    """Writes the ranks' states whenever the Trainer has saved a checkpoint."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_save(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        """Write this rank's optimiser, schedule and random numbers into the checkpoint's folder."""
        from accelerate.utils import recursively_apply

        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        shards = recursively_apply(local_tensor, optimizer.state_dict())
        states = {"optimizer": shards, "lr_scheduler": lr_scheduler.state_dict()}
        save_random_state(self.trainer, str(folder))  # which makes the folder, on a node where no rank wrote weights
        torch.save(states, folder / _file_of(args))


def _file_of(args) -> str:
    return FILE.format(rank=args.process_index, world=args.world_size)


def _load(trainer, load_by_trainer, checkpoint: str | None) -> None:
    """Call the Trainer's method that loads the optimiser and the schedule, then load this rank's.

    Raises:
        ValueError: another number of ranks wrote the checkpoint.
    """
    load_by_trainer(checkpoint)
    if checkpoint is None:
        return
    path = Path(checkpoint) / _file_of(trainer.args)
    if not path.is_file():
        others = sorted(file.name for file in Path(checkpoint).glob(FILE.format(rank="*", world="*")))
        if others:
            raise ValueError(
                f"{checkpoint} was written by other ranks ({others[0]}, ...): resume with as many, or begin a new run "
                "from its adapter"
            )
        return
    saved = torch.load(path, map_location="cpu", weights_only=True)
    optimizer, state = trainer.optimizer, saved["optimizer"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        state["state"][index] = {name: _sharded_as(parameters[index], value) for name, value in values.items()}
    optimizer.load_state_dict(state)
    trainer.lr_scheduler.load_state_dict(saved["lr_scheduler"])


def save_rank_states(trainer) -> None:
    """Make this Trainer resume adapters of a model that Transformers loaded sharded."""
    is_sharded = getattr(trainer, "is_distributed_loading_by_transformers", False)
    if is_sharded and hasattr(trainer.model, "peft_config") and find_callback(trainer, RankStates) is None:
        trainer.add_callback(RankStates(trainer))
        wrap_method(trainer, OPTIMIZER_LOADING_METHOD, _load)
