"""Two gloo ranks whose weights are gathered for each module's turn: DeepSpeed's ZeRO, and FSDP1 as
accelerate sets it up."""

import contextlib
import io
import os
import sys
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from helpers.adapters import forbid_merging, with_lora
from helpers.context_parallel import on_cpus
from helpers.examples import EXAMPLES
from helpers.examples import load as load_example
from helpers.marks import rest_pinned
from helpers.models import CONFIGS, assert_all_close, batch, build, build_patched
from helpers.parallel import OWN_BATCH, SUMMATION, assert_mean_of_ranks, mean_of_ranks, pretend_to_have_gpus
from helpers.ranks import WORLD
from helpers.training import POLICY, TILE, Examples, Watch, arguments, checkpoint_layers, logs_of
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from transformers import AutoModelForCausalLM, Trainer
from transformers.distributed.fsdp import update_fsdp_plugin_peft
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config

import sonicmoe_hf
from sonicmoe_hf import TokenRoundingCallback
from sonicmoe_hf.tools.demo.corpus import standard_library

with_deepspeed = pytest.mark.skipif(sys.platform != "linux", reason="the tests' requirements have it on Linux only")


# DeepSpeed


def zero(stage):
    """Make a config under which weights are gathered for a module's turn and freed after it, small ones too."""
    at_once = dict.fromkeys(("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters"), 0)
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **{f"stage3_{name}": value for name, value in at_once.items()}},
    }


def import_deepspeed():
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # else it compiles an all-reduce over shared memory, in C++
    return deepspeed


def start_engine(model, stage):
    engine, *_ = import_deepspeed().initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config=zero(stage),
        dist_init_required=False,
    )
    return engine


def zero_gradients(model):
    from deepspeed.utils import safe_get_full_grad

    found = {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
    return {name: gradient.float() for name, gradient in found.items() if gradient is not None}


def zero_step(rank, family, stage, routing, patch_last, checkpointing, lora):
    model = build(family) if patch_last else build_patched(family, routing)
    if lora:
        model = with_lora(model)
        model.enable_input_require_grads()
    engine = start_engine(checkpoint_layers(model, checkpointing), stage)
    if patch_last:
        sonicmoe_hf.patch_model(engine, routing)
    watch = Watch(model)
    with forbid_merging() if lora else contextlib.nullcontext():
        loss = engine(**batch(**OWN_BATCH[rank])).loss
    assert set(watch.rounded()) == {routing is not None}
    assert {p.numel() == 0 for p in model.parameters()} == {stage == 3}, "the weights are freed after their turn"
    engine.backward(loss)
    found = loss.detach(), zero_gradients(model)
    engine.destroy()
    return found


@with_deepspeed
@pytest.mark.parametrize(
    "family, stage, routing, patch_last, checkpointing, lora",
    [
        ("qwen3_moe", 3, POLICY, True, None, False),
        ("gpt_oss", 3, None, True, "non_reentrant", True),
        ("olmoe", 3, POLICY, False, "reentrant", False),
        ("deepseek_v3", 2, POLICY, False, None, False),
        *rest_pinned(
            [
                *((family, 3, routing, False, None, False) for family in CONFIGS for routing in (None, POLICY)),
                ("gpt_oss", 3, None, True, None, False),
                ("gpt_oss", 3, POLICY, True, "non_reentrant", False),
                ("gpt_oss", 2, None, True, None, False),
                ("qwen3_moe", 3, None, False, None, True),
                ("qwen3_moe", 3, None, False, "reentrant", True),
                ("qwen3_moe", 2, None, True, None, True),
            ],
            0,
        ),
    ],
)
def test_zero_gives_the_unsharded_models_loss_and_gradients(
    ranks, family, stage, routing, patch_last, checkpointing, lora
):
    """Patched before the engine is made or after it, checkpointed, and with the factors of adapted experts gathered."""
    model = build_patched(family, routing)
    results = ranks.run(zero_step, family, stage, routing, patch_last, checkpointing, lora)
    assert_mean_of_ranks(with_lora(model) if lora else model, results)


@mock.patch.dict(os.environ)
def trained(rank, folder, checkpoint, options, wrapper):
    """Train on these ranks by a Trainer, and return its logs; a callback patches the model once the
    Trainer has prepared it."""
    args = arguments(folder, max_steps=3, learning_rate=0.05, **options)
    if "deepspeed" in options:
        import_deepspeed()
    if "fsdp" in options:
        pretend_to_have_gpus()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)  # after `args`: sharded as it loads
    assert {p.numel() == 0 for p in model.parameters()} == {is_deepspeed_zero3_enabled()}
    callbacks = [TokenRoundingCallback(tile=TILE, start=1)]
    trainer = Trainer(model, args, train_dataset=Examples(32, padding=True), callbacks=callbacks)
    sonicmoe_hf.attach(trainer)
    trainer.train()
    assert trainer.args.world_size == WORLD and type(trainer.model_wrapped).__name__ == wrapper
    if "deepspeed" in options:
        trainer.model_wrapped.destroy()
        unset_hf_deepspeed_config()  # else every model built from now on is sharded
    return [
        [
            log["loss"],
            log["moe/load_cv"],
            *(log.get(f"moe/rows_{key}", 0) for key in ("added", "dropped")),
        ]  # of rounding
        for log in logs_of(trainer)
    ]


def assert_trained_alike(actual, expected):
    assert len(expected[0]) == 3 and expected[0][0][2:] == [0, 0] and all(log[2] > 0 for log in expected[0][1:])
    for rank in range(WORLD):
        for log, expected_log in zip(actual[rank], expected[rank]):
            assert log == pytest.approx(expected_log, rel=1e-5), SUMMATION


@with_deepspeed
@pytest.mark.parametrize("layout", rest_pinned(["hub", "native"]))
def test_the_trainer_rounds_and_counts_with_zero_3_as_with_zero_2(ranks, tmp_path, layout):
    checkpoint = tmp_path / "hub"
    build("qwen3_moe").save_pretrained(checkpoint)
    if layout == "native":
        sonicmoe_hf.convert_checkpoint(checkpoint, tmp_path / "native", layout="native")
        checkpoint = tmp_path / "native"
    # ZeRO-2 keeps weights whole. Without DeepSpeed the Trainer itself is 3e-4 off after two updates, eager experts too
    expected, actual = (
        ranks.run(trained, str(tmp_path), str(checkpoint), {"deepspeed": zero(stage)}, "DeepSpeedEngine")
        for stage in (2, 3)
    )
    assert_trained_alike(actual, expected)


def refused(rank, stage):
    import_deepspeed()  # as TrainingArguments(deepspeed=...) does, before a model is loaded
    model = sonicmoe_hf.quantize_experts(build("qwen3_moe", hidden_size=64, moe_intermediate_size=64), "nf4")
    words = r"DeepSpeed does not take packed experts; replicate them .*, or load the model in bf16 for DeepSpeed"
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match=words):
        start_engine(with_lora(model), stage)
    model = build_patched("qwen3_moe")
    engine = start_engine(with_lora(model), stage)
    engine(**batch())
    engine.destroy()


@with_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_is_not_started_with_packed_experts(ranks, stage):
    ranks.run(refused, stage)


# FSDP1


def fsdp_gradients(model):
    """Gather the gradients of whole parameters, zero where there is none."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_() if parameter.grad is None else parameter.copy_(parameter.grad)
    with FullyShardedDataParallel.summon_full_params(model):
        named = model.named_parameters()
        return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in named}


def fsdp_step(
    rank, family, routing, use_orig_params, patch_last, checkpointing=None, units=None, precision=None, lora=False
):
    pretend_to_have_gpus()
    model = checkpoint_layers(build(family) if patch_last else build_patched(family, routing), checkpointing)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        use_orig_params=use_orig_params,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=units,
        mixed_precision_policy=precision,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if lora:
        model = with_lora(model, target_modules=["q_proj"])
        update_fsdp_plugin_peft(model, accelerator)  # as the Trainer does
    prepared = accelerator.prepare(model)
    if patch_last:
        sonicmoe_hf.patch_model(prepared, routing)
    watch = Watch(prepared)
    with forbid_merging() if lora else contextlib.nullcontext():
        loss = prepared(**batch(**OWN_BATCH[rank])).loss
    accelerator.backward(loss)
    wrapped = [module for module in prepared.modules() if isinstance(module, FullyShardedDataParallel)]
    assert len(wrapped) >= 1 + model.config.num_hidden_layers and set(watch.rounded()) == {routing is not None}
    return loss.detach(), fsdp_gradients(prepared)


@pytest.mark.parametrize("family", rest_pinned(CONFIGS))
@pytest.mark.parametrize("routing", [None, POLICY], ids=["top_k", "token_rounding"])
def test_fsdp1_gives_the_unsharded_models_loss_and_gradients(ranks, family, routing):
    model = build_patched(family, routing)
    losses, expected = mean_of_ranks(model)
    expected = {name: expected.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()}
    for use_orig_params in (True, False):
        for patch_last, checkpointing in ((False, None), (True, None), (False, "reentrant"), (True, "non_reentrant")):
            results = ranks.run(fsdp_step, family, routing, use_orig_params, patch_last, checkpointing)
            for own_loss, (loss, actual) in zip(losses, results):
                assert_all_close({"loss": loss, **actual}, {"loss": own_loss, **expected}, 1e-5, SUMMATION)


@pytest.mark.parametrize("patch_last", [False, True])
def test_fsdp1_by_pefts_wrap_policy_gathers_the_factors_of_adapted_experts(ranks, patch_last):
    model = with_lora(build_patched("qwen3_moe", None), target_modules=["q_proj"])
    losses, expected = mean_of_ranks(model)
    results = ranks.run(fsdp_step, "qwen3_moe", None, True, patch_last, None, None, None, True)
    for own_loss, (loss, actual) in zip(losses, results):
        learned = {name: tensor for name, tensor in actual.items() if name in expected}
        assert_all_close({"loss": loss, **learned}, {"loss": own_loss, **expected}, 1e-5, SUMMATION)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1s_mixed_precision_leaves_the_rounded_weights_as_they_are(ranks, use_orig_params):
    layers, experts = ["DeepseekV3DecoderLayer"], ["DeepseekV3DecoderLayer", "DeepseekV3Experts"]
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    # arguments of a unit are then cast to bf16, and the family's routing weights are fp32
    within, apart = (
        ranks.run(fsdp_step, "deepseek_v3", POLICY, use_orig_params, False, None, units, precision)
        for units in (layers, experts)
    )
    for (loss, gradients), (same_loss, same_gradients) in zip(within, apart):
        assert_all_close({"loss": loss, **gradients}, {"loss": same_loss, **same_gradients}, 1e-6, SUMMATION)


def test_the_trainer_rounds_and_counts_with_fsdp1_as_with_ddp(ranks, tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path / "hub")
    config = {"version": 1, "sync_module_states": False}  # accelerate refuses to broadcast weights between CPUs
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": config}
    expected, actual = (
        ranks.run(trained, str(tmp_path), str(tmp_path / "hub"), options, wrapper)
        for options, wrapper in (({}, "DistributedDataParallel"), (fsdp, "FullyShardedDataParallel"))
    )
    assert_trained_alike(actual, expected)


# the recipes of docs/recipes.md


def launch_environment(config):
    """List the variables that `accelerate launch --config_file config` sets for its processes."""
    options, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(config), "-"]))
    environment = prepare_multi_gpu_env(options)
    return {
        name: value for name, value in environment.items() if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))
    }


@mock.patch.dict(os.environ)
def finetuned(rank, options, environment):
    """Run examples/finetune.py on these ranks. Returns the held-out loss and the Trainer's wrapped model; whether it
    prints."""
    os.environ.update(environment)
    if "--deepspeed" in options:
        import_deepspeed()
    finetune, texts = load_example("finetune"), standard_library()[0][:4]
    finetune.standard_library = lambda: (texts, [])
    make_arguments, make_trainer, trainers = finetune.training_arguments, finetune.build_trainer, []

    def training_arguments(arguments):
        found = make_arguments(arguments)
        if environment:
            pretend_to_have_gpus()
        return found

    finetune.training_arguments = training_arguments
    finetune.build_trainer = lambda *args: trainers.append(make_trainer(*args)) or trainers[-1]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        loss = finetune.main(options)["eval_loss"]
    wrapper = type(trainers[0].model_wrapped).__name__
    if "--deepspeed" in options:
        trainers[0].model_wrapped.destroy()
        unset_hf_deepspeed_config()
    return loss, wrapper, "held-out loss" in printed.getvalue()


@pytest.mark.slow
@with_deepspeed
def test_the_example_trains_the_same_with_fsdp2_by_its_config_with_zero_3_and_with_ddp(ranks, tmp_path):
    def run(name, *more, **environment):
        options = ["--steps", "2", "--batch-size", "2", "--sequence-length", "32", "--held-out-blocks", "4"]
        options += ["--learning-rate", "1e-3"]
        results = ranks.run(finetuned, [*options, "--output", str(tmp_path / name), *more], environment)
        assert results[0][:2] == results[1][:2] and [printed for *_, printed in results] == [True, False]
        return *results[0][:2], load_file(tmp_path / name / "model.safetensors")

    run("start")  # the small model, for the others to begin with
    start = ("--model", str(tmp_path / "start"))
    expected, wrapper, weights = run("ddp", *start)
    assert wrapper == "DistributedDataParallel"
    fsdp2 = run("fsdp2", *start, **launch_environment(EXAMPLES / "fsdp2.yaml"))
    zero3 = run("zero3", *start, "--deepspeed", str(EXAMPLES / "zero3.json"))
    wrappers = ["FSDPQwen3MoeForCausalLM", "DeepSpeedEngine"]
    for (loss, wrapper, same_weights), expected_wrapper in zip((fsdp2, zero3), wrappers):
        assert wrapper == expected_wrapper and loss == pytest.approx(expected, rel=1e-5), SUMMATION
        same_weights = {name: same_weights[name] for name in weights}  # FSDP2 saves tied weights twice
        assert_all_close(same_weights, weights, 1e-2, "Adam's first steps make of a small difference a large one")


def finetuned_in_parts(rank, options, environment):
    with on_cpus():
        return finetuned(rank, options, environment)


@pytest.mark.slow
def test_the_example_trains_the_same_with_context_parallelism_by_its_config_and_with_ddp(ranks, tmp_path):
    """Two sequences a step: one on each rank, or half of both."""
    options = ["--steps", "2", "--sequence-length", "32", "--held-out-blocks", "4", "--output", str(tmp_path)]
    options += ["--per-layer-loss", "1e-9"]  # the balancing loss is that of a rank's tokens
    environment = launch_environment(EXAMPLES / "context_parallel.yaml")
    parts = ranks.run(finetuned_in_parts, [*options, "--batch-size", "2"], environment)
    whole = ranks.run(finetuned, [*options, "--batch-size", "1"], {})
    assert [loss for loss, *_ in parts] == pytest.approx([loss for loss, *_ in whole], rel=1e-5), SUMMATION


def written_by_qlora(rank, folder):
    """List the folders in which this rank wrote, how many lines it printed, and the held-out loss."""
    qlora, written = load_example("qlora"), []
    qlora.load_texts = lambda arguments: standard_library()[0][:2]
    qlora.VOCAB_SIZE, merge, make = 300, sonicmoe_hf.merge_adapter, qlora.make_small_model
    qlora.make_small_model = lambda texts, to: written.append(to.name) or make(texts, to)

    def merge_adapter(base, adapter, to, *more):
        written.append(to.name)
        return merge(base, adapter, to, *more)

    options = ["--steps", "1", "--batch-size", "1", "--sequence-length", "32", "--rank", "2", "--output", folder]
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(sonicmoe_hf, "merge_adapter", merge_adapter),
    ):
        loss = qlora.main([*options, "--replicate"])["eval_loss"]
    return written, len(printed.getvalue().splitlines()), loss


@pytest.mark.slow
def test_the_example_of_qlora_is_written_and_merged_by_one_rank(ranks, tmp_path):
    (written, printed, loss), (nothing, silence, same_loss) = ranks.run(written_by_qlora, str(tmp_path))
    assert written == ["base", "merged"] and printed and (tmp_path / "merged" / "model.safetensors").is_file()
    assert nothing == [] and silence == 0 and same_loss == loss
