"""`sonicmoe-hf warmup --compile`: a model's compiled layers in torch's cache on disk, ahead of the first step."""

from __future__ import annotations

import copy
import tempfile
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from peft import get_peft_model
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from ...checkpoints.reading.config_only import build_on_meta
from ...compiling.layers import checkpointable_layers, why_in_python
from ...errors import UnlikeApartError
from ...lora.config import lora_config
from ...private.torch import cached_graphs
from ...trainer.attach import attach
from ..random_models import random_packed_model

LENGTHS = 512, 384  # of which compiled layers take any


class Settings(NamedTuple):
    """The settings of a run that decide what is compiled.

    quantize: the format of the experts, or None. rank: of the adapters of `lora_config`. tokens: of each sequence, or
    None where lengths vary. liger: use_liger_kernel.
    """

    dtype: torch.dtype
    quantize: str | None
    rank: int
    batch_size: int
    tokens: int | None
    liger: bool


class Graphs(NamedTuple):
    """The number of graphs that the cache had, that were added to it, and that it does not take, and torch's reasons for
    leaving something to Python."""

    there: int
    added: int
    refused: int
    reasons: list[str]


def compile_ahead(name: str, settings: Settings) -> Graphs:
    """Train a step of a model's first decoder layers, of each kind at least one, with random weights, and another as one
    row where lengths vary and the model can be trained so."""
    config = _config_with_each_kind(build_on_meta(name))
    model: Any = random_packed_model(config, experts=settings.quantize, dtype=settings.dtype)
    model = get_peft_model(model, lora_config(model, r=settings.rank))
    batches = _batches(settings, model.config.get_text_config().vocab_size)
    before = cached_graphs()
    _train(model, settings, batches, 0)
    if settings.tokens is None:
        with suppress(UnlikeApartError):  # a run that asks for no rows then makes none
            _train(model, settings, batches, sum(batch["input_ids"].numel() for batch in batches))
    counted = cached_graphs() - before
    return Graphs(
        there=counted["autograd_cache_hit"],
        added=counted["autograd_cache_saved"],
        refused=counted["autograd_cache_bypass"],
        reasons=why_in_python(model),
    )


def _train(model: Any, settings: Settings, batches: list, packed_tokens: int) -> None:
    """Train a step of these micro-batches, in rows of at most so many tokens."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=1,
            per_device_train_batch_size=1,  # an element of the dataset is a micro-batch
            gradient_accumulation_steps=len(batches),
            bf16=settings.dtype == torch.bfloat16,
            fp16=settings.dtype == torch.float16,
            use_cpu=not torch.accelerator.is_available(),
            use_liger_kernel=settings.liger,
            torch_compile=True,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            remove_unused_columns=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=batches, data_collator=lambda rows: rows[0])  # type: ignore[arg-type]
        attach(trainer, compile=True, packed_tokens=packed_tokens)
        trainer.train()


def _config_with_each_kind(model: PreTrainedModel) -> PreTrainedConfig:
    """Make the config of a model like this one, whose decoder has as few of its first layers as have all of its kinds.

    Raises:
        ValueError: the config's number of layers is not that of the decoder.
    """
    whole = copy.deepcopy(model.config)
    config = whole.get_text_config()
    types = getattr(config, "layer_types", None) or ()
    kinds = [
        (repr(layer), [(name, each.shape) for name, each in layer.named_parameters()], tuple(types[i : i + 1]))
        for i, layer in enumerate(checkpointable_layers(model.get_decoder()))
    ]
    if len(kinds) != config.num_hidden_layers:
        raise ValueError(
            f"the decoder of {type(model).__name__} has {len(kinds)} layers and its config num_hidden_layers="
            f"{config.num_hidden_layers}, so that its first ones cannot be built alone; leave --compile out, and let the "
            "first step compile them"
        )
    count = max((kinds.index(kind) for kind in kinds), default=0) + 1
    config.num_hidden_layers = count
    if config.num_hidden_layers != count:  # Nemotron-H's follows from these
        config.layer_types = types[:count]
    return whole


def _batches(settings: Settings, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Make a step's micro-batches: of each length, where they have several sequences also with padding. Collators give a
    mask without padding too."""
    batches = []
    for length in LENGTHS if settings.tokens is None else [settings.tokens]:
        shape = settings.batch_size, length
        ids = torch.randint(vocabulary, shape, dtype=torch.int64, device="cpu")
        batches.append({"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})
        if settings.batch_size > 1:
            mask = torch.ones_like(ids)
            mask[0, length // 2 :] = 0
            batches.append({**batches[-1], "attention_mask": mask})
    return batches
