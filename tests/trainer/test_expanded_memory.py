"""expanded_memory: packed experts that lie expanded too while a Trainer trains, with the same results."""

import copy

import pytest
import torch
from helpers.adapters import with_lora
from helpers.marks import crossed
from helpers.models import OF_64, batch, build, loss_and_gradients
from helpers.training import OutOfMemory, fail_in, logs_of, trainer_for
from transformers import TrainerCallback

import sonicmoe_hf
from sonicmoe_hf import UnsupportedExpertsError, compile_layers, patch_model, quantize_experts
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.layer.packed_weight import PackedWeight
from sonicmoe_hf.streaming.placement import expert_layers
from sonicmoe_hf.trainer.expanded_memory import ExpandedWeights, expanded_nbytes

LAYERS = 3


def dense(family="qwen3_moe", layers=LAYERS):
    return build(family, num_hidden_layers=layers, **OF_64[family])


def packed(family="qwen3_moe", format="nf4", layers=LAYERS, **options):
    model = dense(family, layers)
    patch_model(model)
    return with_lora(quantize_experts(model, format, **options))


def weights_of(model):
    return [weight for weight in model.parameters() if isinstance(weight, PackedWeight)]


def bytes_of_layer(model):
    layers = len(expert_layers(model))
    return sum(map(expanded_nbytes, weights_of(model))) // layers


@pytest.mark.parametrize(
    "family, format", crossed(["qwen3_moe", "gpt_oss"], [each for each in FORMATS if each != "uint4"], everywhere=2)
)
def test_layers_that_fit_compute_the_same_bits_and_expand_nothing(family, format):
    model = packed(family, format)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    expected = loss_and_gradients(model.train(), batch(2, 8))
    expanded = ExpandedWeights(model, 2 * bytes_of_layer(model) + 1)
    assert [weight.expanded is not None for weight in weights_of(model)] == [True] * 4 + [False] * 2
    copied = copy.deepcopy(model)
    assert not any(weight.expanded is not None for weight in weights_of(copied))
    for weight in expanded.weights:
        weight.codes.bitwise_not_()  # nothing reads it
    actual = loss_and_gradients(model, batch(2, 8))
    for weight in expanded.weights:
        weight.codes.bitwise_not_()
    expanded.release()
    after = loss_and_gradients(model, batch(2, 8))
    assert not any(weight.expanded is not None for weight in weights_of(model))
    for results in (actual, after):
        assert results.keys() == expected.keys()
        assert all(torch.equal(results[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_compiled_layers_take_them_and_let_them_go():
    model = packed(layers=1)
    compile_layers(model, backend="aot_eager")
    expected = loss_and_gradients(model.train(), batch(2, 8))
    expanded = ExpandedWeights(model, "1GiB")
    for weight in expanded.weights:
        weight.codes.bitwise_not_()
    actual = loss_and_gradients(model, batch(2, 8))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_weights_that_are_loaded_or_moved_are_expanded_no_longer():
    model, other = packed(), packed()
    ExpandedWeights(model, "1GiB")
    model.load_state_dict(other.state_dict())
    assert not any(weight.expanded is not None for weight in weights_of(model))
    ExpandedWeights(model, "1GiB")
    weights = weights_of(model)
    weights[0].data = weights_of(other)[0].data
    assert [weight.expanded is not None for weight in weights] == [False] + [True] * 5


def test_another_dtype_is_computed_from_what_is_stored():
    model = packed()
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_and_gradients(model.train(), batch(2, 8))
        ExpandedWeights(model, "1GiB")
        actual = loss_and_gradients(model, batch(2, 8))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


class Look(TrainerCallback):
    counts = None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.counts = [weight.expanded is not None for weight in weights_of(model)]


def test_a_trainer_trains_alike_and_gives_the_memory_back_after_an_error_too(tmp_path, capsys):
    runs = []
    for number, memory in enumerate((None, "1GiB")):
        trainer = trainer_for(packed(), tmp_path / str(number), [look := Look()], max_steps=3, logging_steps=1)
        sonicmoe_hf.attach(trainer, expanded_memory=memory)
        trainer.train()
        runs.append([log["loss"] for log in logs_of(trainer)])
        assert look.counts == [memory is not None] * 6
        assert not any(weight.expanded is not None for weight in weights_of(trainer.model))
    assert runs[0] == runs[1]
    assert f"packed as nf4 and in {LAYERS} of {LAYERS} layers expanded" in capsys.readouterr().err
    trainer = trainer_for(packed(), tmp_path / "error", max_steps=3)
    sonicmoe_hf.attach(trainer, expanded_memory="1GiB")
    fail_in(trainer.model.get_base_model().lm_head, OutOfMemory())
    with pytest.raises(OutOfMemory):
        trainer.train()
    assert not any(weight.expanded is not None for weight in weights_of(trainer.model))


@pytest.mark.parametrize("make", [lambda: dense(), lambda: packed(experts_memory=0)], ids=["dense", "host"])
def test_a_model_without_packed_experts_on_the_device_is_refused_and_taken_as_the_message_says(make, tmp_path):
    with pytest.raises(UnsupportedExpertsError, match='experts_quantization="nf4" and without experts_memory'):
        sonicmoe_hf.attach(trainer_for(make(), tmp_path), expanded_memory="1GiB")
    dense(layers=1).save_pretrained(tmp_path)
    loaded = with_lora(sonicmoe_hf.from_pretrained(tmp_path, experts_quantization="nf4"))
    sonicmoe_hf.attach(trainer := trainer_for(loaded, tmp_path, max_steps=1), expanded_memory="1GiB")
    trainer.train()


@pytest.mark.parametrize("memory", ["many", -1, "auto", True])
def test_what_is_no_number_of_bytes_is_named(memory, tmp_path):
    trainer = trainer_for(packed(layers=1), tmp_path)
    with pytest.raises(ValueError, match=r'expanded_memory is .*such as "20GiB"'):
        sonicmoe_hf.attach(trainer, expanded_memory=memory)
    sonicmoe_hf.attach(trainer, expanded_memory="20GiB")
