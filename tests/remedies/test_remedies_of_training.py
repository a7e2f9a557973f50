"""Messages of callbacks, attach, resuming and routing: each is raised, and then what it names is done."""

from functools import partial

import pytest
import torch
from helpers.models import batch, build, build_patched, relative_error
from helpers.said import says, silent
from helpers.training import POLICY, TILE, arguments, run_trainer, trainer_for
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import TrainingArguments

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback, LoadBalancing, RecordedRouting, TokenRoundingCallback
from sonicmoe_hf.layer.routing import TokenRounding
from sonicmoe_hf.routing.patched_model import routing_state
from sonicmoe_hf.trainer.resume import restore

pytestmark = pytest.mark.pinned
ONE = {"num_hidden_layers": 1}


def of_one_layer(family="qwen3_moe", **changes):
    return build(family, **{**ONE, **changes})


def test_moments_and_tiles_of_a_rounding_callback(tmp_path):
    with says("give an optimiser step (an int, 0 or more) or a fraction"):
        TokenRoundingCallback(start="soon")
    with says("start 5 must come before end 5"):
        TokenRoundingCallback(start=5, end=5)
    with says("the model has tile=4", "give one of them"):
        run_trainer(build_patched("qwen3_moe", POLICY, **ONE), tmp_path, [TokenRoundingCallback(tile=8)], max_steps=1)
    for callback in (TokenRoundingCallback(tile=8, start=0, end=0.5), TokenRoundingCallback(start=0, end=1)):
        model = of_one_layer() if callback.policy.tile else build_patched("qwen3_moe", POLICY, **ONE)
        assert run_trainer(model, tmp_path, [callback], max_steps=1).state.global_step == 1


def test_what_balancing_is_given():
    with says("give it per_layer_loss=0.05, bias_update=1e-3, or both"):
        LoadBalancing()
    with says("give a number above 0, such as 0.05, or None"):
        LoadBalancing(per_layer_loss=0)
    given = LoadBalancing(per_layer_loss=0.05, bias_update=1e-3)
    assert (given.per_layer_loss, given.bias_update, LoadBalancing(0.05, None).bias_update) == (0.05, 1e-3, None)
    with says("has no correction bias for bias_update; use per_layer_loss"):
        LoadBalancing(bias_update=1e-3).start(build_patched("qwen3_moe", **ONE))
    model = build_patched("qwen3_moe", **ONE)
    plain = model(**batch()).loss.item()
    balancing = LoadBalancing(per_layer_loss=0.05)
    balancing.start(model)
    loss = model(**batch()).loss
    loss.backward()
    assert loss.item() == plain and model.model.layers[0].mlp.gate.weight.grad.any(), "its gradients alone change"


def test_two_balancing_callbacks_become_one(tmp_path):
    with says("give one of them per_layer_loss and bias_update"):
        run_trainer(
            build("deepseek_v3"), tmp_path, [LoadBalancing(0.05), LoadBalancing(bias_update=1e-3)], attach=False
        )
    model = build("deepseek_v3")
    before = model.model.layers[1].mlp.gate.e_score_correction_bias.clone()
    run_trainer(model, tmp_path, [LoadBalancing(0.05, 1e-3)], attach=False, max_steps=1)
    assert not torch.equal(model.model.layers[1].mlp.gate.e_score_correction_bias, before)


def test_biases_beside_an_adapter_are_saved_with_their_routers(tmp_path):
    def adapted(**options):
        model = get_peft_model(build("deepseek_v3"), LoraConfig(target_modules=["o_proj"], **options))
        sonicmoe_hf.patch_model(model)
        return model

    with says("put the routers into modules_to_save of the PEFT config"):
        LoadBalancing(bias_update=1e-3).start(adapted())
    model, balancing = adapted(modules_to_save=["gate"]), LoadBalancing(bias_update=1e-3)
    balancing.start(model)
    model(**batch())
    balancing.step(model)
    moved = model.base_model.model.model.layers[1].mlp.gate.modules_to_save["default"].e_score_correction_bias
    model.save_pretrained(tmp_path)
    loaded = build("deepseek_v3")
    loaded.load_adapter(str(tmp_path))
    biases = [value for name, value in loaded.state_dict().items() if "modules_to_save" in name and "bias" in name]
    assert any(torch.equal(value, moved) for value in biases)


def test_balancings_scale_comes_from_a_call_or_a_loss():
    model, balancing = build_patched("qwen3_moe", **ONE), LoadBalancing(per_layer_loss=0.05)
    balancing.start(model)
    inputs = batch()
    labels = inputs.pop("labels")
    with says("call it first, and compute the loss from what it returns"):
        balancing.scaled_as(model, torch.ones((), requires_grad=True))
    with says("Pass labels, so that the model returns its loss, and call backward on that loss"):
        model(**inputs).logits.sum().backward()
    model.zero_grad()
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    balancing.scaled_as(model, loss).backward()
    by_hand = model.model.layers[0].mlp.gate.weight.grad.clone()
    model.zero_grad()
    model(**inputs, labels=labels).loss.backward()
    assert relative_error(model.model.layers[0].mlp.gate.weight.grad, by_hand) < 1e-5


def test_a_second_router_loss_is_left_out(tmp_path):
    class LikeTRL(TrainingArguments):
        router_aux_loss_coef = 0.001

    def train(model, **options):
        run_trainer(model, tmp_path, [LoadBalancing(0.05)], max_steps=1, **options)

    words = "so that both count"
    model = of_one_layer(output_router_logits=True)
    with says(words, "set model.config.output_router_logits = False"):
        train(model)
    model.config.output_router_logits = False
    with silent(words):
        train(model)
    for coefficient in (0.001, 0.0):
        given = arguments(tmp_path, LikeTRL, max_steps=1)
        given.router_aux_loss_coef = coefficient
        with says("pass router_aux_loss_coef=0.0 to LikeTRL", words) if coefficient else silent(words):
            LoadBalancing(0.05).on_train_begin(
                given, trainer_for(of_one_layer(), tmp_path).state, None, of_one_layer()
            )


def test_what_attach_takes(tmp_path):
    with says("attach(trainer) before trainer.train()", "needs patch_model(model) alone"):
        sonicmoe_hf.attach(of_one_layer())
    with says("give the largest number of tokens of a row, such as 8192"):
        sonicmoe_hf.attach(trainer_for(of_one_layer(), tmp_path), packed_tokens=-1)
    wrong = {"compile": "yes", "few_lengths": 4, "packed_tokens": True}
    for (name, value), expected in zip(wrong.items(), ("True, False or None",) * 2 + ("a number of tokens",)):
        with pytest.raises(TypeError, match=f"{name} is {value!r}, where {expected}"):
            sonicmoe_hf.attach(trainer_for(of_one_layer(), tmp_path), **{name: value})
    trainer = trainer_for(of_one_layer(), tmp_path, gradient_accumulation_steps=2, max_steps=1)
    sonicmoe_hf.attach(trainer, packed_tokens=8192)
    assert trainer.train().global_step == 1
    smoothed = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = trainer_for(of_one_layer(), tmp_path, **smoothed)
    sonicmoe_hf.attach(trainer, packed_tokens=8192)
    with says("micro-batches cannot be packed: ", "leave packed_tokens of attach(trainer) out"):
        trainer.train()
    assert run_trainer(of_one_layer(), tmp_path, **smoothed).state.global_step == 1


def test_loads_that_are_counted_are_logged_and_drawn(tmp_path):
    metrics = "call sonicmoe_hf.attach(trainer) to send its metrics to reporters and log_history"
    with says(metrics):
        run_trainer(of_one_layer(), tmp_path, [ExpertLoadCallback()], attach=False, max_steps=1)
    callback = ExpertLoadCallback()
    with silent(metrics):
        trainer = run_trainer(of_one_layer(), tmp_path, [callback], max_steps=2)
    assert any("moe" in name for log in trainer.state.log_history for name in log)
    with says("is no picture; name a file with one of the endings"):
        callback.draw(tmp_path / "load.mp3")
    with says("train at least logging_steps steps first"):
        ExpertLoadCallback().draw(tmp_path / "load.png")
    callback.draw(tmp_path / "load.png")
    assert (tmp_path / "load.png").stat().st_size > 1000


def test_experts_come_back_from_the_checkpoint_of_their_own_model(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    first = run_trainer(of_one_layer(), tmp_path / "run", [TokenRoundingCallback(tile=TILE)], max_steps=2, **saving)
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    with says("call sonicmoe_hf.attach(trainer), when it has its callbacks, before trainer.train()"):
        run_trainer(of_one_layer(), tmp_path, [TokenRoundingCallback(tile=TILE)], False, checkpoint, max_steps=2)
    with says("resume with the model that wrote the checkpoint"):
        restore(of_one_layer(moe_intermediate_size=8), checkpoint)
    again = run_trainer(
        of_one_layer(seed=5), tmp_path, [TokenRoundingCallback(tile=TILE)], True, checkpoint, max_steps=2
    )
    for (name, value), (_, expected) in zip(again.model.named_parameters(), first.model.named_parameters()):
        assert torch.equal(value, expected), name


def test_ranks_resume_in_their_number_or_begin_anew_from_the_adapter(tmp_path):
    """One rank in the place of several, of a model that Transformers would have sharded."""

    def train(model, checkpoint=None, steps=2):
        saving = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
        trainer = trainer_for(model, tmp_path / "run", max_steps=steps, **saving)
        trainer.is_distributed_loading_by_transformers = True
        sonicmoe_hf.attach(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    def adapted():
        model = of_one_layer()
        return get_peft_model(model, sonicmoe_hf.lora_config(model, r=2))

    train(adapted())
    checkpoint = tmp_path / "run" / "checkpoint-1"
    states = checkpoint / "rank0-of-1.pt"
    states.rename(checkpoint / "rank0-of-2.pt")
    with says("was written by other ranks", "resume with as many, or begin a new run from its adapter"):
        train(adapted(), str(checkpoint))
    anew = PeftModel.from_pretrained(of_one_layer(), checkpoint, is_trainable=True)
    assert train(anew, steps=1).state.global_step == 1
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert train(adapted(), str(checkpoint)).state.global_step == 2


def test_a_router_that_cannot_round_trains_without_the_callback(tmp_path):
    from transformers import PhimoeConfig, PhimoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = PhimoeForCausalLM(PhimoeConfig(vocab_size=64, num_hidden_layers=1, num_local_experts=4, **sizes))
    with says("leave TokenRoundingCallback out"):
        run_trainer(model, tmp_path, [TokenRoundingCallback(tile=TILE)], max_steps=1)
    assert run_trainer(model, tmp_path, max_steps=1).state.global_step == 1


def test_what_recording_and_replaying_take():
    model, inputs = build_patched("qwen3_moe"), batch()
    with torch.no_grad(), sonicmoe_hf.record_routing(model) as routing:
        logits = model(**inputs).logits
        model(**inputs)
    with says("give it the tensor of one: recorded.tensors()[0]"):
        sonicmoe_hf.serving_divergence(model, routing, **inputs)
    shares = sonicmoe_hf.serving_divergence(model, routing.tensors()[0], **inputs)
    assert set(shares.values()) == {0.0}, "the same model chooses the same experts"
    with torch.no_grad():
        with says("record as many calls, or call it after the `with`"), sonicmoe_hf.replay_routing(model, routing):
            for _ in range(3):
                model(**inputs)
        with sonicmoe_hf.replay_routing(model, routing):
            assert torch.equal(model(**inputs).logits, logits)
        assert torch.equal(model(**inputs).logits, logits)


def test_rounded_or_unpatched_models_are_recorded_once_they_are_patched_for_top_k():
    model, inputs = build_patched("qwen3_moe", POLICY, **ONE), batch()
    with says('use set_routing(model, "top_k")'), sonicmoe_hf.record_routing(model):
        model(**inputs)
    sonicmoe_hf.set_routing(model, "top_k")
    with sonicmoe_hf.record_routing(model) as routing:
        model(**inputs)
    assert routing.tensors()[0].shape == (1, 96, 2)
    with says("call unpatch_model after the `with`"), sonicmoe_hf.record_routing(model):
        sonicmoe_hf.unpatch_model(model)
    with says("is not patched; call sonicmoe_hf.patch_model(model) first"), sonicmoe_hf.record_routing(model):
        pass
    sonicmoe_hf.patch_model(model)
    with torch.no_grad(), sonicmoe_hf.record_routing(model) as again:
        model(**inputs)
    sonicmoe_hf.unpatch_model(model)
    assert torch.equal(again.tensors()[0], routing.tensors()[0])


def test_a_mask_of_another_shape_is_given_in_two_dimensions():
    model = build_patched("qwen3_moe", POLICY, **ONE)
    inputs = batch(padding=True)
    four = inputs["attention_mask"][:, None, None].expand(4, 1, 24, 24).bool()
    with says("Call the model with a mask of [batch, sequence length], or without one where there is no padding"):
        model(**{**inputs, "attention_mask": four})
    assert model(**inputs).loss.isfinite()
    ids = batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, model(**batch()).logits)


def test_routing_names_are_choices_of_it():
    with says("a kind of token rounding: give TokenRounding(rounding='nearest')"):
        build_patched("qwen3_moe", "nearest", **ONE)
    model = build_patched("qwen3_moe", TokenRounding(rounding="nearest"), **ONE)
    assert routing_state(model).policy.rounding == "nearest"


def test_a_servers_array_is_read_with_its_layers_named():
    rows = torch.tensor([1, 2]).repeat(5, 2, 1)  # tokens, layers, experts per token
    rows[:, 0] = 0  # layer 0 is dense, and nothing was written there
    read = partial(RecordedRouting.from_server, attention_mask=torch.ones(1, 6))
    with says("Name the layers with experts in layers="):
        read([rows], layers=[0, 1])
    assert read([rows], layers=[1]).tensors()[0][0, :5].tolist() == [[1, 2]] * 5
    rows[2] = 0
    with says("where a token's row is missing, set its ids to -1"):
        read([rows], layers=[1])
    rows[2] = -1
    assert read([rows], layers=[1]).tensors()[0][0, 1:4].tolist() == [[1, 2], [-1, -1], [1, 2]]
