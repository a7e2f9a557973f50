"""QLoRA from a hub id to a checkpoint that an inference engine serves: experts in 4 bits, adapters, merge.

Without arguments: a small Qwen3-MoE-architecture model with random weights, on the standard library's sources, offline,
on any machine.

    python examples/qlora.py
    python examples/qlora.py --model Qwen/Qwen3-30B-A3B --dataset roneneldan/TinyStories --output outputs/qlora
    python examples/qlora.py --model openai/gpt-oss-20b --dataset my_texts.jsonl
    python examples/qlora.py --model Qwen/Qwen3.5-35B-A3B --all-linear --no-liger --dataset my_texts.jsonl    # a hybrid
    python examples/qlora.py --model Qwen/Qwen3-30B-A3B --random --steps 10      # before the download: speed and memory
    python examples/qlora.py --model openai/gpt-oss-120b --experts-memory 0 ...    # its experts in host memory
    python examples/qlora.py --model deepseek-ai/DeepSeek-V3 --experts-quantization nf4 --experts-memory 0 \
        --linear-nf4 --optim adamw_8bit ...    # on one GPU of 80 GB
    python examples/qlora.py --trl ...
    torchrun --nproc-per-node 8 examples/qlora.py --model deepseek-ai/DeepSeek-V3 --experts-quantization fp8 \
        --dataset my_texts.jsonl
    torchrun --nproc-per-node 8 examples/qlora.py --model deepseek-ai/DeepSeek-V3 --experts-quantization fp8 --random \
        --layers 8 --steps 10
    torchrun --nproc-per-node 2 examples/qlora.py --replicate ...    # each GPU holds all packed experts

Qwen3-30B-A3B takes 21.4 GiB at 2,048 tokens a step with r = 8 on experts and attention, gpt-oss-20b 15.5 GiB. Experts are
packed while the checkpoint streams in (NF4; gpt-oss's MXFP4 and DeepSeek's FP8 stay as they are), and on GPUs the linear
layers beside them become bitsandbytes' NF4 where that is installed. Under torchrun each GPU holds its own experts and
their adapters, FSDP2 shards everything else in bf16, and the first rank merges; it takes Transformers 5.23. A folder that
`sonicmoe-hf convert MODEL FOLDER --layout native --quantize nf4` wrote loads in seconds: give it as --model. --trl trains
with TRL's SFTTrainer in place of Transformers' Trainer.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: its threads wait without spinning

import argparse
import importlib.util
from pathlib import Path

import torch
from datasets import Dataset
from finetune import cut_into_blocks, load_texts
from peft import get_peft_model
from shared import (
    VOCAB_SIZE,
    ThroughputCallback,
    add_activation_offloading,
    add_data_options,
    add_model_options,
    add_training_options,
    checkpointing,
    compiles_by_default,
    config_of,
    keep_gradients_once,
    liger_kernels,
    pack_linear_layers,
    parsed,
    random_packed_model,
    small_config,
    train_tokenizer,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

import sonicmoe_hf
from sonicmoe_hf.formats.declared import declared_quantization
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.patching.loading_packed import declared_for


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)  # --random: the experts' weights as packed bytes; trains, saves nothing
    parser.add_argument(
        "--experts-quantization",
        choices=tuple(FORMATS),
        help="default: the checkpoint's own format, else nf4 (uint4: int4 with a zero for each group)",
    )
    parser.add_argument("--experts-compute", choices=("fp8",), help="products of FP8 experts in FP8")
    parser.add_argument(
        "--experts-memory",
        help="such as 8GiB: how much of the experts stays on the GPU, while the rest is copied from host memory for each "
        'layer; or "auto"',
    )
    parser.add_argument(
        "--expanded-memory",
        help="such as 20GiB: how much of the GPU holds packed experts expanded too; `sonicmoe-hf plan --all` says what "
        "is left",
    )
    parser.add_argument(
        "--linear-nf4",
        action=argparse.BooleanOptionalAction,
        help="bitsandbytes' NF4 for linear layers; default: where it is installed and the checkpoint is not quantized",
    )
    parser.add_argument("--replicate", action="store_true", help="under torchrun: every GPU holds all experts")
    parser.add_argument(
        "--optim", default="adamw_torch_fused", help="Trainer's; adamw_8bit: the adapters' state by bitsandbytes"
    )
    parser.add_argument("--attn-implementation", help="default: the model's own; gpt-oss: torch_sinks on GPUs")
    parser.add_argument("--attention-only", action="store_true", help="no adapters on the experts")
    parser.add_argument("--all-linear", action="store_true", help="adapt linear attention, Mamba, shared experts too")
    parser.add_argument(
        "--liger", action=argparse.BooleanOptionalAction, help="for the loss; default: on GPUs, where it is installed"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile of each layer; default: on GPUs, with --model",
    )
    add_activation_offloading(parser)
    add_data_options(parser)
    parser.add_argument("--sequence-length", type=int, help="default: 512; for the small model 128")
    add_training_options(parser, steps=40, batch_size=4, rank=8, output=Path("outputs/qlora"), seed=0)
    parser.add_argument("--learning-rate", type=float, help="default: 1e-4; for the small model 3e-3")
    parser.add_argument("--trl", action="store_true", help="TRL's SFTTrainer")
    options = parsed(parser, arguments)
    if options.liger is None:
        options.liger = torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None
    if options.compile is None:
        options.compile = compiles_by_default(options)
    options.sequence_length = options.sequence_length or (128 if options.model is None else 512)
    return options


def make_small_model(texts, folder: Path) -> None:
    """Save a checkpoint as the hub has them, with random weights and a tokenizer of the texts."""
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    AutoModelForCausalLM.from_config(small_config(tokenizer), dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def linear_in_4_bits(arguments: argparse.Namespace, declared, shared) -> bool:
    """Tell whether bitsandbytes packs the linear layers, which must not be sharded then."""
    if arguments.linear_nf4 is not None:
        return arguments.linear_nf4
    # on CPUs bitsandbytes 0.50 loses gradients once a model has been evaluated
    is_there = torch.cuda.is_available() and importlib.util.find_spec("bitsandbytes") is not None
    return is_there and declared is None and shared is None


def options_of(arguments: argparse.Namespace) -> dict:
    """Collect the options that a model is made with, whether its weights are loaded or random."""
    options = {"dtype": torch.bfloat16, "attn_implementation": arguments.attn_implementation}
    return {name: value for name, value in options.items() if value is not None}


def experts_format(arguments: argparse.Namespace, declared) -> str:
    """Choose the experts' format: what is asked for, else the checkpoint's own."""
    stored = None if declared is None else declared.format_name()
    return arguments.experts_quantization or (stored if stored in FORMATS else "nf4")


def sharing(arguments: argparse.Namespace, world_size: int):
    """Say how ranks share the model's experts and shard the rest; None where each holds everything."""
    if world_size == 1 or arguments.replicate:
        return None
    from transformers.distributed import DistributedConfig

    return DistributedConfig(fsdp_size=world_size, ep_size=world_size, ep_implementation="sonicmoe_hf")


def load_packed(name: str, arguments: argparse.Namespace, world_size: int = 1):
    """Load the model with packed experts, and packed linear layers where `linear_in_4_bits`."""
    options, (_, declared) = options_of(arguments), declared_for(name, {})
    if declared is None or not declared.is_packed_here:
        options["experts_quantization"] = experts_format(arguments, declared)
    options["distributed_config"] = sharing(arguments, world_size)
    options["experts_memory"] = arguments.experts_memory
    packs_linear = linear_in_4_bits(arguments, declared, options["distributed_config"])
    if packs_linear and declared is None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = sonicmoe_hf.from_pretrained(name, **options)
    if packs_linear and declared is not None:  # a quantized checkpoint's, which are dense when they have been loaded
        pack_linear_layers(model, "nf4")
    return model


def load_random(texts, arguments: argparse.Namespace, world_size: int = 1):
    """Make (a model with random weights, packed as `load_packed` does; the small model's tokenizer)."""
    config, shared = config_of(arguments.model, arguments.layers), sharing(arguments, world_size)
    declared = declared_quantization(config)
    linear = "nf4" if linear_in_4_bits(arguments, declared, shared) else None
    model = random_packed_model(
        config,
        experts_format(arguments, declared),
        linear,
        distributed_config=shared,
        experts_memory=arguments.experts_memory,
        **options_of(arguments),
    )
    sonicmoe_hf.patch_model(model)
    return model, train_tokenizer(texts, VOCAB_SIZE)


def training_arguments(arguments: argparse.Namespace) -> TrainingArguments:
    """Make the arguments of Transformers' Trainer or TRL's. They come before the model: under torchrun they tell each
    rank its GPU."""
    settings = {
        "output_dir": str(arguments.output / "adapter"),
        "max_steps": arguments.steps,
        "per_device_train_batch_size": arguments.batch_size,
        "per_device_eval_batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate or (3e-3 if arguments.model is None else 1e-4),
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, arguments.steps // 20),
        "bf16": True,
        **checkpointing(arguments.activation_offloading),
        **(liger_kernels() if arguments.liger else {}),
        "torch_compile": arguments.compile,  # after `attach` of each layer
        "optim": arguments.optim,
        "logging_steps": max(1, arguments.steps // 8),
        "save_strategy": "no",
        "report_to": "none",
        "seed": arguments.seed,
        "use_cpu": not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    if not arguments.trl:
        return TrainingArguments(**settings)
    from trl import SFTConfig

    return SFTConfig(dataset_kwargs={"skip_prepare_dataset": True}, **settings)


def build_trainer(model, tokenizer, blocks, args: TrainingArguments, arguments: argparse.Namespace) -> Trainer:
    """Make Transformers' Trainer or TRL's, which logs the load of the experts."""
    trainer: type[Trainer] = Trainer
    if arguments.trl:
        from trl import SFTTrainer as trainer
    if isinstance(blocks, list):
        blocks = Dataset.from_list(blocks)
    held_out = blocks.train_test_split(test_size=max(1, min(32, len(blocks) // 10)), seed=arguments.seed)
    prepared = trainer(
        model=model,
        args=args,
        train_dataset=held_out["train"],
        eval_dataset=held_out["test"],
        processing_class=tokenizer,
        callbacks=[sonicmoe_hf.ExpertLoadCallback(), ThroughputCallback(arguments.sequence_length)],
    )
    sonicmoe_hf.attach(prepared, expanded_memory=arguments.expanded_memory)
    keep_gradients_once(prepared)
    return prepared


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save the adapter, merge; returns the metrics. With --random, train."""
    arguments = parse_arguments(argv)
    set_seed(arguments.seed)
    args = training_arguments(arguments)
    is_first = args.process_index == 0
    texts, adapter, merged = load_texts(arguments), arguments.output / "adapter", arguments.output / "merged"
    if arguments.random:
        model, tokenizer = load_random(texts, arguments, args.world_size)
    else:
        base = arguments.model or str(arguments.output / "base")
        with args.main_process_first(local=False):
            if arguments.model is None and is_first:
                make_small_model(texts, arguments.output / "base")
        tokenizer = AutoTokenizer.from_pretrained(base)
        model = load_packed(base, arguments, args.world_size)
    if arguments.experts_compute is not None:
        sonicmoe_hf.patch_model(model, experts_compute=arguments.experts_compute)
    options = {"target_parameters": []} if arguments.attention_only else {}
    if arguments.all_linear:
        options["target_modules"] = "all-linear"
    model = get_peft_model(model, sonicmoe_hf.lora_config(model, arguments.rank, **options))
    if is_first:
        model.print_trainable_parameters()
    blocks = cut_into_blocks(texts, tokenizer, arguments.sequence_length)
    trainer = build_trainer(model, tokenizer, blocks, args, arguments)
    if arguments.random:
        return trainer.train().metrics
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    metrics = {"loss_before": before, **trainer.evaluate()}
    trainer.save_model(str(adapter))
    if not is_first:  # one rank merges
        return metrics
    print(f"held-out loss {before:.3f} -> {metrics['eval_loss']:.3f}; the adapter is in {adapter}")

    done = sonicmoe_hf.merge_adapter(base, adapter, merged, "hub")
    for notice in done.notices:
        print(f"note: {notice}")
    print(f"merged into {base}: {done.nbytes / 1e9:.2f} GB in {merged}. To serve it:\n\n    vllm serve {merged}\n")
    return metrics


if __name__ == "__main__":
    main()
