"""Parts of a patched model that are copied (by deepcopy, by PEFT's modules_to_save) or put in: they
keep working, or say so."""

import copy
import pickle

import pytest
import torch
from helpers.marks import crossed, rest_pinned
from helpers.models import (
    CONFIGS,
    ORDER_OF_SUMS,
    assert_all_close,
    batch,
    build,
    build_patched,
    loss_and_gradients,
    patching,
    through_a_file,
)
from helpers.training import (
    POLICY,
    TILE,
    Watch,
    checkpoint_layers,
    logs_of,
    run_trainer,
    start_counting,
)
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import sonicmoe_hf
from sonicmoe_hf import TokenRounding, TokenRoundingCallback
from sonicmoe_hf.layer.experts_module import IMPLEMENTATION
from sonicmoe_hf.patching.moe_layers import every_experts, find_layers
from sonicmoe_hf.routing.patched_model import router_hooks, routing_state

ORDERS = ["patched, then PEFT", "PEFT, then patched"]


def saving(model, *modules):
    """Make a PEFT model that trains copies of these modules beside adapters of the attention that change nothing."""
    return get_peft_model(model, LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=list(modules)))


def patched_and_saving(order, modules, family="qwen3_moe"):
    if order == "patched, then PEFT":
        return saving(build_patched(family, POLICY), *modules)
    model = saving(build(family), *modules)
    sonicmoe_hf.patch_model(model, POLICY)
    return model


@pytest.fixture
def computed(monkeypatch):
    """Record the experts modules that our function computed."""
    noted, forward = [], ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]
    noting = lambda experts, *args, **kwargs: noted.append(experts) or forward(experts, *args, **kwargs)  # noqa: E731
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, IMPLEMENTATION, noting)
    return noted


@pytest.mark.parametrize(
    "modules, order, kind",
    crossed([["gate"], ["mlp"], ["experts"], ["gate", "experts"]], ORDERS, ["reentrant", None, "non_reentrant"]),
)
def test_what_peft_copies_rounds_counts_and_learns_as_the_original_and_is_unpatched_with_it(modules, order, kind):
    plain = build_patched("qwen3_moe", POLICY)
    start_counting(plain)
    expected = loss_and_gradients(plain, batch(padding=True))
    counts = [hook.load.take() for hook in router_hooks(plain)]
    model = patched_and_saving(order, modules)
    if kind is not None:
        model.enable_input_require_grads()
    start_counting(checkpoint_layers(model, kind))
    watch = Watch(model)
    actual = {  # under the names that they have without PEFT, without those of its adapters
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", ""): tensor
        for name, tensor in loss_and_gradients(model, batch(padding=True)).items()
        if "lora_" not in name
    }
    assert watch.rounded() == [True] * (2 if kind is None else 4)
    learned = {name: expected[name] for name in actual}
    weights = sum({"gate": 1, "experts": 2, "mlp": 3}[module] for module in modules)
    assert sum(".mlp." in name for name in learned) == 2 * weights
    assert_all_close(actual, learned, 1e-5, ORDER_OF_SUMS)
    hooks = router_hooks(model)
    assert [hook.layer_name for hook in hooks] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert all(torch.equal(hook.load.take(), count) for hook, count in zip(hooks, counts))
    sonicmoe_hf.unpatch_model(model)
    assert {experts.config._experts_implementation for experts in every_experts(model)} == {"eager"}
    for module in model.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        assert not any(type(hook).__module__.startswith("sonicmoe_hf") for hook in hooks)
        assert not any("sonicmoe" in name for name in vars(module))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_copy_of_the_experts_is_ours_whichever_adapter_is_on(family, order, computed):
    model = patched_and_saving(order, ["mlp"], family=family)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["mlp"]))

    def check():
        live = [layer.experts for layer in find_layers(model)]
        watch = Watch(model)
        computed.clear()
        model(**batch())
        assert computed[-len(live) :] == live and watch.rounded() == [True] * len(live)
        return live

    each = [check()]
    model.set_adapter("other")
    each.append(check())
    with model.disable_adapter():
        each.append(check())
    assert len({id(experts) for live in each for experts in live}) == 3 * len(each[0]) > 0


def test_a_trainer_counts_on_the_copies_of_a_model_from_pretrained(tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    logs = []
    for peft in (False, True):
        model = sonicmoe_hf.from_pretrained(tmp_path, dtype=torch.float32)
        model = saving(model, "gate") if peft else model
        watch = Watch(model)
        (log,) = logs_of(run_trainer(model, tmp_path, [TokenRoundingCallback(tile=TILE)], max_steps=1))
        assert watch.rounded() == [True, True]
        logs.append({name: value for name, value in log.items() if name.startswith("moe/")})
    assert logs[0] == logs[1] and logs[0]["moe/padded_rows_avoided"] > 0


@pytest.mark.parametrize("family", CONFIGS)
def test_a_deep_copied_layer_put_back_rounds_and_follows_its_models_policy(family):
    model = build_patched(family, POLICY)
    expected = loss_and_gradients(model, batch(padding=True))
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])
    watch = Watch(model)
    assert_all_close(loss_and_gradients(model, batch(padding=True)), expected, 1e-6, "the same computation")
    assert all(watch.rounded())
    sonicmoe_hf.set_routing(model, None)
    model(**batch())
    assert not any(watch.rounded())


def test_a_layer_copied_to_a_new_place_is_counted_under_its_own_name(tmp_path):
    model = build_patched("qwen3_moe")
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.model.config.num_hidden_layers = 3
    callback = sonicmoe_hf.ExpertLoadCallback()
    run_trainer(model, tmp_path, [TokenRoundingCallback(tile=TILE), callback], max_steps=1)
    assert list(callback.history[0]["rows_per_expert"]) == [f"model.layers.{i}.mlp" for i in range(3)]
    assert all(sum(rows) > 0 for rows in callback.history[0]["rows_per_expert"].values())


def test_a_deep_copied_inner_model_is_a_patched_model_of_its_own():
    model = build_patched("qwen3_moe", POLICY)
    inner = copy.deepcopy(model.model)
    sonicmoe_hf.set_routing(model, None)
    assert sonicmoe_hf.is_patched(inner) and routing_state(inner).policy == POLICY
    watch = Watch(inner)
    inner(batch()["input_ids"])
    assert watch.rounded() == [True, True]
    sonicmoe_hf.unpatch_model(inner)
    assert sonicmoe_hf.is_patched(model) and not sonicmoe_hf.is_patched(inner)


def test_a_router_put_in_after_patching_rounds_and_is_counted(tmp_path):
    model = build_patched("qwen3_moe", POLICY)

    def put_in():
        for layer in model.model.layers:
            layer.mlp.gate = type(layer.mlp.gate)(model.config).requires_grad_()
            torch.nn.init.normal_(layer.mlp.gate.weight)
        return Watch(model)

    watch = put_in()  # before the first call
    model(**batch())
    assert watch.rounded() == [True, True]
    put_in()
    for ask in (start_counting, lambda model: sonicmoe_hf.set_routing(model, TokenRounding(tile=2))):
        watch = put_in()
        ask(model)
        model(**batch())
        assert watch.rounded() == [True, True] and all(hook.load.counted.any() for hook in router_hooks(model))
    watch, callback = put_in(), sonicmoe_hf.ExpertLoadCallback()
    run_trainer(model, tmp_path, [TokenRoundingCallback(tile=2), callback], max_steps=1)
    assert watch.rounded() == [True, True] and len(callback.history[0]["rows_per_expert"]) == 2


def test_experts_of_a_loaded_model_get_the_implementation_on_their_own_config(tmp_path, computed):
    build("qwen3_moe").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    copied = model.model.layers[1].mlp.experts
    copied.config = copy.deepcopy(copied.config)
    copied.config._experts_implementation = "grouped_mm"
    sonicmoe_hf.patch_model(model)
    assert copied.config._experts_implementation == model.config._experts_implementation == IMPLEMENTATION
    model(**batch())
    assert computed[-2:] == [layer.experts for layer in find_layers(model)]
    sonicmoe_hf.unpatch_model(model)
    assert (model.config._experts_implementation, copied.config._experts_implementation) == ("eager", "grouped_mm")


def test_models_built_from_one_config_object_are_patched_and_unpatched_by_themselves(computed):
    config = CONFIGS["qwen3_moe"]()
    first, second, plain = (AutoModelForCausalLM.from_config(config, experts_implementation="eager") for _ in range(3))

    def ours():
        """List the models whose experts ours compute."""
        found = []
        for model in (first, second, plain):
            computed.clear()
            model(**batch())
            found.append(len(computed) == 2)
        return found

    sonicmoe_hf.patch_model(first)
    assert ours() == [True, False, False]
    sonicmoe_hf.patch_model(second)
    sonicmoe_hf.unpatch_model(first)
    assert ours() == [False, True, False]
    sonicmoe_hf.unpatch_model(second)
    assert ours() == [False, False, False] and config._experts_implementation == "eager"


def test_the_modules_of_a_patched_model_share_its_config_however_often_it_is_patched():
    def configs(model):
        return {id(module.config) for module in model.modules() if "config" in vars(module)}

    model = build("qwen3_moe")
    sonicmoe_hf.patch_model(model.model)
    sonicmoe_hf.patch_model(model)
    own = configs(model)
    assert own == {id(model.config)}
    sonicmoe_hf.patch_model(model)
    assert configs(model) == own
    with patching("qwen3_moe"):  # the inner model before the outer one, both while they are built
        assert len(configs(build("qwen3_moe"))) == 1


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_a_file],
    ids=["deepcopy", "pickle", "file"],
)
@pytest.mark.parametrize("family", rest_pinned(CONFIGS))
def test_a_copy_trains_as_the_original_and_on_its_own_and_unpatching_it_leaves_the_original_patched(family, copied):
    try:
        copied(build(family))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        pytest.skip(f"Transformers' own model does not: {error}")
    model = build_patched(family, POLICY)
    start_counting(model)
    expected = loss_and_gradients(model, batch(padding=True))
    model.zero_grad()
    other = copied(model)
    before = [hook.load.counted.clone() for hook in router_hooks(model)]
    assert_all_close(loss_and_gradients(other, batch(padding=True)), expected, 1e-6, "the same computation")
    assert all(torch.equal(hook.load.counted, count) for hook, count in zip(router_hooks(model), before))
    sonicmoe_hf.set_routing(other, None)
    assert routing_state(model).policy == POLICY and routing_state(other).policy is None
    sonicmoe_hf.unpatch_model(other)
    assert sonicmoe_hf.is_patched(model) and not sonicmoe_hf.is_patched(other)
    assert other.config._experts_implementation == "eager"
    for module in other.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not any("sonicmoe" in name for name in vars(module))
    watch = Watch(model)
    assert_all_close(loss_and_gradients(model, batch(padding=True)), expected, 1e-6, "the same computation")
    assert watch.rounded() == [True] * len(list(find_layers(model)))
    assert model.config._experts_implementation == IMPLEMENTATION
