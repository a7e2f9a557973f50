"""A function that TRL has no more, or otherwise, is an error when a trainer is made."""

import re

import pytest
import trl
from helpers.rl import make
from trl.generation import vllm_client
from trl.trainer import grpo_trainer

import sonicmoe_hf
from sonicmoe_hf.trl import GRPOTrainer
from sonicmoe_hf.trl import functions as of_trl

INSTALLED = re.escape(f"TRL {trl.__version__} has no")
OURS = re.escape(f"sonicmoe-hf {sonicmoe_hf.__version__} needs")


@pytest.mark.parametrize(
    "owner, name, other",
    [
        (vllm_client.VLLMClient, "init_communicator", None),
        (vllm_client.VLLMClient, "_post", lambda self, path, **options: None),
        (grpo_trainer.VLLMGeneration, "generate", lambda self, prompts, num_generations: None),
        (grpo_trainer.GRPOTrainer, "_generate", lambda self, inputs: None),
        (grpo_trainer.GRPOTrainer, "_get_per_token_logps_and_entropies", lambda self, batch: None),
        (grpo_trainer.GRPOTrainer, "compute_loss", None),
    ],
)
def test_a_function_that_has_gone_or_changed_is_named_with_both_versions(
    owner, name, other, base, tmp_path, monkeypatch
):
    if other is None and name in vars(owner):
        other = property(None)
        monkeypatch.setattr(owner, name, None)
    else:
        monkeypatch.setattr(owner, name, other)
    with pytest.raises(
        RuntimeError, match=rf"{INSTALLED} {owner.__name__}\.{name}\(self, .*\), which {OURS}.*; install"
    ):
        make(GRPOTrainer, base, tmp_path)


def test_1_14_hands_positional_arguments_on_to_functions_that_are_looked_at_in_its_place(monkeypatch):
    class Trainer:
        __module__ = "trl.trainer.grpo_trainer"

        def _generate(self, prompts): ...
        def _generate_and_score_completions(self, inputs): ...
        def compute_loss(self, model, inputs, return_outputs=False): ...
        def _get_per_token_logps_and_entropies(self, model, *args, batch_size=None, **kwargs): ...
        def _full_logits_logps(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None): ...
        def _chunked_logps(self, model, input_ids, attention_mask, logits_to_keep): ...

    of_trl.check_replay_functions(Trainer)
    monkeypatch.setattr(Trainer, "_chunked_logps", lambda self, model, inputs: None)
    with pytest.raises(RuntimeError, match=r"_chunked_logps\(self, model, input_ids"):
        of_trl.check_replay_functions(Trainer)


def test_a_class_that_samples_otherwise_or_sends_adapters_already_is_refused():
    for other, reason in (
        (trl.SFTTrainer, "no trainer of TRL's that samples"),
        (GRPOTrainer, "sends adapters already"),
    ):
        with pytest.raises(TypeError, match=reason):
            sonicmoe_hf.vllm_adapters(other)
    with pytest.raises(ValueError, match="divergence_every is -1"):
        sonicmoe_hf.vllm_adapters(trl.GRPOTrainer, divergence_every=-1)
    with pytest.raises(AttributeError, match="has no attribute 'SFTTrainer'"):
        sonicmoe_hf.trl.SFTTrainer  # noqa: B018
