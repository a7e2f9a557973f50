"""GRPO (TRL) of a mixture-of-experts model with LoRA on its experts, which are those that sampled in every training call.

A small change of the weights can change a router's choice, and then a token's probability ratio compares two different
networks. With vLLM, which gets the adapter alone at each step, its experts are replayed; without it the policy's own are.
Without arguments: a small model with random weights, which learns to write lower-case letters; offline, in a minute on a
CPU.

    python examples/grpo.py
    python examples/grpo.py --vllm colocate
    python examples/grpo.py --model Qwen/Qwen3-30B-A3B --dataset trl-lib/tldr --bf16 --vllm colocate
    python examples/grpo.py --model Qwen/Qwen3-30B-A3B --dataset trl-lib/tldr --bf16 --vllm http://localhost:8000

--vllm, with a GPU: "colocate", in this process, or the URL of `vllm serve`, TRL 1.11 or newer; an error says what command
line that needs. Logged are serving/kl, serving/largest_gap and serving/divergence, between vLLM and the trainer.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: its threads wait without spinning

import argparse

import torch
import trl
from datasets import Dataset, load_dataset
from shared import add_training_options, small_config, standard_library, train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig

import sonicmoe_hf
from sonicmoe_hf.trl import GRPOTrainer

SMALL = {
    "max_completion_length": 16,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "vllm_max_model_length": 128,
    "vllm_gpu_memory_utilization": 0.3,
}


def lower_case(completions, **kwargs) -> list[float]:
    """Compute a reward, to replace by your own: the share of lower-case letters."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [sum(letter.islower() for letter in text) / max(len(text), 1) for text in texts]


def small_model(folder: str):
    """Save a small model with random weights in `folder`, from where vLLM reads it too; return its tokenizer, and
    prompts: first lines of Python's functions."""
    texts = standard_library()[0]
    tokenizer = train_tokenizer(texts, 512)
    config = small_config(tokenizer)
    config.num_experts, config.num_hidden_layers = 8, 2
    config.tie_word_embeddings = False
    config.initializer_range = 0.15  # as large as trained weights, since the adapter alone is trained
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lines = [line.strip() for text in texts for line in text.splitlines() if line.lstrip().startswith("def ")]
    return tokenizer, Dataset.from_list([{"prompt": line[:60]} for line in lines])


def vllm_options(vllm: str | None) -> dict:
    """Make GRPOConfig's arguments for --vllm."""
    if vllm is None:
        return {}
    if vllm == "colocate":
        return {"use_vllm": True, "vllm_mode": "colocate"}
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": vllm}


def main(argv: list[str] | None = None) -> list[dict]:
    """Train a model on the prompts of a dataset; returns what the trainer logged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or local folder; default: a small model with random weights")
    parser.add_argument("--dataset", help="with a column of prompts, as TRL wants it; with --model")
    parser.add_argument("--vllm", help="colocate, or the URL of vllm serve; default: Transformers samples")
    add_training_options(parser, steps=100, output="outputs/grpo")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter (default %(default)s)")
    parser.add_argument("--experts-quantization", help="nf4, mxfp4, fp8 or nvfp4: hold experts packed")
    parser.add_argument("--served-base", help="the base that vLLM serves, rounded as the packed experts are")
    parser.add_argument(
        "--max-completion-length", type=int, help="in tokens; default: 16 for the small model, else TRL's"
    )
    parser.add_argument("--bf16", action="store_true", help="compute in bf16 (autocast), TRL's own default")
    arguments = parser.parse_args(argv)
    if (arguments.model is None) != (arguments.dataset is None):
        parser.error("--model and --dataset belong together")
    set_seed(0)
    options = dict(SMALL) if arguments.model is None else {}
    if arguments.max_completion_length is not None:
        options["max_completion_length"] = arguments.max_completion_length
    if arguments.model is None:
        name = f"{arguments.output}/small"
        tokenizer, prompts = small_model(name)
    else:
        name = arguments.model
        tokenizer, prompts = AutoTokenizer.from_pretrained(name), load_dataset(arguments.dataset, split="train")
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    packing = {"experts_quantization": arguments.experts_quantization} if arguments.experts_quantization else {}
    model = sonicmoe_hf.from_pretrained(name, dtype=dtype, **packing)
    trainer_class = GRPOTrainer
    if arguments.served_base is not None:
        trainer_class = sonicmoe_hf.vllm_adapters(trl.GRPOTrainer, served_base=arguments.served_base)
    trainer = trainer_class(
        model,
        reward_funcs=lower_case,
        args=GRPOConfig(
            arguments.output,
            max_steps=arguments.steps,
            bf16=arguments.bf16,
            num_iterations=2,
            logging_steps=1,
            report_to="none",
            use_cpu=not torch.accelerator.is_available(),
            **vllm_options(arguments.vllm),
            **options,
        ),
        train_dataset=prompts,
        processing_class=tokenizer,
        peft_config=sonicmoe_hf.lora_config(model, r=arguments.rank),
    )
    sonicmoe_hf.attach(trainer)
    trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
