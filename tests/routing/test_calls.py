"""The call that a router takes part in: calls inside calls, calls that checkpointing runs again, calls that are over."""

import contextlib
import functools

import pytest
import torch
from helpers.marks import rest_pinned
from helpers.models import (
    assert_all_close,
    batch,
    build_patched,
    gradients_of,
    loss_and_gradients,
    relative_error,
    twin,
)
from helpers.training import CHECKPOINTING, POLICY, OutOfMemory, Watch, checkpoint_layers, fail_in, start_counting
from torch.utils.checkpoint import checkpoint

import sonicmoe_hf
from sonicmoe_hf.routing import calls

SAME = "the same computation"


def loop_of_ones_own(model, inputs, kind):
    """Compute the loss of the model's parts, each layer checkpointed, without a call of the model."""
    hidden = model.model.embed_tokens(inputs["input_ids"])
    positions = torch.arange(hidden.shape[1]).unsqueeze(0)
    embedded = model.model.rotary_emb(hidden, positions)
    for layer in model.model.layers:
        call = functools.partial(layer, position_embeddings=embedded, position_ids=positions)
        hidden = call(hidden) if kind is None else checkpoint(call, hidden, **kind)
    return model.lm_head(model.model.norm(hidden)).logsumexp(-1).mean()


def whole(model, inputs, kind):
    if kind is None:
        return model(**inputs).loss
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    return checkpoint(lambda given: model(inputs_embeds=given, **rest).loss, embeds, **kind)


@pytest.mark.parametrize("loss_of", rest_pinned([loop_of_ones_own, whole]))
@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("left", ["nothing", "outputs", "outputs of a failed backward"])
def test_what_one_model_trained_says_nothing_to_anothers_backward(loss_of, kind, left):
    model, inputs = checkpoint_layers(build_patched("qwen3_moe", POLICY, use_cache=False), kind), batch(padding=True)
    out = model(**inputs)
    if left == "outputs of a failed backward":
        with fail_in(model.model.layers[0].mlp.gate, OutOfMemory()), pytest.raises(OutOfMemory):
            out.loss.backward()
    else:
        out.loss.backward()
    del model
    if left == "nothing":
        del out
    other = build_patched("qwen3_moe", use_cache=False, seed=1)
    gradients = []
    for checkpointing in (None, CHECKPOINTING[kind]):
        other.zero_grad()
        loss_of(other, inputs, checkpointing).backward()
        gradients.append(gradients_of(other))
    assert_all_close(gradients[1], gradients[0], 1e-6, SAME)


# calls inside calls


def test_a_hook_may_call_the_model_that_it_is_in():
    model = build_patched("qwen3_moe", POLICY)
    expected = loss_and_gradients(model, batch(padding=True))
    with torch.no_grad():
        alone = model(**batch(seed=1)).logits
    inside = []

    def call_again(block, args):
        if not inside:
            inside.append(None)
            with torch.no_grad():
                inside[0] = model(**batch(seed=1)).logits

    model.model.layers[0].mlp.register_forward_pre_hook(call_again)
    assert_all_close(loss_and_gradients(model, batch(padding=True)), expected, 1e-6, SAME)
    assert relative_error(inside[0], alone) < 1e-6, "evaluation inside training uses top-k"
    assert calls.in_progress() is None


def test_a_call_that_is_refused_inside_another_models_call_does_not_end_that():
    model, refused = build_patched("qwen3_moe", POLICY), build_patched("qwen3_moe", POLICY, seed=1)

    def call_the_other(block, args):
        for _ in range(2):  # as often as calls are in progress: of the model, and of its stack of layers
            with sonicmoe_hf.record_routing(refused), pytest.raises(RuntimeError, match="nor with token rounding"):
                refused(**batch())

    model.model.layers[0].mlp.register_forward_pre_hook(call_the_other)
    watch = Watch(model)
    model(**batch())
    assert watch.rounded() == [True, True] and calls.in_progress() is None


def test_a_call_that_an_earlier_hook_stopped_ends_nothing_but_itself():
    """Torch calls our hook after it, though the one before it never ran."""
    model, inputs = build_patched("qwen3_moe", POLICY), batch(padding=True)
    other = build_patched("qwen3_moe", POLICY, seed=1)  # a model gets hooks when something asks for them
    expected = loss_and_gradients(model, inputs)

    def stop(*_):
        raise OutOfMemory

    def call_the_other(*_):
        for _ in range(2):  # as often as calls are in progress
            with pytest.raises(OutOfMemory):
                other(**inputs)

    other.register_forward_pre_hook(stop, prepend=True)
    model.model.layers[0].mlp.register_forward_pre_hook(call_the_other)
    assert_all_close(loss_and_gradients(model, inputs), expected, 1e-5, SAME)


@pytest.mark.parametrize("part", ["", "model"], ids=["the model", "its stack of layers"])
def test_what_is_called_after_an_interrupted_call_is_no_part_of_that_call(part):
    model = build_patched("qwen3_moe", POLICY)
    with fail_in(model.model.layers[1], KeyboardInterrupt()), pytest.raises(KeyboardInterrupt) as kept:
        model(**batch())  # kept: and with it the frames of the interrupted call
    watch = Watch(model)
    with torch.no_grad():
        model.get_submodule(part)(input_ids=batch()["input_ids"])
    assert watch.rounded() == [False, False] and calls.in_progress() is None and kept.tb


# checkpointing around the whole model


def balance(model):
    sonicmoe_hf.LoadBalancing(per_layer_loss=0.1).start(model)


def round_tokens(model):
    sonicmoe_hf.set_routing(model, POLICY)


@contextlib.contextmanager
def replay(model):
    with sonicmoe_hf.record_routing(model) as routing:
        model(**batch())
    with sonicmoe_hf.replay_routing(model, routing):
        yield


@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("ask", [round_tokens, start_counting, balance, sonicmoe_hf.record_routing, replay])
def test_checkpointing_around_a_whole_model_with_work_is_an_error_that_names_its_layers(ask, kind):
    model, inputs = build_patched("qwen3_moe", use_cache=False), batch()
    words = r"whole model runs it twice.*; checkpoint its layers: model\.activation_checkpointing_enable"
    with ask(model) or contextlib.nullcontext(), pytest.raises(RuntimeError, match=words):
        whole(model, inputs, CHECKPOINTING[kind]).backward()
    assert calls.in_progress() is None
    if ask is replay:  # which is over
        whole(model, inputs, CHECKPOINTING[kind]).backward()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[kind])
    with ask(model) or contextlib.nullcontext():
        model(**inputs).loss.backward()


# checkpointing that is not torch's


class Offloaded(torch.autograd.Function):
    """An autograd function as trainers write it that move what they keep to the host."""

    @staticmethod
    def forward(ctx, function, hidden):
        ctx.function = function
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return function(hidden)

    @staticmethod
    def backward(ctx, gradient):
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(hidden)
        torch.autograd.backward(out, gradient)
        return None, hidden.grad


def composable(function, hidden):
    module = torch.nn.Module()
    module.forward = function
    return torch.distributed._composable.checkpoint(module)(hidden)


@pytest.mark.parametrize(
    ("apply", "when"),
    [
        (Offloaded.apply, "without gradients in a model call that has them"),
        (composable, "in backward"),
    ],
)
def test_checkpointing_that_is_not_torchs_is_an_error_that_names_torchs(apply, when):
    model, inputs = build_patched("qwen3_moe", use_cache=False), batch()
    for layer in model.model.layers:
        layer.forward = functools.partial(run_by, apply, layer.forward)
    model(**inputs).loss.backward()
    sonicmoe_hf.set_routing(model, POLICY)
    with pytest.raises(RuntimeError, match=rf"model.layers.\d.mlp runs {when}, and not by torch.utils.checkpoint"):
        model(**inputs).loss.backward()
    for layer in model.model.layers:
        del layer.forward
    model.zero_grad()
    checkpoint_layers(model, "non_reentrant")(**inputs).loss.backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad.any()


@pytest.mark.parametrize("apply", [Offloaded.apply, composable])
def test_so_it_is_where_routing_is_replayed_in_evaluation(apply):
    """Layers that are computed again would have the experts that the routers choose by then."""
    model, inputs = build_patched("qwen3_moe", use_cache=False).eval(), batch()
    with sonicmoe_hf.record_routing(model) as routing:
        model(**inputs)
    for layer in model.model.layers:
        layer.forward = functools.partial(run_by, apply, layer.forward)
    with sonicmoe_hf.replay_routing(model, routing), pytest.raises(RuntimeError, match="runs in backward, and not by"):
        model(**inputs).loss.backward()


def run_by(apply, function, hidden, **options):
    return apply(functools.partial(function, **options), hidden)


# one call's outputs in another call


def test_a_call_on_an_earlier_calls_output_leaves_it_its_own_recomputation():
    model = build_patched("qwen3_moe", POLICY, use_cache=False)
    again = checkpoint_layers(twin(model), "non_reentrant")
    padded, gradients = batch(padding=True), []
    for version in (model, again):
        first = version.model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"])
        second = version.model(inputs_embeds=first.last_hidden_state, output_hidden_states=True)
        second.last_hidden_state.square().mean().backward()
        gradients.append(gradients_of(version))
    assert_all_close(gradients[1], gradients[0], 1e-5, SAME)
