"""PEFT's LoRA on experts' parameters, computed on the rows: everything PEFT offers there,
against PEFT on eager experts."""

import functools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.adapters import (
    EXPERTS,
    NATIVE_EXPERTS,
    ONE_LAYER,
    build_one_layer,
    forbid_merging,
    gradients_without_merging,
    patch,
    random_factors,
    train_router_and_embedding,
    with_lora,
)
from helpers.models import (
    CONFIGS,
    ORDER_OF_SUMS,
    assert_all_close,
    batch,
    build,
    loss_and_gradients,
    relative_error,
    through_a_file,
    twin,
)
from helpers.native import native_twin
from helpers.small_families import small_model
from helpers.training import CHECKPOINTING, POLICY, Watch, checkpoint_layers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import layer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

import sonicmoe_hf
from sonicmoe_hf.errors import UnsupportedModelError
from sonicmoe_hf.lora import peft_wrapper as peft_adapters
from sonicmoe_hf.patching.moe_layers import find_layers

GATE_UP, DOWN = EXPERTS


@pytest.mark.parametrize("order", ["patched, then PEFT", "PEFT, then patched"])
@pytest.mark.parametrize("family", [*CONFIGS, "mixtral", "nemotron_h"])
def test_gradients_of_factors_input_and_router_are_pefts_on_eager_experts(family, order):
    expected = loss_and_gradients(train_router_and_embedding(with_lora(build_one_layer(family))), batch())
    first, then = (patch, with_lora) if order == "patched, then PEFT" else (with_lora, patch)
    model = then(first(build_one_layer(family)))
    actual = gradients_without_merging(train_router_and_embedding(model))
    learned = [name for name in actual if "lora_" in name]
    assert len(learned) == 4 and all(actual[name].abs().max() > 0 for name in actual)
    assert not any("_proj" in name and "lora_" not in name for name in actual), "base weights get no gradient"
    assert_all_close(actual, expected, 1e-5, ORDER_OF_SUMS)


@pytest.mark.parametrize("family", CONFIGS)
def test_native_experts_compute_their_adapters_as_merged_weights(family, tmp_path):
    model = patch(with_lora(native_twin(build_one_layer(family), tmp_path), NATIVE_EXPERTS))
    merged = twin(model).merge_and_unload()
    inputs = batch()
    with forbid_merging():
        actual = model(**inputs).logits
    assert relative_error(actual, merged(**inputs).logits) < 1e-5, ORDER_OF_SUMS
    expected = loss_and_gradients(with_peft_alone(twin(model)), inputs)
    assert_all_close(gradients_without_merging(model), expected, 1e-5, ORDER_OF_SUMS)


def with_peft_alone(model):
    """Set PEFT's own method in this model, which forms W + BA, on each wrapper."""
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            module.forward = peft_adapters._PEFTS_FORWARD.__get__(module)
    return model


OPTIONS = {
    "r = 1": {"r": 1},
    "r = 256": {"r": 256, "lora_alpha": 16},
    "rank and alpha patterns": {"rank_pattern": {"gate_up_proj": 5}, "alpha_pattern": {"mlp.experts.down_proj": 7}},
    "ranks below r": {"rank_pattern": {"gate_up_proj": 1, "mlp.experts.down_proj": 2}},
    "rslora": {"use_rslora": True},
    "gate_up alone": {"targets": [GATE_UP]},
    "down alone": {"targets": [DOWN]},
    "attention": {"target_modules": ["q_proj", "o_proj"]},
    "router": {"targets": [*EXPERTS, "mlp.gate.weight"]},
    "modules_to_save": {"modules_to_save": ["lm_head", "gate"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_that_peft_has_for_parameters_gives_pefts_gradients(options):
    expected = loss_and_gradients(with_lora(build_one_layer("qwen3_moe"), **options), batch())
    model = with_lora(patch(build_one_layer("qwen3_moe")), **options)
    compute = (
        loss_and_gradients if options is OPTIONS["router"] else gradients_without_merging
    )  # PEFT computes the router's
    actual = compute(model, batch())
    scales = {m.parameter_name: m.scaling["default"] for m in model.modules() if isinstance(m, ParamWrapper)}
    if "rank_pattern" in options:
        of_patterns = {"gate_up_proj": 6 / 5, "down_proj": 7 / 3} if "alpha_pattern" in options else None
        assert scales == (of_patterns or {"gate_up_proj": 6 / 1, "down_proj": 6 / 2})
    assert_all_close(actual, expected, 1e-5, ORDER_OF_SUMS)


@pytest.mark.parametrize("scheme", [True, "gaussian", False])
def test_the_init_schemes_of_parameters_start_and_learn_as_with_peft(scheme):
    results = []
    for prepare in (lambda model: model, patch):
        torch.manual_seed(1)
        config = LoraConfig(r=2, target_parameters=EXPERTS, init_lora_weights=scheme)
        results.append(get_peft_model(prepare(build_one_layer("gpt_oss")), config))
    assert_all_close(
        gradients_without_merging(results[1]), loss_and_gradients(results[0], batch()), 1e-5, ORDER_OF_SUMS
    )


def two_adapters(model):
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=9, target_parameters=EXPERTS))
    return random_factors(model, seed=4)


def test_adapters_are_switched_joined_disabled_merged_and_unmerged_as_with_peft():
    theirs, ours = (
        two_adapters(with_lora(build_one_layer("qwen3_moe"))),
        two_adapters(with_lora(patch(build_one_layer("qwen3_moe")))),
    )
    logits = []
    for step in (
        lambda model: model.set_adapter("other"),
        lambda model: model.base_model.set_adapter(["default", "other"]),
        lambda model: model.base_model.set_adapter("default"),
        lambda model: [m.set_scale("default", 3.0) for m in model.modules() if isinstance(m, ParamWrapper)],
    ):
        step(theirs), step(ours)
        actual = gradients_without_merging(ours)
        assert_all_close(actual, loss_and_gradients(theirs, batch()), 1e-5, ORDER_OF_SUMS)
        logits.append(actual["logits"])
    assert min(relative_error(one, other) for one in logits for other in logits if one is not other) > 1e-3

    inputs = batch()
    with forbid_merging(), torch.no_grad():
        active = ours(**inputs).logits
        with ours.disable_adapter():
            alone = ours(**inputs).logits
    assert relative_error(alone, build_one_layer("qwen3_moe")(**inputs).logits) < 1e-5, ORDER_OF_SUMS
    ours.merge_adapter()
    with forbid_merging():
        assert relative_error(ours(**inputs).logits, active) < 1e-5, ORDER_OF_SUMS
    ours.unmerge_adapter()
    with forbid_merging():
        assert relative_error(ours(**inputs).logits, active) < 1e-5, ORDER_OF_SUMS
        assert relative_error(ours.merge_and_unload()(**inputs).logits, active) < 1e-5, ORDER_OF_SUMS


def test_an_adapter_is_saved_and_loaded_in_pefts_files(tmp_path):
    model, inputs = with_lora(patch(build_one_layer("qwen3_moe"))), batch()
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(patch(build_one_layer("qwen3_moe")), tmp_path)
    by_transformers = patch(build_one_layer("qwen3_moe"))
    by_transformers.load_adapter(str(tmp_path))
    for again in (loaded, by_transformers, patch(PeftModel.from_pretrained(build_one_layer("qwen3_moe"), tmp_path))):
        with forbid_merging():
            assert torch.equal(again.train()(**inputs).logits, expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_factors_enter_the_function_as_they_are_stored(family):
    """Views of them would be six more nodes of autograd in every layer, and ZeRO-3 could not gather them for backward."""
    model = with_lora(patch(build_one_layer(family)))
    nodes, waiting = set(), [model(**batch()).logits.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [before for before, _ in node.next_functions]
    taken = {
        before.variable
        for node in nodes
        if isinstance(node, torch.autograd.function.BackwardCFunction)  # of a Function in Python: the op's, no view's
        for before, _ in node.next_functions
        if hasattr(before, "variable")
    }
    assert taken == {parameter for name, parameter in model.named_parameters() if "lora_" in name}


def test_what_is_remembered_of_a_wrapper_is_looked_at_again_when_its_experts_change():
    model = with_lora(patch(build_one_layer("qwen3_moe")))
    expected = gradients_without_merging(model)
    experts = next(find_layers(model)).experts
    experts._is_expert_parallel = True
    words = "adapters of experts do not work under Transformers' own"
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match=words):
        gradients_without_merging(model)
    del experts._is_expert_parallel
    assert_all_close(gradients_without_merging(model), expected, 0.0, "the same model")
    wrapper = next(m for m in model.modules() if getattr(m, "parameter_name", None) == "gate_up_proj")
    assert len(peft_adapters._adapters(wrapper, experts)) == 1
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.data.to(torch.float8_e4m3fn), requires_grad=False)
    assert not peft_adapters._adapters(wrapper, experts), "left to PEFT: of a dtype that we do not compute in"


# what surrounds the experts


@pytest.mark.parametrize("kind", [None, *CHECKPOINTING])
@pytest.mark.parametrize("family, save", [("gpt_oss", "preactivation"), ("gpt_oss", "input"), ("qwen3_moe", "input")])
def test_tokens_are_rounded_and_layers_recomputed_as_with_weights_that_peft_forms(family, save, kind):
    model = with_lora(patch(build_one_layer(family), routing=POLICY, save=save), target_modules=["q_proj"])
    inputs = batch(padding=True)
    expected = loss_and_gradients(with_peft_alone(twin(model)), inputs)
    model.enable_input_require_grads()
    watch = Watch(checkpoint_layers(model, kind))
    assert_all_close(gradients_without_merging(model, inputs), expected, 1e-5, ORDER_OF_SUMS)
    assert watch.rounded() == [True] * (1 if kind is None else 2)


def test_fp32_adapters_of_bf16_experts_get_fp32_gradients_that_err_no_more_than_pefts():
    exact = loss_and_gradients(with_lora(build_one_layer("qwen3_moe")), batch())
    results = []
    for prepare in (lambda model: model, patch):
        model = with_lora(prepare(build_one_layer("qwen3_moe").bfloat16()))
        assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}
        with torch.autocast("cpu", torch.bfloat16):
            results.append(loss_and_gradients(model, batch()))
    theirs, ours = ({n: relative_error(r[n], exact[n]) for n in exact if "lora_" in n} for r in results)
    assert all(results[1][name].dtype == torch.float32 for name in ours)
    # bf16 rounds W + BA there and rows of rank r here: a fifth more is another order of roundings
    assert sum(ours.values()) <= 1.2 * sum(theirs.values()), (ours, theirs)


def test_under_autocast_inputs_of_adapters_are_not_cast_there_and_back(monkeypatch):
    model = with_lora(patch(build_one_layer("qwen3_moe").bfloat16()), target_modules=["q_proj", "o_proj"])
    ours, casts = layer.Linear._cast_input_dtype, []
    results = []
    for cast in (ours, peft_adapters._PEFTS_CAST):
        noted = lambda self, x, dtype, cast=cast: casts.append(cast(self, x, dtype).dtype) or cast(self, x, dtype)  # noqa: E731
        monkeypatch.setattr(layer.Linear, "_cast_input_dtype", noted)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(loss_and_gradients(model, batch()))
    assert casts == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert_all_close(*results, 0.0, "a cast to fp32 and back changes nothing")
    q_proj = model.base_model.model.model.layers[0].self_attn.q_proj
    assert ours(q_proj, torch.ones(1, dtype=torch.bfloat16), torch.float32).dtype == torch.float32, "without autocast"


def test_copies_and_pickles_of_an_adapted_model_compute_the_same():
    model = with_lora(patch(build_one_layer("qwen3_moe")))
    expected = gradients_without_merging(model)
    for again in (twin(model), through_a_file(model)):
        assert_all_close(gradients_without_merging(again), expected, 0.0, "the same model")


def test_threads_that_share_a_model_each_have_their_adapters():
    model = with_lora(patch(build_one_layer("qwen3_moe"))).eval()
    inputs = [batch(seed=seed) for seed in range(4)]
    expected = [model(**one).logits for one in inputs]
    ready = threading.Barrier(len(inputs))

    def work(one):
        ready.wait()
        with torch.no_grad():
            return [model(**one).logits for _ in range(5)]

    with forbid_merging(), ThreadPoolExecutor(len(inputs)) as pool:
        found = list(pool.map(work, inputs))
    assert all(torch.equal(logits, wanted) for each, wanted in zip(found, expected) for logits in each)


@pytest.mark.pinned
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_after_a_gated_delta_rule_a_step_errs_as_far_from_fp64_as_pefts(family):
    """The layers' gated RMSNorm divides outputs of the delta rule whose root mean square is down to 1e-4 in single
    rows, so that another order of the experts' sums, 1e-6, comes back from it up to a hundred times as large: PEFT on
    eager experts is itself 2e-5 to 1e-4 from fp64, where other families are 1e-6."""
    exact, theirs = (train_router_and_embedding(with_lora(small_model(family))) for _ in range(2))
    ours, inputs = patch(twin(theirs)), batch()
    exact = loss_and_gradients(exact.double(), inputs)
    errors = []
    for model in (theirs, ours):
        found = loss_and_gradients(model, inputs)
        errors.append(max(relative_error(found[name].double(), exact[name]) for name in exact))
    assert errors[1] <= 3 * errors[0], "fp32: roundings in another order"


# what is left to PEFT


def test_an_adapter_of_another_parameter_is_left_to_peft_which_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(peft_adapters, "_said", set())
    targets = [*EXPERTS, "mlp.experts.down_proj_bias"]
    expected = loss_and_gradients(with_lora(build_one_layer("gpt_oss"), targets), batch())
    model = with_lora(patch(build_one_layer("gpt_oss")), targets)
    with caplog.at_level(logging.WARNING, "sonicmoe_hf"):
        actual = loss_and_gradients(model, batch())
        model(**batch())
    assert_all_close(actual, expected, 1e-5, ORDER_OF_SUMS)
    (record,) = [record for record in caplog.records if record.name.startswith("sonicmoe_hf")]
    assert "PEFT itself computes the adapter of GptOssExperts.down_proj_bias" in record.message


def test_an_adapter_of_experts_with_another_forward_is_left_to_peft_which_is_said(caplog, monkeypatch):
    monkeypatch.setattr(peft_adapters, "_said", set())
    expected = loss_and_gradients(with_lora(build_one_layer("qwen3_moe")), batch())
    model = with_lora(build("qwen3_moe", "sonicmoe_hf", **ONE_LAYER))
    experts = next(find_layers(model)).experts
    experts.forward = lambda *arguments: type(experts).forward(experts, *arguments)
    with caplog.at_level(logging.WARNING, "sonicmoe_hf"):
        actual = loss_and_gradients(model, batch())
    assert_all_close(actual, expected, 1e-5, ORDER_OF_SUMS)
    assert {record.name for record in caplog.records} == {"sonicmoe_hf.lora.peft_wrapper"}
    assert all("never reaches sonicmoe_hf; undo what put it there" in record.message for record in caplog.records)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_that_are_not_ours_are_pefts(implementation):
    model = with_lora(build("qwen3_moe", implementation, **ONE_LAYER))
    with pytest.raises(AssertionError, match="W \\+ BA"):
        gradients_without_merging(model)
    sonicmoe_hf.patch_model(model)
    gradients_without_merging(model)
    sonicmoe_hf.unpatch_model(model)
    with pytest.raises(AssertionError, match="W \\+ BA"):
        gradients_without_merging(model)


def test_a_forward_put_in_the_place_of_the_experts_gets_pefts_weights():
    model = with_lora(build_one_layer("qwen3_moe"))
    experts = next(find_layers(model)).experts
    experts.config._experts_implementation = "sonicmoe_hf"
    expected = gradients_without_merging(model)
    saw, eager = set(), type(experts).forward.__wrapped__  # Transformers' own loop over the experts
    experts.forward = lambda *args: saw.add(type(experts).__name__) or eager(experts, *args)
    assert_all_close(loss_and_gradients(model, batch()), expected, 1e-5, ORDER_OF_SUMS)
    assert saw == {"ParametrizedQwen3MoeExperts"}


def test_a_declared_forward_around_the_experts_that_takes_no_keywords_gets_pefts_weights(caplog, monkeypatch):
    monkeypatch.setattr(peft_adapters, "_said", set())
    model = with_lora(patch(build_one_layer("qwen3_moe")))
    expected = loss_and_gradients(model, batch())
    experts = next(find_layers(model)).experts
    forward = experts.forward

    @functools.wraps(forward)
    def around(hidden_states, top_k_index, top_k_weights):
        return forward(hidden_states, top_k_index.clone(), top_k_weights)

    experts.forward = around
    with caplog.at_level(logging.WARNING, "sonicmoe_hf"):
        assert_all_close(loss_and_gradients(model, batch()), expected, 1e-5, ORDER_OF_SUMS)
    assert "hands on no keyword arguments; let it take **kwargs" in caplog.text


def test_a_head_that_is_tied_is_untied_by_a_merge_but_not_by_one_that_peft_refuses(recwarn):
    model = patch(build("qwen3_moe", tie_word_embeddings=True, **ONE_LAYER))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))
    recwarn.clear()
    model.quantization_method = "gptq"
    with pytest.raises(ValueError, match="gptq"):
        adapted.merge_and_unload()
    assert model.lm_head.base_layer.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings
    del model.quantization_method
    merged = adapted.merge_and_unload()
    assert merged.lm_head.weight is not merged.model.embed_tokens.weight and not merged.config.tie_word_embeddings
    assert not [str(each.message) for each in recwarn if "tie_word_embeddings" in str(each.message)]


def test_the_tied_head_of_a_model_that_is_not_ours_is_peft_s_matter():
    adapted = get_peft_model(
        build("qwen3_moe", tie_word_embeddings=True, **ONE_LAYER), LoraConfig(r=2, target_modules=["lm_head"])
    )
    with pytest.warns(UserWarning, match="tie_word_embeddings=True"):
        merged = adapted.merge_and_unload()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight and merged.config.tie_word_embeddings


def test_a_merge_of_an_adapter_that_is_not_active_is_refused_before_it_begins():
    model = patch(build_one_layer("qwen3_moe"), experts_memory=0)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS))
    for merge in (adapted.merge_adapter, adapted.merge_and_unload):
        with pytest.raises(UnsupportedModelError, match="host memory"):
            merge(adapter_names=["other"])
        assert not any(module.merged for module in adapted.modules() if isinstance(module, layer.LoraLayer))
