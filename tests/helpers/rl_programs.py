"""TRL's own command for GRPO, run by `sonicmoe-hf run` as users run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from helpers.programs import write_rows
from helpers.rl_prompts import GAP, PROMPTS, SETTINGS

# TRL has set them in this process if vLLM ran in it
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ROOT = Path(__file__).resolve().parents[2]
START = "import sys; from sonicmoe_hf_command import main; sys.exit(main())"
REWARD = """
def letters(completions, **options):
    return [len(set(str(text))) / (1 + len(str(text))) for text in completions]
"""
OPTIONS = {
    **SETTINGS,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "bf16": False,
    "dtype": "float32",
    "report_to": "none",
    "save_strategy": "steps",
    "save_steps": 2,
    "lora_r": 4,
    "lora_dropout": 0.0,
}


def train_by_trls_command(base, folder, before=""):
    """Train two steps by `sonicmoe-hf run -- trl grpo` of attention and, as asked, experts, in a process that runs
    `before` as it reads the reward; returns what was logged and what the command wrote to standard error."""
    write_rows(folder / "prompts", PROMPTS)
    (folder / "reward.py").write_text(before + REWARD)
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    options += ["--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--reward_funcs", "reward.letters"]
    options += ["--model_name_or_path", str(base), "--dataset_name", str(folder / "prompts"), "--output_dir", "out"]
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **{name: value for name, value in os.environ.items() if name not in RENDEZVOUS},
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-c", START, "run", "--adapt-experts", "4", "--", "trl", "grpo", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    history = json.loads((folder / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    return history, done.stderr


def assert_sent_alone_and_replayed(history, folder):
    """Check that the engine had the adapter of each step, with experts, and the trainer the engine's experts."""
    gaps = [entry["serving/largest_gap"] for entry in history if "serving/largest_gap" in entry]
    assert len(gaps) == 2 and 0 < max(gaps) < GAP
    assert [entry["serving/divergence"] for entry in history if "serving/divergence" in entry] == [0.0, 0.0]
    trained = json.loads((folder / "out" / "adapter_config.json").read_text())
    assert len(trained["target_parameters"]) == 2
