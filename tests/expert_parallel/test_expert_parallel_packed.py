"""Packed experts under expert parallelism, on two and four gloo ranks: each holds its own experts, and together they
compute what one rank with all of them computes."""

import functools

import pytest
import torch
import torch.distributed as dist
from helpers.adapters import with_lora
from helpers.checkpoints import CUT_OFF, edit_tensors, make, packed_in, to_fp8, to_nvfp4
from helpers.integers import EXPERTS, to_integers
from helpers.marks import rest_pinned, rest_slow
from helpers.models import assert_all_close, batch, build
from helpers.parallel import OWN_BATCH, PARTIAL_SUMS, mean_of_ranks
from helpers.ranks import WORLD
from helpers.training import POLICY
from test_expert_parallel import APART, SHARED, load, step
from test_expert_parallel import pytestmark as pytestmark
from transformers import BitsAndBytesConfig
from transformers.distributed import DistributedConfig

import sonicmoe_hf
from sonicmoe_hf.expert_parallel.exchange import EXCHANGES, use_exchange
from sonicmoe_hf.formats.shares import pack_share
from sonicmoe_hf.layer.holding import Holder, Holding
from sonicmoe_hf.layer.packed_weight import PackedWeight
from sonicmoe_hf.patching.moe_layers import find_layers

FORMATS = ["nf4", "mxfp4", "fp8", "nvfp4"]
SIZES = {"hidden_size": 64, "moe_intermediate_size": 128}


def held_logits(model, rank, sizes, routing=None):
    """Compute this rank's logits in training, by every exchange of tokens, and the values of its packed weights."""
    held = packed_in(model)
    assert len(held) == 4 and all(len(weight) == len(weight.codes) == 4 for weight in held.values())
    found = []
    sonicmoe_hf.set_routing(model, routing)
    for kind in EXCHANGES:
        with use_exchange(kind):
            found.append(model(**batch(**OWN_BATCH[rank if sizes == APART else 0])).logits.detach())
    return found, {name: weight.dequantize() for name, weight in held.items()}


def packed_and_reloaded(rank, folder, sizes, format):
    model = load(f"{folder}/hub", sizes, experts_quantization=format)
    model.save_pretrained(f"{folder}/saved")
    dist.barrier()
    reloaded = load(f"{folder}/saved", sizes)
    return [held_logits(model, rank, sizes), held_logits(reloaded, rank, sizes, POLICY)]


@pytest.mark.parametrize(
    ("format", "sizes"),
    [*rest_pinned(zip(FORMATS, (SHARED, APART) * 2)), *rest_slow(zip(FORMATS, (APART, SHARED) * 2), 0)],
)
def test_ranks_pack_save_and_reload_their_experts_as_one_rank_does_all(ranks, format, sizes, tmp_path):
    build("qwen3_moe", **SIZES).save_pretrained(tmp_path / "hub")
    model = sonicmoe_hf.from_pretrained(tmp_path / "hub", experts_quantization=format).train()
    results = ranks.run(packed_and_reloaded, str(tmp_path), sizes, format)
    saved = sonicmoe_hf.from_pretrained(tmp_path / "saved").train()
    for whole, routing in ((model, None), (saved, POLICY)):
        sonicmoe_hf.set_routing(whole, routing)
    for rank, loads in enumerate(results):
        for whole, (found, held) in zip((model, saved), loads, strict=True):
            for name, weight in held.items():
                assert torch.equal(weight, packed_in(whole)[name].dequantize()[4 * rank : 4 * rank + 4]), name
            expected = whole(**batch(**OWN_BATCH[rank if sizes == APART else 0])).logits.detach()
            for one in found:
                assert_all_close({"logits": one}, {"logits": expected}, 1e-5, PARTIAL_SUMS)
    state = model.state_dict()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def refusals(rank, folder):
    messages = []
    for name, sizes, options in (
        ("damaged", APART, {}),
        ("narrow", APART, {}),
        ("damaged fp8", APART, {}),
        ("lacking", APART, {}),
        ("hub", {**APART, "ep_implementation": "all_to_all"}, {}),
        ("hub", {"fsdp_size": WORLD}, {}),
        ("hub", APART, {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}),
    ):
        config = DistributedConfig(**{"ep_implementation": "sonicmoe_hf", **sizes})
        try:
            sonicmoe_hf.from_pretrained(
                f"{folder}/{name}", distributed_config=config, experts_quantization="nf4", **options
            )
        except (ValueError, RuntimeError) as error:
            messages.append(f"{error}")
    experts = next(find_layers(build("qwen3_moe", **SIZES))).experts
    experts.down_proj.data[0, 0, 0] = torch.nan
    own = experts.down_proj.data[4 * rank : 4 * rank + 4]
    pack = functools.partial(PackedWeight.quantize, own, "nf4")
    holding = Holding(Holder.EXPERT_PARALLEL, 4, dist.group.WORLD, rank, WORLD)
    try:
        pack_share("nf4", pack, own.shape, own.device, holding)
    except ValueError as error:
        messages.append(f"{error}")
    return messages


def test_what_ranks_cannot_hold_raises_an_error_on_all_of_them(ranks, tmp_path):
    model = build("qwen3_moe", **SIZES)
    model.save_pretrained(tmp_path / "hub")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[0, 0, 0] = torch.nan  # an expert of the first rank
    model.save_pretrained(tmp_path / "damaged")
    build("qwen3_moe", hidden_size=64, moe_intermediate_size=64, num_experts=2).save_pretrained(tmp_path / "narrow")
    fp8, scale = tmp_path / "damaged fp8", "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv"
    make(fp8, "qwen3_moe", **{**CUT_OFF, "hidden_size": 192})
    to_fp8(fp8)
    edit_tensors(fp8, lambda tensors: tensors[scale].fill_(torch.nan))
    build("qwen3_moe", **SIZES).save_pretrained(tmp_path / "lacking")
    of_last = "model.layers.{}.mlp.experts.7.{}_proj.weight"  # of the second rank
    edit_tensors(tmp_path / "lacking", {of_last.format(0, "up"): None, of_last.format(1, "down"): None})
    found = ranks.run(refusals, str(tmp_path))
    assert "have NaN or infinite values, or are missing: see that rank's error" in found[0][3]
    assert "model.layers.1.mlp.experts.down_proj has shape (3, 64, 128) in the checkpoint" in found[1][3]
    for damaged, narrow, damaged_fp8, _, theirs, sharded, linear, nan in found:
        assert "NaN or infinite" in damaged
        assert "NaN or infinite" in nan and "NaN or infinite" in damaged_fp8
        assert 'use "mxfp4"' in narrow
        assert 'ep_implementation="sonicmoe_hf"' in theirs and 'ep_implementation="sonicmoe_hf"' in sharded
        assert "leave out quantization_config" in linear


def from_hub(rank, folder, format):
    """Compute logits, packed values, and a step with adapters on the experts, by every exchange of tokens."""
    model = load(folder, APART, experts_quantization=format, dtype=torch.float32)
    with torch.no_grad():
        logits = model(**batch(**OWN_BATCH[rank])).logits
    held = {name: weight.dequantize() for name, weight in packed_in(model).items()}
    model, found = with_lora(model), []
    for kind in EXCHANGES:
        with use_exchange(kind):
            found.append(step(model, batch(**OWN_BATCH[rank])))
    return logits, held, found


@pytest.mark.parametrize(
    ("stored", "format", "family"),
    [
        ("fp8", "fp8", "deepseek_v3"),
        ("nvfp4", "nvfp4", "qwen3_moe"),
        ("ct-32", "int4", "qwen3_moe"),
        ("gptq-v2", "int4", "qwen3_moe"),
        *rest_pinned([("fp8", "fp8", "qwen3_moe"), ("fp8", "nf4", "deepseek_v3")], 0),
    ],
)
def test_ranks_hold_of_a_hub_checkpoint_what_one_rank_does(ranks, stored, format, family, tmp_path):
    if stored == "fp8":  # a rank's 72 rows of 144 end inside a block
        make(tmp_path / "hub", family, **{**CUT_OFF, "hidden_size": 192 if format == "nf4" else 144})
        to_fp8(tmp_path / "hub")
    else:
        make(tmp_path / "hub", family, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2)
        to_nvfp4(tmp_path / "hub") if stored == "nvfp4" else to_integers(tmp_path / "hub", stored, EXPERTS)
    model = sonicmoe_hf.from_pretrained(tmp_path / "hub", experts_quantization=format, dtype=torch.float32).train()
    results = ranks.run(from_hub, str(tmp_path / "hub"), format)
    for rank, (logits, held, _) in enumerate(results):
        for name, weight in held.items():
            assert torch.equal(weight, packed_in(model)[name].dequantize()[4 * rank : 4 * rank + 4]), name
        with torch.no_grad():
            expected = model(**batch(**OWN_BATCH[rank])).logits
        assert_all_close({"logits": logits}, {"logits": expected}, 1e-5, PARTIAL_SUMS)
    losses, gradients = mean_of_ranks(with_lora(model))
    for loss, (*_, found) in zip(losses, results, strict=True):
        for one in found:
            assert_all_close(one, {"loss": loss, **gradients}, 1e-5, PARTIAL_SUMS)
