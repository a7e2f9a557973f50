"""Errors, interrupts and threads while layers are copied: no copy is lost, and no buffer is read or written by two."""

import threading

import pytest
import torch
from helpers.models import loss_and_gradients
from helpers.streamed import add_adapter, streamed_layers
from test_streaming import BATCH, assert_equal, streamed

from sonicmoe_hf.kernels import eager


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["down", "down_backward"])
def test_after_an_error_in_mid_step_the_next_steps_are_right(late_copies, monkeypatch, where, error):
    expected = loss_and_gradients(add_adapter(streamed(None)), BATCH)
    model, calls, function = add_adapter(streamed(0)), [], getattr(eager, where)

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise error("in the middle")
        return function(*args, **kwargs)

    with monkeypatch.context() as patching:
        patching.setattr(eager, where, interrupted)
        with pytest.raises(error, match="in the middle"):
            loss_and_gradients(model, BATCH)
    for _ in range(2):
        assert_equal(loss_and_gradients(model, BATCH).values(), expected.values())


def test_a_use_that_was_interrupted_before_its_end_holds_no_buffer(late_copies):
    model = add_adapter(streamed(0))
    layers = streamed_layers(model)
    expected = loss_and_gradients(model, BATCH)
    for number in (1, 3):
        layers[number].stream.begin(layers[number])  # an interrupt that came before `with` began
    assert_equal(loss_and_gradients(model, BATCH).values(), expected.values())


def test_a_copy_that_an_interrupt_cut_off_is_made_again(late_copies, monkeypatch):
    model = streamed(0)
    expected = model(**BATCH).logits
    layers = streamed_layers(model)
    copy_now = late_copies.copy

    def cut_off(self, pairs, after, done):
        copy_now(self, list(pairs)[:1], after, done)
        raise KeyboardInterrupt

    stream = layers[0].stream
    held = [buffer.layer() for buffer in stream._buffers]
    other = next(layer for layer in layers if layer not in held)
    with monkeypatch.context() as patching:
        patching.setattr(late_copies, "copy", cut_off)
        with pytest.raises(KeyboardInterrupt), other.fetch():
            pass
    for layer in held:
        with layer.fetch() as weights:
            assert torch.equal(weights["gate_up"].codes, layer.weights["gate_up"].codes)
    assert torch.equal(model(**BATCH).logits, expected)


def test_two_threads_compute_at_once_and_a_third_is_an_error(late_copies):
    model = streamed(0)
    layers = streamed_layers(model)
    inside, leave, errors = threading.Barrier(3), threading.Event(), []

    def use(number):
        with layers[number].fetch():
            inside.wait(10)
            leave.wait(10)

    threads = [threading.Thread(target=use, args=(number,)) for number in (0, 3)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    with pytest.raises(RuntimeError, match="more than two threads"), layers[1].fetch():
        errors.append("a third layer was in two buffers")
    leave.set()
    for thread in threads:
        thread.join()
    with layers[1].fetch():
        assert not errors


def test_what_one_thread_computes_with_is_not_overwritten_for_another(late_copies):
    model = streamed(0)
    layers = streamed_layers(model)
    inside, leave, found = threading.Event(), threading.Event(), []

    def use():
        with layers[0].fetch() as weights:
            inside.set()
            leave.wait(10)
            found.append(torch.equal(weights["gate_up"].codes, layers[0].weights["gate_up"].codes))

    thread = threading.Thread(target=use)
    thread.start()
    inside.wait(10)
    for number in (2, 3, 2):
        with layers[number].fetch():
            pass
    leave.set()
    thread.join()
    assert found == [True]
