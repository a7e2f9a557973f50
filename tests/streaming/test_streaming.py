"""Experts in host memory: the resident model's bits, what is copied when, and no read or write out of order."""

import copy
import functools
import gc
import itertools

import pytest
import torch
from helpers.adapters import EXPERTS
from helpers.late_copies import Hazard
from helpers.marks import crossed, rest_pinned, rest_slow
from helpers.models import batch, loss_and_gradients
from helpers.native import native_twin
from helpers.streamed import add_adapter, build_small, build_streamed, copies_of, host_weights, streamed_layers
from peft import LoraConfig, get_peft_model_state_dict
from torch import nn
from transformers import Trainer, TrainingArguments

from sonicmoe_hf import compile_layers, moe_experts, patch_model, quantize_experts
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.layer.call import LayerCall
from sonicmoe_hf.layer.fetching import STREAMED, with_device_weights
from sonicmoe_hf.layer.projection import Projection
from sonicmoe_hf.streaming.placement import expert_layers

LAYERS = 5
BATCH = batch(2, 8)
BATCHES = [batch(2, 8, seed=seed) for seed in range(4)]
FAMILIES = ("qwen3_moe", "gpt_oss")
streamed = functools.partial(build_streamed, layers=LAYERS)


def lived(model):
    """Train and return the results: two steps of two batches each, an evaluation and a generation between them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, given = torch.optim.SGD(trained, lr=0.1), []
    for step in range(2):
        for inputs in BATCHES[2 * step : 2 * step + 2]:
            out = model.train()(**inputs)
            out.loss.backward()
            given.append(out.logits.detach())
        given += [parameter.grad.clone() for parameter in trained]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            given.append(model.eval()(**BATCH).logits)
        prompt = {"input_ids": BATCH["input_ids"][:1], "attention_mask": BATCH["attention_mask"][:1]}
        given.append(model.generate(**prompt, max_new_tokens=3, do_sample=False, use_cache=False))
    return given


def assert_equal(given, expected):
    assert len(given) == len(expected)
    different = [place for place, pair in enumerate(zip(given, expected)) if not torch.equal(*pair)]
    assert not different, f"{len(different)} of {len(expected)} tensors differ, the first is number {different[0]}"


@pytest.mark.parametrize("checkpointing, format", rest_slow(itertools.product([True, None, False], ["nf4", None])))
def test_training_evaluation_and_generation_are_equal_to_the_bit(late_copies, format, checkpointing):
    expected = lived(add_adapter(streamed(None, format), checkpointing))
    for experts_memory, layers in ((0, LAYERS), ("half", (LAYERS + 1) // 2)):
        model = add_adapter(streamed(experts_memory, format), checkpointing)
        assert len(host_weights(model)) == 2 * layers
        assert_equal(lived(model), expected)


@pytest.mark.parametrize(
    "family,format", rest_slow([("gpt_oss", "mxfp4"), *((f, each) for f in FAMILIES for each in FORMATS)])
)
def test_every_format_and_layout_streams(late_copies, family, format):
    expected = loss_and_gradients(add_adapter(streamed(None, format, family)), BATCH)
    given = loss_and_gradients(add_adapter(streamed(0, format, family)), BATCH)
    assert given.keys() == expected.keys()
    assert_equal(given.values(), expected.values())


def numbered(engine, layers):
    """List the log with layers in place of buffers and addresses; one entry where one layer is read several times."""
    number = {host.data_ptr(): place for place, layer in enumerate(layers) for host in layer._bytes.values()}
    held, steps = {}, []
    for kind, buffer, *source in engine.log:
        if kind == "copy":
            held[buffer] = number[source[0]]
        entry = kind, held[buffer]
        if not steps or steps[-1] != entry:
            steps.append(entry)
    return steps


@pytest.mark.parametrize("checkpointing", rest_pinned([True, None, False]), ids=["reentrant", "kept", "recomputed"])
def test_each_layer_is_copied_while_the_one_before_computes(late_copies, checkpointing):
    model = add_adapter(streamed(0, layers=4), checkpointing)
    layers = streamed_layers(model)
    engine = copies_of(model)
    loss_and_gradients(model, BATCH)
    waited, engine.log[:] = engine.finished, []
    for _ in range(2):
        start = len(engine.log)
        loss_and_gradients(model, BATCH)
    # at its end backward leaves layers 1 and 0 where the next forward begins
    engine.log[:] = [("copy", place, host) for place, host in _held(engine, layers)] + engine.log[start:]
    held, steps = 2, numbered(engine, layers)
    forwards = [("read", 0), ("copy", 2), ("read", 1), ("copy", 3), ("read", 2), ("read", 3)]
    backwards = [("copy", 1), ("read", 2), ("copy", 0), ("read", 1), ("read", 0)]
    assert steps[held:] == forwards + backwards
    assert len(engine.buffers) == 2, "no buffer is allocated after the first step"
    assert engine.finished == waited, "no step waits on the host"


def _held(engine, layers):
    """List (buffer, source) of what the two buffers hold before a step: layers 0 and 1."""
    stream = layers[0].stream
    places = {id(buffer.memory): place for place, buffer in enumerate(engine.buffers)}
    return [(places[id(buffer.bytes)], buffer.layer()._bytes["down"].data_ptr()) for buffer in stream._buffers]


def test_the_first_step_goes_forwards_and_back_without_having_seen_another(late_copies):
    model = add_adapter(streamed(0, layers=4))
    loss_and_gradients(model, BATCH)
    layers = streamed_layers(model)
    copied = [number for kind, number in numbered(copies_of(model), layers) if kind == "copy"]
    assert copied == [0, 1, 2, 3, 1, 0]


def test_two_streamed_layers_are_copied_once(late_copies):
    model = add_adapter(streamed(0, layers=2), False)
    for _ in range(3):
        loss_and_gradients(model, BATCH)
    assert [kind for kind, *_ in copies_of(model).log].count("copy") == 2 * 2, "two weights of two layers"


@pytest.mark.pinned
def test_two_models_have_buffers_of_their_own(late_copies):
    expected = [loss_and_gradients(add_adapter(streamed(None, seed=seed)), BATCH) for seed in (0, 1)]
    models = [add_adapter(streamed(0, seed=seed)) for seed in (0, 1)]
    losses = [model(**BATCH).loss for model in models]
    for loss in losses:
        loss.backward()
    for model, gradients in zip(models, expected):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(parameter.grad, gradients[name]), name
    assert copies_of(models[0]) is not copies_of(models[1])


def test_the_op_takes_host_weights_without_a_model(late_copies):
    model = streamed(0)
    _, experts = expert_layers(model)[1]
    x, routing = torch.randn(6, 64), (torch.randint(8, (6, 2)), torch.rand(6, 2))
    up, down = experts.gate_up_proj.resident(), experts.down_proj.resident()
    given = moe_experts(x, experts.gate_up_proj, experts.down_proj, routing)
    assert torch.equal(given, moe_experts(x, up, down, routing))


def test_generation_learns_that_the_first_layer_follows_the_last(late_copies):
    model = streamed(0, layers=4).eval()
    layers = streamed_layers(model)
    with torch.no_grad():
        for _ in range(3):
            model(**BATCH)
    steps = numbered(copies_of(model), layers)
    _, second, third = (place for place, step in enumerate(steps) if step == ("read", 0))
    around = [("copy", 2), ("read", 1), ("copy", 3), ("read", 2), ("copy", 0), ("read", 3), ("copy", 1)]
    assert steps[second + 1 : third] == around


@pytest.mark.pinned
def test_adapters_of_several_names_train_and_are_saved_as_over_resident_experts(late_copies, tmp_path):
    saved = []
    for place, experts_memory in (("resident", None), ("streamed", 0)):
        model = add_adapter(streamed(experts_memory))
        torch.manual_seed(2)
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS))
        for name in ("second", "default", "second"):
            model.set_adapter(name)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.1)
            model(**BATCH).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(tmp_path / place)
        states = [get_peft_model_state_dict(model, adapter_name=name) for name in ("default", "second")]
        saved.append(
            {f"{place} {name}": tensor for place, state in enumerate(states) for name, tensor in state.items()}
        )
    assert saved[0].keys() == saved[1].keys()
    assert_equal(saved[1].values(), saved[0].values())
    for file in (tmp_path / "resident").rglob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "streamed" / file.relative_to(tmp_path / "resident")).read_bytes()


@pytest.mark.pinned
def test_a_trainer_in_mixed_precision_resumes(late_copies, tmp_path):
    rows = [{key: value[0] for key, value in batch(1, 8, seed=seed).items()} for seed in range(12)]

    def trained(experts_memory, folder, steps, resume=None):
        args = TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            save_steps=1,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            seed=0,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            lr_scheduler_type="constant",
            bf16=True,
        )
        model = add_adapter(streamed(experts_memory))
        Trainer(model=model, args=args, train_dataset=rows).train(resume_from_checkpoint=resume)
        return [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]

    expected = trained(None, tmp_path / "resident", 3)
    trained(0, tmp_path / "streamed", 2)
    resumed = trained(0, tmp_path / "streamed", 3, str(tmp_path / "streamed" / "checkpoint-2"))
    assert_equal(resumed, expected)


@pytest.mark.pinned
@pytest.mark.slow
@pytest.mark.parametrize("format, checkpointing", [("nf4", False), ("nf4", True), (None, None)])
def test_compiled_layers_train_evaluate_and_generate_the_same(late_copies, format, checkpointing):
    torch._dynamo.reset()
    expected = lived(add_adapter(streamed(None, format, layers=2), checkpointing))
    model = add_adapter(streamed(0, format, layers=2), checkpointing)
    compile_layers(model, backend="aot_eager")
    assert_equal(lived(model), expected)


def test_memory_is_unpinned_when_the_model_is_gone_and_no_copy_is_under_way(late_copies):
    model = add_adapter(streamed(0))
    engine = copies_of(model)
    loss_and_gradients(model, BATCH)
    with streamed_layers(model)[2].fetch():
        pass  # another layer's copy is under way
    assert engine.queue and len(engine.pinned) == 2 * LAYERS and len(STREAMED) >= LAYERS
    del model
    gc.collect()
    assert not engine.pinned, "a Hazard in a finaliser would leave it"


def insert(layers):
    return [layers[0], copy.deepcopy(layers[0]), *layers[1:]]


def borrow(layers):
    return [layers[1], streamed(None, layers=1, seed=1, moe_intermediate_size=128).model.layers[0], layers[0]]


def drop(layers):
    return layers[1:]


@pytest.mark.parametrize("experts_memory, change", crossed([0, "half"], [list, insert, drop, borrow], everywhere=1))
def test_a_model_whose_layers_change_computes_them_as_on_the_device(late_copies, experts_memory, change):
    model = streamed(experts_memory)
    model(**BATCH)
    model.model.layers = nn.ModuleList(change(list(model.model.layers)))
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = len(model.model.layers)
    expected, model = loss_and_gradients(add_adapter(copy.deepcopy(model)), BATCH), add_adapter(model)
    for memory in (0, "1GiB", 0):
        patch_model(model, experts_memory=memory)
        assert bool(host_weights(model)) == (memory == 0)
        for _ in range(2):
            assert_equal(loss_and_gradients(model, BATCH).values(), expected.values())
    gc.collect()
    pinned = sum(len(engine.pinned) for engine in late_copies.every)
    assert pinned == len(host_weights(model)) == 2 * len(model.get_base_model().model.layers), "others are freed"


@pytest.mark.pinned
def test_a_layer_of_which_one_weight_was_replaced_goes_to_the_host_again(late_copies):
    model = streamed(0)
    experts = model.model.layers[2].mlp.experts
    experts.down_proj = nn.Parameter(torch.randn_like(experts.down_proj.resident()), requires_grad=False)
    copied = copy.deepcopy(model)
    expected = copied(**BATCH).logits
    assert torch.equal(model(**BATCH).logits, expected) and not host_weights(copied)
    patch_model(model, experts_memory=0)
    gc.collect()
    assert torch.equal(model(**BATCH).logits, expected)
    assert len(copies_of(model).pinned) == 2 * len(streamed_layers(model)) == 2 * LAYERS


def test_weights_that_no_layer_holds_are_copied_to_the_device_and_dense_ones_cast():
    gate_up, down = (
        Projection(torch.zeros(shape), scales=torch.zeros(1), state=torch.zeros(1)) for shape in ((3, 8, 4), (3, 4, 4))
    )
    weight = torch.zeros(2, 1, device="meta")  # stands for a GPU
    call = LayerCall(weight=weight, x=None, gate_up=gate_up, down=down, rows=None, options=None)
    with with_device_weights(call, torch.bfloat16) as given:
        for each in (given.gate_up, given.down):
            assert {each.weight.device.type, each.scales.device.type, each.state.device.type} == {"meta"}
            assert each.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("format", [None, "nf4"])
def test_a_first_use_under_inference_mode_serves_later_ones(late_copies, format):
    model, expected = (
        add_adapter(streamed(0, format)),
        loss_and_gradients(add_adapter(streamed(None, format)), BATCH),
    )
    for tokens in (1, 8):  # over the bus, and copied
        with torch.inference_mode():
            model(input_ids=BATCH["input_ids"][:1, :tokens])
    assert_equal(loss_and_gradients(model, BATCH).values(), expected.values())


def test_loading_a_state_dict_replaces_what_the_buffers_hold(late_copies):
    model, other = (
        streamed(0, layers=2),
        streamed(None, layers=2, seed=1),
    )  # both layers stay in the buffers
    expected = other(**BATCH).logits
    model(**BATCH)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(**BATCH).logits, expected)
    assert len(host_weights(model)) == 4


def test_the_detector_sees_a_read_without_a_wait(late_copies, monkeypatch):
    model = streamed(0)
    monkeypatch.setattr(late_copies, "wait", lambda self, done: None)
    with pytest.raises(Hazard, match="before its copy has ended"):
        model(**BATCH)


@pytest.mark.parametrize("format", [None, "nf4"])
def test_a_native_model_loads_state_dicts_over_experts_in_host_memory(late_copies, format, tmp_path):
    resident = native_twin(build_small(layers=LAYERS), tmp_path)
    model = copy.deepcopy(resident)
    if format is None:
        patch_model(model, experts_memory=0)
    else:
        quantize_experts(resident, format)
        quantize_experts(model, format, experts_memory=0)
    state = {name: tensor.clone() for name, tensor in resident.state_dict().items()}
    model.load_state_dict(state)
    assert len(host_weights(model)) == 2 * LAYERS
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_memory_that_ranks_share_is_not_replaced_for_a_weight_that_takes_more(late_copies):
    """Other ranks would go on reading the old."""
    layer = host_weights(streamed(0, "nf4"))[0].layer
    packed, reserved = layer.weights["gate_up"], layer._bytes["gate_up"]
    larger = packed._replace(codes=torch.cat([packed.codes, packed.codes]))
    layer.has_one_copy = True
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        layer.hold("gate_up", larger)
    assert layer._bytes["gate_up"] is reserved
    layer.has_one_copy = False
    assert torch.equal(layer.hold("gate_up", larger).codes, larger.codes)
