"""The demo and the examples run end to end, offline, with few steps."""

import json
import re
import shlex
import shutil

import datasets
import pytest
import torch
from helpers.checkpoints import make, to_fp8
from helpers.examples import EXAMPLES, TEXT, TINY_SIZES, load
from helpers.marks import loads_matrices
from helpers.small_families import small_config
from peft import get_peft_model
from safetensors.torch import load_file
from torch._dynamo.eval_frame import OptimizedModule
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3MoeConfig

import sonicmoe_hf
from sonicmoe_hf.layer.backends import BACKEND_VARIABLE
from sonicmoe_hf.tools.cli.main import main as command
from sonicmoe_hf.tools.demo import corpus

TINY = ["--batch-size", "4", "--sequence-length", "64", "--logging-steps", "2", "--held-out-blocks", "8"]
ROUNDED = ["--rounding", "nearest", "--tile", "8"]


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch, tmp_path):
    """Use a twelfth of the standard library, on the CPU, and no files outside tmp_path."""
    texts, held_out = corpus.standard_library()
    few = (texts[::12], held_out[:4])
    monkeypatch.setattr(corpus, "standard_library", lambda: few)
    monkeypatch.setenv(BACKEND_VARIABLE, "eager")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def log_of(folder):
    """Read the logs of a Trainer from its saved state."""
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.fixture
def finetune(monkeypatch):
    """Load examples/finetune.py, whose text without --dataset can be learned in a few steps."""
    example = load("finetune")
    monkeypatch.setattr(example, "standard_library", lambda: ([TEXT * 20] * 20, []))
    return example


@pytest.mark.slow
def test_finetune_trains_the_small_model_then_its_own_checkpoint_with_lora(finetune, tmp_path, capsys):
    small = str(tmp_path / "small")
    loss = finetune.main(["--steps", "6", "--output", small, *TINY])["eval_loss"]
    frozen = finetune.main(["--steps", "6", "--output", str(tmp_path / "frozen"), "--freeze-experts", *TINY])
    # 0.30 and 0.23 lower with two seeds; not lower with gradients of zero, or of another expert
    assert loss < frozen["eval_loss"] - 0.1, "the experts learned"
    dead = [entry["moe/dead_experts"] for entry in log_of(tmp_path / "small") if "moe/dead_experts" in entry]
    assert f"experts without pairs at the end: {dead[-1]};" in capsys.readouterr().out
    texts = tmp_path / "texts.txt"
    texts.write_text(TEXT * 200)
    options = ["--model", small, "--dataset", str(texts), "--lora", "4"]
    lora = str(tmp_path / "lora")
    finetune.main(
        [*options, "--steps", "4", "--output", lora, "--learning-rate", "1e-2", "--end", "0.5", *TINY, *ROUNDED]
    )
    assert command(["merge", small, lora, str(tmp_path / "merged")]) == 0
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("small", "merged"))
    changed = {name.split(".")[-2] for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {"gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"}
    log = log_of(tmp_path / "lora")
    assert log[0]["moe/rows_added"] + log[0]["moe/rows_dropped"] > 0  # steps 1 and 2 round, 3 and 4 do not
    assert "moe/rows_added" not in log[1]


@pytest.mark.slow
def test_finetune_trains_adapters_beside_packed_experts(finetune, tmp_path):
    options = ["--experts-quantization", "nf4", "--steps", "3", "--output", str(tmp_path / "small"), *TINY]
    with pytest.raises(SystemExit):
        finetune.main(options)
    options += ["--lora", "2", "--learning-rate", "3e-2", "--held-out-blocks", "4"]
    attention_only = finetune.main([*options, "--freeze-experts"])["eval_loss"]
    # 0.09 lower with two seeds
    assert finetune.main(options)["eval_loss"] < attention_only - 0.04, "the experts' adapters learned"
    assert (tmp_path / "small" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finetune", "qlora"])
def test_all_linear_adapts_linear_attention_of_a_hybrid_model(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = load(name)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 2048}
    small_config(
        Qwen3_5MoeTextConfig, sizes | {"layer_types": ["linear_attention", "full_attention"]}
    ).save_pretrained(tmp_path / "tiny")
    options = ["--model", str(tmp_path / "tiny"), "--random", "--steps", "1", "--batch-size", "1"]
    options += ["--sequence-length", "32", "--output", str(tmp_path / "out"), "--all-linear"]
    if name == "finetune":
        options += ["--lora", "4", "--train-only", "--no-gradient-checkpointing"]
    targets = []
    adapt = sonicmoe_hf.lora_config
    monkeypatch.setattr(
        sonicmoe_hf, "lora_config", lambda *given, **named: targets.append(adapt(*given, **named)) or targets[-1]
    )
    example.main(options)
    assert {"in_proj_qkv", "out_proj", "q_proj", "o_proj"} <= targets[0].target_modules
    assert targets[0].target_parameters


@pytest.mark.pinned
def test_finetune_freezes_experts_saves_inputs_and_resumes(tmp_path):
    finetune = load("finetune")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"body": TEXT * 20}) + "\n" for _ in range(60)))
    options = "--text-column body --freeze-experts --save input --backend eager --save-steps 2 --report-to tensorboard"
    options = ["--dataset", str(texts), "--output", str(tmp_path / "out"), *options.split(), *TINY]
    finetune.main(["--steps", "2", *options])
    finetune.main(["--steps", "4", "--resume", *options])
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert [entry["step"] for entry in state["log_history"] if "moe/load_cv" in entry] == [2, 4]


@pytest.mark.slow
@pytest.mark.pinned
@pytest.mark.parametrize(
    "options",
    [ROUNDED, ["--lora", "4", "--no-bf16", "--no-gradient-checkpointing"]],
    ids=["all weights with token rounding", "LoRA"],
)
def test_finetune_resumed_ends_where_a_straight_run_does(options, tmp_path):
    finetune = load("finetune")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    finetune.main(["--steps", "4", "--save-steps", "2", "--output", str(straight), *options, *TINY])
    shutil.copytree(straight / "checkpoint-2", resumed / "checkpoint-2")
    finetune.main(["--steps", "4", "--save-steps", "2", "--output", str(resumed), "--resume", *options, *TINY])
    name = "adapter_model.safetensors" if "--lora" in options else "model.safetensors"
    start, expected, found = [load_file(folder / name) for folder in (straight / "checkpoint-2", straight, resumed)]
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    changed = [key for key in expected if ".experts." in key and not torch.equal(start[key], expected[key])]
    assert changed, "so that the comparison could fail"


def test_finetune_names_a_missing_column(tmp_path):
    texts = tmp_path / "texts.csv"
    texts.write_text("body\nhello\n")
    with pytest.raises(SystemExit, match=r"no column 'text' but \['body'\]"):
        load("finetune").main(["--dataset", str(texts)])


@pytest.mark.parametrize("option", ["--tile=64", "--min-tiles-per-expert=2", "--start=10", "--end=0.9"])
def test_finetune_routes_by_top_k_unless_it_is_told_otherwise_and_says_what_would_then_do_nothing(option, capsys):
    finetune = load("finetune")
    assert finetune.parse_arguments([]).rounding == "top_k"
    assert finetune.parse_arguments(["--rounding", "balanced", option]).rounding == "balanced"
    with pytest.raises(SystemExit):
        finetune.parse_arguments([option])
    assert f"{option.split('=')[0]}: only with token rounding" in capsys.readouterr().err


def test_finetune_offloads_what_checkpointing_keeps_and_nothing_without_it(capsys):
    finetune, offloading = load("finetune"), ["--activation-offloading"]
    assert finetune.parse_arguments(offloading).gradient_checkpointing
    with pytest.raises(SystemExit):
        finetune.parse_arguments([*offloading, "--no-gradient-checkpointing"])
    assert "leave out --no-gradient-checkpointing" in capsys.readouterr().err


def kept_trainers(example, monkeypatch):
    """Make a list that every Trainer which `example` builds from now on goes into."""
    trainers, build = [], example.build_trainer
    monkeypatch.setattr(example, "build_trainer", lambda *args: trainers.append(build(*args)) or trainers[-1])
    return trainers


@pytest.mark.slow
def test_finetune_measures_a_compiled_model_with_random_weights_and_writes_nothing(tmp_path, monkeypatch, capsys):
    finetune = load("finetune")
    trainers = kept_trainers(finetune, monkeypatch)
    Qwen3MoeConfig(**{**TINY_SIZES, "num_hidden_layers": 3, "vocab_size": 2048}).save_pretrained(tmp_path / "tiny")
    with pytest.raises(SystemExit):
        finetune.main(["--random"])
    options = shlex.split("--random --layers 1 --compile eager --dtype bfloat16 --train-only --steps 3")
    paths = ["--model", str(tmp_path / "tiny"), "--output", str(tmp_path / "out")]
    metrics = finetune.main([*paths, *options, *TINY])
    (trainer,) = trainers
    assert isinstance(trainer.model_wrapped, OptimizedModule) and len(trainer.model.model.layers) == 1
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert (
        "train_loss" in metrics and "eval_loss" not in metrics and not list((tmp_path / "out").glob("*.safetensors"))
    )
    rate = re.search(
        r"([\d,]+) tokens/s a device over 1 steps of 256 tokens; first step after", capsys.readouterr().out
    )
    assert int(rate[1].replace(",", "")) > 0
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("tokens", "options", "mode", "layers"),
    [
        (1024, ("--compile",), "reduce-overhead", False),
        (1024, ("--compile", "--gradient-accumulation-steps", "2"), None, True),
        (4096, ("--compile",), None, True),
        (1024, ("--compile", "eager"), None, False),
        (1024, (), None, False),
    ],
)
@torch._inductor.config.patch({"triton.cudagraph_skip_dynamic_graphs": False, "graph_partition": True})
def test_finetune_compiles_what_pays_at_the_tokens_of_a_step(tokens, options, mode, layers):
    finetune = load("finetune")
    parsed = finetune.parse_arguments(["--batch-size", "2", "--sequence-length", str(tokens // 2), *options])
    args = finetune.training_arguments(parsed)
    assert (args.torch_compile_mode, finetune.compiles_layers(parsed)) == (mode, layers)
    assert args.torch_compile == ("--compile" in options and not layers)
    assert torch._inductor.config.triton.cudagraph_skip_dynamic_graphs == (mode is not None)
    assert torch._inductor.config.graph_partition == (mode is None)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("finetune", "--model tiny --lora", "inductor"),
        ("finetune", "--model tiny --lora --no-compile", False),
        ("finetune", "--model tiny --lora --no-gradient-checkpointing", False),
        ("finetune", "--model tiny --lora --per-layer-loss 0.1", False),
        ("finetune", "--model tiny", False),
        ("finetune", "--lora", False),
        ("qlora", "--model tiny", True),
        ("qlora", "--model tiny --activation-offloading", False),
        ("qlora", "", False),
        ("sft_packing", "--model tiny", True),
        ("sft_packing", "--model tiny --attn-implementation flash_attention_2", False),
    ],
)
def test_examples_compile_layers_with_adapters_by_default_on_a_gpu(name, options, expected, monkeypatch):
    example = load(name)
    assert not example.parse_arguments(options.split()).compile
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert example.parse_arguments(options.split()).compile == expected


def test_finetune_asks_for_ligers_kernels_without_its_experts(tmp_path, monkeypatch, capsys):
    finetune = load("finetune")  # tests/patching/test_liger.py trains with the two arguments
    arguments = finetune.parse_arguments(["--liger", "--output", str(tmp_path)])
    assert not finetune.training_arguments(arguments).use_liger_kernel
    assert "--liger is left out: Liger's kernels need a GPU" in capsys.readouterr().out
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert finetune.liger_kernels() == {"use_liger_kernel": True, "liger_kernel_config": {"swiglu": False}}


@pytest.mark.slow
def test_sft_packs_texts_and_trains_adapters_on_experts(tmp_path):
    sft = load("sft_packing")
    options = ["--steps", "2", "--batch-size", "2", "--sequence-length", "64", "--learning-rate", "1e-2"]
    trainer = sft.main([*options, "--output", str(tmp_path)])
    assert {len(row) for row in trainer.train_dataset[:-1]["input_ids"]} == {64}, "no padding"
    assert all(layer.accelerated for layer in sonicmoe_hf.supports(trainer.model))
    factors = load_file(tmp_path / "adapter_model.safetensors")
    trained = [name for name, factor in factors.items() if ".experts." in name and "lora_B" in name and factor.any()]
    assert len(trained) == 2 * 4, "lora_B starts at zero, on two weights of four layers"


@pytest.fixture(scope="module")
def one_gpu():
    pytest.importorskip("torchao")
    return load("full_finetune_one_gpu")


def test_steps_in_backward_give_the_weights_of_one_step_after_it_and_hold_one_gradient_at_a_time(one_gpu):
    models = [AutoModelForCausalLM.from_config(Qwen3MoeConfig(**TINY_SIZES)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in models]
    one_gpu.step_in_backward(models[1], optimizers[1])
    held = []
    for parameter in models[1].parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(p.grad is not None for p in models[1].parameters()))
        )
    for step in range(3):
        tokens = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(step))
        for model in models:
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert len(held) == 3 * len(list(models[1].parameters())) and set(held) == {0}, "freed by the hook before this one"
    for expected, actual in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(expected, actual)


@pytest.mark.slow
def test_full_finetuning_on_one_gpu_trains_bf16_weights_with_moments_in_8_bits(one_gpu, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 400)
    Qwen3MoeConfig(
        **{**TINY_SIZES, "hidden_size": 64, "moe_intermediate_size": 16, "vocab_size": 2048}
    ).save_pretrained(tmp_path / "tiny")
    options = ["--model", str(tmp_path / "tiny"), "--random", "--text", str(text), "--sequence-length", "64"]
    trainer = one_gpu.main([*options, "--steps", "8", "--learning-rate", "1e-2", "--output", str(tmp_path)])
    state = trainer.optimizer.optimizer.state
    for name, weight in trainer.model.named_parameters():
        assert weight.dtype == torch.bfloat16 and weight.grad is None
        if ".experts." in name:
            moments = state[weight]["exp_avg"], state[weight]["exp_avg_sq"]
            assert {type(moment).__name__ for moment in moments} == {"OptimState8bit"}
            assert all(moment.codes.shape == weight.shape and moment.codes.any() for moment in moments)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[-1] < losses[0] - 1
    assert "tokens/s a device over 6 steps" in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")


def test_full_finetuning_on_one_gpu_refuses_a_second(one_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(one_gpu.TrainingArguments, "n_gpu", 2)
    with pytest.raises(SystemExit, match="gradients of 2 GPUs would not be averaged"):
        one_gpu.main(["--output", str(tmp_path)])


@pytest.mark.slow
def test_the_accelerate_loop_lowers_the_held_out_loss():
    before, after = load("accelerate_loop").main(
        ["--steps", "8", "--top-k-steps", "2", "--batch-size", "4", "--tile", "16"]
    )
    assert after < before


@pytest.mark.slow
def test_qlora_goes_from_a_checkpoint_over_packed_experts_to_a_merged_one(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    qlora = load("qlora")
    tiny = ["--steps", "3", "--batch-size", "2", "--sequence-length", "32", "--rank", "2", "--learning-rate", "3e-2"]
    monkeypatch.setattr(qlora, "VOCAB_SIZE", 300)
    monkeypatch.setattr(qlora, "load_texts", lambda arguments: [TEXT] * 40)
    attention_only = qlora.main([*tiny, "--attention-only", "--output", str(tmp_path / "attention")])["eval_loss"]
    # 0.10 lower with two seeds
    in_fp8 = ["--experts-quantization", "fp8", "--experts-compute", "fp8"]
    assert qlora.main([*tiny, *in_fp8, "--output", str(tmp_path / "fp8")])["eval_loss"] < attention_only - 0.05
    losses = qlora.main([*tiny, "--expanded-memory", "1GiB", "--output", str(tmp_path / "first")])
    assert losses["eval_loss"] < attention_only - 0.05, "the experts' adapters learned"
    merged = tmp_path / "first" / "merged"
    assert f"vllm serve {merged}" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")
    # a checkpoint packed once and for all, with TRL's trainer; the adapter is merged into what it was trained on
    packed = str(tmp_path / "packed")
    assert command(["convert", str(merged), packed, "--layout", "native", "--quantize", "mxfp4"]) == 0
    qlora.main([*tiny, "--trl", "--attention-only", "--model", packed, "--output", str(tmp_path / "second")])
    assert "the weights were mxfp4 and are bfloat16 now" in capsys.readouterr().out
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "merged")
    assert type(again).__name__ == "Qwen3MoeForCausalLM"
    # at a model's sizes, before its weights are downloaded
    from_host = ["--experts-memory", "0", "--attention-only"]
    streamed = qlora.main([*tiny, *from_host, "--model", packed, "--output", str(tmp_path / "streamed")])["eval_loss"]
    resident = qlora.main([*tiny, "--attention-only", "--model", packed, "--output", str(tmp_path / "resident")])
    assert streamed == resident["eval_loss"]
    trained = qlora.main([*tiny, *from_host, "--model", str(merged), "--random", "--output", str(tmp_path / "third")])
    assert "train_loss" in trained and not list((tmp_path / "third").rglob("*.safetensors"))
    assert "tokens/s a device over 1 steps of 64 tokens" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"by awq.*which is not read: load the bf16 checkpoint"):
        (tmp_path / "awq").mkdir()
        config = {**json.loads((merged / "config.json").read_text()), "quantization_config": {"quant_method": "awq"}}
        (tmp_path / "awq" / "config.json").write_text(json.dumps(config))
        qlora.load_packed(str(tmp_path / "awq"), qlora.parse_arguments([]))


@loads_matrices
def test_qlora_packs_the_linear_layers_of_a_checkpoint_in_fp8(tmp_path, monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    qlora = load("qlora")
    make(tmp_path, "deepseek_v3", hidden_size=128, moe_intermediate_size=128, intermediate_size=128)
    to_fp8(tmp_path)
    options = ["--model", str(tmp_path), "--experts-quantization", "nf4", "--experts-memory", "0"]
    dense, packed = (
        qlora.load_packed(str(tmp_path), qlora.parse_arguments([*options, *more])) for more in ([], ["--linear-nf4"])
    )
    linear = {name for name, module in dense.named_modules() if isinstance(module, torch.nn.Linear)}
    in_4_bits = {name for name, module in packed.named_modules() if type(module).__name__ == "Linear4bit"}
    assert in_4_bits == linear - {"lm_head"} and any("shared_experts" in name for name in in_4_bits)
    for name in in_4_bits:
        weight, expected = packed.get_submodule(name).weight, dense.get_submodule(name).weight
        given = functional.dequantize_4bit(weight.data, weight.quant_state)
        if expected.shape[1] < 64:  # on CPUs bitsandbytes 0.50 is wrong for rows that are shorter than a block
            continue
        assert (given - expected).norm() < 0.12 * expected.norm(), "NF4's error of normal weights is 0.09"
    tokens = torch.arange(16)[None]
    adapted = get_peft_model(packed, sonicmoe_hf.lora_config(packed, 2))
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad)
