"""Small models with attention sinks, of every type that Transformers has, and their inputs."""

import torch
from helpers.models import GROUPED, SHARED, VOCABULARY, gradients_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from sonicmoe_hf.attention.names import TORCH_SINKS

WINDOW = 4
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
COMMON = {**SHARED, **GROUPED, "sliding_window": WINDOW, "intermediate_size": 16}
BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
CHANGES = {
    "flint": {
        **BOTH_KINDS,
        **ROPE,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "gpt_oss": {**BOTH_KINDS, **ROPE, "num_local_experts": 4},
    "granite_swa": BOTH_KINDS,
    "granitemoe_swa": {**BOTH_KINDS, "num_local_experts": 4},
    "mimo_v2_flash": {
        **BOTH_KINDS,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "head_dim": 24,
        "v_head_dim": 16,
        "num_key_value_heads": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "openai_privacy_filter": {**ROPE, "num_local_experts": 4},
}


def build(model_type="gpt_oss", implementation=TORCH_SINKS, dtype=None, device="cpu", experts="eager", **changes):
    """Build a model in training mode with sinks that matter: at the usual initialisation of
    0.02 they all are the same."""
    torch.manual_seed(0)
    options = {**COMMON, **CHANGES[model_type], **changes}
    if model_type == "openai_privacy_filter":
        options |= {"num_labels": 5}
    config = AutoConfig.for_model(model_type, **options)
    auto = AutoModelForTokenClassification if model_type == "openai_privacy_filter" else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=implementation, experts_implementation=experts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0, 1.5)
            elif parameter.dim() >= 2 and "bias" not in name:
                fan_in = parameter.shape[-2] if ".experts." in name else parameter.shape[-1]
                parameter.normal_(0, 1.0 if "embed" in name else fan_in**-0.5)
            elif "bias" in name:
                parameter.normal_(0, 0.5)
    return model.to(device=device, dtype=dtype).train()


def padded_batch(padding=None, rows=3, length=13, num_labels=VOCABULARY, device="cpu"):
    """Draw tokens, a mask and labels, with -100 for padding: None (a mask of ones), "left", "right" or "both" in one
    batch."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = torch.randint(0, num_labels, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding in ("left", "both"):
        mask[0, : length // 3] = 0
    if padding in ("right", "both"):
        mask[1, -length // 3 :] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    is_predicted = mask * torch.nn.functional.pad(
        mask[:, :-1], (1, 0)
    )  # from a real token: causal models' labels shift
    labels = labels.masked_fill(is_predicted == 0, -100)
    made = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}
    return {name: tensor.to(device) for name, tensor in made.items()}


def packed_batch(lengths=(5, 1, 9), num_labels=VOCABULARY, with_starts=False, device="cpu"):
    """Make one row of packed sequences, told by position_ids, and as data collators do by cu_seq_lens too."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = torch.randint(0, num_labels, ids.shape, generator=generator)
    made = {"input_ids": ids, "position_ids": positions, "labels": labels.masked_fill(positions == 0, -100)}
    if with_starts:
        starts = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
        made |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    made = {name: tensor.to(device) for name, tensor in made.items()}
    longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)} if with_starts else {}
    return {**made, **longest}


def split_packed(lengths=(5, 1, 9)):
    """Split the sequences of `packed_batch` into batches of their own."""
    parts = {name: tensor.split(lengths, 1) for name, tensor in packed_batch(lengths).items()}
    return [dict(zip(parts, each)) for each in zip(*parts.values())]


def results(model, batch):
    """Compute loss, logits of real tokens, and every gradient, of one step."""
    model.zero_grad(set_to_none=True)
    out = model(**batch, use_cache=False) if "privacy" not in model.config.model_type else model(**batch)
    out.loss.backward()
    real = out.logits[batch["attention_mask"].bool()] if "attention_mask" in batch else out.logits
    return {"logits": real.detach(), "loss": out.loss.detach(), **gradients_of(model)}
