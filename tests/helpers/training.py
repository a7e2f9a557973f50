"""Helpers of the tests of training: watching what reaches the experts, token rounding counted by hand, data sets."""

from functools import partial
from types import SimpleNamespace

import torch
from helpers.models import batch
from transformers import Trainer, TrainerState, TrainingArguments

import sonicmoe_hf
from sonicmoe_hf.layer.routing import Routing, TokenRounding
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.routing.patched_model import clear_counts, routing_state
from sonicmoe_hf.trainer import gpu_advice
from sonicmoe_hf.trainer.methods import find_callback

TILE = 4
CHECKPOINTING = {"reentrant": {"use_reentrant": True}, "non_reentrant": {"use_reentrant": False}}
CHECKPOINTED_TRAINING = {  # options of a Trainer
    kind: {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    for kind, kwargs in CHECKPOINTING.items()
} | {"none": {}}
POLICY = TokenRounding(tile=TILE)  # models.batch() gives each of the 8 experts 24 rows on average, padded 19.5


def start_counting(model) -> None:
    """Make the routers of a patched model count their loads from zero, as ExpertLoadCallback does in its steps."""
    clear_counts(model)
    routing_state(model).counts_load = True


class Watch:
    """Notes for every call of the experts of `model` what `note()` says, and the Routing that came, or None."""

    def __init__(self, model, note=lambda: None):
        self.note = note
        self.calls = []
        for layer in find_layers(model):
            layer.experts.register_forward_pre_hook(self)

    def __call__(self, experts, args):
        index = args[1]
        self.calls.append((self.note(), index if isinstance(index, Routing) else None))

    def rounded(self) -> list[bool]:
        """List for every call so far whether it was rounded; the notes start afresh."""
        calls, self.calls = self.calls, []
        return [routing is not None for _, routing in calls]

    def rounded_by_note(self) -> dict:
        """Map each note to whether its calls were rounded (all agree)."""
        is_rounded = {}
        for note, routing in self.calls:
            assert is_rounded.setdefault(note, routing is not None) == (routing is not None), note
        return is_rounded


def rounded_rows(logits_TE, top_k, tile, valid_T):
    """Count rows per expert before and after token rounding to the nearest multiple, one expert at a time, for softmax
    families: the definition, without the package."""
    num_experts = logits_TE.shape[1]
    index_TK = logits_TE[valid_T].softmax(-1).topk(top_k, dim=-1).indices
    before, after = [], []
    for expert in range(num_experts):
        rows = int((index_TK == expert).sum())
        below, rest = rows - rows % tile, rows % tile
        up = 2 * rest > tile and below + tile <= int(valid_T.sum())
        before.append(rows)
        after.append(below + tile * up)
    return torch.tensor(before), torch.tensor(after)


class Examples(torch.utils.data.Dataset):
    """`count` sequences of `models.batch`, one by one, the first of every four unpadded."""

    def __init__(self, count, padding=False, seed=0):
        batches = [batch(padding=padding, seed=seed + i) for i in range(-(-count // 4))]
        self.columns = {name: torch.cat([b[name] for b in batches])[:count] for name in batches[0]}

    def __len__(self):
        return len(self.columns["input_ids"])

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.columns.items()}


def arguments(folder, kind=TrainingArguments, **options) -> TrainingArguments:
    """Make arguments of this class: four unshuffled sequences a step on the CPU, nothing reported, nothing saved."""
    defaults = {
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
    }
    return kind(str(folder), **{**defaults, **options})


def checkpoint_layers(model, kind):
    """Have the model's layers recomputed in backward by this kind of checkpointing; None or "none": leave it as it is."""
    if kind not in (None, "none"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[kind])
    return model


def trainer_for(model, folder, callbacks=(), padding=False, count=16, optimizers=(None, None), **options) -> Trainer:
    """Make a Trainer on `count` examples; its evaluation set has four more."""
    return Trainer(
        model,
        arguments(folder, **options),
        train_dataset=Examples(count, padding),
        callbacks=list(callbacks),
        eval_dataset=Examples(4, padding, seed=100),
        optimizers=optimizers,
    )


def run_trainer(model, folder, callbacks=(), attach=True, checkpoint=None, **options) -> Trainer:
    """Train by the Trainer of `trainer_for`, from the beginning or from a checkpoint, and return it."""
    trainer = trainer_for(model, folder, callbacks, **options)
    if attach:
        sonicmoe_hf.attach(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def logs_of(trainer) -> list[dict]:
    """List the logs of its training steps, without evaluation and the summary at the end."""
    return [log for log in trainer.state.log_history if "loss" in log]


def advise(trainer):
    """Let the advice of a Trainer's run see ten steps of a GPU that waits."""
    accumulated = trainer.args.gradient_accumulation_steps
    args = SimpleNamespace(
        device=torch.device("cuda", 0), gradient_accumulation_steps=accumulated, world_size=trainer.args.world_size
    )
    for step in gpu_advice.SAMPLED_STEPS:
        find_callback(trainer, gpu_advice.GpuAdvice).on_step_end(
            args, TrainerState(global_step=step), None, model=trainer.model
        )


class Routers:
    """Logits and indices of every training call of the routers, in order and by layer, as they computed them."""

    def __init__(self, model):
        self.calls, self.by_layer = [], {}
        for layer in find_layers(model):
            self.by_layer[layer.name] = []
            layer.router.register_forward_hook(partial(self._note, layer.name), prepend=True)

    def _note(self, name, router, args, output):
        if router.training:
            self.calls.append((output[0], output[2]))
            self.by_layer[name].append(output[0].detach())

    def take(self):
        calls, self.calls = self.calls, []
        return calls


class OutOfMemory(RuntimeError):
    """An error that a layer may raise."""


def fail_in(module, error):
    """Make this module's forward raise `error`; return the handle of the hook that does."""

    def fail(*args):
        raise error

    return module.register_forward_hook(fail)


def callback_in_first_step(model):
    """Make an ExpertLoadCallback that is in the first step of a training loop."""
    arguments = SimpleNamespace(load_best_model_at_end=False, torch_compile=False)
    callback = sonicmoe_hf.ExpertLoadCallback()
    for event in (callback.on_train_begin, callback.on_step_begin):
        event(arguments, TrainerState(), None, model=model)
    return callback
