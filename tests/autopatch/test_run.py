"""Programs of others, run by `sonicmoe-hf run` as users run them: their losses are those of the same run by hand."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import trl
from datasets import load_dataset
from helpers.programs import make_model, texts, write_rows
from helpers.terminal import assert_prints_what_is_shown, sessions
from test_program import START
from transformers import AutoModelForCausalLM

import sonicmoe_hf

pytestmark = pytest.mark.slow
ROOT = Path(sonicmoe_hf.__file__).resolve().parent.parent
PATCHED = "sonicmoe-hf: Qwen3MoeForCausalLM: 2 mixture-of-experts layers patched; routing: top-k"
# in docs/trainers.md
SHOWN = {"max_steps": 2, "logging_steps": 1, "learning_rate": 0.01, "use_cpu": True, "bf16": False}
TRAINING = {**SHOWN, "max_steps": 3, "per_device_train_batch_size": 4, "report_to": "none"}
ACCELERATE = """
import json, os, socket, sys
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM

def train():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    if sys.argv[2] == "by hand":
        import sonicmoe_hf
        sonicmoe_hf.patch_model(model)
    else:
        assert "sonicmoe_hf.models.patch" in sys.modules
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randint(300, (16, 12), generator=torch.Generator().manual_seed(1))
    batches = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    model.train()
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
    assert (accelerator.num_processes == 1) == (len(losses[0]) == 1)
    if accelerator.is_main_process:
        print(json.dumps(losses), flush=True)
    accelerator.end_training()
    os._exit(0)  # gloo's threads sometimes abort as Python ends

if sys.argv[2] == "by hand":  # two ranks first, then this process alone: importing is what takes time
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in "01":
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            train()
    assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0, 0]
train()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder with a model of trained-like weights, its tokenizer, texts and pairs of a
    chosen and a rejected text."""
    folder = tmp_path_factory.mktemp("run")
    make_model(folder / "small-qwen3-moe")
    write_rows(folder / "texts", [{"text": text} for text in texts()])
    write_rows(folder / "pairs", [{"prompt": text, "chosen": f" yes {text}", "rejected": " no"} for text in texts()])
    (folder / "loop.py").write_text(ACCELERATE)
    return folder


def launch(*command, cwd):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(cwd / "cache"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run(*words, cwd):
    return launch(sys.executable, "-c", START, *words, cwd=cwd)


def losses(output):
    """Read the logged steps of a Trainer, without what differs from run to run."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [
        {name: entry[name] for name in ("loss", "grad_norm", "moe/load_cv")} for entry in history if "loss" in entry
    ]


def last_line(done):
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def losses_by_hand(folder):
    """Get the losses on two gloo ranks, and those of one process."""
    done = launch(sys.executable, "loop.py", "small-qwen3-moe", "by hand", cwd=folder)
    return [json.loads(line) for line in done.stdout.strip().splitlines()[-2:]]


def test_a_loop_of_accelerates_in_a_child_of_its_launcher_has_the_losses_of_the_same_run_by_hand(
    folder, losses_by_hand
):
    options = shlex.split("--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no")
    done = run("--", "accelerate", "launch", *options, "loop.py", "small-qwen3-moe", "run", cwd=folder)
    assert last_line(done) == losses_by_hand[1]
    assert done.stderr.count(PATCHED) == 1 and "backend: eager" in done.stderr


def test_two_gloo_ranks_that_a_launcher_starts_have_the_losses_of_the_same_run_by_hand_and_one_of_them_reports(
    folder, losses_by_hand
):
    (folder / "start.py").write_text(START)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = launch(*torchrun, "start.py", "loop.py", "small-qwen3-moe", "run", cwd=folder)
    assert last_line(done) == losses_by_hand[0] and len(losses_by_hand[0][0]) == 2
    assert done.stderr.count(PATCHED) == 1


@pytest.fixture(scope="module")
def trained_by_hand(folder):
    """Train by TRL's trainers in this process what its commands train; returns the folder."""
    sft = {**SHOWN, "report_to": "none", "gradient_checkpointing": True}
    for kind, data, options in (("SFT", "texts", sft), ("DPO", "pairs", TRAINING)):
        model = AutoModelForCausalLM.from_pretrained(folder / "small-qwen3-moe", dtype="float32")
        sonicmoe_hf.patch_model(model)
        settings = getattr(trl, f"{kind}Config")(folder / f"{kind.lower()}-by-hand", **options)
        rows = load_dataset(str(folder / data), cache_dir=str(folder / "cache"))["train"]
        trainer = getattr(trl, f"{kind}Trainer")(model=model, args=settings, train_dataset=rows)
        sonicmoe_hf.attach(trainer)
        trainer.train()
        trainer.save_state()
    return folder


def assert_same_losses(folder, output, by_hand, steps):
    logs, expected = (losses(folder / name) for name in (output, by_hand))
    assert len(logs) == len(expected) == steps
    for log, other in zip(logs, expected):
        # fp32, whose sums the CPU orders by where a process happens to have its tensors: 4e-7 has been seen
        assert log == pytest.approx(other, rel=1e-5)


@pytest.mark.pinned
def test_trls_sft_prints_what_the_document_shows_and_has_the_losses_of_the_same_run_by_hand(
    trained_by_hand, monkeypatch
):
    monkeypatch.chdir(trained_by_hand)
    (session,) = [session for session in sessions() if session.command.split()[1] == "run"]
    assert_prints_what_is_shown(session)
    assert session.output.count(PATCHED) == 1
    assert_same_losses(trained_by_hand, "outputs/sft/checkpoint-2", "sft-by-hand", 2)


def test_trls_dpo_has_the_losses_of_the_same_run_by_hand(trained_by_hand):
    options = [word for name, value in TRAINING.items() for word in (f"--{name}", value)]
    options += ["--dataset_name", trained_by_hand / "pairs", "--model_name_or_path", "small-qwen3-moe"]
    done = run("--", "-m", "trl.scripts.dpo", *options, "--output_dir", "dpo-run", cwd=trained_by_hand)
    assert done.stderr.count(PATCHED) == 1
    assert_same_losses(trained_by_hand, "dpo-run/checkpoint-3", "dpo-by-hand", 3)


def test_trls_lora_of_attention_gets_experts_when_asked(folder):
    options = [word for name, value in {**TRAINING, "max_steps": 1}.items() for word in (f"--{name}", value)]
    options += ["--dataset_name", folder / "texts", "--model_name_or_path", "small-qwen3-moe"]
    options += ["--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_r", "8"]  # TRL's dropout is 0.05
    program = ("-m", "trl.scripts.sft", *options, "--output_dir", "experts")
    done = run("--adapt-experts", "4", "--", *program, cwd=folder)
    assert len(json.loads((folder / "experts" / "adapter_config.json").read_text())["target_parameters"]) == 2
    assert "experts: frozen, with LoRA of rank 4" in done.stderr
    assert done.stderr.count("lora_dropout=0.05 is of the linear layers alone") == 1
