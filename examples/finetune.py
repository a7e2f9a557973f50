"""Train or finetune a mixture-of-experts model with the Hugging Face Trainer, with or without token rounding.

Without arguments: a small Qwen3-MoE-architecture model with random weights, on the standard library's sources, offline.

    python examples/finetune.py
    python examples/finetune.py --model Qwen/Qwen3-30B-A3B --dataset roneneldan/TinyStories --lora \
        --sequence-length 4096 --batch-size 4 --output outputs/lora
    python examples/finetune.py --model openai/gpt-oss-20b --dequantize --dataset my_texts.jsonl --bf16
    python examples/finetune.py --model openai/gpt-oss-20b --lora --experts-quantization mxfp4 --dataset my_texts.jsonl
    python examples/finetune.py --model Qwen/Qwen3.5-35B-A3B --lora --all-linear --dataset my_texts.jsonl    # a hybrid
    accelerate launch --config_file examples/fsdp2.yaml examples/finetune.py ...

--lora is the recipe of docs/lora.md: adapters on experts and attention, bf16 weights and autocast, gradient
checkpointing; --experts-quantization makes it QLoRA. `sonicmoe-hf merge` then adds the adapters to the model's weights,
for serving. docs/recipes.md has more commands, with what they took on an H200.
Texts are joined into one stream and cut into blocks without padding. Routing is the model's own top-k; --rounding trains
with token rounding, and docs/token-rounding.md says when that pays.
`sonicmoe-hf doctor MODEL --batch-size B --sequence-length S` says beforehand what a model and batch will get.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: its threads wait without spinning

import argparse
import importlib
import math
from pathlib import Path

import torch
from accelerate import PartialState
from shared import (
    PER_LAYER_LOSS,
    READERS,
    ThroughputCallback,
    add_activation_offloading,
    add_data_options,
    add_model_options,
    add_training_options,
    checkpointing,
    compiles_by_default,
    keep_gradients_once,
    liger_kernels,
    load,
    parsed,
    standard_library,
)
from torch.utils.data import random_split
from transformers import (
    AutoTokenizer,
    FineGrainedFP8Config,
    Mxfp4Config,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import sonicmoe_hf
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.layer.backends import BACKEND_VARIABLE
from sonicmoe_hf.layer.config import ROUNDINGS, SAVE_CHOICES
from sonicmoe_hf.layer.routing import TokenRounding
from sonicmoe_hf.patching.loading_packed import declared_for

FEW_TOKENS = 2048  # of a GPU's step, which waits for Python up to there (docs/performance.md)
SMALL_MODEL_TILE = 64  # its experts get 256 rows a step on average: four tiles
DEAD_EXPERTS = "moe/dead_experts"  # as ExpertLoadCallback logs them
DEQUANTIZERS = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}


def moment(text: str) -> int | float:
    """Read an optimiser step (a whole number) or a fraction of training (with a point: 0.9)."""
    return int(text) if text.isdecimal() else float(text)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)

    model = parser.add_argument_group("model")
    add_model_options(model)
    model.add_argument(
        "--dequantize", action="store_true", help="load a quantized checkpoint (mxfp4, fp8) as plain bf16"
    )
    model.add_argument("--attn-implementation", help="eager, sdpa, flash_attention_2, ...")
    lora = {"metavar": "RANK", "type": int, "nargs": "?", "const": 16, "default": 0}
    lora["help"] = "train LoRA on experts and attention (rank 16); default: all weights"
    model.add_argument("--lora", "--lora-rank", dest="lora_rank", **lora)
    model.add_argument("--lora-alpha", type=int, help="default: twice the rank")
    model.add_argument(
        "--all-linear", action="store_true", help="LoRA on linear attention, Mamba and shared experts too"
    )
    switch = argparse.BooleanOptionalAction
    model.add_argument("--bf16", action=switch, help="compute in bf16 (autocast); default: for LoRA on a GPU")
    model.add_argument("--gradient-checkpointing", action=switch, help="default: for LoRA, and offloading")
    model.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the weights; default: bfloat16 for LoRA with --bf16, else float32",
    )
    model.add_argument(
        "--experts-quantization",
        choices=tuple(FORMATS),
        help="hold the experts packed in 4 or 8 bits and frozen; with --lora (uint4: int4 with a zero for each group)",
    )
    model.add_argument("--freeze-experts", action="store_true", help="no gradients for the experts' weights")
    model.add_argument("--liger", action="store_true", help="Liger's RMSNorm, RoPE and fused linear cross entropy")
    model.add_argument(
        "--compile",
        metavar="BACKEND",
        nargs="?",
        const="inductor",
        help="torch.compile: by inductor, as CUDA graphs or layer by layer, whichever pays at this batch; default: layer "
        "by layer for LoRA of a --model on GPUs, with gradient checkpointing and no --per-layer-loss",
    )
    model.add_argument("--no-compile", dest="compile", action="store_false", default=None, help="no torch.compile")

    data = parser.add_argument_group("data")
    add_data_options(data)
    data.add_argument("--held-out-blocks", type=int, default=64, help="for evaluation; a tenth of the blocks at most")
    add_training_options(data, sequence_length=512)

    moe = parser.add_argument_group("sonicmoe-hf")
    moe.add_argument(
        "--rounding",
        choices=("top_k", *ROUNDINGS),
        default="top_k",
        help="of tokens per expert; default: top_k, no token rounding",
    )
    moe.add_argument("--tile", type=int, help=f"rows; default: {SMALL_MODEL_TILE} for the small model, else 128")
    moe.add_argument("--min-tiles-per-expert", type=float, help=f"default: {TokenRounding.min_tiles_per_expert}")
    moe.add_argument("--start", type=moment, help="of token rounding: step, or fraction of training; default: 0.0")
    moe.add_argument("--end", type=moment, help="likewise; default: 1.0")
    moe.add_argument(
        "--per-layer-loss",
        type=float,
        help=f"balancing loss; default: {PER_LAYER_LOSS} for the small model, else none",
    )
    moe.add_argument("--bias-update", type=float, help="of correction biases (DeepSeek-V3 and its kin), such as 1e-3")
    moe.add_argument("--save", choices=SAVE_CHOICES, default="preactivation", help="what layers keep for backward")
    moe.add_argument("--backend", help=f"overrides the automatic choice, as {BACKEND_VARIABLE} does")

    training = parser.add_argument_group("training")
    add_activation_offloading(training)
    add_training_options(training, steps=100, batch_size=4, gradient_accumulation_steps=1)
    add_training_options(training, logging_steps=10, output="outputs/finetune", seed=0)
    training.add_argument(
        "--learning-rate", type=float, help="default: 3e-3 for the small model, else 1e-5; LoRA: 1e-4"
    )
    training.add_argument("--deepspeed", metavar="JSON", help="a DeepSpeed config, such as examples/zero3.json")
    training.add_argument("--save-steps", type=int, help="default: only at the end")
    training.add_argument(
        "--train-only", action="store_true", help="no evaluation, nothing saved: for speed and memory"
    )
    training.add_argument("--resume", action="store_true", help="from the last checkpoint in --output")
    training.add_argument("--report-to", default="none", help="tensorboard, wandb, ...")
    options = parsed(parser, arguments)
    if options.experts_quantization and not options.lora_rank:
        parser.error("--experts-quantization freezes the experts: it needs --lora")
    if options.rounding == "top_k" and (useless := options_of_rounding(options)):
        names = ", ".join("--" + name.replace("_", "-") for name in useless)
        parser.error(f"{names}: only with token rounding; add --rounding, such as --rounding balanced")
    if options.activation_offloading and options.gradient_checkpointing is False:
        parser.error("--activation-offloading is of gradient checkpointing: leave out --no-gradient-checkpointing")
    if options.bf16 is None:
        options.bf16 = bool(options.lora_rank) and torch.cuda.is_available()  # few CPUs multiply bf16 fast
    if options.gradient_checkpointing is None:
        options.gradient_checkpointing = bool(options.lora_rank) or options.activation_offloading
    if options.compile is None:
        pays = (
            options.lora_rank
            and options.gradient_checkpointing
            and not options.per_layer_loss
            and not options.deepspeed
        )
        options.compile = "inductor" if pays and compiles_by_default(options) else False
    return options


def options_of_rounding(arguments: argparse.Namespace) -> dict[str, int | float]:
    """Collect the options of token rounding beside its kind from the command line."""
    names = ("tile", "min_tiles_per_expert", "start", "end")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def load_texts(arguments: argparse.Namespace):
    """Load a list of texts, or a dataset with a column "text"."""
    if arguments.dataset is None:
        return standard_library()[0]
    from datasets import load_dataset

    reader = READERS.get(Path(arguments.dataset).suffix)
    if reader is not None:
        texts = load_dataset(reader, data_files=arguments.dataset, split="train")
    else:
        texts = load_dataset(arguments.dataset, arguments.dataset_config, split=arguments.split)
    if arguments.text_column not in texts.column_names:
        raise SystemExit(
            f"{arguments.dataset} has no column {arguments.text_column!r} but {texts.column_names}; set --text-column"
        )
    return texts.select_columns([arguments.text_column]).rename_columns({arguments.text_column: "text"})


def cut_into_blocks(texts, tokenizer, length: int):
    """Join all texts to one stream, and cut it into blocks of `length` tokens."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def cut(batch):
        stream = [token for ids in tokenizer(batch["text"], verbose=False)["input_ids"] for token in [*ids, *end]]
        rows = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
        return {"input_ids": rows, "labels": rows}

    if isinstance(texts, list):
        rows = [{"input_ids": row, "labels": row} for row in cut({"text": texts})["input_ids"]]
    else:
        rows = texts.map(cut, batched=True, remove_columns=texts.column_names, desc="tokenizing")
    if len(rows) < 2:
        raise SystemExit(f"{len(rows)} blocks of {length} tokens: too little text; shorten --sequence-length")
    return rows


def load_model(texts, arguments: argparse.Namespace):
    """Load the model, patched, and its tokenizer."""
    is_small = arguments.model is None
    half = arguments.lora_rank and arguments.bf16 and not is_small
    options = {"dtype": arguments.dtype or ("bfloat16" if half else "float32")}
    if arguments.attn_implementation is not None:
        options["attn_implementation"] = arguments.attn_implementation
    if is_small or arguments.random:
        options["dtype"] = getattr(torch, options["dtype"])
        model, tokenizer = load(arguments, texts if isinstance(texts, list) else texts["text"], **options)
        if arguments.experts_quantization is not None:
            sonicmoe_hf.quantize_experts(model, arguments.experts_quantization)
        sonicmoe_hf.patch_model(model, save=arguments.save)
        return model, tokenizer
    if arguments.dequantize:
        _, declared = declared_for(arguments.model, {})
        method = None if declared is None else declared.method
        if method not in DEQUANTIZERS:
            raise SystemExit(f"--dequantize: {arguments.model} is quantized with {method!r}, not {list(DEQUANTIZERS)}")
        options["quantization_config"] = DEQUANTIZERS[method](dequantize=True)
    model = sonicmoe_hf.from_pretrained(
        arguments.model, save=arguments.save, experts_quantization=arguments.experts_quantization, **options
    )
    return model, AutoTokenizer.from_pretrained(arguments.model)


def choose_trained_weights(model: PreTrainedModel, arguments: argparse.Namespace):
    """Choose the weights that are trained: LoRA on the model, frozen experts, or all of it."""
    if arguments.lora_rank:
        options = {"target_parameters": []} if arguments.freeze_experts else {}
        if arguments.all_linear:
            options["target_modules"] = "all-linear"
        if arguments.lora_alpha is not None:
            options["lora_alpha"] = arguments.lora_alpha
        model = importlib.import_module("peft").get_peft_model(
            model, sonicmoe_hf.lora_config(model, arguments.lora_rank, **options)
        )
        if PartialState().is_main_process:
            model.print_trainable_parameters()
    elif arguments.freeze_experts:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.requires_grad_(False)
    return model


def captures_graphs(arguments: argparse.Namespace) -> bool:
    """Tell whether a compiled model runs as CUDA graphs: a step of few tokens waits for Python otherwise. Gradients
    summed over several batches have not been measured so, and a model with gradient checkpointing is no one graph."""
    few = arguments.batch_size * arguments.sequence_length <= FEW_TOKENS
    one_graph = arguments.gradient_accumulation_steps == 1 and not arguments.gradient_checkpointing
    return arguments.compile == "inductor" and few and one_graph


def compiles_layers(arguments: argparse.Namespace) -> bool:
    """Tell whether each layer is compiled on its own: once for all of them, and without the mask that Transformers
    makes inside a compiled model, with which attention is slower."""
    return arguments.compile == "inductor" and not captures_graphs(arguments)


def training_arguments(arguments: argparse.Namespace) -> TrainingArguments:
    """Make the Trainer's arguments. ZeRO-3 wants them before the model, which is then sharded as it loads."""
    learning_rate = arguments.learning_rate
    if learning_rate is None:
        learning_rate = 1e-4 if arguments.lora_rank else 3e-3 if arguments.model is None else 1e-5
    options = {}
    if arguments.gradient_checkpointing:
        options |= checkpointing(arguments.activation_offloading)
    if arguments.liger:
        options |= liger_kernels()
    if arguments.compile and not compiles_layers(arguments):
        options |= {"torch_compile": True, "torch_compile_backend": arguments.compile}
    if captures_graphs(arguments):
        # a graph is of one length: only the last batch of an evaluation has another, and runs without
        options |= {"torch_compile_mode": "reduce-overhead", "dataloader_drop_last": True}
        torch._inductor.config.triton.cudagraph_skip_dynamic_graphs = True
        torch._inductor.config.graph_partition = False  # or that setting leaves most operations out of the graphs
    return TrainingArguments(
        output_dir=arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, arguments.steps // 20),
        bf16=arguments.bf16,
        deepspeed=arguments.deepspeed,
        logging_steps=arguments.logging_steps,
        save_strategy="no" if arguments.save_steps is None else "steps",
        save_steps=arguments.save_steps or arguments.steps,
        report_to=arguments.report_to,
        seed=arguments.seed,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        **options,
    )


def build_trainer(model, tokenizer, blocks, args: TrainingArguments, arguments: argparse.Namespace) -> Trainer:
    """Make a Trainer that logs the load of the experts, with what is asked for: token rounding, balanced experts."""
    held_out = max(1, min(arguments.held_out_blocks, len(blocks) // 10))
    generator = torch.Generator().manual_seed(arguments.seed)
    train_blocks, held_out_blocks = random_split(blocks, [len(blocks) - held_out, held_out], generator)
    callbacks = [sonicmoe_hf.ExpertLoadCallback(), ThroughputCallback(arguments.sequence_length)]
    if arguments.rounding != "top_k":
        options = options_of_rounding(arguments)
        if arguments.model is None:
            options.setdefault("tile", SMALL_MODEL_TILE)
        callbacks.append(sonicmoe_hf.TokenRoundingCallback(rounding=arguments.rounding, **options))
    per_layer_loss = arguments.per_layer_loss
    if per_layer_loss is None and arguments.model is None and not arguments.compile:
        per_layer_loss = PER_LAYER_LOSS  # it does not work in compiled models
    if per_layer_loss is not None or arguments.bias_update is not None:
        callbacks.append(sonicmoe_hf.LoadBalancing(per_layer_loss, arguments.bias_update))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_blocks,
        eval_dataset=held_out_blocks,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    sonicmoe_hf.attach(trainer, compile=compiles_layers(arguments))
    keep_gradients_once(trainer)
    return trainer


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate with top-k, save; returns the metrics. With --train-only, train."""
    arguments = parse_arguments(argv)
    if arguments.lora_rank:
        importlib.import_module("peft")  # before a large model is loaded
    if arguments.backend is not None:
        os.environ[BACKEND_VARIABLE] = arguments.backend
    set_seed(arguments.seed)
    args = training_arguments(arguments)
    texts = load_texts(arguments)
    model, tokenizer = load_model(texts, arguments)
    model = choose_trained_weights(model, arguments)
    blocks = cut_into_blocks(texts, tokenizer, arguments.sequence_length)
    trainer = build_trainer(model, tokenizer, blocks, args, arguments)
    if arguments.compile and trainer.is_world_process_zero():
        what = "each layer" if compiles_layers(arguments) else "the model"
        graphs = ", to run as CUDA graphs" if captures_graphs(arguments) else ""
        print(
            f"torch.compile compiles {what}{graphs}, in the first step, which usually takes a minute, more with many "
            "layers"
        )
    trained = trainer.train(resume_from_checkpoint=arguments.resume)
    if arguments.train_only:
        return trained.metrics
    evaluated = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    metrics = {**trained.metrics, **evaluated, "perplexity": math.exp(evaluated["eval_loss"])}
    for entry in trainer.state.log_history:
        if DEAD_EXPERTS in entry:
            metrics[DEAD_EXPERTS] = entry[DEAD_EXPERTS]  # of the last log
    if trainer.is_world_process_zero():
        print(
            f"held-out loss {evaluated['eval_loss']:.3f}, perplexity {metrics['perplexity']:.1f}; experts without pairs "
            f"at the end: {metrics.get(DEAD_EXPERTS, 'not logged')}; saved to {arguments.output}"
        )
    return metrics


if __name__ == "__main__":
    main()
