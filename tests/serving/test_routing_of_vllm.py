"""The experts that vLLM used, replayed in training: the same model, the same log-probabilities."""

import pytest
import torch
from helpers.vllm_engine import PROMPTS, complete, engine, logprobs_of, model_for_vllm

import sonicmoe_hf
from sonicmoe_hf import RecordedRouting

pytestmark = pytest.mark.serving


def padded(completions):
    """Make ids and mask of the batch of prompts and completions, padded on the left."""
    rows = [[*prompt, *completion.token_ids] for prompt, completion in zip(PROMPTS, completions)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_vllm_used_the_experts_that_the_model_chooses_and_replay_gives_its_log_probabilities(family, tmp_path):
    """A layer without experts too (GLM-4-MoE's first), which vLLM's arrays have as zeros."""
    model = model_for_vllm(family, tmp_path / "model")
    sonicmoe_hf.patch_model(model)
    with engine(tmp_path / "model", enable_return_routed_experts=True) as llm:
        completions = complete(llm)
    ids, mask = padded(completions)
    routing = RecordedRouting.from_server(completions, mask)
    assert len(routing.tensors()[0]) == (1 if family == "glm4_moe" else 2)
    assert set(sonicmoe_hf.serving_divergence(model, routing, input_ids=ids, attention_mask=mask).values()) == {0.0}
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), sonicmoe_hf.replay_routing(model, routing):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    found = logits[:, -1 - len(completions[0].token_ids) : -1].log_softmax(-1).flatten(0, 1)
    assert (found - logprobs_of(completions)).abs().max() < 1e-4, "fp32: two engines' order of sums"
