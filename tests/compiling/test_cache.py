"""torch's cache on disk: the graphs of layers that were compiled before are taken from it."""

from pathlib import Path

import pytest
import torch
from helpers.models import batch, build_patched, loss_and_gradients
from helpers.programs import make_model
from helpers.small_families import small_model
from helpers.training import CHECKPOINTED_TRAINING, trainer_for
from peft import get_peft_model
from torch._dynamo.utils import counters
from torch._inductor import config

import sonicmoe_hf
from sonicmoe_hf.checkpoints.reading.config_only import build_from_config
from sonicmoe_hf.compiling.layers import checkpointable_layers
from sonicmoe_hf.private.torch import cached_graphs
from sonicmoe_hf.tools.cli import warmup_graphs
from sonicmoe_hf.tools.cli.main import main


def kept_graphs():
    """Count the graphs that torch's cache had, that it has taken, and that it does not take."""
    return [cached_graphs()[f"autograd_cache_{what}"] for what in ("hit", "saved", "bypass")]


@pytest.mark.slow
def test_a_second_start_takes_compiled_layers_from_torchs_cache(tmp_path, monkeypatch):
    """No version of torch keeps graphs with a function that it does not know, but in a checkpoint since 2.13."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = build_patched("qwen3_moe", use_cache=False, num_hidden_layers=1)
    sonicmoe_hf.compile_layers(model)
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        with config.patch(fallback_by_default=True):  # torch's own kernels, so that no C++ compiler runs
            loss_and_gradients(model, batch())
        found.append(kept_graphs())
    assert found == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.slow
@pytest.mark.pinned  # Transformers 5.17 has layers compiled twice
def test_warmup_fills_torchs_cache_for_a_run_of_other_lengths(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warmup_graphs, "LENGTHS", (24, 16))
    make_model(tmp_path / "model", torch.bfloat16, hidden_size=64, moe_intermediate_size=64)
    lengths = iter([20, 12])

    def rows_of_a_length(rows):
        length = next(lengths)
        return {name: torch.stack([row[name][:length] for row in rows]) for name in rows[0]}

    with config.patch(fallback_by_default=True):
        torch._dynamo.reset()
        assert main(["warmup", str(tmp_path / "model"), "--compile", "--quantize", "nf4", "--rank", "4"]) == 0
        assert ": 2, of which 2 compiled now" in capsys.readouterr().out
        torch._dynamo.reset()
        counters.clear()
        model = sonicmoe_hf.from_pretrained(tmp_path / "model", experts_quantization="nf4", dtype=torch.bfloat16)
        model = get_peft_model(model, sonicmoe_hf.lora_config(model, r=4))
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1, "bf16": True}
        trainer = trainer_for(model, tmp_path, torch_compile=True, **CHECKPOINTED_TRAINING["non_reentrant"], **options)
        trainer.data_collator = rows_of_a_length
        sonicmoe_hf.attach(trainer)
        trainer.train()
    assert kept_graphs() == [1, 0, 0]


@pytest.mark.slow
@pytest.mark.pinned
def test_warmup_compiles_a_model_whose_micro_batches_are_not_packed(tmp_path, monkeypatch, capsys):
    """Of Qwen3-VL-MoE, whose loss is a mean of each micro-batch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warmup_graphs, "LENGTHS", (24, 16))
    small_model("qwen3_vl_moe").config.save_pretrained(tmp_path)
    with config.patch(fallback_by_default=True):
        torch._dynamo.reset()
        assert main(["warmup", str(tmp_path), "--compile", "--rank", "4"]) == 0
    assert "compiled now" in capsys.readouterr().out


QWEN_VL = {"model_type": "qwen3_vl_moe", "text_config": {"num_hidden_layers": 3}, "vision_config": {"depth": 2}}
NEMOTRON = {"model_type": "nemotron_h", "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"]}


@pytest.mark.parametrize("entries, num_layers", [(QWEN_VL, 1), (NEMOTRON, 3)], ids=["vision too", "derived"])
def test_warmup_builds_the_first_decoder_layers_of_each_kind(entries, num_layers):
    model = build_from_config(entries, Path("config.json"))
    before = model.config.to_dict()
    config = warmup_graphs._config_with_each_kind(model)
    with torch.device("meta"):
        built = type(model)._from_config(config)
    assert len(checkpointable_layers(built.get_decoder())) == num_layers
    assert model.config.to_dict() == before


def test_warmup_does_not_build_a_whole_model_whose_config_counts_other_layers():
    entries = {"model_type": "switch_transformers", "num_layers": 2, "num_decoder_layers": 1}
    model = build_from_config(
        {**entries, "architectures": ["SwitchTransformersForConditionalGeneration"]}, Path("config.json")
    )
    with pytest.raises(ValueError, match="has 1 layers and its config num_hidden_layers=2"):
        warmup_graphs._config_with_each_kind(model)


def test_warmup_wants_a_model_to_compile(capsys):
    assert main(["warmup", "--shape", "2048,768", "--compile"]) == 2
    assert "warmup MODEL --compile" in capsys.readouterr().err
