"""A router sees the call of its thread and, in backward, of its graph; what errors and interrupts leave behind."""

import functools
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.marks import rest_pinned
from helpers.models import assert_all_close, batch, build_patched, loss_and_gradients, relative_error, twin
from helpers.training import CHECKPOINTING, POLICY, OutOfMemory, Watch, checkpoint_layers, fail_in
from torch.utils.checkpoint import checkpoint

import sonicmoe_hf
from sonicmoe_hf.layer.routing import TokenRounding
from sonicmoe_hf.routing import calls

SAME = "the same computation"
PATIENCE = 20  # seconds that a thread waits for the others


class Meeting:
    """Forward pre-hook that has threads wait for each other."""

    def __init__(self, num_threads):
        self.barrier = threading.Barrier(num_threads)

    def __call__(self, module, args):
        self.barrier.wait(PATIENCE)


def meet_in_blocks(*models):
    """Make two threads wait for each other in every block of these models, in forward and when it is recomputed."""
    meeting = Meeting(2)
    for model in models:
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(meeting)


def in_threads(*functions):
    """Run all functions at the same time, and return what each returns."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(function) for function in functions]]


# threads


def test_inference_in_one_thread_leaves_training_in_another_rounding():
    model = build_patched("qwen3_moe", POLICY)
    expected = loss_and_gradients(model, batch(padding=True))
    with torch.no_grad():
        top_k_logits = model(**batch(seed=1)).logits
    meet_in_blocks(model)

    def infer():
        with torch.no_grad():
            return model(**batch(seed=1)).logits

    trained, inferred = in_threads(lambda: loss_and_gradients(model, batch(padding=True)), infer)
    assert_all_close(trained, expected, 1e-6, SAME)
    assert relative_error(inferred, top_k_logits) < 1e-6, SAME


def test_recording_and_replaying_in_one_thread_leave_other_threads_alone():
    model = build_patched("qwen3_moe").eval()
    other = torch.tensor([0, 2]).expand(2, 96, 2)
    with torch.no_grad():
        plain = model(**batch(seed=1)).logits
        with sonicmoe_hf.replay_routing(model, other):
            replayed = model(**batch()).logits
    model.model.layers[0].register_forward_pre_hook(Meeting(3))

    @torch.no_grad()
    def replay():
        with sonicmoe_hf.replay_routing(model, other):
            return model(**batch()).logits

    @torch.no_grad()
    def record():
        with sonicmoe_hf.record_routing(model) as routing:
            model(**batch())
        return routing

    @torch.no_grad()
    def infer():
        return model(**batch(seed=1)).logits

    for _ in range(3):
        logits, routing, inferred = in_threads(replay, record, infer)
        assert relative_error(logits, replayed) < 1e-6 and relative_error(inferred, plain) < 1e-6, SAME
        assert len(routing.calls) == 1 and not torch.equal(routing.tensors()[0], other)


def gradients_of(model, inputs):
    """Compute the gradients of one forward and backward, without touching `.grad`, which threads share."""
    out = model(**inputs)
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(out.loss, list(model.parameters()))))


def gradients_by_backward(model, inputs):
    found = loss_and_gradients(model, inputs)
    return {name: found[name] for name, _ in model.named_parameters()}


@pytest.mark.pinned
@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_two_threads_train_two_models(kind):
    models, expected = [], []
    for family, routing in (("qwen3_moe", POLICY), ("qwen3_moe", TokenRounding(rounding="up", tile=4))):
        model = build_patched(family, routing, use_cache=False)
        expected.append(gradients_by_backward(twin(model), batch(padding=True, seed=len(models))))
        models.append(checkpoint_layers(model, kind))
    meet_in_blocks(*models)
    watches = [Watch(model) for model in models]
    batches = [batch(padding=True, seed=seed) for seed in range(2)]
    steps = [functools.partial(gradients_by_backward, *pair) for pair in zip(models, batches)]
    for _ in range(3):
        for actual, wanted in zip(in_threads(*steps), expected):
            assert_all_close(actual, wanted, 1e-6, SAME)
    assert all(watch.rounded() == [True] * 4 * 3 for watch in watches), "two layers, each once more in backward"


def test_two_threads_differentiate_one_model():
    """Each recomputes with its own padding. (Reentrant checkpointing has no autograd.grad.)"""
    model = build_patched("qwen3_moe", POLICY, use_cache=False)
    batches = [batch(padding=True), batch(seed=1)]
    expected = [gradients_of(model, inputs) for inputs in batches]
    meet_in_blocks(checkpoint_layers(model, "non_reentrant"))
    found = in_threads(*[functools.partial(gradients_of, model, inputs) for inputs in batches])
    for actual, wanted in zip(found, expected):
        assert_all_close(actual, wanted, 1e-6, SAME)


@pytest.mark.parametrize("inner", CHECKPOINTING)
def test_checkpoints_inside_reentrant_checkpoints_recompute_their_calls_routing(inner):
    model = build_patched("qwen3_moe", POLICY, use_cache=False)
    again = checkpoint_layers(twin(model), "reentrant")
    for layer in again.model.layers:
        layer.mlp.forward = functools.partial(checkpoint, layer.mlp.forward, **CHECKPOINTING[inner])
    gradients = []
    for version in (model, again):
        first, second = (version(**inputs).loss for inputs in (batch(padding=True), batch(seed=1)))
        (first + second).backward()
        gradients.append({name: p.grad for name, p in version.named_parameters()})
    assert_all_close(gradients[1], gradients[0], 1e-5, SAME)


# errors


@pytest.mark.parametrize("place", ["model.layers.1.mlp.experts", "model.layers.1.mlp.gate", "lm_head", "model.norm"])
def test_a_forward_that_raises_leaves_no_call_behind(place):
    model = build_patched("qwen3_moe", POLICY)
    with fail_in(model.get_submodule(place), OutOfMemory()), pytest.raises(OutOfMemory):
        model(**batch())
    assert calls.in_progress() is None
    watch = Watch(model)
    model.model.layers[0].mlp(torch.randn(4, 24, 32))
    assert watch.rounded() == [False], "a layer called alone uses top-k"


def test_a_model_called_inside_another_keeps_its_own_settings():
    student, teacher = build_patched("qwen3_moe", POLICY), build_patched("qwen3_moe", TokenRounding(tile=4), seed=1)
    watches = [Watch(student), Watch(teacher)]

    def teach(layer, args):
        with torch.no_grad():
            teacher(**batch(seed=1))

    student.model.layers[0].mlp.register_forward_pre_hook(teach)
    student(**batch(padding=True)).loss.backward()
    assert [watch.rounded() for watch in watches] == [[True, True], [False, False]]


@pytest.mark.parametrize("kind", rest_pinned(CHECKPOINTING))
def test_nothing_holds_a_model_or_its_calls_after_training(kind):
    model = checkpoint_layers(build_patched("qwen3_moe", POLICY, use_cache=False), kind)
    loss_and_gradients(model, batch())
    out = model(**batch())
    with fail_in(model.model.layers[0].mlp.gate, OutOfMemory()), pytest.raises(OutOfMemory):
        out.loss.backward()
    del out
    reference = weakref.ref(model)
    del model
    for _ in range(2):  # calls are let go with the graph, which the collector does not see into
        gc.collect()
    assert reference() is None and calls.in_progress() is None and calls.checkpoint_in_progress() is None
