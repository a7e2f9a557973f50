"""GRPO (TRL) of a mixture-of-experts model whose training calls use the experts of the rollout's policy.

A small change of the weights can change a router's choice, and then a token's probability ratio compares two different
networks. Here the experts of each completion are recorded once, before the first update, and replayed in every training
call of it: what changes from update to update is the policy, not the choice of experts. Without arguments: a small model
with random weights, which learns to write lower-case letters; offline, in a minute on a CPU.

    python examples/grpo_replay.py
    python examples/grpo_replay.py --model Qwen/Qwen3-30B-A3B --dataset trl-lib/tldr --bf16

What TRL's hooks do not reach: sampling itself runs the policy one token at a time (or in vLLM), and its routing is not
read. The recorded routing is that of the same weights on the whole completion.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

import sonicmoe_hf
from sonicmoe_hf.demo.corpus import standard_library, train_tokenizer
from sonicmoe_hf.demo.model import small_config

ROUTING = "routing"  # beside TRL's own tensors of a batch, which it shuffles and splits together: [B, L, S, K]


class ReplayingGRPOTrainer(GRPOTrainer):
    """GRPOTrainer that records the routing of each batch of completions, and replays it in the policy's training calls.

    The reference model routes by itself. The model has to be patched by sonicmoe_hf, with top-k.
    """

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        rows = self.args.per_device_train_batch_size  # the batch of completions has several of training
        with torch.no_grad(), self.accelerator.autocast(), sonicmoe_hf.record_routing(self.model) as routing:
            for some_ids, some_mask in zip(ids.split(rows), mask.split(rows)):
                self.model(input_ids=some_ids, attention_mask=some_mask, logits_to_keep=1)
        experts_LTK = torch.cat(routing.tensors(), dim=1)
        batch[ROUTING] = experts_LTK.unflatten(1, ids.shape).transpose(0, 1).contiguous()
        return batch

    def _compute_loss(self, model, inputs):
        experts_LTK = inputs[ROUTING].transpose(0, 1).flatten(1, 2)
        with sonicmoe_hf.replay_routing(model, experts_LTK):
            return super()._compute_loss(model, inputs)


def lower_case(completions, **kwargs) -> list[float]:
    """A reward to replace by your own: the share of lower-case letters."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [sum(letter.islower() for letter in text) / max(len(text), 1) for text in texts]


def small_model():
    """The demo's small model with random weights, its tokenizer, and prompts: first lines of Python's functions."""
    texts = standard_library()[0]
    tokenizer = train_tokenizer(texts, 512)
    config = small_config(tokenizer)
    config.num_experts, config.num_hidden_layers = 8, 2
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lines = [line.strip() for text in texts for line in text.splitlines() if line.lstrip().startswith("def ")]
    return model, tokenizer, Dataset.from_list([{"prompt": line} for line in lines])


def main(argv: list[str] | None = None) -> list[dict]:
    """Train a model on the prompts of a dataset; returns what the trainer logged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or local folder; default: a small model with random weights")
    parser.add_argument("--dataset", help="with a column of prompts, as TRL wants it; with --model")
    parser.add_argument("--output", default="outputs/grpo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--max-completion-length", type=int, help="in tokens; default: 16 for the small model, else TRL's"
    )
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args(argv)
    if (arguments.model is None) != (arguments.dataset is None):
        parser.error("--model and --dataset belong together")
    set_seed(0)
    options = (
        {} if arguments.max_completion_length is None else {"max_completion_length": arguments.max_completion_length}
    )
    if arguments.model is None:
        model, tokenizer, prompts = small_model()
        sonicmoe_hf.patch_model(model)
        options = {"max_completion_length": 16, "learning_rate": 3e-3, "gradient_checkpointing": False, **options}
    else:
        dtype = torch.bfloat16 if arguments.bf16 else torch.float32
        model = sonicmoe_hf.from_pretrained(arguments.model, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        prompts = load_dataset(arguments.dataset, split="train")
    trainer = ReplayingGRPOTrainer(
        model,
        reward_funcs=lower_case,
        args=GRPOConfig(
            arguments.output,
            max_steps=arguments.steps,
            bf16=arguments.bf16,
            num_iterations=2,
            report_to="none",
            use_cpu=not torch.accelerator.is_available(),
            **options,
        ),
        train_dataset=prompts,
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
