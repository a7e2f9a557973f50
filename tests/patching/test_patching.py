"""patch_model and patch: reversible, idempotent, honest about what they cannot do."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers.models import CONFIGS, batch, build, build_patched, loss_and_gradients, patching, relative_error
from helpers.training import Watch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import sonicmoe_hf
from sonicmoe_hf.layer.routing import TokenRounding
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.patching.support import UnsupportedModelError, supports
from sonicmoe_hf.routing.hooks import ModelHook
from sonicmoe_hf.routing.patched_model import router_hooks, routing_state
from sonicmoe_hf.routing.support import why_no_rounding


def states(model):
    """List the settings that the hooks of the models inside `model` use, by identity."""
    return {
        id(hook.__self__.state)
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
        if isinstance(getattr(hook, "__self__", None), ModelHook)
    }


def fingerprint(model):
    """List everything that patching could leave behind on a model."""
    return [
        (
            name,
            type(m),
            sorted(k for k in vars(m) if k != "training"),
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
            len(m._forward_pre_hooks_with_kwargs),
            len(m._forward_hooks_with_kwargs),
        )
        for name, m in model.named_modules()
    ] + [model.config._experts_implementation, model.config.to_dict()]


@pytest.mark.parametrize("family", CONFIGS)
def test_unpatching_leaves_nothing_behind(family):
    model, inputs = build(family), batch()
    before, wanted = fingerprint(model), loss_and_gradients(model, inputs)
    sonicmoe_hf.patch_model(model, "token_rounding", save="input")
    loss_and_gradients(model, inputs)
    assert fingerprint(model) != before
    sonicmoe_hf.unpatch_model(model)
    assert fingerprint(model) == before
    got = loss_and_gradients(model, inputs)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    sonicmoe_hf.unpatch_model(model)  # nothing to undo, no complaint


def test_patching_twice_is_patching_once_with_the_last_settings():
    model = build("qwen3_moe")
    first = sonicmoe_hf.patch_model(model, "token_rounding")
    before = fingerprint(model)
    again = sonicmoe_hf.patch_model(model, TokenRounding(tile=4), save="input")
    assert fingerprint(model) == before
    assert first.routing == TokenRounding() and again.routing == TokenRounding(tile=4) == routing_state(model).policy
    sonicmoe_hf.set_routing(model, None)
    assert routing_state(model).policy is None
    sonicmoe_hf.unpatch_model(model)
    assert model.config._experts_implementation == "eager"


def test_routers_have_hooks_from_when_something_beside_top_k_asks_for_them():
    model = build_patched("qwen3_moe")
    sonicmoe_hf.set_routing(model, "top_k")
    loss_and_gradients(model, batch())
    assert not router_hooks(model) and not states(model)
    with sonicmoe_hf.record_routing(model):
        pass
    assert len(router_hooks(model)) == 2 and len(states(model)) == 1


def test_patching_the_inner_model_first_is_fine():
    model, inputs = build("olmoe"), batch()
    sonicmoe_hf.patch_model(model.model)
    sonicmoe_hf.patch_model(model, TokenRounding(tile=4))
    assert len(router_hooks(model)) == 2 and len(states(model)) == 1
    assert loss_and_gradients(model, inputs)["loss"].isfinite()
    sonicmoe_hf.unpatch_model(model.model)
    assert not sonicmoe_hf.is_patched(model), "its experts are Transformers' again"
    sonicmoe_hf.unpatch_model(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_report_names_every_layer():
    report = sonicmoe_hf.patch_model(build("deepseek_v3", num_hidden_layers=3))
    assert [layer.name for layer in report.layers] == ["model.layers.1.mlp", "model.layers.2.mlp"]
    assert all(
        layer.family == "deepseek_v3" and layer.accelerated and layer.reason == "fully supported"
        for layer in report.layers
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_patch_reaches_models_built_later_and_unpatch_stops_it(family):
    inputs, post_init = batch(), PreTrainedModel.post_init
    plain = build(family)
    with patching([family], routing=TokenRounding(tile=4)):
        model = build(family)
        assert model.config._experts_implementation == "sonicmoe_hf" and len(router_hooks(model)) > 0
        assert states(model) == {id(routing_state(model))}
        rounded = loss_and_gradients(model, inputs)
        assert relative_error(rounded["logits"], loss_and_gradients(plain, inputs)["logits"]) > 1e-3
    later = build(family)
    assert later.config._experts_implementation == "eager" and not router_hooks(later)
    assert PreTrainedModel.post_init is post_init


def test_patch_covers_all_families_and_from_pretrained(tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    with patching():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert sonicmoe_hf.is_patched(model) and sonicmoe_hf.is_patched(build("gpt_oss"))


def test_from_pretrained_loads_patches_and_hands_on_what_transformers_says_of_the_names(tmp_path):
    original, inputs = build("qwen3_moe"), batch()
    original.save_pretrained(tmp_path)
    model = sonicmoe_hf.from_pretrained(tmp_path, routing=TokenRounding(tile=4), dtype=torch.float32)
    assert model.config._experts_implementation == "sonicmoe_hf" and routing_state(model).policy.tile == 4
    with torch.no_grad():
        assert relative_error(model.eval()(**inputs).logits, original.eval()(**inputs).logits) < 1e-5
    for options, words in (
        ({"experts_implementation": "eager"}, "experts_implementation='eager' contradicts"),
        ({"routing": "rounded"}, "routing is 'rounded'"),
        ({"dtype": "bf16"}, "dtype is 'bf16', which torch does not know; give 'bfloat16'"),
        ({"torch_dtype": "float23"}, "'float23'.* give 'float"),
        ({"load_in_4bit": True}, "load_in_4bit=True is no argument .* experts_quantization='nf4' packs the experts"),
    ):
        with pytest.raises(ValueError, match=words):
            sonicmoe_hf.from_pretrained(tmp_path, **options)
    for name, meant in (
        ("expert_quantization", "experts_quantization"),
        ("experts_mem", "experts_memory"),
        ("expert_compute", "experts_compute"),
        ("routng", "routing"),
    ):
        with pytest.raises(TypeError, match=rf"^from_pretrained has no argument {name}; did you mean {meant}\?$"):
            sonicmoe_hf.from_pretrained("read of no folder", **{name: "nf4"})
    kept = {"use_cache": False, "router_aux_loss_coef": 0.5, "experts_implementation": "sonicmoe_hf"}
    assert sonicmoe_hf.from_pretrained(tmp_path, **kept).config.router_aux_loss_coef == 0.5
    model, information = sonicmoe_hf.from_pretrained(tmp_path, output_loading_info=True)
    assert routing_state(model).policy is None and not information["missing_keys"]


def test_from_pretrained_says_what_a_folder_lacks(tmp_path):
    (tmp_path / "empty").mkdir()
    build("qwen3_moe").config.save_pretrained(tmp_path / "config")
    for folder, words in (
        (
            "none",
            "there is no folder .*none, and the hub did not give it.*: ",
        ),
        ("empty", "empty has no config.json, so it is no model's folder: "),
        ("config", "config has a config.json, but Transformers cannot load its weights: .*model.safetensors"),
    ):
        for format in (None, "nf4"):
            with pytest.raises(OSError, match=words):
                sonicmoe_hf.from_pretrained(tmp_path / folder, experts_quantization=format)


@pytest.mark.parametrize("family", CONFIGS)
def test_saving_a_patched_model_saves_the_plain_one(family, tmp_path):
    plain, model = build(family), build_patched(family, "token_rounding")
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path / "patched")
    plain.save_pretrained(tmp_path / "plain")
    for file in sorted((tmp_path / "plain").iterdir()):
        assert (tmp_path / "patched" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_layer_called_alone_uses_top_k():
    model = build_patched("qwen3_moe", TokenRounding(tile=4))
    loss_and_gradients(model, batch())
    watch = Watch(model)
    model.model.layers[0].mlp(torch.randn(2, 8, 32))
    assert watch.rounded() == [False]


def test_another_implementation_under_token_rounding_raises_and_is_named():
    model = build_patched("qwen3_moe", TokenRounding(tile=4))
    model.set_experts_implementation("eager")
    with pytest.raises(TypeError, match=r'token rounding needs experts_implementation="sonicmoe_hf"'):
        model(**batch())
    sonicmoe_hf.set_routing(model, None)
    assert model(**batch()).loss.isfinite(), "top-k works with any implementation"


def replicated(module):
    """Copy the module as DataParallel does on a GPU; its replicas' weights are no parameters."""
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        replica._modules[name] = replicated(child)
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.detach())
    return replica


def test_data_parallel_replicas_compute_by_top_k_are_not_kept_and_raise_under_token_rounding():
    model = build_patched("qwen3_moe")
    replica = replicated(model)
    logits, kept = replica(**batch()).logits.detach(), weakref.ref(next(find_layers(replica)).experts)
    del replica
    gc.collect()
    assert kept() is None and relative_error(logits, model(**batch()).logits) < 1e-5
    sonicmoe_hf.set_routing(model, TokenRounding(tile=4))
    with pytest.raises(RuntimeError, match=r"nn.DataParallel.*one process per GPU"):
        replicated(model)(**batch())
    assert model(**batch()).loss.isfinite(), "as in a process of its own"


def test_few_tokens_fall_back_to_top_k_and_say_so_once(caplog):
    inputs = batch(rows=1, length=8)
    plain, model = build("qwen3_moe"), build_patched("qwen3_moe", TokenRounding(tile=16))
    with caplog.at_level("WARNING", logger="sonicmoe_hf.routing.handlers"):
        got = model(**inputs).logits
        model(**batch(rows=1, length=7))
    assert relative_error(got, plain(**inputs).logits) < 1e-5
    said = [r.getMessage() for r in caplog.records if "fewer than 4 tiles of 16" in r.getMessage()]
    assert len(said) == 1 and "8 tokens with top-2 of 8 experts are 2 rows per expert" in said[0]
    assert "or a smaller tile= and min_tiles_per_expert= (" in said[0]


def test_a_tile_of_which_few_tokens_have_enough_is_named_and_rounds(caplog):
    with caplog.at_level("WARNING", logger="sonicmoe_hf.routing.handlers"):
        build_patched("qwen3_moe", TokenRounding(tile=128))(**batch(rows=4, length=64))
        (said,) = [record.getMessage() for record in caplog.records]
        assert said.endswith("larger batches round, or tile=16 (TokenRoundingCallback, TokenRounding)")
        build_patched("qwen3_moe", TokenRounding(tile=16))(**batch(rows=4, length=64))
    assert len(caplog.records) == 1


def test_tokens_that_fall_back_to_top_k_are_said_to_include_padding_where_there_is_some(caplog):
    inputs = batch(rows=2, length=8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    with caplog.at_level("WARNING", logger="sonicmoe_hf.routing.handlers"):
        build_patched("qwen3_moe", TokenRounding(tile=16))(**{**inputs, "attention_mask": mask})
    (said,) = [r.getMessage() for r in caplog.records if "fewer than 4 tiles of 16" in r.getMessage()]
    assert "16 tokens with top-2 of 8 experts are 4 rows per expert, padding included, fewer than" in said


def test_a_block_with_a_forward_that_is_not_transformers_rounds_no_tokens():
    model = build("qwen3_moe", num_hidden_layers=1)
    (layer,) = find_layers(model)

    class Meddling(type(layer.block)):
        def forward(self, hidden_states):
            _, weights, indices = self.gate(hidden_states.view(-1, hidden_states.shape[-1]))
            return self.experts(hidden_states, indices + 0, weights)

    class Renamed(type(layer.block)):
        pass

    layer.block.__class__ = Renamed
    assert not why_no_rounding(model)
    layer.block.__class__ = Meddling
    assert supports(model)[0].accelerated
    assert "Meddling.forward, of which nobody knows" in why_no_rounding(model)["model.layers.0.mlp"]


def test_supports_works_on_the_meta_device():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["deepseek_v3"]())
    assert [layer.reason for layer in supports(model)] == ["fully supported"]


def test_models_that_cannot_be_patched_raise_with_the_reason():
    dense = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"](mlp_only_layers=[0, 1]))
    patch, model = sonicmoe_hf.patch_model, build("qwen3_moe")
    for function, error, words in (
        (lambda: patch(nn.Linear(2, 2)), TypeError, "Linear holds no Transformers model"),
        (lambda: patch(SimpleNamespace(callback_handler=0)), TypeError, "a model and got .*: give .* trainer.model"),
        (lambda: sonicmoe_hf.lora_config("org/name"), TypeError, "a model and got a str: load it first"),
        (lambda: patch(dense), UnsupportedModelError, "has no mixture-of-experts layer"),
        (lambda: sonicmoe_hf.patch("llama"), ValueError, "family is 'llama'; choose one of 'qwen3_moe'"),
        (lambda: sonicmoe_hf.set_routing(model, None), ValueError, "is not patched; call sonicmoe_hf.patch_model"),
        (lambda: patch(model, save="nothing"), ValueError, "save is 'nothing'; choose one of 'preactivation'"),
    ):
        with pytest.raises(error, match=words):
            function()


def test_a_refused_model_is_left_as_it_was():
    model = build("qwen3_moe")
    model.model.layers[1].mlp.experts.has_post_expert_norm = True
    before = fingerprint(model)
    words = r"1 of 2 mixture-of-experts layers.*\n  model.layers.1.mlp: .*a norm of their own"
    with pytest.raises(UnsupportedModelError, match=words):
        sonicmoe_hf.patch_model(model)
    assert fingerprint(model) == before


def test_quantized_weights_are_refused_with_the_remedy():
    model = build("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        experts.gate_up_proj = nn.Parameter(torch.zeros(8, 32, 32).to(dtype), requires_grad=False)
        with pytest.raises(UnsupportedModelError, match=f"gate_up_proj is stored as {dtype}, quantized; load"):
            sonicmoe_hf.patch_model(model)


# which model


class Pair(nn.Module):
    def __init__(self, **models):
        super().__init__()
        for name, model in models.items():
            setattr(self, name, model)


def test_two_models_in_one_module_are_an_error_that_names_both():
    pair = Pair(student=build("qwen3_moe"), teacher=build("olmoe"))
    words = (
        r"Pair holds 2 models with experts: student \(Qwen3MoeForCausalLM\) and teacher \(OlmoeForCausalLM\); pass one"
    )
    for function in (sonicmoe_hf.patch_model, sonicmoe_hf.unpatch_model, sonicmoe_hf.is_patched, routing_state):
        with pytest.raises(ValueError, match=words):
            function(pair)
    sonicmoe_hf.patch_model(pair.teacher)
    assert not sonicmoe_hf.is_patched(pair.student)


def test_the_one_model_with_experts_is_meant_whatever_stands_beside_it():
    tower = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    pair = Pair(tower=tower, language=build("qwen3_moe"))
    sonicmoe_hf.patch_model(pair, "token_rounding")
    assert sonicmoe_hf.is_patched(pair.language) and len(router_hooks(pair)) == 2


def test_a_transformers_model_that_contains_others_is_one():
    model = build("qwen3_vl_moe").eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        report = sonicmoe_hf.patch_model(Pair(whole=model), "token_rounding")
        actual = model(input_ids=ids).logits
    assert [layer.accelerated for layer in report.layers] == [True, True] and len(states(model)) == 1
    assert model.config.text_config._experts_implementation == "sonicmoe_hf"
    assert relative_error(actual, expected) < 1e-5  # fp32: another order of sums
    sonicmoe_hf.unpatch_model(model)
    assert model.config.text_config._experts_implementation == "eager" and not states(model)
