"""LoRA on experts that ranks share: factors are sharded with their experts, and all is as on one rank with all of them."""

import contextlib
import io
import sys

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from helpers.adapters import with_lora
from helpers.examples import EXAMPLES, TEXT
from helpers.examples import load as load_example
from helpers.models import assert_all_close, batch, build
from helpers.parallel import OWN_BATCH
from helpers.ranks import WORLD, Ranks
from helpers.training import Examples
from peft import PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from test_expert_parallel import APART, PARTIAL_SUMS, SHARED, load
from test_expert_parallel import pytestmark as pytestmark
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import sonicmoe_hf
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.errors import UnsupportedModelError

SIZES = {"hidden_size": 64, "moe_intermediate_size": 128}
RANK = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def adapted(model, sizes):
    """With adapters on experts, and on attention that tensor parallelism does not split, in which PEFT draws both factors."""
    torch.manual_seed(5)
    modules = [] if sizes == SHARED else ["q_proj", "v_proj"]
    return get_peft_model(model, sonicmoe_hf.lora_config(model, RANK, init_lora_weights=False, target_modules=modules))


def factors(model):
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


def own_factors(whole, rank):
    """What of one rank's factors two ranks hold."""
    if "lora_A" in whole[0]:
        return whole[1].view(8, RANK, -1)[4 * rank : 4 * rank + 4].flatten(0, 1)
    return whole[1].view(-1, RANK, 8)[..., 4 * rank : 4 * rank + 4].flatten(1)


def held_and_saved(rank, folder, sizes, format):
    model = adapted(load(f"{folder}/base", sizes, experts_quantization=format), sizes)
    held = {
        name: getattr(factor, "to_local", lambda f=factor: f)().detach() for name, factor in factors(model).items()
    }
    inputs = batch(**OWN_BATCH[rank if sizes == APART else 0])
    found = [model(**inputs).logits.detach()]
    model.save_pretrained(f"{folder}/adapter", is_main_process=rank == 0)
    dist.barrier()
    base = load(f"{folder}/base", sizes, experts_quantization=format)
    reloaded = PeftModel.from_pretrained(base, f"{folder}/adapter", is_trainable=True)
    found.append(reloaded(**inputs).logits.detach())
    wrapper = next(module for module in model.modules() if isinstance(module, ParamWrapper))
    with pytest.raises(UnsupportedModelError, match="sonicmoe-hf merge"):
        wrapper.merge()
    return held, found


@pytest.mark.parametrize(("sizes", "format"), [(SHARED, "mxfp4"), (APART, "nf4"), (APART, None)])
def test_ranks_hold_one_ranks_factors_and_save_them_whole(ranks, sizes, format, tmp_path):
    build("qwen3_moe", **SIZES).save_pretrained(tmp_path / "base")
    results = ranks.run(held_and_saved, str(tmp_path), sizes, format)
    base = sonicmoe_hf.from_pretrained(tmp_path / "base", experts_quantization=format).train()
    model = adapted(base, sizes)
    expected = factors(model)
    for rank, (held, found) in enumerate(results):
        assert set(held) == set(expected)
        for name, factor in held.items():
            whole = own_factors((name, expected[name]), rank) if ".experts." in name else expected[name]
            assert torch.equal(factor, whole), name
        with torch.no_grad():
            logits = model(**batch(**OWN_BATCH[rank if sizes == APART else 0])).logits
        for one in found:
            assert_all_close({"logits": one}, {"logits": logits}, 1e-5, PARTIAL_SUMS)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    whole = {name.replace(".default", ""): factor for name, factor in expected.items()}
    assert set(saved) == set(whole) and all(torch.equal(saved[name], factor) for name, factor in whole.items())


def trainer_of(model, output, steps, batch_size):
    args = TrainingArguments(
        str(output), max_steps=steps, per_device_train_batch_size=batch_size, learning_rate=1e-3, max_grad_norm=0.1,
        logging_steps=1, save_strategy="steps", save_steps=2, save_only_model=True, report_to="none", use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=Examples(24, padding=True))
    sonicmoe_hf.attach(trainer)
    return trainer


def logged(trainer):
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def trained(rank, folder):
    """What two runs log, one of four steps and one of its last two, and whether they end alike."""
    AcceleratorState._reset_state(True)
    ends, logs = [], []
    for resume in (None, f"{folder}/run/checkpoint-2"):
        model = with_lora(
            load(f"{folder}/base", APART, experts_quantization="nf4"), target_modules=["q_proj", "v_proj"]
        )
        trainer = trainer_of(model, f"{folder}/run" if resume is None else f"{folder}/resumed", 4, 2)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{folder}/{'run' if resume is None else 'resumed'}/adapter")
        ends.append({name: getattr(p, "to_local", lambda p=p: p)().detach() for name, p in factors(model).items()})
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


def trained_by_qlora(rank, folder):
    """The held-out losses of examples/qlora.py, and the shapes of what a rank holds in a run with random weights."""
    AcceleratorState._reset_state(True)
    sys.path.insert(0, str(EXAMPLES))  # it imports another example
    qlora = load_example("qlora")
    qlora.load_texts, qlora.VOCAB_SIZE = lambda arguments: [TEXT] * 40, 300
    tiny = ["--steps", "4", "--batch-size", "2", "--sequence-length", "32", "--rank", "2"]
    with contextlib.redirect_stdout(io.StringIO()):
        losses = qlora.main([*tiny, "--experts-quantization", "mxfp4", "--output", folder])
        dist.barrier()
        make, models = qlora.random_packed_model, []
        qlora.random_packed_model = lambda *given, **options: models.append(make(*given, **options)) or models[-1]
        merged = f"{folder}/merged"
        qlora.main([*tiny, "--model", merged, "--random", "--layers", "1", "--output", f"{folder}/random"])
    (model,) = models
    held = {type(p): tuple(p.shape) for name, p in model.named_parameters() if name.endswith("down_proj")}
    return losses, held


def test_the_example_of_qlora_trains_on_ranks_that_share_experts(ranks, tmp_path):
    for losses, held in ranks.run(trained_by_qlora, str(tmp_path)):
        assert losses["eval_loss"] < losses["loss_before"]
        assert held == {PackedWeight: (16, 128, 64)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.model.layers[0].mlp.experts.down_proj.shape == (32, 128, 64)
