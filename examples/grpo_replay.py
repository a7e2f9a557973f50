"""GRPO (TRL) of a mixture-of-experts model whose training calls use the experts of the rollout's policy.

A small change of the weights can change a router's choice, and then a token's probability ratio compares two different
networks. Here the experts of each completion are recorded once, before the first update, and replayed in every training
call of it: what changes from update to update is the policy, not the choice of experts.

    python examples/grpo_replay.py --model Qwen/Qwen3-30B-A3B --dataset trl-lib/tldr --bf16

What TRL's hooks do not reach: sampling itself runs the policy one token at a time (or in vLLM), and its routing is not
read. The recorded routing is that of the same weights on the whole completion.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import sonicmoe_hf

ROUTING = "routing"  # beside TRL's own tensors of a batch, which it shuffles and splits together: [B, L, S, K]


class ReplayingGRPOTrainer(GRPOTrainer):
    """GRPOTrainer that records the routing of each batch of completions, and replays it in the policy's training calls.

    The reference model routes by itself. The model has to be patched by sonicmoe_hf, with top-k.
    """

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad(), self.accelerator.autocast(), sonicmoe_hf.record_routing(self.model) as routing:
            self.model(input_ids=ids, attention_mask=mask, logits_to_keep=1)
        (experts_LTK,) = routing.tensors()
        batch[ROUTING] = experts_LTK.unflatten(1, ids.shape).transpose(0, 1).contiguous()
        return batch

    def _compute_loss(self, model, inputs):
        experts_LTK = inputs[ROUTING].transpose(0, 1).flatten(1, 2)
        with sonicmoe_hf.replay_routing(model, experts_LTK):
            return super()._compute_loss(model, inputs)


def brevity(completions, **kwargs) -> list[float]:
    """A reward to replace by your own: short answers."""
    return [-len(completion) / 100 for completion in map(str, completions)]


def main() -> None:
    """Train a model on the prompts of a dataset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True, help="with a column of prompts, as TRL wants it")
    parser.add_argument("--output", default="outputs/grpo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    model = sonicmoe_hf.from_pretrained(arguments.model, dtype=torch.bfloat16 if arguments.bf16 else torch.float32)
    trainer = ReplayingGRPOTrainer(
        model,
        reward_funcs=brevity,
        args=GRPOConfig(arguments.output, max_steps=arguments.steps, bf16=arguments.bf16, num_iterations=2),
        train_dataset=load_dataset(arguments.dataset, split="train"),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
    )
    trainer.train()


if __name__ == "__main__":
    main()
