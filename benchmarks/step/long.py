"""Training steps of one long sequence, by Transformers' Trainer: adapters on the experts and all of the attention, frozen
experts in NF4, gradient checkpointing, Liger's kernels.

    python -m benchmarks.step.long                                  # one GPU
    torchrun --nproc-per-node 4 -m benchmarks.step.long             # context parallelism over four, as accelerate has it
    torchrun --nproc-per-node 2 -m benchmarks.step.long --ulysses --experts bf16

Over several GPUs accelerate slices each sequence, attention is torch's ring attention, and FSDP2 shards the weights. With
--ulysses DeepSpeed's Ulysses shares the heads of attention and ZeRO-2 shards what the optimizer has, as packed experts
cannot.
Small models are checked first: on one GPU gradients beside those of fp32, with layers in pieces; over several, the loss
and what a step changes beside those of one GPU that has the whole sequence. Weights are random; with --spread-load
experts have the load of a trained model.

--device cpu --tiny checks the script.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import tempfile
import time
from unittest import mock

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Table
from benchmarks.common.timing import release
from benchmarks.step import checking, models
from benchmarks.step.run import Run, build_base, check, join_ranks, prepare
from benchmarks.step.training import GIB, WHOLE_ATTENTION, record
from sonicmoe_hf.layer import pieces
from sonicmoe_hf.layer.config import SAVE_CHOICES

RANK = 8
SHORT = 16384  # tokens of a first step, which compiles kernels and allocates the optimiser's state
CHECKPOINTS = "checkpoints"  # what layers keep for backward where it is not what `patch_model(save=...)` says
SMALL = 256  # tokens of a checked sequence; rows of a piece there
MAX_DIFFERENCE = 0.05  # of a gradient, relative to its norm: the same model in bf16, with sums in another order


class StepTimes(TrainerCallback):
    """Times each step of a Trainer; peak_GiB: of the last."""

    def __init__(self):
        self.milliseconds, self.peak_GiB, self.on_gpu = [], float("nan"), torch.cuda.is_available()

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.began = self._now()

    def on_step_end(self, args, state, control, **kwargs):
        self.milliseconds.append(self._now() - self.began)
        if self.on_gpu:
            self.peak_GiB = torch.cuda.max_memory_allocated() / GIB


def share_sequences(ranks: int, ulysses: bool) -> dict:
    """Choose a Trainer's arguments by which so many ranks share each sequence."""
    if ranks == 1:
        return {}
    if not ulysses:
        fsdp = {"version": 2, "cpu_ram_efficient_loading": False, "reshard_after_forward": True}
        return {"fsdp": True, "fsdp_config": fsdp, "parallelism_config": ParallelismConfig(cp_size=ranks)}
    deepspeed = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": "auto"},
    }
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa", sp_seq_length_is_variable=True)
    parallelism = ParallelismConfig(sp_size=ranks, sp_backend="deepspeed", sp_handler=handler)
    return {"deepspeed": deepspeed, "parallelism_config": parallelism}


def train(
    model, sequences: list[torch.Tensor], checkpointing: bool = True, offloading: bool = False, bf16=True, **settings
):
    """Train on one sequence a step, and return (its StepTimes, the Trainer, the losses). settings: of its arguments."""
    on_gpu = torch.cuda.is_available()
    args = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        max_steps=len(sequences),
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        bf16=bf16,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,  # Liger's loss, as the forward, names no positions
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False, "offload": offloading and on_gpu},
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        **settings,
    )
    times = StepTimes()
    rows = [{"input_ids": each, "labels": each, "position_ids": torch.arange(len(each))} for each in sequences]
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[times])
    sonicmoe_hf.attach(trainer)
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    trainer.train()
    if "deepspeed" in settings:  # which registers its attention in the place of torch's, once a process
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
        parallel_state_sp._release_sequence_parallel_groups()
    return times, trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def draw_sequence(length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(1))


def values_of(model) -> dict[str, torch.Tensor]:
    """Copy the trained parameters, whole, by name, to the CPU."""
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).float().cpu() for n, p in named.items()}


def check_ranks(run: Run, options: argparse.Namespace, ranks: int) -> None:
    """Compare a step of plain gradient descent of a small model over all ranks with the gradients of this rank alone,
    which has the whole sequence. By Ulysses in fp32, since DeepSpeed's bf16 rounds what a step changes, and with
    gradients that DeepSpeed multiplies by the ranks.

    Raises:
        SystemExit: the loss or a gradient differs.
    """
    tiny, run = argparse.Namespace(device=options.device, tiny=True), run._replace(layers=checking.LAYERS)
    model = prepare(build_base(run, tiny), run)
    model = model.float() if options.ulysses else model
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tokens = draw_sequence(SMALL, model.config.vocab_size)
    batch = tokens.unsqueeze(0).to(options.device)
    with torch.autocast(options.device, torch.bfloat16, enabled=not options.ulysses):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    before = values_of(model)
    expected = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    settings = {"optim": "sgd", "learning_rate": 1 / ranks if options.ulysses else 1.0, "bf16": not options.ulysses}
    _, trainer, (parallel_loss,) = train(model, [tokens], **settings, **share_sequences(ranks, options.ulysses))
    gradients = {name: before[name] - value for name, value in values_of(trainer.model).items()}
    errors = {name: ((gradients[name] - grad).norm() / grad.norm()).item() for name, grad in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    print(f"  {ranks} ranks: loss {parallel_loss}, one: {loss.item()}; worst gradient {errors[worst]:.4f} ({worst})")
    if abs(parallel_loss - loss.item()) > 0.01 * loss.item() or not errors[worst] < MAX_DIFFERENCE:
        raise SystemExit(f"{ranks} ranks train something else than one")


def measure(run: Run, kept: str, options: argparse.Namespace, ranks: int) -> dict:
    """Measure milliseconds, tokens per second of a GPU, and GiB at the peak of this rank."""
    model = prepare(build_base(run, options), run)
    if kept != CHECKPOINTS:
        sonicmoe_hf.patch_model(model, save=kept)
    tokens = draw_sequence(run.tokens, model.config.vocab_size)
    settings = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "optim": "adamw_torch_fused"}
    times, _, (_, *losses) = train(
        model,
        [tokens[:SHORT], *[tokens] * options.steps],
        run.checkpointing,
        options.offloading,
        **settings,
        **share_sequences(ranks, options.ulysses),
    )
    if not losses[-1] <= losses[0]:  # FSDP2 gives them in bf16
        raise SystemExit(f"the loss on one sequence went from {losses[0]} to {losses[-1]}: it does not train")
    milliseconds = times.milliseconds[-max(1, options.steps - 1) :]
    per_second = [1e3 * run.tokens / ranks / each for each in milliseconds]
    return {"ms": milliseconds, "tokens_per_second": per_second, "peak_GiB": times.peak_GiB}


def main():
    parser = Command(__doc__, "long.csv", "--device cpu --tiny --lengths 256")
    models.add_settings(parser)
    parser.add_argument("--model", default="Qwen3-30B-A3B", choices=models.MODELS)
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536, 131072])
    parser.add_argument("--experts", default="nf4", help="format of the experts, or bf16")
    kept = {"choices": (CHECKPOINTS, *SAVE_CHOICES), "nargs": "+", "default": [CHECKPOINTS]}
    parser.add_argument("--kept", **kept, help="what layers keep for backward")
    parser.add_argument("--offloading", action="store_true", help="hidden states between layers in pinned host memory")
    parser.add_argument(
        "--steps", type=int, default=2, help="at full length, of which the first is timed if it is alone"
    )
    parser.add_argument("--ulysses", action="store_true", help="DeepSpeed's, over several GPUs, for experts in bf16")
    parser.add_argument("--no-cudnn", action="store_true", help="attention by torch's flash kernels")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="the caller has checked")
    options = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(not options.no_cudnn)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        join_ranks(options.device)
    if options.ulysses:
        import deepspeed

        deepspeed.init_distributed(auto_mpi_discovery=False)
    table, layers = Table(options.csv), options.layers or models.MODELS[options.model].layers
    experts = None if options.experts == "bf16" else options.experts
    mode = "LoRA" if experts is None else "QLoRA"
    attention = "torch_sinks" if options.model.startswith("gpt-oss") and options.device == "cuda" else None
    run = Run(options.model, layers, 0, mode, experts=experts, attention=attention, checkpointing=True)
    run = run._replace(rank=RANK, targets=WHOLE_ATTENTION)
    if not options.no_check:
        if ranks > 1:
            check_ranks(run, options, ranks)
        else:
            with mock.patch.object(pieces, "MAX_ROWS", SMALL):
                check([run], options, autocast=True)
        release()
    launch = [*models.settings_of(options.model, options), *["offloading"] * options.offloading]
    parallelism = "Ulysses" if options.ulysses else "context parallelism"
    launch += ["flash attention"] * options.no_cudnn + [f"{ranks} GPUs", parallelism] * (ranks > 1)
    for length, kept in itertools.product(options.lengths, options.kept):
        run = run._replace(tokens=length, checkpointing=kept == CHECKPOINTS)
        settings = ", ".join([*launch, "checkpointing" if run.checkpointing else f"save={kept}"])
        columns = options.model, f"{layers},{length}", run.contender, f"{mode}, experts in {options.experts}"
        record(table, (*columns, settings), functools.partial(measure, run, kept, options, ranks))
        if int(os.environ.get("RANK", 0)) == 0:
            table.write()


if __name__ == "__main__":
    main()
