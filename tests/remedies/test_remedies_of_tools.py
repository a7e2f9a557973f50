"""Messages of the commands: each is printed, and then what it names is done."""

import random
import shutil

import peft
import pytest
import torch
from helpers.adapters import adapt
from helpers.checkpoints import edit_tensors, load_whole, make, tensors_in
from helpers.engine_adapters import edit_adapter_config
from helpers.models import build
from helpers.said import says, silent
from helpers.training import Examples, arguments
from helpers.trl_trainers import word_tokenizer
from transformers import Trainer

import sonicmoe_hf
from sonicmoe_hf import convert_adapter, merge_adapter
from sonicmoe_hf.routing.patched_model import routing_state
from sonicmoe_hf.tools.autopatch.session import Session
from sonicmoe_hf.tools.autopatch.settings import RunSettings
from sonicmoe_hf.tools.cli.main import main

pytestmark = pytest.mark.pinned
WORD = "<{}>"
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def run(*words):
    """Run a command; returns its exit code."""
    return main([str(word) for word in words])


# check


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Write a base with a tokenizer, an adapter of it, what that merges to, and text."""
    folder = tmp_path_factory.mktemp("check")
    make(folder / "base", "deepseek_v3", dtype=torch.float32, num_hidden_layers=2)
    word_tokenizer(WORD).save_pretrained(folder / "base")
    modules = ["kv_b_proj", "o_proj"]
    adapt(load_whole(folder / "base"), folder / "adapter", size=0.05, target_modules=modules)
    merge_adapter(folder / "base", folder / "adapter", folder / "merged")
    words = random.Random(0)
    (folder / "text").write_text(" ".join(WORD.format(words.randint(4, 63)) for _ in range(150)))
    (folder / "short").write_text(" ".join(WORD.format(number) for number in range(4, 8)))
    return folder


def check(base, *places, adapter=None, folder=None, text="text"):
    return run("check", folder or base / "base", adapter or base / "adapter", *places, "--text", base / text)


def without(base, target, *parts):
    """Merge the adapter without these parts, as a place does that does not apply them."""
    adapter = shutil.copytree(base / "adapter", target.with_name("part"))
    edit_tensors(adapter, {n: 0 * t for n, t in tensors_in(adapter).items() if any(part in n for part in parts)})
    merge_adapter(base / "base", adapter, target)
    shutil.rmtree(adapter)
    return target


def test_what_check_compares(base, tmp_path):
    with says("name a FOLDER where it went, or a --server"):
        assert check(base) == 2
    assert check(base, base / "merged") == 0
    shutil.copytree(base / "base", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with says("has a tokenizer; save the model's into one of them"):
        assert check(base, base / "merged", folder=tmp_path / "bare") == 2
    word_tokenizer(WORD).save_pretrained(tmp_path / "bare")
    assert check(base, base / "merged", folder=tmp_path / "bare") == 0
    with says("tokens are too few to tell, give a longer --text"):
        assert check(base, base / "merged", text="short") == 2


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (["experts"], "the engine takes no adapters of experts, or not in this form; convert (--layout) or merge it"),
        (["kv_b_proj"], "vLLM decodes without the adapter of this layer; merge it"),
    ],
)
def test_what_check_finds_missing_is_there_once_it_is_merged(parts, words, base, tmp_path):
    with says(words):
        assert check(base, without(base, tmp_path / "place", *parts)) == 1
    assert check(base, base / "merged") == 0


def test_an_order_of_unsloths_is_brought_into_pefts(base, tmp_path):
    adapter = shutil.copytree(base / "adapter", tmp_path / "unsloth")
    edit_adapter_config(adapter, auto_mapping={"unsloth_fixed": True})
    with says("bring it into PEFT's first: sonicmoe-hf convert ADAPTER DST --layout hub"):
        assert check(base, base / "merged", adapter=adapter) == 1
    convert_adapter(adapter, tmp_path / "hub", "hub", trained_on=base / "base")
    peft_model = peft.PeftModel.from_pretrained(load_whole(base / "base"), tmp_path / "hub")
    peft_model.merge_and_unload().save_pretrained(tmp_path / "served")
    assert check(base, tmp_path / "served", adapter=adapter) == 0


# convert, doctor and warmup


def test_what_commands_about_checkpoints_are_given(tmp_path):
    make(tmp_path / "base", "qwen3_moe", num_hidden_layers=1, hidden_size=64, moe_intermediate_size=64)
    convert = ("convert", tmp_path / "base", tmp_path / "rounded", "--layout", "hub", "--round", "nf4")
    with says("--round leaves experts dense, in the hub's layout and their own dtype; leave --dtype out"):
        assert run(*convert, "--dtype", "float32") == 2
    with says(
        "--round leaves experts dense, in the hub's layout and their own dtype; give --layout hub in place of native"
    ):
        assert run(*convert, "--layout", "native") == 2
    with says("serve this where experts_quantization='nf4' trains"):
        assert run(*convert) == 0
    rounded = sonicmoe_hf.from_pretrained(tmp_path / "rounded", dtype=torch.float32)
    trained = sonicmoe_hf.from_pretrained(tmp_path / "base", dtype=torch.float32, experts_quantization="nf4")
    for name, weight in trained.named_parameters():
        if isinstance(weight, sonicmoe_hf.PackedWeight):
            error = (rounded.get_parameter(name) - weight.dequantize()).norm() / rounded.get_parameter(name).norm()
            assert error < 0.005, "to bf16"
    sonicmoe_hf.convert_checkpoint(tmp_path / "base", tmp_path / "native")
    with says("whose rows stand in another order; round the checkpoint of the hub that is trained"):
        assert run("convert", tmp_path / "native", tmp_path / "x", "--layout", "hub", "--round", "nf4") == 2
    with says("it needs 2048 tokens per forward on each device: raise the batch size or the sequence length"):
        run("doctor", tmp_path / "base", "--batch-size", 15, "--sequence-length", 128)
    for options in (("--batch-size", 16), ("--batch-size", 15, "--tile", 64)):
        with silent("falls back to top-k"):
            assert run("doctor", tmp_path / "base", "--sequence-length", 128, *options) == 0
    with says("give a model, or --shape H,I: sonicmoe-hf warmup MODEL, or sonicmoe-hf warmup --shape"):
        assert run("warmup") == 2


# run


def session(**settings):
    return Session(RunSettings(**settings))


def test_settings_of_run():
    with says("--tile is of token rounding; add --routing, such as --routing nearest"):
        RunSettings(tile=64)
    made, model = session(tile=64, routing="nearest"), build("qwen3_moe", num_hidden_layers=1)
    made.built(model)
    assert routing_state(model).policy.tile == 64
    with says("no program to run; name it after --: sonicmoe-hf run -- trl sft"):
        assert run("run") == 2
    assert run("run", "--", "python", "-c", "pass") == 0


def test_token_rounding_of_run_is_left_out_of_a_policy_trainer(tmp_path):
    class DPOTrainer(Trainer):
        pass

    def prepare(**settings):
        made, model = session(**settings), build("qwen3_moe", num_hidden_layers=1)
        made.built(model)
        made.prepare(DPOTrainer(model, arguments(tmp_path, max_steps=1), train_dataset=Examples(4)))
        return model

    with says("train it with top-k: leave out --routing of sonicmoe-hf run"):
        prepare(routing="nearest")
    assert routing_state(prepare()).policy is None


def test_experts_that_run_adapts(tmp_path):
    def adapted(config, **settings):
        made, model = session(**settings), build("qwen3_moe", num_hidden_layers=1)
        made.built(model)
        made.adapt(config, model)
        return peft.get_peft_model(model, config)

    model = build("qwen3_moe", num_hidden_layers=1)
    words = {
        "have the program set it to 0 or leave it out, or leave out --adapt-experts": peft.LoraConfig(
            **LORA, use_dora=True
        ),
        "adapts experts already (target_parameters has": sonicmoe_hf.lora_config(model),
        "adds experts to a LoraConfig, not to a AdaLoraConfig; leave it out": peft.AdaLoraConfig(
            target_modules=["q_proj"], total_step=9
        ),
    }
    for message, config in words.items():
        with says(message):
            adapted(config, adapt_experts=4)
        assert adapted(config).peft_config, "without the option"
    factors = adapted(peft.LoraConfig(**LORA), adapt_experts=4).state_dict()
    assert {tensor.shape[0] for name, tensor in factors.items() if "experts" in name and "lora_A" in name} == {4 * 8}


def test_an_option_of_run_without_effect_is_left_out(tmp_path):
    def train(**settings):
        made, model = session(**settings), build("qwen3_moe", num_hidden_layers=1)
        made.built(model)
        made.report()

    with says("--adapt-experts 4 had no effect: training begins, and the program has", "; leave the option out"):
        train(adapt_experts=4)
    with says("experts: trained"):
        train()
