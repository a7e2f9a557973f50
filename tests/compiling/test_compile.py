"""torch.compile: whole models without graph breaks, checkpointing around compiled parts, the Trainer's own option."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from functorch.compile import make_boxed_func
from helpers.adapters import random_factors, with_lora
from helpers.marks import rest_pinned, rest_slow
from helpers.models import (
    ORDER_OF_SUMS,
    assert_all_close,
    batch,
    build,
    build_patched,
    loss_and_gradients,
    relative_error,
    twin,
)
from helpers.training import CHECKPOINTED_TRAINING, POLICY, TILE, checkpoint_layers, run_trainer, start_counting
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import sonicmoe_hf
from sonicmoe_hf import TokenRoundingCallback
from sonicmoe_hf.compiling import compiled_module
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.routing.patched_model import router_hooks

ONE_LAYER = {"num_hidden_layers": 1}  # compiling is what takes the time here
# with top-k Qwen3-MoE follows the mode below; OLMoE's block differs from its by a flag
CASES = [("qwen3_moe", POLICY, None), ("gpt_oss", None, None), ("qwen3_moe", POLICY, "non_reentrant")]
CASES += [("gpt_oss", POLICY, None), ("olmoe", POLICY, None)]
CASES += [("deepseek_v3", POLICY, None), ("deepseek_v3", None, None)]


@pytest.mark.parametrize(("family", "routing", "kind"), rest_slow(CASES))
def test_a_compiled_model_without_graph_breaks_computes_and_counts_the_same(family, routing, kind):
    torch._dynamo.reset()
    # Transformers warns of the cache and checkpointing together, which no graph can hold
    model = build_patched(family, routing, use_cache=kind is None, **({} if family == "deepseek_v3" else ONE_LAYER))
    start_counting(model)
    inputs = batch(padding=True)
    expected = loss_and_gradients(model, inputs)
    counts = [hook.load.take() for hook in router_hooks(model)]
    compiled = torch.compile(checkpoint_layers(model, kind), fullgraph=True, backend="aot_eager")
    assert_all_close(loss_and_gradients(compiled, inputs), expected, 1e-5, ORDER_OF_SUMS)
    assert all(torch.equal(hook.load.take(), count) for hook, count in zip(router_hooks(model), counts))


def test_a_block_whose_experts_have_no_gate_compiles_without_graph_breaks():
    torch._dynamo.reset()
    block = next(find_layers(build_patched("nemotron_h"))).block
    x = torch.randn(2, 16, 32)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), block(x)) < 1e-5, ORDER_OF_SUMS


TRAINED = {
    "all weights": lambda model: model,
    "LoRA": with_lora,
    "QLoRA": lambda model: with_lora(packed(model), target_modules=["o_proj"]),
}


def packed(model):
    sonicmoe_hf.quantize_experts(model, "nf4")
    return model


ALONE = [("QLoRA", "non_reentrant", None, "deepseek_v3"), ("all weights", None, POLICY, "qwen3_moe")]
ALONE += [("LoRA", "reentrant", POLICY, "qwen3_moe")]
FURTHER = [("all weights", None, None), ("QLoRA", None, None), ("all weights", "reentrant", None)]
FURTHER += [("QLoRA", "reentrant", None), ("LoRA", "non_reentrant", None)]
FURTHER += [("all weights", "non_reentrant", None), ("LoRA", "reentrant", None)]
FURTHER += [("LoRA", "non_reentrant", POLICY), ("QLoRA", "non_reentrant", None)]


@pytest.mark.parametrize(
    ("trained", "kind", "routing", "family"),
    [*rest_pinned(ALONE, 2), *rest_slow([(*case, "qwen3_moe") for case in FURTHER], 0)],
)
def test_layers_compiled_on_their_own_are_compiled_once_for_all(trained, kind, routing, family):
    """Adapters and checkpointing are included, at which Dynamo gives a layer up whole where anything outside is
    written. DeepSeek-V3's first layer has no experts, and is compiled apart, whatever torch's limit of variants is."""
    torch._dynamo.reset()
    counters.clear()
    # NF4 takes blocks of 64 columns
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64} if trained == "QLoRA" else {}
    model, inputs = TRAINED[trained](build_patched(family, routing, use_cache=False, **sizes)), batch()
    if trained != "all weights":
        model.enable_input_require_grads()
    expected = loss_and_gradients(checkpoint_layers(model, kind), inputs)
    compiled = CompileCounter()
    with torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings():
        assert sonicmoe_hf.compile_layers(model, backend=compiled) == 2
        warnings.filterwarnings("error", "torch.compile left a part")
        actual = [loss_and_gradients(model, inputs) for _ in range(2)]
    # torch 2.11 compiles apart what a reentrant checkpoint computes again, with gradients
    frames = 2 if family == "deepseek_v3" else 1
    assert compiled.frame_count in ((1, 2) if kind == "reentrant" else (frames,)) and not counters["graph_break"]
    for found in actual:
        assert_all_close(found, expected, 1e-5, ORDER_OF_SUMS)


# with a torch that leaves such layers uncompiled both kinds are the same test
@pytest.mark.parametrize(
    "kind", rest_slow(["non_reentrant", "reentrant"]) if compiled_module.RECORDS else ["non_reentrant"]
)
def test_compiled_layers_record_router_logits_for_the_auxiliary_loss(kind):
    """TRL's trainers ask for it. Of reentrant checkpoints the uncompiled loss has no gradient, so another kind's is
    compared with it."""
    torch._dynamo.reset()
    counters.clear()
    model = with_lora(build_patched("qwen3_moe", use_cache=False, router_aux_loss_coef=0.5, **ONE_LAYER))
    model.enable_input_require_grads()
    recorded = {**batch(), "output_router_logits": True}
    expected = loss_and_gradients(checkpoint_layers(model, "non_reentrant"), recorded)
    without = loss_and_gradients(model, batch())
    assert relative_error(expected["loss"], without["loss"]) > 1e-2
    sonicmoe_hf.compile_layers(checkpoint_layers(model, kind), backend="aot_eager")
    for step, (inputs, values) in enumerate(((recorded, expected), (batch(), without), (recorded, expected))):
        with nullcontext() if compiled_module.RECORDS or step else pytest.warns(UserWarning, match="torch 2.13"):
            assert_all_close(loss_and_gradients(model, inputs), values, 1e-5, ORDER_OF_SUMS)
    assert not counters["graph_break"]


def switched(name):
    """Call a method of PEFT's tuner, which changes it in place."""

    def switch(model):
        getattr(model.base_model, name)()
        return model

    return switch


def with_a_second_adapter(model):
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    return random_factors(model, seed=5)


def unpatch(model):
    sonicmoe_hf.unpatch_model(model)
    return model


CHANGES = {
    "compiled": lambda model: model,
    "adapters off": switched("disable_adapter_layers"),
    "adapters on": switched("enable_adapter_layers"),
    "two adapters": with_a_second_adapter,
    "merged": switched("merge_adapter"),
    "taken apart": switched("unmerge_adapter"),
    "merged for good": lambda model: model.merge_and_unload(),
    "not patched": unpatch,
}


@pytest.mark.slow
def test_compiled_layers_follow_what_becomes_of_a_model_and_so_does_a_second_one_of_its_kind():
    torch._dynamo.reset()
    models, inputs = [with_lora(build_patched("qwen3_moe", use_cache=False, **ONE_LAYER)) for _ in range(3)], batch()
    for model in models:
        model.enable_input_require_grads()
    for model in models[1:]:
        sonicmoe_hf.compile_layers(model, backend="eager")
    for what, change in CHANGES.items():
        models = [change(model) for model in models]
        expected, *others = (loss_and_gradients(model, inputs) for model in models)
        for found in others:
            assert_all_close(found, expected, 1e-5, f"{what}: {ORDER_OF_SUMS}")


def in_memory_of_a_graph(graph, inputs, options):
    """Compile as a CUDA graph does: each run of a backward pass writes to the memory of the one before."""
    assert options["triton.cudagraphs"] and options["triton.cudagraph_skip_dynamic_graphs"]
    assert options["graph_partition"] is False, "or torch 2.11 leaves most of a layer out of its graph"
    assert options["shape_padding"] is False, "the caller's own"

    def backward(graph, inputs):
        memory = []

        def run(*args):
            results = graph(*args)
            memory[:] = memory or [torch.empty_like(r) if r is not None else None for r in results]
            return [r if r is None else m.copy_(r).detach() for m, r in zip(memory, results, strict=True)]

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=backward)(graph, inputs)


@pytest.mark.pinned
@pytest.mark.parametrize("kind", rest_slow(["non_reentrant", None]))
def test_layers_captured_as_graphs_accumulate_gradients_and_generate(kind):
    """Adapters come after compile_layers, and the second ones after training."""
    torch._dynamo.reset()
    counters.clear()
    base = build_patched("qwen3_moe", **ONE_LAYER)
    plain = with_lora(twin(base))
    options = {"mode": "reduce-overhead", "options": {"shape_padding": False}}
    sonicmoe_hf.compile_layers(base, **options, backend=in_memory_of_a_graph)
    model = with_lora(base)
    model.enable_input_require_grads()
    batches = [batch(seed=seed) for seed in (1, 2, 3)]

    def accumulated(model):
        for inputs in batches:
            model(**inputs, use_cache=False).loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return gradients

    expected = accumulated(plain)
    prompt = {"input_ids": batches[0]["input_ids"][:, :4], "max_new_tokens": 3, "do_sample": False}
    tokens = plain.eval().generate(**prompt)
    checkpoint_layers(model, kind)
    for _ in range(2):
        assert_all_close(accumulated(model), expected, 1e-5, ORDER_OF_SUMS)
    assert counters["stats"]["unique_graphs"] == 1  # generation compiles nothing
    assert model.eval().generate(**prompt).equal(tokens)
    plain, model = with_a_second_adapter(plain.train()), with_a_second_adapter(model.train())
    expected = accumulated(plain)
    assert any(".second." in name for name in expected)
    assert_all_close(accumulated(model), expected, 1e-5, ORDER_OF_SUMS)


@pytest.mark.parametrize("mode", rest_pinned([None, "reduce-overhead"]))
def test_compile_layers_says_what_torch_leaves_to_python(mode):
    """CUDA graphs say it also after a call without gradients, which is not compiled."""
    torch._dynamo.reset()
    model = build_patched("qwen3_moe", use_cache=False, **ONE_LAYER)
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: torch._dynamo.graph_break("of a test"))
    sonicmoe_hf.compile_layers(model, mode=mode, backend=lambda graph, inputs, **options: graph)
    if mode is not None:
        with torch.no_grad():
            model(**batch())
    with pytest.warns(UserWarning, match="left a part of Qwen3MoeDecoderLayer to Python"):
        model(**batch())
    with pytest.raises(ValueError, match=r"Linear has no layers .*; use torch\.compile"):
        sonicmoe_hf.compile_layers(torch.nn.Linear(2, 2))


@pytest.mark.slow
def test_a_compiled_model_follows_the_policy_and_the_mode():
    torch._dynamo.reset()
    model = build_patched("qwen3_moe", **ONE_LAYER)
    inputs = batch()
    expected = loss_and_gradients(model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = loss_and_gradients(compiled, inputs)
    assert_all_close(actual, expected, 1e-5, ORDER_OF_SUMS)
    top_k = actual["logits"]
    sonicmoe_hf.set_routing(model, POLICY)
    rounded = loss_and_gradients(compiled, inputs)["logits"]
    with torch.no_grad():
        without_gradients, evaluated = compiled(**inputs).logits, compiled.eval()(**inputs).logits
    sonicmoe_hf.set_routing(model, None)
    again = loss_and_gradients(compiled.train(), inputs)["logits"]
    assert relative_error(rounded, top_k) > 1e-3
    for logits in (without_gradients, evaluated, again):
        assert relative_error(logits, top_k) < 1e-5  # fp32: the same computation, compiled for another case


def compile_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def compile_model(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    ("order", "compiled"),
    rest_slow(
        [
            *((order, compile_layers) for order in ("in another thread", "before", "between")),
            ("unpatched", compile_model),
        ]
    ),
)
def test_other_models_of_the_class_that_are_compiled_too_do_not_turn_rounding_off(order, compiled):
    """Dynamo would use what fits of their code, and by default it does not ask whether modules have hooks. The other
    model is compiled before ours or between two calls of it, or is ours, unpatched. After torch 2.11 each thread has
    settings of its own, also those of autograd in which checkpoints are computed again on GPUs."""
    torch._dynamo.reset()
    torch._dynamo.config.skip_nnmodule_hook_guards = True  # as a new process finds it
    model, inputs = build("qwen3_moe", "sonicmoe_hf", use_cache=False, **ONE_LAYER), batch()
    baseline = model if order == "unpatched" else twin(model)
    ours = twin(model)
    sonicmoe_hf.patch_model(ours, POLICY)
    expected = ours(**inputs).logits
    torch._dynamo.config.skip_nnmodule_hook_guards = True
    if order in ("before", "unpatched"):
        compiled(baseline)(**inputs)
    sonicmoe_hf.patch_model(model, POLICY)
    compiled_model = compiled(model)
    with ThreadPoolExecutor(1) as executor:
        if order == "in another thread":
            executor.submit(compiled(baseline), **inputs).result()
            found = [executor.submit(compiled_model, **inputs).result().logits]
        else:
            found = [compiled_model(**inputs).logits]
    if order == "between":
        compiled(baseline)(**inputs)
        found.append(compiled_model(**inputs).logits)
    assert all(relative_error(logits, expected) < 1e-5 for logits in found), ORDER_OF_SUMS


@pytest.mark.pinned
def test_what_does_not_work_in_compiled_models_is_an_error_there():
    torch._dynamo.reset()
    model, inputs = build_patched("qwen3_moe", use_cache=False, **ONE_LAYER), batch()
    with sonicmoe_hf.record_routing(model) as routing:
        model(**inputs)
    with sonicmoe_hf.record_routing(model), pytest.raises(RuntimeError, match="neither in a compiled model"):
        compile_model(model)(**inputs)
    compile_layers(model)(**inputs)  # there is code without any of it
    for following in (sonicmoe_hf.record_routing(model), sonicmoe_hf.replay_routing(model, routing)):
        with following, pytest.raises(RuntimeError, match="neither in a compiled model"):
            model(**inputs)
    sonicmoe_hf.LoadBalancing(per_layer_loss=0.1).start(model)
    with pytest.raises(RuntimeError, match="does not work in a compiled model"):
        model(**inputs)


def compile_blocks(model):
    for layer in model.model.layers:
        layer.mlp.compile(fullgraph=True, backend="aot_eager")
    return model


def compile_with_graph_breaks(model):
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())
    return torch.compile(model, backend="aot_eager")


CHECKPOINTED = [("reentrant", compile_blocks), ("non_reentrant", compile_with_graph_breaks)]
CHECKPOINTED += [("non_reentrant", compile_blocks), ("reentrant", compile_with_graph_breaks)]


@pytest.mark.parametrize(("kind", "compiled"), rest_slow(CHECKPOINTED))
def test_checkpointing_around_compiled_parts_recomputes_the_routing_of_the_forward(kind, compiled):
    torch._dynamo.reset()
    model = build_patched("qwen3_moe", use_cache=False, **ONE_LAYER)
    again, inputs = checkpoint_layers(twin(model), kind), batch(padding=True)
    compiled_again = compiled(again)
    for routing in (POLICY, None):  # the second without rounding, after some with
        sonicmoe_hf.set_routing(model, routing)
        sonicmoe_hf.set_routing(again, routing)
        expected, actual = loss_and_gradients(model, inputs), loss_and_gradients(compiled_again, inputs)
        assert_all_close(actual, expected, 1e-5, ORDER_OF_SUMS)


@pytest.mark.slow
def test_a_compiled_model_takes_any_length_and_falls_back_where_tokens_are_few():
    torch._dynamo.reset()
    model = build_patched("qwen3_moe", POLICY, **ONE_LAYER)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (24, 32, 12):  # the second compiles for any length, the third is too short for rounding
        expected, actual = (loss_and_gradients(m, batch(length=length))["logits"] for m in (model, compiled))
        assert relative_error(actual, expected) < 1e-5  # fp32: the same computation, compiled


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKPOINTED_TRAINING)
def test_the_trainers_torch_compile_follows_the_schedule(kind, tmp_path):
    """The Trainer compiles layers after `attach`, with adapters under checkpointing too."""
    logs = []
    counters.clear()
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch._dynamo.reset()
        options = {
            "padding": True,
            "eval_strategy": "steps",
            "eval_steps": 2,
            **CHECKPOINTED_TRAINING[kind],
            **options,
        }
        callbacks = [TokenRoundingCallback(tile=TILE, start=1, end=3)]
        model = build("qwen3_moe", **ONE_LAYER)
        if kind != "none":
            sonicmoe_hf.patch_model(model)
            model = with_lora(model, target_modules=["q_proj"])
        trainer = run_trainer(model, tmp_path, callbacks, **options)
        kept = ("loss", "eval_loss", "moe/load_cv", "moe/rows_added", "moe/padded_rows_avoided")
        logs.append([log[key] for log in trainer.state.log_history for key in kept if key in log])
    assert len(logs[0]) == 4 * 2 + 2 * 2 + 2, "four steps, of which two round, and two evaluations"
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)  # fp32 after four updates
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
