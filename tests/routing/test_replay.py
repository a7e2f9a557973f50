"""record_routing and replay_routing: the same experts, weights from the current logits, the
same bits from the same model."""

import pytest
import torch
from helpers.architectures import architectures, layers_of
from helpers.models import (
    CONFIGS,
    batch,
    build,
    build_patched,
    ernie_vl_text,
    gradients_of,
    image_tokens,
    loss_and_gradients,
    relative_error,
    with_other_routers,
)
from helpers.training import CHECKPOINTING, POLICY, checkpoint_layers
from torch.overrides import TorchFunctionMode

import sonicmoe_hf
from sonicmoe_hf import UnsupportedModelError, record_routing, replay_routing
from sonicmoe_hf.patching.moe_layers import find_layers


def same_experts(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


@pytest.mark.parametrize("family", CONFIGS)
def test_the_same_model_gives_the_same_bits_and_a_changed_one_uses_the_recorded_experts(family):
    model, inputs = build_patched(family), batch(padding=True)
    plain = loss_and_gradients(model, inputs)
    with torch.no_grad(), record_routing(model.eval()) as routing:
        model(**inputs)
    with replay_routing(model.train(), routing):
        again = loss_and_gradients(model, inputs)
    assert all(torch.equal(again[name], plain[name]) for name in plain)

    other = with_other_routers(model)
    with record_routing(other) as own:
        loss_and_gradients(other, inputs)
    with replay_routing(other, routing), record_routing(other) as used:
        found = loss_and_gradients(other, inputs)
    assert same_experts(used, routing) and not same_experts(own, routing)
    assert len(routing.calls) == 1 and routing.tensors()[0].shape == (len(list(find_layers(model))), 96, 2)
    for layer in find_layers(other):
        assert layer.router.weight.grad.any() and found["loss"].isfinite(), "the weights are differentiable"


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_checkpointing_recomputes_with_the_replayed_experts_also_after_the_context(kind):
    model, inputs = build_patched("qwen3_moe"), batch()
    with torch.no_grad(), record_routing(model) as routing:
        model(**inputs)
    other = with_other_routers(model)
    with replay_routing(other, routing):
        expected = loss_and_gradients(other, inputs)
    checkpoint_layers(other, kind).zero_grad()
    with replay_routing(other, routing), record_routing(other) as used:
        loss = other(**inputs).loss
    loss.backward()
    assert same_experts(used, routing), "recorded once"
    for name, gradient in gradients_of(other).items():
        assert torch.equal(gradient, expected[name]), name


def test_calls_are_replayed_in_order_and_tensors_do_too():
    model = build_patched("qwen3_moe")
    inputs = [batch(seed=seed) for seed in range(2)]
    with torch.no_grad(), record_routing(model) as routing:
        logits = [model(**each).logits for each in inputs]
    tensors = [tensor.long() for tensor in routing.tensors()]
    with torch.no_grad(), replay_routing(model, tensors):
        again = [model(**each).logits for each in inputs]
        with pytest.raises(RuntimeError, match="called more often than the replayed routing has calls"):
            model(**inputs[0])
    assert all(torch.equal(a, b) for a, b in zip(again, logits))
    with torch.no_grad(), replay_routing(model, tensors[1]):
        assert relative_error(model(**inputs[0]).logits, logits[0]) > 1e-3, "another batch's experts: not a test"
    unknown = torch.full_like(tensors[1], -1)
    with torch.no_grad(), replay_routing(model, unknown):
        assert torch.equal(model(**inputs[0]).logits, logits[0]), "ids below 0 keep the router's choice"
    some, other = tensors[1].clone(), tensors[1].clone()
    some[:, 1::3, 0], other[:, 1::3] = -1, tensors[0][:, 1::3]
    with torch.no_grad(), replay_routing(model, some), record_routing(model) as used:
        model(**inputs[0])
    chosen, layers = used.tensors()[0].long(), slice(0, 1)  # of the first layer, which sees what it saw at first
    assert torch.equal(chosen[layers], other[layers]), "one id below 0 keeps all of the router's choice for that token"
    assert (chosen >= 0).all() and torch.equal(chosen[:, 0::3], other[:, 0::3])
    with torch.no_grad():
        assert torch.equal(model(**inputs[0]).logits, logits[0]), "nothing is left behind"


def test_of_replays_inside_each_other_the_innermost_counts():
    model, inputs = build_patched("qwen3_moe"), batch()
    outer, inner = (torch.tensor(pair).expand(2, 96, 2) for pair in ([0, 2], [1, 3]))
    with torch.no_grad(), replay_routing(model, [outer, outer]), record_routing(model) as used:
        model(**inputs)
        with replay_routing(model, inner):
            model(**inputs)
        model(**inputs)
    assert [call[0, 0].tolist() for call in used.tensors()] == [[0, 2], [1, 3], [0, 2]]


# layers that run several times in a call, or not at all


def called_twice():
    """Build a model whose layers run on the sequence and on its reverse."""
    model = build_patched("qwen3_moe", use_cache=False)

    def forward(input_ids, attention_mask=None, labels=None):
        there, back = (model.model(ids).last_hidden_state for ids in (input_ids, input_ids.flip(1)))
        return model.lm_head(there + back.flip(1))

    model.forward = forward
    return model, batch()


def with_a_shared_block():
    """Build a model of which two layers use the same experts."""
    model = build("qwen3_moe", use_cache=False)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    sonicmoe_hf.patch_model(model)
    return model, batch()


@pytest.mark.parametrize("made", [called_twice, with_a_shared_block])
def test_runs_of_a_layer_are_replayed_in_their_order(made):
    model, inputs = made()
    with torch.no_grad(), record_routing(model) as routing:
        model(**inputs)
    assert all(len(runs) == 2 for runs in routing.calls[0].values())
    with torch.no_grad():
        for layer in find_layers(model):
            layer.router.weight.neg_()  # the routers would choose other experts
        with replay_routing(model, routing), record_routing(model) as used:
            model(**inputs)
        for name, runs in routing.calls[0].items():
            assert all(torch.equal(*pair) for pair in zip(runs, used.calls[0][name], strict=True))
            assert not torch.equal(*runs), "the same experts in both: not a test"
        with pytest.raises(ValueError, match=r"call 0 is no tensor .*model.layers.0.mlp ran 2 times; hand the"):
            routing.tensors()
        whole = dict(routing.calls[0])
        for times, words in (
            (3, "ran 2 times in this model call, but 3 times in the recorded"),
            (1, "runs more often in this model call than in the recorded one, where it ran 1 times"),
        ):
            routing.calls[0] = {name: [*runs, runs[0]][:times] for name, runs in whole.items()}
            with replay_routing(model, routing), pytest.raises(RuntimeError, match=words):
                model(**inputs)


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_checkpointing_of_runs_of_one_layer_is_an_error(kind):
    model, inputs = with_a_shared_block()
    with torch.no_grad(), record_routing(model) as routing:
        model(**inputs)
    with replay_routing(checkpoint_layers(model, kind), routing):
        loss = model(**inputs).loss
    words = "runs 2 times in one model call, and gradient checkpointing does not tell .*; replay without gradient"
    with pytest.raises(RuntimeError, match=words):
        loss.backward()
    model.gradient_checkpointing_disable()
    model.zero_grad()
    with replay_routing(model, routing):
        model(**inputs).loss.backward()
    assert all(layer.experts.down_proj.grad.isfinite().all() for layer in find_layers(model))


def test_routers_of_images_are_recorded_and_replayed_and_text_alone_has_none_of_them():
    model, inputs = ernie_vl_text(), batch()
    sonicmoe_hf.patch_model(model)
    text = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    images = {**text, "moe_mm_token_type_ids": image_tokens(inputs)}
    with torch.no_grad():
        with record_routing(model) as of_images:
            plain = model(**images).last_hidden_state
        with record_routing(model) as of_text:
            model(**text)
        with replay_routing(model, of_images):
            assert torch.equal(model(**images).last_hidden_state, plain)
    with pytest.raises(ValueError, match="vision_moe ran 0 times"):
        of_text.tensors()
    del of_images.calls[0]["layers.1.mlp.vision_moe"]  # as if the record were of text alone, with as many tokens
    inputs_differ = r"vision_moe runs more often .* must have the same kind of inputs"
    with torch.no_grad(), replay_routing(model, of_images), pytest.raises(RuntimeError, match=inputs_differ):
        model(**images)


class HostReads(TorchFunctionMode):
    """Counts the operations for which the host waits for a GPU: values of tensors that Python asks for."""

    READS = (torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.item, torch.Tensor.tolist)

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in self.READS
        return function(*args, **(kwargs or {}))


def test_a_given_tensor_is_read_once_and_a_recorded_routing_never():
    model, inputs = build_patched("qwen3_moe", num_hidden_layers=3), batch()
    with torch.no_grad(), record_routing(model) as routing:
        model(**inputs)
    for source, reads in ((routing, 0), (routing.tensors()[0].long(), 1)):
        with HostReads() as watch, replay_routing(model, source):
            pass
        assert watch.count == reads, "not once a layer"


def test_what_it_cannot_do_is_refused_by_name():
    model, inputs = build_patched("qwen3_moe"), batch()
    whole = torch.zeros(2, 96, 2, dtype=torch.long)
    of_others = []
    for changes in ({"num_hidden_layers": 1}, {"num_experts": 16}):
        with record_routing(build_patched("qwen3_moe", **changes)) as of_another:
            of_others.append(of_another)
    layers = (
        r"is of layers with experts \{.*\}, but the model has \{'model.layers.0.mlp': 8, 'model.layers.1.mlp': 8\}"
    )
    for routing, words in (
        *((of_another, layers) for of_another in of_others),
        (whole[:, :48], r"has shape \(48, 2\), but this call's is \(96, 2\)"),
        (whole[:1], r"must be integer \[layers, tokens, experts per token\], of 2 layers"),
        (whole.float(), r"the routing is torch.float32"),
        (whole.bool(), r"the routing is torch.bool"),
        (whole + 8, r"model.layers.0.mlp has 8 experts, but its routing names expert 8"),
    ):
        with pytest.raises(ValueError, match=words), replay_routing(model, routing):
            model(**inputs)
    sonicmoe_hf.set_routing(model, POLICY)
    with pytest.raises(RuntimeError, match="nor with token rounding; use set_routing"), record_routing(model):
        model(**inputs)
    without = next(layers_of(a) for a in architectures() if a.experts == "JambaExperts")
    sonicmoe_hf.patch_model(without)
    unknown = "recording and replaying do not know its router"
    with pytest.raises(UnsupportedModelError, match=unknown), record_routing(without):
        pass


def test_a_recorded_call_in_which_no_router_reports_is_an_error():
    model = build_patched("qwen3_moe")
    model.model.forward = build("qwen3_moe").model.forward
    with sonicmoe_hf.record_routing(model), pytest.raises(RuntimeError, match="no router of it reported its experts"):
        model(**batch())


@pytest.mark.parametrize("then", [lambda model: None, sonicmoe_hf.patch_model])
def test_a_model_that_is_unpatched_inside_a_replay_ends_it_with_an_error(then):
    model = build_patched("qwen3_moe")
    given = torch.zeros(2, 96, 2, dtype=torch.long)
    with pytest.raises(RuntimeError, match="unpatched inside record_routing"), replay_routing(model, given):
        sonicmoe_hf.unpatch_model(model)
        then(model)
