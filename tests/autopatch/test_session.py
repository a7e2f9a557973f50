"""The models of a process of `sonicmoe-hf run`: what is patched, what is said at the first training step, and what is
refused. The processes themselves are tests/autopatch/test_run.py's."""

import copy
import re

import peft
import pytest
import torch
from accelerate import Accelerator
from helpers import models
from helpers.training import Examples, arguments
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Trainer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

import sonicmoe_hf
from sonicmoe_hf.kernels.announce import announce
from sonicmoe_hf.tools.autopatch.session import Session
from sonicmoe_hf.tools.autopatch.settings import RunSettings
from sonicmoe_hf.trainer.load_callback import ExpertLoadCallback

BATCH = models.batch()
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def make_session(**settings):
    """Make a Session that follows nothing of this process but what a test hands it."""
    return Session(RunSettings(**settings))


def build(family="qwen3_moe", **changes):
    return models.build(family, **changes).train()


def dense_model():
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    return AutoModelForCausalLM.from_config(config)


def train_step(session, model):
    model(**BATCH).loss.backward()
    session.report()  # the optimiser's step


def test_a_model_is_patched_when_built_and_reported_once_at_the_first_training_step(capsys):
    session, model = make_session(save="input"), build()
    session.built(model.model)  # its constructor ends before that of the model around it
    session.built(model)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        train_step(session, model)
    said = capsys.readouterr().err
    assert said.count("sonicmoe-hf: Qwen3MoeForCausalLM: 2 mixture-of-experts layers patched; routing: top-k") == 1
    assert "backend: eager (" in said and "in torch.float32" in said and "experts: trained" in said


def test_the_backend_is_told_for_the_dtype_of_accelerates_mixed_precision(capsys):
    session, model = make_session(), build()
    session.built(model)
    Accelerator(mixed_precision="bf16", cpu=True)
    session.report()
    assert "in torch.bfloat16" in capsys.readouterr().err


def test_dense_experts_in_host_memory_are_frozen_and_not_packed(capsys):
    session, model = make_session(), build()
    session.built(model)
    sonicmoe_hf.patch_model(model, experts_memory=0)  # as a program may
    session.report()
    assert capsys.readouterr().err.endswith("experts: frozen\n")


def test_a_model_without_experts_is_told_why_nothing_is_patched(capsys):
    session = make_session()
    model = dense_model()
    session.built(model)
    session.report()  # the optimiser's first step
    said = capsys.readouterr().err
    assert "LlamaForCausalLM is not patched: LlamaForCausalLM has no mixture-of-experts layer" in said


def test_a_program_that_trains_nothing_is_told_at_its_end(capsys):
    session, model = make_session(), build()
    session.built(model)
    session.at_exit()
    said = capsys.readouterr().err
    assert said.startswith("sonicmoe-hf: the program ended before a training step\n") and "2 mixture" in said
    assert "experts: trained" not in said


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"LOCAL_RANK": "0", "RANK": "8"}, {"SLURM_PROCID": "1"}])
def test_only_the_first_rank_of_all_machines_speaks(capsys, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    announce("a layer of a new size")
    session, model = make_session(), build()
    session.built(model)
    train_step(session, model)
    assert capsys.readouterr().err == ""


def test_a_model_that_can_be_patched_no_longer_is_as_it_was_by_itself():
    session, model = make_session(), build()
    session.built(model)
    assert sonicmoe_hf.is_patched(model)
    model.model.layers[1].mlp.experts.act_fn = nn.Tanh()  # as a program may change it after the constructor
    session.built(model)
    assert "Tanh" in session.reasons[model] and not sonicmoe_hf.is_patched(model)
    train_step(session, model)


def test_routing_is_set_where_every_layer_can_round_and_refused_where_not(monkeypatch):
    session, model = make_session(routing="balanced", tile=4), build()
    session.built(model)
    report = sonicmoe_hf.patch_model(copy.deepcopy(model))
    assert len(report.layers) == 2
    assert sonicmoe_hf.routing.patched_model.routing_state(model).policy.rounding == "balanced"
    monkeypatch.setattr("sonicmoe_hf.routing.support._why_no_rounding", lambda layer: "it cannot")
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match="it cannot; leave out --routing of sonicmoe-hf run"):
        session.built(build())


def test_a_model_is_patched_after_it_was_loaded_not_while(tmp_path):
    """A quantizer may replace the experts meanwhile."""
    build().save_pretrained(tmp_path)
    session, during = make_session(), []

    def load(name, **options):
        inner = Qwen3MoeForCausalLM.from_pretrained(name, **options)
        session.built(inner)
        during.append(sonicmoe_hf.is_patched(inner))
        return inner, {"missing_keys": set()}

    model, info = session.load(load, Qwen3MoeForCausalLM, (str(tmp_path),), {})
    assert during == [False] and sonicmoe_hf.is_patched(model) and info == {"missing_keys": set()}


def test_models_without_weights_are_not_spoken_of(capsys):
    """Shells of models, as accelerate's init_empty_weights builds them, compute nothing."""
    session = make_session()
    with torch.device("meta"):
        shell = build()
    session.built(shell)
    session.report()
    assert sonicmoe_hf.is_patched(shell) and capsys.readouterr().err == ""


def test_models_are_patched_after_one_that_could_not_be_loaded(tmp_path):
    session, model = make_session(), build()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        session.load(Qwen3MoeForCausalLM.from_pretrained, Qwen3MoeForCausalLM, (str(tmp_path),), {})
    session.built(model)
    assert sonicmoe_hf.is_patched(model)


def test_experts_are_packed_as_they_are_loaded_and_dense_models_are_left_alone(tmp_path, capsys):
    build(moe_intermediate_size=32).save_pretrained(tmp_path / "moe")
    dense_model().save_pretrained(tmp_path / "dense")
    session = make_session(experts_quantization="mxfp4")
    with pytest.raises(RuntimeError, match="--experts-quantization mxfp4 had no effect"):
        session.report()
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    session.load(type(dense).from_pretrained, type(dense), (str(tmp_path / "dense"),), {})
    assert not session.has_packed
    for args, kwargs in (((str(tmp_path / "moe"),), {}), ((), {"pretrained_model_name_or_path": tmp_path / "moe"})):
        model = session.load(Qwen3MoeForCausalLM.from_pretrained, Qwen3MoeForCausalLM, args, kwargs)
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, sonicmoe_hf.PackedWeight)
    train_step(session, model.train())
    assert "experts: frozen, packed as mxfp4" in capsys.readouterr().err


def test_experts_that_bitsandbytes_leaves_dense_are_told_at_load_and_in_the_report(tmp_path, capsys, caplog):
    build(moe_intermediate_size=64, hidden_size=64).save_pretrained(tmp_path)
    kwargs = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "dtype": torch.bfloat16}
    model = sonicmoe_hf.from_pretrained(tmp_path, **kwargs)
    sonicmoe_hf.patch_model(model)
    (said,) = (message for message in caplog.messages if "bitsandbytes" in message)
    share = re.search(r"its experts, (\d+)% of its bytes, stay in torch\.bfloat16: pack them", said)
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    total = sum(weight.nbytes for weight in model.parameters())
    assert int(share[1]) == round(100 * sum(weight.nbytes for weight in experts) / total) > 50
    for format, told in (
        (None, "experts: frozen, in torch.bfloat16 beside"),
        ("nf4", "experts: frozen, packed as nf4"),
    ):
        session = make_session(experts_quantization=format)
        model = session.load(Qwen3MoeForCausalLM.from_pretrained, Qwen3MoeForCausalLM, (str(tmp_path),), dict(kwargs))
        peft.get_peft_model(model, peft.LoraConfig(**LORA))
        session.report()
        assert told in capsys.readouterr().err
    assert len([message for message in caplog.messages if "bitsandbytes" in message]) == 2, "none of packed experts"


def test_experts_are_looked_for_where_the_program_loads_from(tmp_path):
    build(moe_intermediate_size=32).save_pretrained(tmp_path / "inner")
    session, places = make_session(experts_quantization="mxfp4"), []

    class Model(Qwen3MoeForCausalLM):
        class config_class:
            @staticmethod
            def from_pretrained(name, **options):
                places.append((name, options))
                return Qwen3MoeForCausalLM.config_class.from_pretrained(name, **options)

    kwargs = {"subfolder": "inner", "local_files_only": True, "dtype": torch.float32}
    session.load(Qwen3MoeForCausalLM.from_pretrained, Model, (str(tmp_path),), kwargs)
    assert places == [(str(tmp_path), {"subfolder": "inner", "local_files_only": True})] and session.has_packed


@pytest.mark.parametrize("rank", [8, 3])
def test_experts_are_added_to_a_lora_of_the_program_at_its_own_scale(rank, capsys, recwarn):
    session, model = make_session(adapt_experts=rank), build()
    session.built(model)
    config = peft.LoraConfig(**LORA, lora_dropout=0.05)
    session.adapt(config, model)
    adapted = peft.get_peft_model(model, config)
    scales = {
        module.parameter_name: (module.r["default"], module.scaling["default"])
        for module in adapted.modules()
        if type(module).__name__ == "ParamWrapper"
    }
    assert scales == {"gate_up_proj": (rank, 2.0), "down_proj": (rank, 2.0)}
    assert not [warning for warning in recwarn if "pattern keys did not match" in str(warning.message)]
    session.adapt(config, model)  # DPO applies the policy's config for its reference too
    train_step(session, adapted)
    assert f"experts: frozen, with LoRA of rank {rank}" in capsys.readouterr().err


def test_a_lora_that_cannot_take_experts_is_refused_with_the_remedy():
    session, model = make_session(adapt_experts=4), build()
    session.built(model)
    for config, message in (
        (peft.LoraConfig(**LORA, use_dora=True), "use_dora is True.*leave out --adapt-experts"),
        (sonicmoe_hf.lora_config(model), "adapts experts already .*leave out --adapt-experts"),
        (peft.AdaLoraConfig(total_step=9), "not to a AdaLoraConfig"),
    ):
        with pytest.raises(ValueError, match=message):
            session.adapt(config, model)
    with pytest.raises(RuntimeError, match="--adapt-experts 4 had no effect"):
        train_step(session, model)


def test_a_saved_adapter_a_dense_model_and_a_lora_of_attention_alone_are_left_alone():
    session, model = make_session(adapt_experts=4), build()
    session.built(model)
    saved = peft.LoraConfig(**LORA, inference_mode=True)
    session.adapt(saved, model)
    other = peft.LoraConfig(**LORA)
    session.adapt(other, nn.Linear(2, 2))
    not_asked = peft.LoraConfig(**LORA)
    make_session().adapt(not_asked, model)
    assert all(config.target_parameters is None for config in (saved, other, not_asked))


def test_a_trainer_of_a_patched_model_is_attached_and_another_is_left_alone(tmp_path):
    session, model = make_session(), build()
    trainer = Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=Examples(4))
    session.prepare(trainer)
    assert not any(isinstance(callback, ExpertLoadCallback) for callback in trainer.callback_handler.callbacks)
    session.built(model)
    session.prepare(trainer)
    trainer.train()
    assert "moe/dead_experts" in trainer.state.log_history[0]


def test_token_rounding_is_refused_in_a_policy_trainer(tmp_path):
    session, model = make_session(routing="nearest"), build()
    session.built(model)

    class DPOTrainer(Trainer):
        pass

    with pytest.raises(ValueError, match=r"DPOTrainer: .*leave out --routing of sonicmoe-hf run"):
        session.prepare(DPOTrainer(model, arguments(tmp_path), train_dataset=Examples(4)))
