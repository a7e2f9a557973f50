"""Adds to vLLM 0.32 what it lacks on CPUs: experts with LoRA, which it has in Triton's kernels for GPUs alone, and
experts that are loaded anew.

Three functions in torch take the place of those kernels: the experts' two products, and what an adapter adds to either.
Names of an adapter's tensors, how they are split, stacked and kept in slots, which token has which adapter, and where the
gates and ups of gpt-oss lie remain vLLM's own code. Base models without LoRA run vLLM's kernels for CPUs, which keep the
weights in an order of their own: after `reload_weights` vLLM leaves them as they were loaded.
"""

import torch
from torch.nn import functional


def apply(
    self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, apply_router_weight_on_input, **others
):
    """Take the place of TritonExperts.apply: output [T, H] of hidden_states [T, H], w1 [E, 2I, H], w2 [E, H, I]."""
    assert self.quant_dtype is None and not apply_router_weight_on_input and others["expert_map"] is None
    context, ids_TK = self._lora_context, topk_ids.long()
    w1_bias, w2_bias = self.w1_bias, self.w2_bias
    y_TKO = torch.einsum("tkoh,th->tko", w1[ids_TK], hidden_states)
    y_TKO = y_TKO if w1_bias is None else y_TKO + w1_bias[ids_TK]
    shared = {"topk_ids": ids_TK, "topk_weights": topk_weights, "w1": w1, "w2": w2}
    sizes = {"num_tokens": len(ids_TK), "top_k_num": ids_TK.shape[1]}
    slots_T = None
    if context is not None:
        slots_T = self.apply_w13_lora(context, y=y_TKO, x=hidden_states, expert_map=None, **shared, **sizes)[-1]
    h_TKI = ACTIVATIONS[activation.value](y_TKO)
    z_TKH = torch.einsum("tkhi,tki->tkh", w2[ids_TK], h_TKI)
    z_TKH = z_TKH if w2_bias is None else z_TKH + w2_bias[ids_TK]
    if context is not None:
        del shared["topk_ids"]
        of_kernels = dict.fromkeys(("sorted_token_ids_lora", "num_tokens_post_padded_lora"))
        mapping = {"expert_ids_lora": ids_TK, "token_lora_mapping": slots_T, **of_kernels}
        self.apply_w2_lora(context, y=z_TKH, x=h_TKI, **mapping, **shared, **sizes)
    output.copy_((z_TKH * topk_weights.unsqueeze(-1)).sum(1))


def add_lora_w13(self, y, x, a_stacked, b_stacked, topk_ids, *others, token_lora_mapping=None, **options):
    """Add the adapters' products to y [T, K, 2I] of x [T, H]: gates and ups lie one after the other."""
    slots_T = self.token_lora_indices[: len(x)] if token_lora_mapping is None else token_lora_mapping
    x_TKH = x.unsqueeze(1).expand(-1, topk_ids.shape[1], -1)
    for part, a, b in zip(y.chunk(len(a_stacked), -1), a_stacked, b_stacked):
        _add(part, x_TKH, a, b, topk_ids, slots_T)
    return None, None, None, slots_T


def add_lora_w2(
    self, y, x, a_stacked, b_stacked, topk_weights, sorted_ids, topk_ids, num_padded, slots_T, *others, **options
):
    """Add the adapters' products to y [T, K, H] of x [T, K, I]."""
    _add(y, x, a_stacked[0], b_stacked[0], topk_ids, slots_T)


def _add(y_TKO, x_TKI, a, b, ids_TK, slots_T):
    """Add B A x of each token's slot and expert in place; a [slots, E, r, I], b [slots, E, O,
    r]; no adapter in slot -1."""
    slots_T1 = slots_T.long().unsqueeze(1)
    a_TKRI, b_TKOR = a[slots_T1.clamp(min=0), ids_TK], b[slots_T1.clamp(min=0), ids_TK]
    product_TKO = torch.einsum("tkor,tkr->tko", b_TKOR, torch.einsum("tkri,tki->tkr", a_TKRI, x_TKI))
    y_TKO += torch.where(slots_T1.unsqueeze(-1) >= 0, product_TKO, 0)


def _silu(y):
    gate, up = y.chunk(2, -1)
    return functional.silu(gate) * up


def _swigluoai(y):
    gate, up = y[..., ::2].clamp(max=7.0), y[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


ACTIVATIONS = {"silu": _silu, "swigluoai": _swigluoai}


def reordering(set_up):
    """Make UnquantizedFusedMoEMethod._setup_kernel, which has the kernels order their weights at the first load alone."""

    def set_up_kernel(self, layer, w13, w2):
        is_loaded_anew = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if is_loaded_anew:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return set_up_kernel


def install():
    """Install the replacements: vLLM calls this in every process that it starts."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    TritonExperts.apply = apply
    PunicaWrapperCPU.add_lora_w13, PunicaWrapperCPU.add_lora_w2 = add_lora_w13, add_lora_w2
    UnquantizedFusedMoEMethod._setup_kernel = reordering(UnquantizedFusedMoEMethod._setup_kernel)
