"""Two gloo ranks with packed experts beside adapters: DDP, FSDP2, and what Transformers cannot split."""

import copy

import pytest
import torch
from helpers.adapters import with_lora
from helpers.checkpoints import fp8_of
from helpers.marks import rest_pinned
from helpers.models import OF_64, assert_all_close, batch, build, loss_and_gradients
from helpers.parallel import OWN_BATCH, SUMMATION, mean_of_ranks, parallel_config, whole_gradients
from helpers.ranks import WORLD
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import sonicmoe_hf
from sonicmoe_hf.formats.dense_conversion import dense_shard
from sonicmoe_hf.formats.float_matrices import FP8Matrix


def packed_with_adapters(format, family="qwen3_moe", **changes):
    model = sonicmoe_hf.quantize_experts(build(family, **OF_64[family], **changes), format)
    sonicmoe_hf.patch_model(model)
    return with_lora(model, target_modules=["q_proj"])


def packed_under_ddp(rank):
    peft = packed_with_adapters("nf4")
    loss_and_gradients(DistributedDataParallel(peft), batch(seed=rank))
    return whole_gradients(peft)


def test_packed_experts_are_replicated_beside_adapters(ranks):
    first, second = ranks.run(packed_under_ddp)
    assert len(first) == 12 and all(torch.equal(first[name], second[name]) for name in first)


def packed_under_fsdp2(rank, format, family, precision, checkpointing, folder):
    peft = packed_with_adapters(format, family)
    whole = copy.deepcopy(peft)
    if checkpointing:
        peft.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in peft.get_base_model().model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32))
    fully_shard(peft)
    found = []
    for _ in range(2):  # the second time, into what the first has freed
        peft(**batch(**OWN_BATCH[rank])).loss.backward()
        found.append(whole_gradients(peft))
        peft.zero_grad()
    assert_all_close(found[1], found[0], 0.0, "the same step twice")

    name, dense = next((n, p) for n, p in whole.named_parameters() if isinstance(p, sonicmoe_hf.PackedWeight))
    part = peft.get_parameter(name).to_local()
    assert (part.shape[0] * WORLD, part.codes.nbytes * WORLD) == (dense.shape[0], dense.codes.nbytes)
    with pytest.raises(RuntimeError, match="one rank's shard of a packed weight"):
        part.dequantize()
    again = peft.get_parameter(name).full_tensor()
    assert isinstance(again, sonicmoe_hf.PackedWeight) and torch.equal(again.dequantize(), dense.dequantize())
    peft.load_state_dict(peft.state_dict())
    adapters = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)  # what accelerate saves
    assert set(get_model_state_dict(peft, options=adapters)) == set(found[0])
    with pytest.raises(CheckpointException, match=r"distributed checkpoints .* save the adapters alone"):
        distributed_checkpoint.save(get_model_state_dict(peft), checkpoint_id=folder)
    with pytest.raises(RuntimeError, match="3 experts cannot be cut into shards of 2"):
        fully_shard(packed_with_adapters(format, num_experts=3))
    three = packed_with_adapters(format, num_experts=3)
    fully_shard(three, ignored_params={p for p in three.parameters() if isinstance(p, sonicmoe_hf.PackedWeight)})
    three(**batch(**OWN_BATCH[rank])).loss.backward()
    dense = fully_shard(build("qwen3_moe", **OF_64["qwen3_moe"]))
    with pytest.raises(sonicmoe_hf.UnsupportedExpertsError, match="quantize experts before the model is sharded"):
        sonicmoe_hf.quantize_experts(dense, format)
    return found[0]


@pytest.mark.parametrize(
    "format, family, precision, tolerance",
    [
        ("nf4", "qwen3_moe", torch.float32, 1e-5),
        ("mxfp4", "gpt_oss", torch.float32, 1e-5),
        *rest_pinned(
            [
                ("mxfp4", "qwen3_moe", torch.bfloat16, 0.2),
                ("nf4", "gpt_oss", torch.float32, 1e-5),
                ("fp8", "qwen3_moe", torch.float32, 1e-5),
                ("nvfp4", "qwen3_moe", torch.float32, 1e-5),
            ],
            0,
        ),
    ],
)
def test_fsdp2_shards_packed_experts_and_gives_the_unsharded_models_gradients(
    ranks, format, family, precision, tolerance, tmp_path
):
    """gpt-oss's are stored transposed."""
    _, expected = mean_of_ranks(packed_with_adapters(format, family))
    for actual in ranks.run(packed_under_fsdp2, format, family, precision, format == "nf4", str(tmp_path)):
        assert_all_close(actual, expected, tolerance, f"{SUMMATION}; bf16 routes some tokens otherwise")


def fp8_rows(rank, sizes):
    """Take, of matrices [N, K] in FP8 that are sharded by rows, this rank's values, and those of the whole that
    should be here."""
    mesh, found = init_device_mesh("cpu", (WORLD,)), []
    for rows, columns in sizes:
        values, scales, dense = fp8_of(torch.randn(rows, columns), "fp32")
        values, scales, wanted, parameter = (  # gloo sends no FP8; all ranks have the whole
            distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
            for tensor in (values, scales, dense, torch.empty_like(dense))
        )
        found.append((dense_shard(FP8Matrix(), values.to_local(), scales.to_local(), parameter), wanted.to_local()))
    return found


def test_fp8_rows_that_ranks_share_unevenly_have_the_scales_of_their_own_blocks(ranks):
    """145 rows are 73 and 72, 257 are 129 and 128; their blocks are 1 and 1, and 2 and 1. One row is 1 and 0."""
    sizes = ((145, 144), (257, 64), (384, 130), (1, 16))
    for rank, results in enumerate(ranks.run(fp8_rows, sizes)):
        for (rows, _), (found, wanted) in zip(sizes, results, strict=True):
            assert len(found) == (rows + 1) // 2 - rank * (rows % 2) and torch.equal(found, wanted)


def packed_logits(rank, folder, format):
    options = {"experts_quantization": format, "distributed_config": parallel_config("expert")}
    with torch.no_grad():
        return sonicmoe_hf.from_pretrained(folder, **options)(**batch()).logits


@pytest.mark.parametrize("format", rest_pinned(["nf4", "mxfp4"]))
def test_transformers_own_expert_parallelism_packs_and_computes_each_ranks_experts(ranks, format, tmp_path):
    build("qwen3_moe", hidden_size=64, moe_intermediate_size=128).save_pretrained(tmp_path)
    with torch.no_grad():
        expected = sonicmoe_hf.from_pretrained(tmp_path, experts_quantization=format)(**batch()).logits
    for logits in ranks.run(packed_logits, str(tmp_path), format):
        assert_all_close({"logits": logits}, {"logits": expected}, 1e-5, SUMMATION)


def packed_by_transformers_own(rank, folder, kind):
    with pytest.raises(sonicmoe_hf.UnsupportedModelError) as error:
        sonicmoe_hf.from_pretrained(folder, experts_quantization="nf4", distributed_config=parallel_config(kind))
    return str(error.value)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("data", r"DistributedConfig(fsdp_size=2) does not take packed experts; split them by expert parallelism"),
        ("tensor", "tensor parallelism cannot split packed experts; load the model without tp_size, or in bf16"),
    ],
)
def test_packed_experts_are_not_loaded_into_shards_that_do_not_take_them(ranks, kind, expected, tmp_path):
    build("qwen3_moe", hidden_size=64, moe_intermediate_size=64).save_pretrained(tmp_path)
    for message in ranks.run(packed_by_transformers_own, str(tmp_path), kind):
        assert message.startswith(expected)
