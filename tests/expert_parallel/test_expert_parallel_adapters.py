"""LoRA on experts that ranks share: factors are sharded with their experts, and all is as on
one rank with all of them."""

import contextlib
import io
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.adapters import with_lora
from helpers.checkpoints import CUT_OFF, make, packed_in, to_fp8
from helpers.examples import EXAMPLES, TEXT
from helpers.examples import load as load_example
from helpers.marks import rest_pinned
from helpers.models import assert_all_close, batch, build
from helpers.parallel import OWN_BATCH, PARTIAL_SUMS, mean_of_ranks
from helpers.ranks import WORLD
from helpers.training import Examples
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from test_expert_parallel import APART, SHARED, load, step
from test_expert_parallel import pytestmark as pytestmark
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import sonicmoe_hf
from sonicmoe_hf.errors import UnsupportedModelError
from sonicmoe_hf.layer.holding import local_tensor
from sonicmoe_hf.tools.demo.corpus import train_tokenizer

SIZES = {"hidden_size": 64, "moe_intermediate_size": 128}
RANK = 3


def adapted(model, sizes):
    """Add adapters to experts, and to attention that tensor parallelism does not split, in which PEFT draws both
    factors."""
    torch.manual_seed(5)
    modules = [] if sizes == SHARED else ["q_proj", "v_proj"]
    return get_peft_model(model, sonicmoe_hf.lora_config(model, RANK, init_lora_weights=False, target_modules=modules))


def factors(model):
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


def held_factors(model):
    return {name: local_tensor(factor).detach() for name, factor in factors(model).items()}


def own_factors(name, whole, rank):
    """Select the part of one process's factors that one of two ranks holds."""
    if "lora_A" in name:
        return whole.view(8, RANK, -1)[4 * rank : 4 * rank + 4].flatten(0, 1)
    return whole.view(-1, RANK, 8)[..., 4 * rank : 4 * rank + 4].flatten(1)


def held_and_saved(rank, folder, sizes, format):
    model = adapted(load(f"{folder}/base", sizes, experts_quantization=format), sizes)
    held = held_factors(model)
    inputs = batch(**OWN_BATCH[rank if sizes == APART else 0])
    found = [model(**inputs).logits.detach()]
    model.save_pretrained(f"{folder}/adapter", is_main_process=rank == 0)
    dist.barrier()
    base = load(f"{folder}/base", sizes, experts_quantization=format)
    reloaded = PeftModel.from_pretrained(base, f"{folder}/adapter", is_trainable=True)
    found.append(reloaded(**inputs).logits.detach())
    if sizes == SHARED:  # which shards no linear layers
        return held, found, {name: weight.dequantize() for name, weight in packed_in(model.merge_and_unload()).items()}
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(
            UnsupportedModelError, match=r"ranks share.* cannot be merged in memory.*sonicmoe-hf merge"
        ):
            merge()
    return held, found, {}


@pytest.mark.parametrize(("sizes", "format"), rest_pinned([(APART, "nf4"), (SHARED, "mxfp4"), (APART, None)]))
def test_ranks_hold_one_ranks_factors_and_save_them_whole(ranks, sizes, format, tmp_path):
    build("qwen3_moe", **SIZES).save_pretrained(tmp_path / "base")
    results = ranks.run(held_and_saved, str(tmp_path), sizes, format)
    base = sonicmoe_hf.from_pretrained(tmp_path / "base", experts_quantization=format).train()
    model = adapted(base, sizes)
    expected = factors(model)
    for rank, (held, found, _) in enumerate(results):
        assert set(held) == set(expected)
        for name, factor in held.items():
            whole = own_factors(name, expected[name], rank) if ".experts." in name else expected[name]
            assert torch.equal(factor, whole), name
        with torch.no_grad():
            logits = model(**batch(**OWN_BATCH[rank if sizes == APART else 0])).logits
        for one in found:
            assert_all_close({"logits": one}, {"logits": logits}, 1e-5, PARTIAL_SUMS)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    whole = {name.replace(".default", ""): factor for name, factor in expected.items()}
    assert set(saved) == set(whole) and all(torch.equal(saved[name], factor) for name, factor in whole.items())
    if sizes == SHARED:
        for name, weight in packed_in(model.merge_and_unload()).items():
            parts = [merged[name] for _, _, merged in results]
            assert torch.equal(torch.cat(parts), weight.dequantize()), "rounded by the numbers of all experts"


def trainer_of(model, output, steps, batch_size):
    args = TrainingArguments(
        str(output),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        learning_rate=1e-3,
        max_grad_norm=0.1,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_only_model=True,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Examples(24, padding=True))
    sonicmoe_hf.attach(trainer)
    return trainer


def logged(trainer):
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def trained(rank, folder):
    """Compute the logs of two runs, one of four steps and one of its last two, and whether they end alike."""
    ends, logs = [], []
    for resume in (None, f"{folder}/run/checkpoint-2"):
        model = with_lora(
            load(f"{folder}/base", APART, experts_quantization="nf4"), target_modules=["q_proj", "v_proj"]
        )
        trainer = trainer_of(model, f"{folder}/run" if resume is None else f"{folder}/resumed", 4, 2)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{folder}/{'run' if resume is None else 'resumed'}/adapter")
        ends.append(held_factors(model))
        logs.append(logged(trainer))
    return logs, all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_trainer_trains_saves_and_resumes_as_on_one_rank(ranks, tmp_path):
    build("qwen3_moe", **SIZES).save_pretrained(tmp_path / "base")
    results = ranks.run(trained, str(tmp_path))
    model = sonicmoe_hf.from_pretrained(tmp_path / "base", experts_quantization="nf4")
    model = with_lora(model, target_modules=["q_proj", "v_proj"])
    before = {name: factor.detach().clone() for name, factor in factors(model).items()}
    trainer = trainer_of(model, tmp_path / "one", 4, 2 * WORLD)
    trainer.train()
    expected = logged(trainer)
    for (whole_run, resumed), ends_alike in results:
        assert ends_alike and whole_run[2:] == resumed[-2:]
        for found, wanted in zip(whole_run, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-4), "Trainer rounds what it logs"
    assert all(norm > 0.1 for _, norm in expected), "clipped"
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    for name, factor in factors(model).items():
        moved, wanted = saved[name.replace(".default", "")] - before[name], factor - before[name]
        assert_all_close(
            {name: moved}, {name: wanted}, 2e-2, "Adam's first steps make of a small difference a large one"
        )


def compiled_step(rank, folder):
    """Run a step of a model whose layers are compiled and checkpointed; also count what Dynamo left to Python."""
    model = with_lora(load(folder, APART), target_modules=["o_proj"])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compiled = CompileCounter()
    sonicmoe_hf.compile_layers(model, backend=compiled)
    found = step(model, batch(**OWN_BATCH[rank]))
    return found, compiled.frame_count, sum(counters["graph_break"].values())


def test_what_is_beside_experts_that_ranks_share_is_compiled(ranks, tmp_path):
    model = build("deepseek_v3")
    model.save_pretrained(tmp_path)
    sonicmoe_hf.patch_model(model)
    losses, expected = mean_of_ranks(with_lora(model, target_modules=["o_proj"]))
    for loss, (found, frames, breaks) in zip(losses, ranks.run(compiled_step, str(tmp_path)), strict=True):
        assert frames == 5 and not breaks, "attention, norm, MLP or router, and shared experts, of different widths"
        assert_all_close(found, {"loss": loss, **expected}, 1e-5, PARTIAL_SUMS)


PLAIN_PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("base", experts_implementation="eager")
model = PeftModel.from_pretrained(model, "adapter")
with torch.no_grad():
    torch.save(model(**torch.load("inputs.pt")).logits, "logits.pt")
assert "sonicmoe_hf" not in sys.modules
"""


def saved_adapter(rank, folder):
    model = adapted(load(f"{folder}/base", APART), APART)
    model.save_pretrained(f"{folder}/adapter", is_main_process=rank == 0)
    with torch.no_grad():
        return model(**batch(**OWN_BATCH[rank])).logits


@pytest.mark.slow
def test_peft_loads_the_adapter_without_this_package(ranks, tmp_path):
    build("qwen3_moe", **SIZES).save_pretrained(tmp_path / "base")
    logits, _ = ranks.run(saved_adapter, str(tmp_path))
    torch.save(batch(**OWN_BATCH[0]), tmp_path / "inputs.pt")
    subprocess.run([sys.executable, "-c", PLAIN_PEFT], cwd=tmp_path, check=True)
    plain = torch.load(tmp_path / "logits.pt")
    assert_all_close({"logits": plain}, {"logits": logits}, 1e-5, PARTIAL_SUMS)


TINY = ["--steps", "4", "--batch-size", "2", "--sequence-length", "32", "--rank", "2"]


def qlora_example():
    """Load examples/qlora.py, with texts of its own."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))  # it imports another example
    qlora = load_example("qlora")
    qlora.load_texts, qlora.VOCAB_SIZE = lambda arguments: [TEXT] * 40, 300
    return qlora


def trained_by_qlora(rank, folder, *options):
    """Compute the held-out losses of examples/qlora.py."""
    with contextlib.redirect_stdout(io.StringIO()):
        losses = qlora_example().main([*TINY, *options, "--output", folder])
    dist.barrier()
    return losses


def trained_at_random(rank, folder, model, *options):
    """Select the experts that a rank holds in a run of examples/qlora.py with random weights, and whether it has a
    loss."""
    qlora = qlora_example()
    make, models = qlora.random_packed_model, []
    qlora.random_packed_model = lambda *given, **named: models.append(make(*given, **named)) or models[-1]
    with contextlib.redirect_stdout(io.StringIO()):
        metrics = qlora.main([*TINY, "--model", model, "--random", *options, "--output", f"{folder}/random"])
    (model,) = models
    held = {(p.format, tuple(p.shape)) for name, p in model.named_parameters() if name.endswith("down_proj")}
    return held, metrics["train_loss"]


@pytest.mark.slow
def test_the_example_of_qlora_trains_on_ranks_that_share_experts(ranks, tmp_path):
    for losses in ranks.run(trained_by_qlora, str(tmp_path), "--experts-quantization", "mxfp4"):
        assert losses["eval_loss"] < losses["loss_before"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.model.layers[0].mlp.experts.down_proj.shape == (32, 128, 64)


@pytest.mark.slow
def test_the_example_of_qlora_trains_deepseek_v3_from_its_fp8_checkpoint(ranks, tmp_path):
    hub = tmp_path / "hub"
    make(hub, "deepseek_v3", **CUT_OFF, vocab_size=300)
    to_fp8(hub)
    train_tokenizer([TEXT] * 40, 300).save_pretrained(hub)
    options = ("--experts-quantization", "fp8")
    for losses in ranks.run(trained_by_qlora, str(tmp_path), *options, "--model", str(hub), "--learning-rate", "3e-3"):
        assert losses["eval_loss"] < losses["loss_before"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    inputs, logits = batch(), []
    with torch.no_grad():
        before = dense(**inputs).logits
        for model in (merged, PeftModel.from_pretrained(dense, tmp_path / "adapter")):
            logits.append(model(**inputs).logits - before)
    assert_all_close({"logits": logits[0]}, {"logits": logits[1]}, 0.2, "a merged weight is rounded to bf16")

    random = ranks.run(trained_at_random, str(tmp_path), str(hub), "--layers", "3", *options)
    for held, loss in random:
        assert held == {("fp8", (4, 144, 192))} and math.isfinite(loss)
