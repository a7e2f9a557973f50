"""Two gloo ranks that share each sequence, by accelerate's context parallelism, and by DeepSpeed's Ulysses."""

import contextlib
import subprocess
import sys
from types import MethodType, SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.big_modeling import _attach_context_parallel_hooks
from accelerate.utils import DeepSpeedSequenceParallelConfig
from datasets import Dataset
from helpers.adapters import with_lora
from helpers.context_parallel import on_cpus, positions_of_rank
from helpers.models import CONFIGS, OF_64, OTHERS, assert_all_close, batch, build, build_patched
from helpers.parallel import SUMMATION, gather, load_parallel, pretend_to_have_gpus
from helpers.ranks import WORLD
from helpers.training import TILE, Examples, arguments, logs_of
from helpers.trl_trainers import word_tokenizer
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback, LoadBalancing, TokenRoundingCallback
from sonicmoe_hf.layer.holding import has_expert_parallelism
from sonicmoe_hf.routing import handlers
from sonicmoe_hf.trainer.documents import checked_step

pytestmark = pytest.mark.pinned  # accelerate and torch.distributed are what constraints.txt says
FSDP2 = {"version": 2, "cpu_ram_efficient_loading": False}
with_deepspeed = pytest.mark.skipif(sys.platform != "linux", reason="the tests' requirements have it on Linux only")
LOSS, BIAS = LoadBalancing(per_layer_loss=0.5), LoadBalancing(bias_update=1e-2)


def shared_sequences():
    """Make options of a Trainer, which writes to the last of them."""
    return {"fsdp": True, "fsdp_config": FSDP2, "parallelism_config": ParallelismConfig(cp_size=WORLD)}


def model_of(kind):
    """Make a patched model: with adapters, of packed experts or not; or one of a family that trains whole."""
    if kind in CONFIGS | OTHERS:
        return build_patched(kind, attn_implementation="sdpa")
    model = build("qwen3_moe", **OF_64["qwen3_moe"], attn_implementation="sdpa")
    if kind == "fused loss":
        model.forward = MethodType(fused_loss, model)
    if kind == "packed":
        sonicmoe_hf.quantize_experts(model, "nf4")
    sonicmoe_hf.patch_model(model)
    return with_lora(model, target_modules=["q_proj"])


class FusedLoss(torch.autograd.Function):
    """A loss that computes its gradient in forward, as Liger's does."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, count):
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            logits = torch.nn.functional.linear(hidden, weight.detach()).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / count
            (ctx.gradient,) = torch.autograd.grad(loss, hidden)
        return loss.detach()

    @staticmethod
    def backward(ctx, scale):
        return scale * ctx.gradient, None, None, None


def fused_loss(self, input_ids, shift_labels=None, labels=None, num_items_in_batch=None, chunk_mem_const=0, **inputs):
    """Compute the loss as Liger's forward does, which reads the head's weight and does not call the head."""
    hidden = self.model(input_ids, **inputs).last_hidden_state
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
    return CausalLMOutput(loss=FusedLoss.apply(hidden, self.lm_head.weight, targets, num_items_in_batch))


fused_loss.__module__ = "liger_kernel.transformers.model.qwen3_moe"


def trained(kind, folder, callbacks=(), rate=0.05, **options):
    """Train, and return the Trainer's logs, its weights with the routers' biases, and the rows of each expert. padded:
    sequences of other lengths, summed over micro-batches, and evaluated."""
    model, counts, is_padded = model_of(kind), ExpertLoadCallback(), kind == "padded"
    options["gradient_accumulation_steps"] = 1 + is_padded
    if kind == "by TRL":
        from trl import SFTConfig, SFTTrainer  # which a machine for the GPU tests may lack

        options |= {"kind": SFTConfig, "bf16": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    args = arguments(folder, max_steps=3, learning_rate=rate, gradient_checkpointing=True, **options)
    if "fsdp" in options:
        pretend_to_have_gpus()
    examples, more = Examples(16, is_padded), {}
    count, length = examples.columns["input_ids"].shape
    examples.columns.setdefault("position_ids", torch.arange(length).expand(count, length))  # for Ulysses
    if kind == "by TRL":
        more = {"processing_class": word_tokenizer()}
        examples = Dataset.from_dict({name: column.tolist() for name, column in examples.columns.items()})
    trainer = (SFTTrainer if more else Trainer)(
        model=model, args=args, train_dataset=examples, callbacks=[counts, *callbacks], **more
    )
    sonicmoe_hf.attach(trainer)
    trainer.train()
    learned = {n: gather(p.detach()) for n, p in trainer.model.named_parameters() if p.requires_grad}
    learned |= {n: b for n, b in trainer.model.named_buffers() if n.endswith("e_score_correction_bias")}
    losses = [log["loss"] for log in logs_of(trainer)]
    if is_padded:
        losses.append(trainer.evaluate(examples)["eval_loss"])
    return losses, learned, [log["rows_per_expert"] for log in counts.history]


def trained_in_parts(rank, *args):
    with on_cpus():
        return trained(*args, **shared_sequences())


@mock.patch.dict("os.environ", DS_ACCELERATOR="cpu")
def trained_by_heads(rank, *args):
    """Train with Ulysses, whose attention gathers a sequence and shares the heads, and undo what DeepSpeed registers."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    deepspeed.ops.__compatible_ops__ = {}  # else it compiles an all-reduce over shared memory, in C++
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
    }
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa", sp_seq_length_is_variable=True)
    parallelism = ParallelismConfig(sp_size=WORLD, sp_backend="deepspeed", sp_handler=handler)
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        return trained(*args, deepspeed=config, parallelism_config=parallelism)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
        parallel_state_sp._release_sequence_parallel_groups()


def assert_trained_alike(results, expected):
    losses, learned, rows = expected
    for found_losses, found, found_rows in results:
        assert found_losses == pytest.approx(losses, rel=1e-5), SUMMATION
        assert_all_close(found, learned, 1e-5, SUMMATION)
        assert found_rows == rows


@pytest.mark.parametrize(
    ("kind", "callbacks"),
    [
        ("dense", ()),
        pytest.param("deepseek_v3", (BIAS,), marks=pytest.mark.slow),
        pytest.param("packed", (), marks=pytest.mark.slow),
        pytest.param("padded", (), marks=pytest.mark.slow),
        pytest.param("by TRL", (), marks=pytest.mark.slow),
        pytest.param("fused loss", (), marks=pytest.mark.slow),
    ],
)
def test_context_parallelism_trains_and_counts_as_one_rank_does(ranks, kind, callbacks, tmp_path):
    """FSDP2, adapters or all weights, gradient checkpointing, and biases by the load of all parts of a sequence."""
    expected = trained(kind, str(tmp_path), callbacks)
    assert_trained_alike(ranks.run(trained_in_parts, kind, str(tmp_path), callbacks), expected)


@with_deepspeed
@pytest.mark.parametrize(
    ("kind", "callbacks"), [("dense", ()), pytest.param("glm4_moe", (BIAS,), marks=pytest.mark.slow)]
)
def test_ulysses_trains_and_counts_as_one_rank_does(ranks, kind, callbacks, tmp_path):
    """ZeRO-2. DeepSpeed's gradients are those of one rank times the ranks, as with Transformers' own experts."""
    expected = trained(kind, str(tmp_path), callbacks, WORLD * 0.05)
    assert_trained_alike(ranks.run(trained_by_heads, kind, str(tmp_path), callbacks), expected)


@pytest.mark.slow
def test_the_balancing_loss_is_that_of_each_ranks_part(ranks, tmp_path):
    """Weighted by the part's share of the labels, as micro-batches are."""
    length = batch()["input_ids"].shape[1]
    parts = [positions_of_rank(rank, WORLD, length) for rank in range(WORLD)]
    labels = [len(part) - int(length - 1 in part) for part in parts]

    def of_parts(scores_TE, top_k_index_TK, valid_T, of_one=handlers.layer_loss):
        scores, index = scores_TE.unflatten(0, (-1, length)), top_k_index_TK.unflatten(0, (-1, length))
        losses = [of_one(scores[:, part].flatten(0, 1), index[:, part].flatten(0, 1), None) for part in parts]
        return sum(count * loss for count, loss in zip(labels, losses)) / sum(labels)

    with mock.patch.object(handlers, "layer_loss", of_parts):
        expected = trained("dense", str(tmp_path), (LOSS,))
    assert_trained_alike(ranks.run(trained_in_parts, "dense", str(tmp_path), (LOSS,)), expected)


@pytest.mark.parametrize("train", [trained_in_parts, pytest.param(trained_by_heads, marks=with_deepspeed)])
def test_each_rank_rounds_the_tokens_of_its_part(ranks, train, tmp_path):
    rounding = TokenRoundingCallback(tile=TILE, min_tiles_per_expert=1)
    for losses, _, rows in ranks.run(train, "dense", str(tmp_path), (rounding,)):
        assert len(losses) == 3
        assert all(count % TILE == 0 for log in rows for layer in log.values() for count in layer), "sums of two tiles"


def replayed_in_parts(rank):
    """Record and replay the part of this rank, and what the whole sequence's experts are for it."""
    model, inputs = build_patched("qwen3_moe", attn_implementation="sdpa"), batch()
    positions = positions_of_rank(rank, WORLD, inputs["input_ids"].shape[1])
    with sonicmoe_hf.record_routing(model) as whole, torch.no_grad():
        model(**inputs)
    part = {name: column[:, positions] for name, column in inputs.items()} | {"position_ids": positions[None]}
    part.pop("labels")
    (experts,) = (torch.stack([index for (index,) in call.values()]) for call in whole.calls)
    of_part = experts.unflatten(1, (len(inputs["input_ids"]), -1))[:, :, positions].flatten(1, 2)
    with sonicmoe_hf.replay_routing(model, of_part), sonicmoe_hf.record_routing(model) as found:
        model(**part)
    assert all(torch.equal(index, given) for (index,), given in zip(found.calls[0].values(), of_part, strict=True))
    too_many = pytest.raises(ValueError, match="the replayed routing of a layer has shape")
    with too_many, sonicmoe_hf.replay_routing(model, experts):
        model(**part)


def test_a_rank_replays_the_experts_of_its_positions_and_refuses_those_of_all(ranks):
    ranks.run(replayed_in_parts)


# what does not work


def with_shared_experts(rank, folder):
    pretend_to_have_gpus()
    model = load_parallel(folder, "ours")
    with pytest.raises(ValueError, match=r"ParallelismConfig total_size \(4\) does not match num_processes \(2\)"):
        Trainer(model, arguments(folder, **shared_sequences()), train_dataset=Examples(4))


@pytest.mark.skipif(not has_expert_parallelism(), reason="Transformers 5.23")
def test_expert_parallelism_over_the_same_ranks_is_an_error(ranks, tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    ranks.run(with_shared_experts, str(tmp_path))


class Documents(Examples):
    """Four in each sequence, as a collator without padding packs them."""

    def __init__(self, count, padding):
        super().__init__(count)
        del self.columns["attention_mask"]
        self.columns["position_ids"] = torch.arange(6).repeat(count, 4)


def with_documents(rank, train, *args):
    with (
        mock.patch.dict(globals(), Examples=Documents),
        pytest.raises(ValueError, match="begin anew inside a sequence"),
    ):
        train(rank, "dense", *args)


@pytest.mark.parametrize(
    "train", [trained_in_parts, pytest.param(trained_by_heads, marks=[with_deepspeed, pytest.mark.slow])]
)
def test_documents_that_attention_would_not_keep_apart_are_an_error(ranks, train, tmp_path):
    ranks.run(with_documents, train, str(tmp_path))


@pytest.mark.parametrize("length", [6, 12])
@pytest.mark.parametrize(("option", "rank"), [("cp", 0), ("cp", 1), ("sp", 0), ("sp", 1)])
def test_documents_are_told_from_a_sequence_that_is_one(option, rank, length):
    """Positions that begin anew tell them: in a whole sequence of twelve (cp), or in a rank's half of it (sp)."""
    whole = torch.arange(12).remainder(length).expand(2, 12)
    config = SimpleNamespace(cp_enabled=option == "cp", sp_enabled=option == "sp", sp_size=WORLD)
    config.sp_handler = SimpleNamespace(sp_attn_implementation="sdpa")
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=config))
    inputs = {"position_ids": whole if option == "cp" else whole.chunk(WORLD, 1)[rank]}
    has_two = length == 6 and (option == "cp" or rank == 1)
    words = rf"{option}_size.*give each document a sequence of its own"
    with mock.patch.object(torch.distributed, "get_rank", return_value=rank):
        with pytest.raises(ValueError, match=words) if has_two else contextlib.nullcontext():
            assert checked_step(trainer, lambda model, given: given, None, inputs) is inputs
        apart = whole.reshape(-1, length)
        inputs = {"position_ids": apart if option == "cp" else apart.chunk(WORLD, 1)[rank]}
        assert checked_step(trainer, lambda model, given: given, None, inputs) is inputs


def test_torch_sinks_is_an_error_by_name_under_both(tmp_path):
    model = build_patched("gpt_oss", attn_implementation="torch_sinks")
    trainer = Trainer(model, arguments(str(tmp_path)), train_dataset=Examples(4))
    trainer.accelerator.state.parallelism_config = mock.Mock(cp_enabled=True, cp_backend="torch")
    with pytest.raises(ValueError, match="only with SDPA attention, you are using torch_sinks"):
        trainer._prepare_context_parallel_inputs(model, batch())
    with pytest.raises(ValueError, match=r"does not support attention layers of type \['sliding_attention'\]"):
        _attach_context_parallel_hooks(model)
    with pytest.raises(ValueError, match="Invalid sp_attn_implementation: torch_sinks"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="torch_sinks")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_two_gpus_give_the_gradients_of_one(attention, tmp_path):
    """The benchmark checks the same, here of a small model; by torch's ring attention in bf16."""
    options = []
    if attention == "ulysses":
        pytest.importorskip("deepspeed")
        options = ["--ulysses", "--experts", "bf16"]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    small = ["--tiny", "--layers", "2", "--lengths", "256", "--csv", str(tmp_path / "long.csv")]
    subprocess.run([*ranks, "-m", "benchmarks.step.long", *small, *options], check=True, timeout=180)
