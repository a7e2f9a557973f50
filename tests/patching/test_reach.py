"""Calls of the experts reach us, or an error says why not: subclasses, forwards that somebody replaced, experts outside
the interface."""

import functools
import sys
from types import ModuleType

import pytest
import torch
from helpers.models import batch, build, build_patched, loss_and_gradients, relative_error
from helpers.ranks import Ranks
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, JetMoeConfig, Llama4TextConfig, LongcatFlashConfig
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

import sonicmoe_hf
from sonicmoe_hf.patching.forwards import why_not_reached
from sonicmoe_hf.patching.support import UnsupportedModelError, supports

SUBCLASS = """
import torch
from helpers.models import batch, build, loss_and_gradients, relative_error
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM
import sonicmoe_hf
from sonicmoe_hf.kernels import eager
from helpers.training import POLICY, Watch


class WithAHead(Qwen3MoeForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.head = torch.nn.Linear(config.hidden_size, 1)


computed, up = [], eager.up
eager.up = lambda *args, **kwargs: computed.append(args[0].shape) or up(*args, **kwargs)
plain = build("qwen3_moe")
model = WithAHead(plain.config)
model.load_state_dict({**model.state_dict(), **plain.state_dict()})
expected = loss_and_gradients(plain, batch())["logits"]
assert not computed
sonicmoe_hf.patch_model(model)
assert relative_error(loss_and_gradients(model, batch())["logits"], expected) < 1e-5
assert len(computed) == 2, computed
sonicmoe_hf.set_routing(model, POLICY)
watch = Watch(model)
loss_and_gradients(model, batch())
assert watch.rounded() == [True, True]
sonicmoe_hf.unpatch_model(model)
assert model.config._experts_implementation == "eager"
computed.clear()
sonicmoe_hf.patch()
again = WithAHead(plain.config)
assert sonicmoe_hf.is_patched(again)
again(**batch())
assert len(computed) == 2, computed
"""


def run_as_main(rank, code):
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(code, vars(main))


@pytest.mark.slow
def test_a_users_own_subclass_in_main_is_accelerated(tmp_path):
    ranks = Ranks(tmp_path, world=1)  # a process that has imported what this takes
    ranks.run(run_as_main, SUBCLASS)
    ranks.close()


def of_somebody_else(hidden_states, top_k_index, top_k_weights):
    return hidden_states


@pytest.mark.parametrize("when", ["before patching", "after patching", "after a call"])
def test_a_forward_put_in_the_place_of_the_experts_own_is_refused_by_name(when):
    model = build("qwen3_moe")
    words = r"model.layers.1.mlp: Qwen3MoeExperts: its forward is .*of_somebody_else, which never reaches sonicmoe_hf; undo what put it"
    if when != "before patching":
        sonicmoe_hf.patch_model(model)
    if when == "after a call":
        model(**batch())
    experts = model.model.layers[1].mlp.experts
    experts.forward = of_somebody_else
    with pytest.raises(UnsupportedModelError, match=words):
        sonicmoe_hf.patch_model(model) if when == "before patching" else model(**batch())
    assert [layer.accelerated for layer in supports(model)] == [True, False]
    del experts.forward
    sonicmoe_hf.patch_model(model)
    assert model(**batch()).loss.isfinite()


def test_experts_that_transformers_leaves_outside_its_interface_are_named_without_a_change_to_undo():
    config = LongcatFlashConfig(hidden_size=16, expert_ffn_hidden_size=16, n_routed_experts=4, zero_expert_num=2)
    words = why_not_reached(LongcatFlashExperts(config))
    assert "its class's own" in words and "train this model without sonicmoe_hf" in words and "undo" not in words


def test_longcat_flashs_identity_experts_are_named_and_it_trains_without_sonicmoe_hf():
    sizes = dict.fromkeys(("hidden_size", "ffn_hidden_size", "expert_ffn_hidden_size"), 16)
    sizes |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 4)
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8}
    experts = {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2}
    config = LongcatFlashConfig(vocab_size=64, num_layers=1, num_hidden_layers=2, **sizes, **experts)
    model = AutoModelForCausalLM.from_config(config)
    words = (
        "LongcatFlashMoE is outside .*2 of its 6 experts are identity experts.*; train this model without sonicmoe_hf"
    )
    with pytest.raises(UnsupportedModelError, match=words):
        sonicmoe_hf.patch_model(model)
    model = get_peft_model(model, LoraConfig(target_modules=["q_b_proj"]))
    tokens = torch.arange(1, 9)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_a_class_that_overrides_the_experts_forward_is_refused_by_name():
    model = build("qwen3_moe")
    experts = model.model.layers[0].mlp.experts

    class Instrumented(type(experts)):
        def forward(self, *args):
            return super().forward(*args)

    experts.__class__ = Instrumented
    words = r"model.layers.0.mlp: Instrumented: its forward is .*Instrumented.fo"
    with pytest.raises(UnsupportedModelError, match=words):
        sonicmoe_hf.patch_model(model)


def test_a_wrapper_that_says_what_it_wraps_is_taken_at_its_word():
    model, expected = build("qwen3_moe"), loss_and_gradients(build("qwen3_moe"), batch())
    experts = model.model.layers[0].mlp.experts
    honest, calls = experts.forward, []
    experts.forward = functools.wraps(honest)(lambda *args: calls.append(1) or honest(*args))
    sonicmoe_hf.patch_model(model)
    assert relative_error(loss_and_gradients(model, batch())["logits"], expected["logits"]) < 1e-5 and calls == [1]


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_model_compiled_with_another_forward_does_not_run_as_if_it_were_ours(fullgraph):
    torch._dynamo.reset()
    model = build_patched("qwen3_moe", num_hidden_layers=1)
    model.model.layers[0].mlp.experts.forward = of_somebody_else
    words = r"Observed exception|its forward is .*of_somebody"
    with pytest.raises((RuntimeError, UnsupportedModelError), match=words):
        torch.compile(model, fullgraph=fullgraph, backend="aot_eager")(**batch())


@pytest.mark.slow
def test_a_model_compiles_after_another_whose_compilation_raised():
    """Dynamo then leaves the code around the experts to Python, and compiles experts alone."""
    torch._dynamo.reset()
    wrong, model = (build("qwen3_moe", num_hidden_layers=1) for _ in range(2))
    expected = loss_and_gradients(model, batch())
    for each in (wrong, model):
        sonicmoe_hf.patch_model(each)
    wrong.model.layers[0].mlp.experts.forward = of_somebody_else
    with pytest.raises(UnsupportedModelError, match=r"its forward is .*of_somebody_else"):
        torch.compile(wrong, backend="eager")(**batch())
    assert relative_error(torch.compile(model, backend="eager")(**batch()).logits, expected["logits"]) < 1e-5
    assert model(**batch()).loss.isfinite()
    torch._dynamo.reset()


# outside the experts interface


def outside(name):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    special = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    if name == "llama4":
        return Llama4TextConfig(**sizes, **special, num_attention_heads=4, head_dim=8, intermediate_size_mlp=16)
    return JetMoeConfig(**sizes, **special, kv_channels=8)


@pytest.mark.parametrize(("name", "layer"), [("llama4", "Llama4TextMoe"), ("jetmoe", "JetMoeMoE")])
def test_experts_outside_the_interface_are_named_by_from_pretrained_supports_and_patch_model(name, layer, tmp_path):
    AutoModelForCausalLM.from_config(outside(name)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="sonicmoe_hf")
    named = [support for support in supports(model) if support.reason.startswith(layer)]
    assert len(named) == 2 and not any(support.accelerated for support in named)
    outside_words = rf"cannot be accelerated:\n  model.layers.0.*{layer} is outside"
    for function, given in ((sonicmoe_hf.patch_model, model), (sonicmoe_hf.from_pretrained, tmp_path)):
        with pytest.raises(UnsupportedModelError, match=outside_words):
            function(given)
