"""GRPO (TRL) of a mixture-of-experts model whose training calls use the experts of the rollout.

A small change of the weights can change a router's choice, and then a token's probability ratio compares two different
networks. Here every completion keeps its experts: what changes from update to update is the policy, not the choice of
experts. Without arguments: a small model with random weights, which learns to write lower-case letters; offline, in a
minute on a CPU.

    python examples/grpo_replay.py
    python examples/grpo_replay.py --routing server
    python examples/grpo_replay.py --vllm
    python examples/grpo_replay.py --model Qwen/Qwen3-30B-A3B --dataset trl-lib/tldr --bf16

--routing policy: TRL samples, and does not read the experts that sampling used. The policy's routing of the whole
completion is recorded before the first update, in a call with the same weights.
--routing server: an inference server samples, and returns its experts beside the tokens. Its old log-probabilities, which
TRL 1.16 computes before a subclass sees the batch, are computed with them too. `StandInServer` returns what vLLM does.
--vllm: vLLM 0.32 or newer samples in this process, as `VLLMServer` has it, and its experts are replayed.
"""

from __future__ import annotations

import argparse
import copy
from contextlib import nullcontext
from pathlib import Path

import numpy
import torch
from datasets import Dataset, load_dataset
from shared import add_training_options, small_config, standard_library, train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

import sonicmoe_hf
from sonicmoe_hf import RecordedRouting

ROUTING = "routing"  # beside TRL's own tensors of a batch, which it shuffles and splits together: [B, L, S, K]
ROLLOUT_EXPERTS = "routed_experts"  # what a rollout returns beside its tokens: an array for each completion


class ReplayingGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose policy uses, in every training call, the experts that sampled; the model has to be patched by
    sonicmoe_hf, with top-k. A reference model routes by itself.

    With a `rollout_func` that returns "routed_experts", one of vLLM's arrays for each completion, these are replayed, in
    the old log-probabilities too, and "serving_divergence" is logged: the share of tokens whose experts the policy would
    not have chosen. Without, the policy's own routing of each batch is recorded before the first update.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.mask_truncated_completions:
            raise ValueError("mask_truncated_completions hides tokens whose experts a server returns: leave it out")
        self.rollout_experts = None  # the rollout's arrays, until its batch is scored

    def _generate(self, prompts):
        generated = super()._generate(prompts)
        (fields,) = [
            part for part in generated if isinstance(part, dict)
        ]  # those of the rollout that are not TRL's own
        self.rollout_experts = fields.pop(ROLLOUT_EXPERTS, None)
        return generated

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        if self.rollout_experts is None:
            calls = self._recorded(ids, mask)
        else:
            calls = self._aligned(self.rollout_experts, mask)
            self._log_divergence(calls, ids, mask)
            if "old_per_token_logps" in batch:
                gaps = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()
                self._log("serving_gap", gaps[batch["completion_mask"].bool()].max().item())
        self.rollout_experts = None
        experts_LTK = torch.cat(calls, dim=1).to(ids.device)
        batch[ROUTING] = experts_LTK.unflatten(1, ids.shape).transpose(0, 1).contiguous()
        return batch

    def _rows(self) -> int:
        """Return the number of sequences in a call: a batch of completions has several batches of training."""
        return self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size

    def _recorded(self, ids, mask) -> list[torch.Tensor]:
        """Return the policy's own experts, [L, tokens of a call, K] for each call."""
        with torch.no_grad(), self.accelerator.autocast(), sonicmoe_hf.record_routing(self.model) as routing:
            for some_ids, some_mask in zip(ids.split(self._rows()), mask.split(self._rows())):
                self.model(input_ids=some_ids, attention_mask=some_mask, logits_to_keep=1)
        return routing.tensors()

    def _aligned(self, experts, mask) -> list[torch.Tensor]:
        """Return the server's experts, [L, tokens of a call, K] for each call."""
        rows = self._rows()
        return [
            RecordedRouting.from_server(experts[start : start + rows], mask[start : start + rows]).tensors()[0]
            for start in range(0, len(mask), rows)
        ]

    def _log_divergence(self, calls, ids, mask):
        shares = []
        for call, some_ids, some_mask in zip(calls, ids.split(self._rows()), mask.split(self._rows())):
            with self.accelerator.autocast():
                of_layers = sonicmoe_hf.serving_divergence(
                    self.model, call, input_ids=some_ids, attention_mask=some_mask, logits_to_keep=1
                )
            shares.append(sum(of_layers.values()) / len(of_layers))
        self._log("serving_divergence", sum(shares) / len(shares))

    def _log(self, name: str, value: float):
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args, **kwargs):
        """Compute also the old log-probabilities, which TRL computes, where it needs them, before it hands out the
        batch."""
        replay = nullcontext()
        if self.rollout_experts is not None and model is self.model:
            replay = sonicmoe_hf.replay_routing(model, self._aligned(self.rollout_experts, attention_mask))
        with replay:
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)

    def _compute_loss(self, model, inputs):
        experts_LTK = inputs[ROUTING].transpose(0, 1).flatten(1, 2)
        with sonicmoe_hf.replay_routing(model, experts_LTK):
            return super()._compute_loss(model, inputs)


class StandInServer:
    """A stand-in for vLLM on a machine without it: a copy of the policy in bf16, which samples token by token with a
    cache, and returns tokens, their log-probabilities and the experts that it used.
    """

    def __init__(self, model):
        self.model = copy.deepcopy(model).to(torch.bfloat16).eval()

    def rollout(self, prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        """Serve as TRL's `rollout_func`: a completion for each prompt."""
        policy = trainer.accelerator.unwrap_model(trainer.model)
        self.model.to(policy.device).load_state_dict(policy.state_dict())  # rounds to bf16
        tokenizer = trainer.processing_class
        completions = [
            self._complete(_tokens_of(prompt, tokenizer), trainer.max_completion_length, tokenizer.eos_token_id)
            for prompt in prompts
        ]
        return {name: [completion[name] for completion in completions] for name in completions[0]}

    @torch.no_grad()
    def _complete(self, prompt_ids: list[int], max_tokens: int, eos: int) -> dict[str, list | numpy.ndarray]:
        """Complete one prompt: a call for the prompt, then one for each token but the last, as a server's are."""
        ids, logprobs, cache = torch.tensor([prompt_ids], device=self.model.device), [], None
        sampled: list[int] = []
        with sonicmoe_hf.record_routing(self.model) as routing:
            while len(sampled) < max_tokens and (not sampled or sampled[-1] != eos):
                output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                cache, logs = output.past_key_values, output.logits[0, -1].float().log_softmax(-1)
                sampled.append(int(logs.exp().multinomial(1)))
                logprobs.append(float(logs[sampled[-1]]))
                ids = ids.new_tensor([sampled[-1:]])
        experts_LTK = torch.cat(routing.tensors(), dim=1)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": sampled,
            "logprobs": logprobs,
            ROLLOUT_EXPERTS: experts_LTK.transpose(0, 1).cpu().numpy(),  # [tokens - 1, layers, K]
        }


class VLLMServer:
    """vLLM in this process, in the policy's own dtype. It reads the policy from a folder, so that a change of the weights
    costs a save and a load; `use_vllm` of TRL passes them on in memory, but drops the experts."""

    def __init__(self, model, folder: Path, **options):
        from vllm import LLM

        self.folder, self.step_of_weights = folder, 0
        model.save_pretrained(folder)
        self.llm = LLM(
            str(folder),
            dtype=str(model.dtype).removeprefix("torch."),
            skip_tokenizer_init=True,
            enable_return_routed_experts=True,
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
            gpu_memory_utilization=0.3,
            enforce_eager=not torch.accelerator.is_available(),  # compiled for a CPU, vLLM 0.32 records no experts
            **options,
        )

    def rollout(self, prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        """Serve as TRL's `rollout_func`: a completion for each prompt."""
        from vllm import SamplingParams

        if self.step_of_weights != trainer.state.global_step:
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(self.folder)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder)})
            self.llm.reset_prefix_cache()
            self.step_of_weights = trainer.state.global_step
        tokenizer = trainer.processing_class
        parameters = SamplingParams(
            max_tokens=trainer.max_completion_length,
            temperature=trainer.temperature,
            stop_token_ids=[tokenizer.eos_token_id],
            logprobs=0,
            detokenize=False,
        )
        given = [{"prompt_token_ids": _tokens_of(prompt, tokenizer)} for prompt in prompts]
        outputs = self.llm.generate(given, parameters, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        return {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "logprobs": [[next(iter(step.values())).logprob for step in c.logprobs] for c in completions],
            ROLLOUT_EXPERTS: [completion.routed_experts for completion in completions],
        }


def _tokens_of(prompt: str | list[dict], tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]


def lower_case(completions, **kwargs) -> list[float]:
    """Compute a reward, to replace by your own: the share of lower-case letters."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [sum(letter.islower() for letter in text) / max(len(text), 1) for text in texts]


def small_model():
    """Make the demo's small model with random weights, its tokenizer, and prompts: first lines of Python's functions."""
    texts = standard_library()[0]
    tokenizer = train_tokenizer(texts, 512)
    config = small_config(tokenizer)
    config.num_experts, config.num_hidden_layers = 8, 2
    config.tie_word_embeddings = False  # vLLM on a CPU keeps a copy of a tied head
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lines = [line.strip() for text in texts for line in text.splitlines() if line.lstrip().startswith("def ")]
    return model, tokenizer, Dataset.from_list([{"prompt": line} for line in lines])


def main(argv: list[str] | None = None) -> list[dict]:
    """Train a model on the prompts of a dataset; returns what the trainer logged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or local folder; default: a small model with random weights")
    parser.add_argument("--dataset", help="with a column of prompts, as TRL wants it; with --model")
    parser.add_argument(
        "--routing", choices=("policy", "server"), default="policy", help="whose experts are replayed; see above"
    )
    parser.add_argument("--vllm", action="store_true", help="sample with vLLM, whose experts are replayed")
    add_training_options(parser, steps=100, output="outputs/grpo")
    parser.add_argument(
        "--max-completion-length", type=int, help="in tokens; default: 16 for the small model, else TRL's"
    )
    parser.add_argument("--bf16", action="store_true", help="compute in bf16 (autocast), TRL's own default")
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
    server = {}
    if arguments.vllm:
        server = {"rollout_func": VLLMServer(model, Path(arguments.output) / "policy").rollout}
    elif arguments.routing == "server":
        server = {"rollout_func": StandInServer(model).rollout}
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
        **server,
    )
    trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
