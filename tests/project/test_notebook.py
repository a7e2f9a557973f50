"""The notebooks run, offline and with few steps."""

import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from helpers.examples import EXAMPLES
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM

import sonicmoe_hf
from sonicmoe_hf.examples.shared import small_config, standard_library, train_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.pinned]
ROOT = Path(sonicmoe_hf.__file__).resolve().parents[1]


def run(name, folder, monkeypatch, **changes):
    """Run a notebook in `folder`, with `changes` of its settings by name; return what its cells print, and its cells."""
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    settings = next(cell for cell in notebook.cells if cell.source.find("MODEL = ") >= 0)
    for setting, value in changes.items():
        settings.source, count = re.subn(
            rf"^{re.escape(setting)} = .*$", f"{setting} = {value}", settings.source, flags=re.M
        )
        assert count == 1
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]  # Jupyter starts a notebook in its own folder
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("COLUMNS", "120")
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    return "".join(output.get("text", "") for output in outputs)


def losses(printed):
    return [float(loss) for loss in re.search(r"held-out loss: ([\d.]+) -> ([\d.]+)", printed).groups()]


def test_the_quick_start_trains_merges_and_finds_the_adapter_applied(tmp_path, monkeypatch):
    steps = {"STEPS, SEQUENCE_LENGTH, BATCH_SIZE": "16, 64, 8"}
    printed = run("quickstart.ipynb", tmp_path, monkeypatch, **steps)
    first, last = losses(printed)
    assert last < first - 0.15  # random weights at the start: the loss of guessing, 6.9
    assert "experts: frozen, with LoRA of rank 8" in printed
    assert re.search(r"\bapplied\b", printed) and not re.search(r"applied in part|not applied|cannot tell", printed)


def test_the_notebook_for_24_gb_plans_and_trains_beside_packed_experts(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    texts, _ = standard_library()
    tokenizer = train_tokenizer(texts[:10], 512)
    tokenizer.save_pretrained(tmp_path / "small")
    AutoModelForCausalLM.from_config(small_config(tokenizer)).save_pretrained(tmp_path / "small")
    steps = {"STEPS, SEQUENCE_LENGTH, RANK": "2, 64, 2"}
    printed = run("qwen3_30b_24gb.ipynb", tmp_path, monkeypatch, MODEL='"small"', **steps)
    assert "QLoRA NF4 linear too, r=8, one GPU + checkpointing" in printed
    assert "experts: frozen, packed as nf4, with LoRA of rank 2" in printed and losses(printed)
    config = json.loads((tmp_path / "outputs" / "qwen3-24gb" / "lora" / "adapter_config.json").read_text())
    assert len(config["target_parameters"]) == 2


@pytest.mark.parametrize("name", ["quickstart.ipynb", "qwen3_30b_24gb.ipynb"])
def test_a_notebook_has_no_outputs_is_linked_from_the_readme_and_stands_alone(name):
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert f"/blob/main/examples/{name})" in (ROOT / "README.md").read_text(encoding="utf-8")
    text = "\n".join(cell.source for cell in notebook.cells)
    (installed,) = re.findall(r"%pip install -q (.+)", text)
    assert "sonicmoe-hf[all]" in installed
    links = re.findall(r"\]\(([^)]+)\)", text)  # Colab has the notebook alone
    paths = [re.search(r"/sonicmoe-hf/blob/main/(.+)", link)[1] for link in links if link.startswith("https://")]
    assert len(paths) == len(links) and all((ROOT / path).is_file() for path in paths)
