"""Two gloo ranks: DDP, FSDP2, expert and tensor parallelism."""

import contextlib
import functools

import pytest
import torch
from accelerate import Accelerator
from helpers.adapters import EXPERTS, forbid_merging, with_lora
from helpers.marks import rest_pinned, rest_slow
from helpers.models import assert_all_close, batch, build, build_patched, loss_and_gradients, patching
from helpers.parallel import (
    HAS_EP_SIZE,
    OWN_BATCH,
    PARTIAL_SUMS,
    assert_mean_of_ranks,
    load_parallel,
    train_and_evaluate,
    whole_gradients,
)
from helpers.ranks import WORLD
from helpers.training import CHECKPOINTING, POLICY, Watch, checkpoint_layers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sonicmoe_hf
from sonicmoe_hf.layer.holding import Holder, has_expert_parallelism, holding_of
from sonicmoe_hf.patching.moe_layers import find_layers

# DDP and FSDP2

ODD = {  # experts, their size and adapters' rank: none of them divides over two ranks
    "qwen3_moe": {"num_experts": 7, "moe_intermediate_size": 15},
    "gpt_oss": {"num_local_experts": 7, "intermediate_size": 15},
}


def made(family, routing=POLICY, is_odd=False, is_adapted=False):
    model = build_patched(family, routing, **(ODD[family] if is_odd else {}))
    return with_lora(model, target_modules=["q_proj"], r=3) if is_adapted else model


def step(
    rank, kind, family, routing=POLICY, checkpointing=None, patch_last=False, own=False, precision=None, **changes
):
    """Run one step on each rank's batch. own: the experts are a unit of their own."""
    model = build(family) if patch_last else made(family, routing, **changes)
    checkpoint_layers(model, checkpointing)
    if kind == "DDP":
        model = Accelerator(cpu=True).prepare(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        for layer in (model.get_base_model() if changes.get("is_adapted") else model).model.layers:
            if own and hasattr(layer.mlp, "experts"):
                fully_shard(layer.mlp.experts, mp_policy=policy)
            fully_shard(layer, mp_policy=policy)
            assert type(layer).__name__.startswith("FSDP")
        fully_shard(model, mp_policy=policy)
    if patch_last:
        sonicmoe_hf.patch_model(model, routing)
    watch = Watch(model)
    with forbid_merging() if changes.get("is_adapted") else contextlib.nullcontext():
        loss = model(**batch(**OWN_BATCH[rank])).loss
        loss.backward()
    assert type(model).__name__.startswith({"DDP": "DistributedDataParallel", "FSDP2": "FSDP"}[kind])
    assert {type(layer.experts).__name__.startswith("FSDP") for layer in find_layers(model)} == {own}
    assert set(watch.rounded()) == {routing is not None}
    return loss.detach(), whole_gradients(model)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "DDP", "family": "qwen3_moe"},
        {"kind": "DDP", "family": "gpt_oss"},
        *({"kind": "DDP", "family": "qwen3_moe", "checkpointing": kind} for kind in CHECKPOINTING),
        {"kind": "FSDP2", "family": "olmoe", "patch_last": True, "routing": None},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_every_rank_routes_its_own_tokens_and_gradients_are_averaged(ranks, options):
    expected = build_patched(options["family"], options.get("routing", POLICY))
    assert_mean_of_ranks(expected, ranks.run(step, **options))


def compiled_step(rank, kind):
    """Run one step of compiled layers with adapters on each rank's batch, as two micro-batches alike."""
    torch._dynamo.reset()
    model = checkpoint_layers(made("qwen3_moe", is_adapted=True), kind)
    model.enable_input_require_grads()
    sonicmoe_hf.compile_layers(model, backend="aot_eager")
    model = Accelerator(cpu=True).prepare(model)
    for context in (model.no_sync(), contextlib.nullcontext()):
        with context:
            loss = model(**batch(**OWN_BATCH[rank])).loss
            (loss / 2).backward()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    return loss.detach(), whole_gradients(model)


@pytest.mark.parametrize("kind", rest_slow(["non_reentrant", "reentrant"]))
def test_compiled_layers_under_ddp_and_checkpointing_get_the_mean_of_ranks(ranks, kind):
    assert_mean_of_ranks(made("qwen3_moe", is_adapted=True), ranks.run(compiled_step, kind))


@pytest.mark.parametrize(
    "kind, is_odd, is_adapted",
    [("FSDP2", True, False), ("FSDP2", True, True), ("FSDP2", False, True), ("DDP", False, True)],
)
@pytest.mark.parametrize("family", rest_pinned(ODD))
def test_odd_sizes_and_adapted_experts_get_the_unsharded_models_gradients(ranks, family, kind, is_odd, is_adapted):
    changes = {"family": family, "is_odd": is_odd, "is_adapted": is_adapted}
    results = ranks.run(step, kind, **changes)
    if is_adapted:
        assert all(sum(".experts." in name for name in found) == 2 * 4 for _, found in results)
    assert_mean_of_ranks(made(**changes), results)


def holder_of_wrapped(rank):
    """Shard experts, around whose forward somebody put another, and adapt them."""
    model = made("qwen3_moe")
    for layer in find_layers(model):
        layer.experts.forward = functools.partial(layer.experts.forward)
        fully_shard(layer.experts)
    with_lora(model)
    return {holding_of(layer.experts).by for layer in find_layers(model)}


def test_experts_that_fsdp2_shards_may_have_a_forward_around_their_own(ranks):
    assert ranks.run(holder_of_wrapped) == [{Holder.FSDP2}] * WORLD


def compiled_under_fsdp2(rank):
    model = checkpoint_layers(made("qwen3_moe", None, is_adapted=True), "non_reentrant")
    sonicmoe_hf.compile_layers(model, backend="aot_eager")
    for module in (*model.get_base_model().model.layers, model):
        fully_shard(module)
    loss = model(**batch(**OWN_BATCH[rank])).loss
    loss.backward()
    return loss.detach(), whole_gradients(model)


@pytest.mark.slow
def test_compiled_layers_under_fsdp2_get_the_mean_of_ranks(ranks):
    assert_mean_of_ranks(made("qwen3_moe", None, is_adapted=True), ranks.run(compiled_under_fsdp2))


# FSDP2 of torch 2.15 takes a gradient of a bf16 parameter as it was computed: that of gpt-oss's norms in fp32. Before,
# and without FSDP2, autograd rounds it to bf16.
KEEPS_COMPUTED_DTYPE = "grad_dtype" in (MixedPrecisionPolicy.__doc__ or "")


def in_precision(model, precision):
    """Convert a model as mixed precision computes with it: parameters in `precision`, buffers as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision)
        if KEEPS_COMPUTED_DTYPE:
            parameter.grad_dtype = None
    return model


@pytest.mark.parametrize(
    ("precision", "own"),
    rest_slow([(torch.float32, False), (torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False)], 2),
)
@pytest.mark.parametrize(
    "family, checkpointing, patch_last",
    [
        ("qwen3_moe", None, False),
        ("qwen3_moe", "non_reentrant", True),
        ("gpt_oss", None, True),
        ("deepseek_v3", None, False),
    ],
)
def test_under_fsdp2_token_rounding_gives_the_unsharded_models_loss_and_gradients(
    ranks, family, checkpointing, patch_last, own, precision
):
    model = in_precision(build_patched(family, POLICY), precision)
    results = ranks.run(step, "FSDP2", family, POLICY, checkpointing, patch_last, own, precision)
    # in bf16, too: every rank computes the same bf16 numbers, and their sum over ranks is in fp32
    assert_mean_of_ranks(model, results)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_under_transformers_own_fsdp_token_rounding_gives_the_unsharded_models_gradients(ranks, family, tmp_path):
    model = build_patched(family, POLICY)
    model.save_pretrained(tmp_path)
    assert_mean_of_ranks(model, ranks.run(own_batch_step, str(tmp_path), "data", POLICY))


# expert and tensor parallelism


def parallel_step(rank, folder, kind, routing=None):
    model = load_parallel(folder, kind, experts_implementation="sonicmoe_hf")
    sonicmoe_hf.patch_model(model, routing)
    experts = next(find_layers(model)).experts
    assert experts.num_experts == (8 if kind == "tensor" else 8 // WORLD)
    holder = {"expert": Holder.THEIR_EXPERT_PARALLEL, "tensor": Holder.TENSOR_PARALLEL}[kind]
    if kind == "tensor" and type(model).__name__ == "GptOssForCausalLM":
        holder = Holder.ONE_DEVICE  # Transformers' plan splits its attention alone
    assert holding_of(experts).by is holder
    return train_and_evaluate(model, batch(padding=True))


@pytest.mark.parametrize("kind", ["expert", "tensor"])
@pytest.mark.parametrize("family", rest_pinned(["qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3"], 2))
def test_under_parallelism_of_the_experts_top_k_equals_the_unsharded_model(ranks, family, kind, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    expected = train_and_evaluate(model, batch(padding=True))
    for actual in ranks.run(parallel_step, str(tmp_path), kind):
        assert_all_close(actual, expected, 1e-5, PARTIAL_SUMS)


def test_where_tensor_parallelism_leaves_the_experts_whole_tokens_are_rounded(ranks, tmp_path):
    model = build_patched("gpt_oss", POLICY)
    model.save_pretrained(tmp_path)
    expected = loss_and_gradients(model, batch(padding=True))
    for actual in ranks.run(parallel_step, str(tmp_path), "tensor", POLICY):
        del actual["inference"]
        assert_all_close(actual, expected, 1e-5, PARTIAL_SUMS)


def own_batch_step(rank, folder, kind, routing=None):
    model = load_parallel(folder, kind, experts_implementation="sonicmoe_hf")
    sonicmoe_hf.patch_model(model, routing)
    watch = Watch(model)
    loss = model(**batch(**OWN_BATCH[rank])).loss
    loss.backward()
    assert type(model).__name__.startswith("FSDP") and set(watch.rounded()) == {routing is not None}
    holder = {"data": Holder.FSDP2, "both": Holder.THEIR_EXPERT_PARALLEL}[kind]
    assert holding_of(next(find_layers(model)).experts).by is holder
    return loss.detach(), whole_gradients(model)


@pytest.mark.skipif(
    not HAS_EP_SIZE, reason="this Transformers exchanges no tokens between ranks with different batches"
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_ranks_that_exchange_tokens_of_different_batches_get_the_mean_gradients(ranks, family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    assert_mean_of_ranks(model, ranks.run(own_batch_step, str(tmp_path), "both"))


def refusals(rank, folder, kind):
    """List the messages that a user gets, in each of the ways to ask for token rounding."""
    model = load_parallel(folder, kind)
    with patching(routing=POLICY):
        unaware = load_parallel(folder, kind)

    def set_routing():
        assert not sonicmoe_hf.is_patched(model)
        sonicmoe_hf.patch_model(model)
        sonicmoe_hf.set_routing(model, POLICY)

    messages = []
    for use in (lambda: sonicmoe_hf.patch_model(model, POLICY), set_routing, lambda: unaware(**batch())):
        with pytest.raises(sonicmoe_hf.UnsupportedModelError) as error:
            use()
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("kind", ["expert", "tensor"])
def test_token_rounding_under_parallelism_of_the_experts_raises_and_names_the_remedy(ranks, kind, tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    for messages in ranks.run(refusals, str(tmp_path), kind):
        assert all(f"does not work under {kind} parallelism" in m and "use routing=None" in m for m in messages)


def adapted_in_parallel(rank, folder, kind, targets):
    """Get the message to a user who adapts experts that are split over ranks, before anything runs."""
    model = load_parallel(folder, kind, experts_implementation="sonicmoe_hf")
    with pytest.raises(sonicmoe_hf.UnsupportedModelError) as error:
        with_lora(model, targets)(**batch())  # PEFT before 0.21 asks nobody when it makes adapters
    return str(error.value)


@pytest.mark.parametrize("kind", ["expert", "tensor", *["both"] * HAS_EP_SIZE])
def test_adapters_of_experts_that_transformers_splits_raise_and_name_the_remedy(ranks, kind, tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    for message in ranks.run(adapted_in_parallel, str(tmp_path), kind, EXPERTS):
        assert "do not work under Transformers' own expert and tensor parallelism" in message
        assert "or shard it by FSDP, or adapt no experts: target_parameters=[]" in message


@pytest.mark.skipif(not has_expert_parallelism(), reason="this Transformers takes no expert parallelism of ours")
def test_adapters_of_biases_under_our_expert_parallelism_raise(ranks, tmp_path):
    build("gpt_oss").save_pretrained(tmp_path)
    for message in ranks.run(adapted_in_parallel, str(tmp_path), "ours", ["mlp.experts.down_proj_bias"]):
        assert "leave down_proj_bias out of target_parameters" in message
