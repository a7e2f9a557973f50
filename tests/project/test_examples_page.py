"""The programs of docs/examples.md run as they are printed: only names, sizes and the number of steps are replaced."""

import json
import re
from importlib.resources import files

import datasets
import pytest
import torch
from helpers.examples import EXAMPLES, TINY_SIZES
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from sonicmoe_hf import PackedWeight
from sonicmoe_hf.layer.backends import BACKEND_VARIABLE
from sonicmoe_hf.tools.cli.main import main as command
from sonicmoe_hf.tools.demo import corpus

pytestmark = pytest.mark.pinned
QUESTIONS = [f"what does the {animal} do?" for animal in ("fox", "dog", "cat", "owl")] * 4
ANSWERS = [f"it {verb}, and does not mind" for verb in ("jumps", "sleeps", "purrs", "sees")] * 4
USER = [{"role": "user", "content": question} for question in QUESTIONS]
ASSISTANT = [{"role": "assistant", "content": answer} for answer in ANSWERS]
REJECTED = {"role": "assistant", "content": "no"}
DATASETS = {
    "trl-lib/Capybara": {"messages": [[user, answer] for user, answer in zip(USER, ASSISTANT)]},
    "trl-lib/ultrafeedback_binarized": {
        "chosen": [[user, answer] for user, answer in zip(USER, ASSISTANT)],
        "rejected": [[user, REJECTED] for user in USER],
    },
    "trl-lib/tldr": {"prompt": QUESTIONS, "completion": ANSWERS},
    "HuggingFaceFW/fineweb-edu": {"text": QUESTIONS * 20},
}
CHAT = "Conversations, loss on the answers"
PRETRAINING = "Pretraining, with token rounding and balanced experts"
QWEN3 = '"Qwen/Qwen3-30B-A3B"'
FEW_STEPS = {"max_steps=1000,": "max_steps=2, use_cpu=True, disable_tqdm=True,", "logging_steps=10": "logging_steps=1"}


def loaded(name, subset=None, *, split, streaming=False):
    """Replace `datasets.load_dataset`."""
    rows = datasets.Dataset.from_dict(DATASETS[name])
    return rows.to_iterable_dataset() if streaming else rows


def section(heading):
    """Read the page's text under a heading."""
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Make a small model in the place of Qwen3-30B-A3B, its tokenizer with Qwen3's own chat template."""
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    tokenizer = corpus.train_tokenizer(QUESTIONS + ANSWERS, 320)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = files("trl").joinpath("chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    sizes = {**TINY_SIZES, "vocab_size": len(tokenizer), "hidden_size": 64, "moe_intermediate_size": 64}
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen3MoeConfig(**{**sizes, "num_hidden_layers": 2}, **tokens)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def run(hub, tmp_path, monkeypatch):
    """Run the program under a heading; returns its names. Every change of its text must be one of what is printed."""
    monkeypatch.setenv(BACKEND_VARIABLE, "eager")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets, "load_dataset", loaded)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(heading, changes):
        (text,) = re.findall(r"```python\n(.*?)```", section(heading), flags=re.DOTALL)
        for old, new in {QWEN3: repr(str(hub)), **changes}.items():
            assert text.count(old) == 1, f"{old}: {text.count(old)} times under {heading}"
            text = text.replace(old, new)
        exec(compile(text, f"docs/examples.md, {heading}", "exec"), names := {})
        return names

    return run


def log_of(names):
    return [entry for entry in names["trainer"].state.log_history if "loss" in entry]


def assert_adapters_trained(folder, layers=2):
    """Check that lora_B, which starts at zero, is trained: of both weights of each layer's experts, and of the
    attention."""
    factors = load_file(folder / "adapter_model.safetensors")
    trained = [name for name, factor in factors.items() if "lora_B" in name and factor.any()]
    assert sum(".experts." in name for name in trained) == 2 * layers
    assert sum("self_attn" in name for name in trained) == 4 * layers


def test_a_chat_is_trained_on_its_answers_alone_with_the_template_of_the_model(run, hub, tmp_path, capsys):
    names = run(CHAT, FEW_STEPS)
    in_loss = f"<think>\n\n</think>\n\n{ANSWERS[0]}<|im_end|>"
    assert in_loss in capsys.readouterr().out
    trainer, tokenizer = names["trainer"], names["tokenizer"]
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}, "which few_lengths pads"
    for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        assert tokenizer.decode(labels[labels != -100]).strip() in {
            in_loss.replace(ANSWERS[0], answer) for answer in ANSWERS
        }
        assert "what does the" in tokenizer.decode(tokens)
    assert [entry["moe/dead_experts"] for entry in log_of(names)] and len(log_of(names)) == 2
    assert_adapters_trained(tmp_path / "outputs" / "chat")
    assert command(["merge", str(hub), "outputs/chat", "outputs/merged"]) == 0


def test_prompts_with_answers_need_no_template_that_marks_them(run, tmp_path):
    changes = {"    assistant_only_loss=True,\n": "", "trl-lib/Capybara": "trl-lib/tldr"}
    names = run(CHAT, {**FEW_STEPS, **changes})
    labels = names["trainer"].train_dataset[0]["labels"]
    text = names["tokenizer"].decode([token for token in labels if token != -100])
    assert text.strip() == f"{ANSWERS[0]}<|im_end|>"
    assert_adapters_trained(tmp_path / "outputs" / "chat")


def test_dpo_prefers_the_chosen_answers(run, tmp_path):
    changes = {"learning_rate=5e-6": "learning_rate=1e-2", "gradient_accumulation_steps=8": "report_to=[]"}
    names = run("Preferences: DPO", {**FEW_STEPS, **changes})
    first, last = (entry["rewards/margins"] for entry in log_of(names))
    assert abs(first) < 1e-6 < last, "the reference is the model without adapters, so the first step has no margin"
    assert_adapters_trained(tmp_path / "outputs" / "dpo")


def test_grpo_replays_the_routing_of_its_samples(run, tmp_path):
    """Without vLLM, which this environment lacks."""
    changes = {"max_completion_length=128": "max_completion_length=4", "learning_rate=1e-5": "learning_rate=1e-2"}
    changes |= {"    use_vllm=True,\n": "", '    vllm_mode="colocate",\n': ""}
    names = run("A reward: GRPO with replayed routing", {**FEW_STEPS, **changes})
    first, second = log_of(names)
    assert -1 <= first["reward"] < 0 and "reward" not in second, "two updates of one batch"
    assert first["moe/load_cv"] == second["moe/load_cv"] and first["entropy"] != second["entropy"]
    assert_adapters_trained(tmp_path / "outputs" / "grpo")


def test_pretraining_rounds_and_balances_until_its_last_tenth(run, tmp_path):
    sizes = {
        "length = 4096": "length = 64",
        "hidden_size=1024": "hidden_size=64",
        "num_hidden_layers=16": "num_hidden_layers=2",
        "num_attention_heads=16": "num_attention_heads=2",
        "num_key_value_heads=4": "num_key_value_heads=2",
        "head_dim=64": "head_dim=32",
        "num_experts=128": "num_experts=8",
        "num_experts_per_tok=8": "num_experts_per_tok=2",
        "moe_intermediate_size=256": "moe_intermediate_size=16",
        "gradient_accumulation_steps=16": "disable_tqdm=True",
        'rounding="balanced"': 'rounding="balanced", tile=8, min_tiles_per_expert=1',
        "warmup_steps=500": "warmup_steps=1",
        "use_liger_kernel=True": "use_cpu=True",
        "logging_steps=10": "logging_steps=1",
        "max_steps=20_000": "max_steps=10",
        "learning_rate=4e-4": "learning_rate=2e-3",
    }
    names = run(PRETRAINING, sizes)
    log = log_of(names)
    moved = [entry.get("moe/rows_added", 0) + entry.get("moe/rows_dropped", 0) for entry in log]
    assert len(log) == 10 and all(moved[:9]) and moved[9] == 0
    assert log[-1]["loss"] < log[0]["loss"] - 1
    folder = tmp_path / "outputs" / "pretraining"
    assert len(AutoTokenizer.from_pretrained(folder)) == AutoModelForCausalLM.from_pretrained(folder).config.vocab_size


@pytest.mark.slow
def test_qlora_trains_beside_packed_experts_and_is_merged(run, hub, tmp_path):
    pytest.importorskip("bitsandbytes")
    changes = {"gradient_accumulation_steps=8": "report_to=[]"}
    names = run("QLoRA on 24 GB", {**FEW_STEPS, **changes})
    packed = [weight for weight in names["model"].parameters() if isinstance(weight, PackedWeight)]
    assert len(packed) == 2 * 2 and {weight.format for weight in packed} == {"nf4"}
    assert_adapters_trained(tmp_path / "outputs" / "qlora")
    assert command(["merge", str(hub), "outputs/qlora", "outputs/merged"]) == 0
    config = json.loads((tmp_path / "outputs" / "merged" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
