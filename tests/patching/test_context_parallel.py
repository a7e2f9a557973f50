"""Two gloo ranks that share each sequence: accelerate's context parallelism, and DeepSpeed's Ulysses."""

import pytest
from accelerate import ParallelismConfig
from helpers.adapters import with_lora
from helpers.context_parallel import on_cpus
from helpers.models import OF_64, assert_all_close, build
from helpers.parallel import SUMMATION, gathered, pretend_to_have_gpus
from helpers.ranks import WORLD
from helpers.training import Examples, arguments, logs_of
from transformers import Trainer

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback

FSDP2 = {"version": 2, "cpu_ram_efficient_loading": False}


def model_of(kind):
    """Return a patched model with adapters, of packed experts or not, whose attention is torch's."""
    model = build("qwen3_moe", **OF_64["qwen3_moe"], attn_implementation="sdpa")
    if kind == "packed":
        sonicmoe_hf.quantize_experts(model, "nf4")
    sonicmoe_hf.patch_model(model)
    return with_lora(model, target_modules=["q_proj"])


def trained(model, folder, **options):
    """Return the logs of a Trainer, and what it trained."""
    args = arguments(folder, max_steps=3, learning_rate=0.05, gradient_checkpointing=True, **options)
    if "fsdp" in options:
        pretend_to_have_gpus()
    trainer = Trainer(model, args, train_dataset=Examples(16), callbacks=[ExpertLoadCallback()])
    sonicmoe_hf.attach(trainer)
    trainer.train()
    learned = {n: gathered(p.detach()) for n, p in trainer.model.named_parameters() if p.requires_grad}
    return [[log[key] for key in ("loss", "moe/load_cv")] for log in logs_of(trainer)], learned


def trained_in_parts(rank, kind, folder):
    options = {"fsdp": True, "fsdp_config": FSDP2, "parallelism_config": ParallelismConfig(cp_size=WORLD)}
    with on_cpus():
        return trained(model_of(kind), folder, **options)


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_a_trainer_with_context_parallelism_trains_as_one_rank_does(ranks, kind, tmp_path):
    logs, learned = trained(model_of(kind), str(tmp_path))
    for found_logs, found in ranks.run(trained_in_parts, kind, str(tmp_path)):
        for log, expected in zip(found_logs, logs, strict=True):
            assert log == pytest.approx(expected, rel=1e-5), SUMMATION
        assert_all_close(found, learned, 1e-5, SUMMATION)
