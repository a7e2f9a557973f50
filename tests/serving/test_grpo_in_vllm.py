"""GRPO (TRL) sampled by vLLM, which gets adapters of experts alone and returns the experts that the trainer replays."""

import importlib
import os
import sys
from pathlib import Path

import pytest
from accelerate import Accelerator
from helpers.checkpoints import tensors_in
from helpers.http_servers import running
from helpers.rl_programs import assert_sent_alone_and_replayed, train_by_trls_command
from helpers.trl_trainers import model_of, sentence_tokenizer
from helpers.vllm_engine import WIDTHS, stopped
from peft import get_peft_model

import sonicmoe_hf
from sonicmoe_hf.trl import async_grpo

pytestmark = pytest.mark.serving
TRITON_FOR_CPUS = """from types import SimpleNamespace
from triton.backends import backends
backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=bool)))
"""  # as conftest.py has it, in the server's processes
LOOP = {"num_iterations": 2, "beta": 0.1, "max_steps": 4}


def path_with_triton(folder):
    """Make PYTHONPATH of processes that vLLM runs in."""
    (site := folder / "site").mkdir()
    (site / "sitecustomize.py").write_text(TRITON_FOR_CPUS)
    return os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Save a small Qwen3-MoE of widths that vLLM's kernels for CPUs take, with its tokenizer."""
    folder, words = tmp_path_factory.mktemp("base"), sentence_tokenizer()
    model_of(words, **WIDTHS).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture
def rl(monkeypatch):
    """Import the modules that import TRL, and with it vLLM, whose newer runner alone returns experts."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    return importlib.import_module("helpers.rl")


@pytest.mark.parametrize(
    "config, lora, options",
    [(LOOP, {}, {}), ({}, {"experts_r": 2}, {}), ({}, {}, {"replay": False})],
    ids=["in PEFT's form", "in vLLM's form", "without replay"],
)
def test_colocated_vllm_has_the_trainers_log_probabilities_as_the_adapter_changes(
    config, lora, options, rl, base, tmp_path
):
    trainer = rl.make(sonicmoe_hf.vllm_adapters(rl.TRLsGRPOTrainer, **options), base, tmp_path, config, lora)
    with stopped(trainer.vllm_generation.llm):
        trainer.train()
    gaps = rl.logged(trainer)
    assert len(gaps) == 2 and 0 < max(gaps) < rl.GAP
    assert rl.logged(trainer, "serving/divergence") == ([] if options else [0.0, 0.0])


def test_vllm_that_keeps_the_first_adapter_is_far_away(rl, base, tmp_path):
    trainer = rl.synced_once(rl.make(rl.GRPOTrainer, base, tmp_path))
    with stopped(trainer.vllm_generation.llm):
        trainer.train()
    first, second = rl.logged(trainer)
    assert first < rl.GAP and second > 1e-2


def test_trls_command_run_by_sonicmoe_hf_sends_adapters_alone_and_replays(base, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("PYTHONPATH", path_with_triton(tmp_path))
    history, said = train_by_trls_command(base, tmp_path)
    assert_sent_alone_and_replayed(history, tmp_path)
    assert said.count("experts: frozen, with LoRA of rank 4") == 1


def test_vllm_serve_started_by_the_command_line_that_is_printed_loads_each_version(rl, base, tmp_path):
    """Three runs on one server, one without replay: versions of the later ones go on."""
    vllm = [str(Path(sys.executable).with_name("vllm")), "serve", str(base)]
    flags = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--enable-mixed-moe-lora-format"]
    flags += ["--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    small = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "96", "--max-num-seqs", "8"]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    variables["PYTHONPATH"] = path_with_triton(tmp_path)
    command = [*vllm, *flags, *small, "--host", "127.0.0.1", "--port"]
    with running(command, tmp_path / "log", {**os.environ, **variables}) as port:
        served = {"vllm_mode": "server", "vllm_server_base_url": f"http://127.0.0.1:{port}"}
        for config, replay in ((LOOP, False), (LOOP, True), ({"max_steps": 1}, True)):
            class_ = sonicmoe_hf.vllm_adapters(rl.TRLsGRPOTrainer, replay=replay)
            trainer = rl.make(class_, base, tmp_path / "run", {**config, **served})
            trainer.train()
            assert 0 < max(rl.logged(trainer)) < rl.GAP
            assert set(rl.logged(trainer, "serving/divergence")) == ({0.0} if replay else set())
        printed = trainer.vllm_generation.server.command()
        names = [model["id"] for model in trainer.vllm_generation.server._models()]
    assert printed.endswith(" ".join([*vllm[1:], *flags, *small[:2]]))
    assert len(names) == 2 and names[1].endswith("-5")


def test_async_grpo_writes_an_adapter_of_experts_as_vllm_loads_it(rl, base, tmp_path):
    """TRL's own functions refuse it, and fall back to whole weights on a ValueError."""
    model = rl.loaded(base)
    model = get_peft_model(model, sonicmoe_hf.lora_config(model))
    assert async_grpo._checked_config(model) is model.peft_config["default"]
    async_grpo.check_hooks(async_grpo.ASYNC)
    trainer = object.__new__(sonicmoe_hf.trl.AsyncGRPOTrainer)
    trainer._versions = None
    for version in (1, 2):
        trainer._save(model, Accelerator(cpu=True), "default", str(tmp_path / f"trl-policy-v{version}"))
    names = tensors_in(tmp_path / "trl-policy-v2")
    assert {path.name for path in tmp_path.iterdir()} == {"trl-policy-v1", "trl-policy-v2"}
    assert "base_model.model.model.layers.1.mlp.experts.7.down_proj.lora_B.weight" in names
    with pytest.raises(RuntimeError, match="the model has none"):
        async_grpo._checked_config(rl.loaded(base))
