"""Terminal sessions of the documents: what follows <!-- terminal --> is a command behind a $, and what it prints.

PYTHONPATH=.:tests python -m helpers.terminal runs all of them, and writes what they print.
"""

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from peft import get_peft_model
from transformers import DeepseekV3Config, Qwen3MoeConfig

import sonicmoe_hf
from sonicmoe_hf.layer.backends import BACKEND_VARIABLE
from sonicmoe_hf.tools.cli.main import main
from sonicmoe_hf.tools.random_models import QWEN3_30B_A3B

from .programs import make_model, texts, write_rows

ROOT = Path(__file__).parents[2]
COLUMNS = "110"
NAMES_PATHS = ("convert", "merge")  # which are longer than what is shown of them
MARK = "<!-- terminal -->\n```text\n"
SESSION = re.compile(MARK + r"\$ ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)```\n", flags=re.DOTALL)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
LARGER = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32, "num_hidden_layers": 4}
NUMBER = r"(?<=': ')(\d+\.\d+)(?=')"  # in what a Trainer logs
LOGGED = ("loss", "grad_norm", "moe/load_max_over_mean", "moe/dead_experts")  # of what a Trainer prints


class Session(NamedTuple):
    """A command in a document, and what the document says that it prints."""

    document: str
    command: str
    output: str


def make_configs(folder: Path) -> None:
    """Write the configs of hub models, in folders of their ids: no network is needed."""
    Qwen3MoeConfig(**QWEN3_30B_A3B, dtype="bfloat16").save_pretrained(folder / "Qwen" / "Qwen3-30B-A3B")
    deepseek = DeepseekV3Config(quantization_config=FP8)  # whose defaults are DeepSeek-V3's sizes
    deepseek.save_pretrained(folder / "deepseek-ai" / "DeepSeek-V3")


def make_folders(folder: Path) -> None:
    """Make the files that the sessions name: configs, small models, an adapter, a dataset;
    examples/, as in a checkout."""
    make_configs(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    make_model(folder / "small-qwen3-moe")
    write_rows(folder / "texts", [{"text": text} for text in texts()])
    model = make_model(folder / "qwen3-moe-26m", torch.bfloat16, **LARGER)
    adapted = get_peft_model(model, sonicmoe_hf.lora_config(model, 8, init_lora_weights=False))
    adapted.save_pretrained(folder / "lora")
    sonicmoe_hf.convert_adapter(folder / "lora", folder / "lora-vllm", "vllm", trained_on=folder / "qwen3-moe-26m")
    for name, parameter in adapted.named_parameters():
        parameter.data *= ".experts." not in name or "lora_B" not in name
    adapted.merge_and_unload().save_pretrained(folder / "merged-elsewhere")  # by what knows no experts
    (folder / "notes.txt").write_text("\n".join(texts()))


def output_of(command: str) -> str:
    """Run a command of sonicmoe-hf and return its output in a terminal of COLUMNS columns, without times and the
    folder's path; of a program that it runs, its own lines and LOGGED."""
    words = shlex.split(command.replace("\\\n", " "))[1:]
    shown = SHOWN_OF.get(words[0], str)
    apart = words[0] == "run" or (shown is not str and torch.cuda.is_available())
    printed = shown(_of_process(words) if apart else _of_main(words))
    printed = re.sub(r"\d+ s$", "0 s", printed.replace(f"{Path.cwd()}/", ""), flags=re.MULTILINE)
    return "".join(line.rstrip() + "\n" for line in printed.splitlines())


def _of_main(words: list[str]) -> str:
    columns = mock.patch.dict(os.environ, COLUMNS="300" if words[0] in NAMES_PATHS else COLUMNS)
    with columns, contextlib.redirect_stdout(io.StringIO()) as printed:
        os.environ.pop(BACKEND_VARIABLE, None)
        main(words)
    return printed.getvalue()


def _of_process(words: list[str]) -> str:
    """Get the output of a process that has no GPU."""
    own = {"PYTHONPATH": str(ROOT), "COLUMNS": COLUMNS, "HF_DATASETS_CACHE": str(Path.cwd() / "cache")}
    own |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **own}
    environment.pop(BACKEND_VARIABLE, None)
    command = [sys.executable, "-m", "sonicmoe_hf", *words]
    printed = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment, timeout=500, **printed)
    if done.returncode != 0:
        raise RuntimeError(done.stdout)
    return done.stdout


def _of_run(printed: str) -> str:
    return "\n".join(filter(None, map(_shown, re.split(r"[\r\n]+", printed))))


def _of_doctor(printed: str) -> str:
    """Get doctor's lines on the model; versions and devices come before."""
    return printed[re.search(r"^\S+ \(\w+\) *$", printed, flags=re.MULTILINE).start() :]


def _shown(line: str) -> str | None:
    if line.startswith("{'loss'"):
        logged = ast.literal_eval(line)
        return str({name: logged[name] for name in LOGGED})
    return line if line.startswith("sonicmoe-hf:") else None


# of the output of commands that depend on the machine, the part that is shown
SHOWN_OF = {"run": _of_run, "doctor": _of_doctor}


def sessions() -> list[Session]:
    """Read every session of the documents."""
    return [
        Session(path.name, *session)
        for path in sorted((ROOT / "docs").glob("*.md"))
        for session in SESSION.findall(path.read_text(encoding="utf-8"))
    ]


def assert_prints_what_is_shown(session: Session) -> None:
    """Run the session's command in the present folder; losses are in fp32, whose sums a CPU may order in another way."""
    printed, shown = (re.split(NUMBER, text) for text in (output_of(session.command), session.output))
    assert printed[::2] == shown[::2], f"{session.document}: PYTHONPATH=.:tests python -m helpers.terminal"
    assert list(map(float, printed[1::2])) == pytest.approx(list(map(float, shown[1::2])), rel=1e-2)


def _write() -> None:
    def written(match: re.Match) -> str:
        print(f"$ {match[1]}", flush=True)
        return f"{MARK}$ {match[1]}\n{output_of(match[1])}```\n"

    for name in sorted({session.document for session in sessions()}):
        document = ROOT / "docs" / name
        document.write_text(SESSION.sub(written, document.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as temporary:
        make_folders(Path(temporary))
        os.chdir(temporary)
        _write()
        os.chdir(before)
