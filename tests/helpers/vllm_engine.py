"""vLLM on a CPU in this process, small models that its kernels take, and what it says beside Transformers and PEFT.

Its kernels for CPUs want widths that are multiples of 32, and MLA the size of DeepSeek's latent vectors.
"""

import gc
import json
import os
from contextlib import contextmanager

import torch
from helpers.models import VOCABULARY, with_realistic_weights
from helpers.small_families import small_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

PROMPTS = [[5, 9, 33, 7, 41], [3, 3, 3, 11, 60, 4], list(range(4, 30))]
TOKENS = 6
WIDTHS = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 128,
}
MLA = {
    **WIDTHS,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
OF_FAMILIES = {
    "deepseek_v2": {**MLA, "topk_method": "greedy", "n_group": 1},
    "deepseek_v3": MLA,
    "glm4_moe_lite": MLA,
}
# entries of released config.json that vLLM reads and this Transformers' classes do not write
RELEASED = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
}
FAMILIES_SERVED = (
    "deepseek_v2",
    "deepseek_v3",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)


def model_for_vllm(family, folder, dtype=torch.float32, **changes):
    """Make a small model of the family, saved in `folder` with the config of a released checkpoint."""
    config = small_config(CONFIG_MAPPING[family], {**OF_FAMILIES.get(family, WIDTHS), **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    model = with_realistic_weights(model).eval().to(dtype)
    model.save_pretrained(folder)
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**entries, **RELEASED.get(family, {})}))
    return model


@contextmanager
def engine(folder, **options):
    """Start vLLM of the checkpoint in `folder`, in this process, as small as it goes."""
    routed = options.get("enable_return_routed_experts", False)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(routed))
    from vllm import LLM

    sizes = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    if "kv_lora_rank" in json.loads((folder / "config.json").read_text()):
        # vLLM's rotary kernel for CPUs gives wrong keys for MLA
        options["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    options.setdefault("enable_prefix_caching", routed)
    settings = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_logprobs": -1, **sizes}
    with stopped(LLM(str(folder), disable_log_stats=True, **{**settings, **options})) as llm:
        yield llm


@contextmanager
def stopped(llm):
    """Stop the engine at the end, so that the next one may start in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def complete(llm, adapter=None, prompts=PROMPTS, tokens=TOKENS, **options):
    """Complete the prompts greedily: vLLM's CompletionOutput of each, with log-probabilities of the whole vocabulary.
    options: of the LoRARequest."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    parameters = SamplingParams(max_tokens=tokens, temperature=0, logprobs=-1, ignore_eos=True, detokenize=False)
    request = adapter and LoRARequest(adapter.name, 1, str(adapter), **options)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, parameters, lora_request=request, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def logprobs_of(completions):
    """Compute log-probabilities [tokens of all completions, vocabulary]."""
    steps = [step for completion in completions for step in completion.logprobs]
    return torch.tensor([[step[token].logprob for token in range(VOCABULARY)] for step in steps])


@torch.no_grad()
def logprobs_in_transformers(model, completions, prompts=PROMPTS):
    """Compute the same of Transformers' model, for the tokens that vLLM chose."""
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        rows.append(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1))
    return torch.cat(rows)


def distance(model, completions):
    """Compute the largest difference of a log-probability, over the whole vocabulary."""
    return float((logprobs_of(completions) - logprobs_in_transformers(model, completions)).abs().max())
